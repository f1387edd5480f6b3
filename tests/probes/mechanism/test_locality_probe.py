"""Laws of the locality probe on tiny random models, and of its summary on rows made by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from locality_rows import made_rows
from tiny_models import CONFIGS, FAMILIES, tiny, tokens
from worded_models import effects_of
from worded_models import measured as measured_by

from kvprobe.probes.mechanism.locality.probe import INTERVENTIONS, Locality
from kvprobe.tasks.context import Span, TokenizedContext
from kvprobe.tasks.pairs import Pair, Provenance


def make_pair(seed: int, length: int = 18, start: int = 4, width: int = 2) -> Pair:
    base = tokens(length, seed)
    donor = list(base)
    donor[start : start + width] = [3 + (token + 7) % 50 for token in base[start : start + width]]
    span = Span(start, start + width)
    contexts = [TokenizedContext(tuple(ids), {"field": span}, "") for ids in (base, donor)]
    return Pair(contexts[0], contexts[1], span, 5, 9, Provenance(f"s{seed % 3}", "made", seed))


def measured(family: str, pairs: list[Pair], **parameters: Any) -> pd.DataFrame:
    return measured_by(Locality(**parameters), tiny(family), pairs)


def margins(rows: pd.DataFrame) -> pd.DataFrame:
    decisions = rows[rows["measurement"] == "decision"]
    table = decisions.pivot(index="pair", columns="intervention", values="margin")
    return table.join(decisions.groupby("pair")[["m_base", "m_donor"]].first())


@pytest.mark.parametrize("family", FAMILIES)
@given(start=st.integers(1, 8), width=st.integers(1, 4), seed=st.integers(0, 99))
def test_identities(family: str, start: int, width: int, seed: int) -> None:
    rows = measured(family, [make_pair(seed, start=start, width=width)])
    margin = margins(rows)
    # Rows of one batch agree to rounding only; that the transplanted cache is bit-equal is a law of the engine.
    assert margin["no_op"].sub(margin["m_base"]).abs().max() < 1e-4
    assert margin["full_downstream"].sub(margin["m_donor"]).abs().max() < 1e-3
    changes = rows[rows["measurement"] == "cache_change"].set_index("region")
    # Experts run the tokens of all positions in groups, so that rounding before the field may depend on what is after.
    experts = any(hasattr(CONFIGS[family], name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    assert (changes.loc["before", ["change_keys", "change_values"]].to_numpy() <= (1e-5 if experts else 0)).all()
    assert (changes.loc["field", ["change_keys", "change_values"]].to_numpy() > 0).all()
    # In the first layer an entry knows its own token alone.
    downstream = changes.loc["downstream"].set_index("layer")[["change_keys", "change_values"]]
    assert (downstream.loc[0] <= (1e-5 if experts else 0)).all()
    assert (downstream.loc[1:].to_numpy() > 0).any()
    assert rows["noise_floor"].max() < 1e-3


def test_a_field_at_the_very_start_has_nothing_before_it() -> None:
    rows = measured("qwen3", [make_pair(1, start=0)])
    assert set(rows["region"].dropna()) == {"field", "downstream"}


def test_batch_size_changes_nothing_beyond_the_noise_floor() -> None:
    pairs = [make_pair(seed) for seed in range(3)]
    alone, together = measured("gemma2", pairs, batch_size=1), measured("gemma2", pairs)
    difference = (margins(alone) - margins(together)).abs().to_numpy()
    assert difference.max() < 1e-4


def test_rows_have_the_same_columns_in_every_cell_and_no_missing_number() -> None:
    rows = pd.DataFrame(Locality().measure(tiny("mistral"), [make_pair(0)], lambda done, total: None))
    decisions = rows[rows["measurement"] == "decision"].dropna(axis=1, how="all")
    assert list(decisions["intervention"]) == list(INTERVENTIONS)
    assert not decisions.isna().any().any()
    assert (decisions["positions"] >= 2).all()


@given(
    field=st.floats(-0.5, 1.5),
    rest=st.floats(-0.5, 1.5),
    gaps=st.lists(st.floats(1.5, 20), min_size=9, max_size=12),
)
def test_summary_finds_what_was_put_in(field: float, rest: float, gaps: list[float]) -> None:
    effects = effects_of(Locality(), made_rows(field, rest, gaps))
    assert effects["field_only.recovery"].estimate == pytest.approx(field, abs=1e-9)
    assert effects["downstream_only.recovery"].estimate == pytest.approx(rest, abs=1e-9)
    assert effects["interaction.recovery"].estimate == pytest.approx(1 - field - rest, abs=1e-9)
    shares = effects["shapley_field.recovery"].estimate + effects["shapley_rest.recovery"].estimate
    assert shares == pytest.approx(effects["full_downstream.recovery"].estimate, abs=1e-9)
    assert {"median", "mean_of_ratios"} <= set(effects["field_only.recovery"].extra)
    assert effects["full_downstream.flip_rate"].estimate == 1.0
    assert effects["no_op.error"].estimate == 0.0
    assert effects["blast_radius.before"].estimate == effects["blast_radius.before"].high == 0.0
    assert effects["noise.margin"].estimate == 1e-9


def test_no_interval_is_narrower_than_the_noise_floor() -> None:
    rows = made_rows(0.0, 1.0, [10.0] * 9).assign(noise_floor=0.5)
    effect = effects_of(Locality(), rows)["field_only.recovery"]
    assert (effect.low, effect.high) == pytest.approx((-0.05, 0.05))
