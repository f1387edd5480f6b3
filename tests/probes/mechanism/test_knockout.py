"""Laws of the knockout probe, its differences on made rows, and plain Hugging Face in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_rows import made_rows
from worded_models import aligned, answers_of, effects_of, margin_of, measured, plain_logits, worded

from kvprobe.probes.mechanism.knockout.caches import with_actions_exchanged
from kvprobe.probes.mechanism.knockout.key_sets import equal_mass
from kvprobe.probes.mechanism.knockout.probe import Knockout
from kvprobe.stats import Effect
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair

SMALL = Knockout(fractions=(0.25, 1.0), draws=2, folds=2)
CACHES = ("stale", "field_only", "new", "swapped")


def pairs_of(size: int) -> list[Pair]:
    return aligned(GatedDecision(size=size, notes_before=(0, 0), notes_after=(0, 1)))


@cache
def rows_of(family: str) -> pd.DataFrame:
    return measured(SMALL, worded(family), pairs_of(2))


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2"])
def test_nothing_hidden_changes_nothing(family: str) -> None:
    rows = rows_of(family)
    empty = rows[rows["intervention"] == "empty"]
    assert empty["margin"].to_numpy() == pytest.approx(empty["unmasked"].to_numpy(), abs=1e-6)
    free = rows[rows["intervention"] == "none"].pivot(index="pair", columns="cache", values="margin")
    common = rows.groupby("pair").first()
    assert free["stale"].to_numpy() == pytest.approx(common["m_base"].to_numpy(), abs=1e-6)
    assert free["new"].to_numpy() == pytest.approx(common["m_donor"].to_numpy(), abs=1e-6)
    assert list(dict.fromkeys(rows["cache"])) == list(CACHES)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_all_positions_in_all_layers_leave_only_the_field_to_tell_caches_apart(family: str) -> None:
    rows = rows_of(family)
    table = rows.pivot_table(index=["pair", "intervention"], columns="cache", values="margin")
    everything = table.xs("all_layers", level="intervention")
    assert everything["field_only"].to_numpy() == pytest.approx(everything["new"].to_numpy(), abs=1e-6)
    assert everything["stale"].to_numpy() == pytest.approx(everything["swapped"].to_numpy(), abs=1e-6)
    assert table.xs("attention_100", level="intervention").to_numpy() == pytest.approx(everything.to_numpy(), abs=1e-6)


def test_the_same_budget_is_hidden_on_every_cache() -> None:
    rows = rows_of("qwen3")
    budgets = rows.groupby(["pair", "intervention", "cache"])[["keys", "attention_mass"]].sum().reset_index()
    assert (budgets.groupby(["pair", "intervention"])[["keys", "attention_mass"]].nunique() == 1).all().all()
    sized = rows[rows["intervention"].str.contains("_25") & ~rows["intervention"].str.startswith("equal_mass")]
    assert (sized.groupby("pair")["keys"].nunique() == 1).all()
    most = rows[rows["intervention"] == "attention_25"].set_index(["pair", "cache"])["attention_mass"]
    others = sized.groupby(["pair", "cache"])["attention_mass"].max()
    assert most.to_numpy() == pytest.approx(others.loc[most.index].to_numpy())


@given(data=st.data())
def test_equal_mass_reaches_the_mass_where_it_can_and_spares_the_set(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.001, 1.0), min_size=3, max_size=20))
    mass = dict(enumerate(weights))
    acting = data.draw(st.lists(st.sampled_from(list(mass)), unique=True, min_size=1, max_size=len(mass) - 1))
    drawn = equal_mass(acting, mass, np.random.default_rng(data.draw(st.integers(0, 99))))
    wanted, held = (sum(mass[position] for position in part) for part in (acting, drawn))
    assert drawn
    assert set(drawn).isdisjoint(acting)
    assert len(set(drawn)) == len(drawn)
    assert held >= wanted or len(drawn) == len(mass) - len(acting)
    assert len(drawn) == 1 or held - mass[drawn[-1]] < wanted


def test_the_swapped_rule_calls_for_the_other_action() -> None:
    for pair in pairs_of(6):
        swapped = with_actions_exchanged(pair)
        assert swapped is not None
        differ = [p for p, (a, b) in enumerate(zip(pair.base.token_ids, swapped.token_ids, strict=True)) if a != b]
        assert {pair.base.token_ids[p] for p in differ} == {pair.base_answer_id, pair.donor_answer_id}
        assert all(p in pair.base.spans["policy"].positions for p in differ)
        again = with_actions_exchanged(Pair(swapped, pair.donor, pair.field, *answers_of(pair), pair.scenario))
        assert again is not None
        assert again.token_ids == pair.base.token_ids


def test_against_plain_hugging_face() -> None:
    """All of the text after the field hidden from the last token, on the stale and on the swapped prompt."""
    pair, model = pairs_of(2)[0], worded("llama").model
    rows = rows_of("llama")
    length, last = len(pair.base.token_ids), pair.decision_position
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    causal[last, pair.field.end : last] = False
    mask = torch.zeros(length, length, dtype=torch.float64).masked_fill(~causal, torch.finfo(torch.float32).min)
    swapped = with_actions_exchanged(pair)
    assert swapped is not None
    for name, prompt in (("stale", pair.base), ("new", pair.donor), ("swapped", swapped)):
        with torch.no_grad():
            output = model(torch.tensor([prompt.token_ids]), attention_mask=mask[None, None])
        part = rows[(rows["pair"] == 0) & (rows["cache"] == name)].set_index("intervention")
        assert part.loc["all_layers", "margin"] == pytest.approx(margin_of(pair, output.logits[0, -1]), abs=1e-9)
        assert part.loc["none", "margin"] == pytest.approx(
            margin_of(pair, plain_logits(model, prompt.token_ids)), abs=1e-9
        )


def effects_where(shifts: dict[str, dict[str, float]]) -> dict[str, Effect]:
    """Of pairs with gaps of their own, whose margins shift by set and cache just so, as shares of the gap."""
    free = {"stale": 0.0, "field_only": 0.0, "new": 1.0, "swapped": 1.0}
    cases = [
        {"cache": name, "intervention": keys, "recovery": free[name] + moved.get(name, 0.0), "attention_mass": 0.1}
        for name in free
        for keys, moved in {"none": {}, "empty": {}, **shifts}.items()
    ]
    rows = made_rows(cases, gaps=[2.0 + pair for pair in range(10)], base=-1.0)
    unmasked = rows["m_donor"].where(rows["cache"].map(free) > 0, rows["m_base"])
    return effects_of(SMALL, rows.assign(unmasked=unmasked, flipped=(rows["margin"] > 0) != (unmasked > 0)))


def test_a_default_action_is_told_from_the_notes() -> None:
    """A model that falls back on the donor's action, whatever notes it had, shifts alike on opposite notes."""
    default = dict.fromkeys(CACHES, 0.4)
    notes = {"stale": 0.5, "field_only": 0.5, "new": -0.5, "swapped": -0.5}
    effects = effects_where({"effect_25": notes, "random_25": default})
    assert effects["effect_25.erased"].estimate == pytest.approx(1.0)
    assert effects["random_25.erased"].estimate == pytest.approx(0.0, abs=1e-12)
    assert effects["random_25.default_shift"].estimate == pytest.approx(0.4 * 6.5)
    assert effects["effect_25.default_shift"].estimate == pytest.approx(0.0, abs=1e-12)
    assert effects["effect_25_over_random.erased"].estimate == pytest.approx(1.0)
    assert effects["effect_25.field_difference"].estimate == pytest.approx(0.0, abs=1e-12)


@given(field=st.floats(0.0, 1.0), both=st.floats(0.0, 0.6))
def test_the_field_shows_as_a_difference_of_differences(field: float, both: float) -> None:
    shifts = {"stale": both, "field_only": both + field, "new": 0.0, "swapped": 0.0}
    effects = effects_where({"attention_25": shifts})
    assert effects["attention_25.field_difference"].estimate == pytest.approx(field, abs=1e-9)


def test_key_sets_of_the_paper_and_of_the_controls_are_read() -> None:
    effects = set(effects_of(SMALL, rows_of("qwen3")))
    assert {"attention_25.field_only.follows_new", "all_layers.field_difference", "effect_25.erased"} <= effects
    assert {f"effect_25_over_{control}.erased" for control in ("random", "equal_mass", "low_effect")} <= effects
    assert {f"{band}_layers.field_only.follows_new" for band in ("early", "mid", "late", "all")} <= effects
    assert {"none.stale.follows_new", "effect_25_in_sample.erased"} <= effects
