"""Laws of the dissociation probe, and one number against plain Hugging Face."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch
from worded_models import aligned, answers_of, labelled, plain_margin, worded

from kvprobe.errors import ConfigError
from kvprobe.models.loader import load_subject
from kvprobe.probes.mechanism.dissociation.probe import INTERVENTIONS, Dissociation
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.polarity import Polarity

PAIRS = aligned(Polarity(size=3))


def measured(subject_dtype: torch.dtype = torch.float32, pairs: list[Pair] = PAIRS) -> pd.DataFrame:
    rows = Dissociation().measure(worded(dtype=subject_dtype), pairs, lambda done, total: None)
    return labelled(rows, pairs)


def margins(rows: pd.DataFrame) -> pd.DataFrame:
    table = rows.pivot(index="pair", columns="intervention", values="margin")
    return table.join(rows.groupby("pair")[["m_base", "m_donor"]].first())


def test_everything_from_the_donor_is_the_donor() -> None:
    table = margins(measured())
    assert table["full_downstream"].sub(table["m_donor"]).abs().max() < 1e-4
    assert table["notes"].sub(table["m_base"]).abs().max() > 1e-3


def test_notes_and_the_plain_script_agree_in_float64() -> None:
    pair, model = PAIRS[0], worded().model
    table = margins(measured(torch.float64, [pair])).loc[0]
    notes = list(pair.downstream.positions)
    for name, source in (
        ("notes", pair.donor),
        ("other_field_notes", pair.variants["field_changed"]),
        ("same_conclusion_notes", pair.variants["both_changed"]),
    ):
        expected = plain_margin(model, pair.base.token_ids, source.token_ids, notes, answers_of(pair))
        assert table[name] == pytest.approx(expected, abs=1e-9)


def test_pairs_without_the_square_are_refused() -> None:
    bare = replace(PAIRS[0], variants={})
    with pytest.raises(ConfigError, match="use task polarity"):
        Dissociation().measure(worded(dtype=torch.float32), [bare], lambda done, total: None)


def made_rows(recovery: dict[str, float], wrong: int = 0) -> pd.DataFrame:
    """Ten skeletons whose gap is 10 logits; the last `wrong` decide the prompt with both changed wrongly."""
    rows = []
    for pair in range(10):
        for name in INTERVENTIONS:
            bad = name.startswith("same_conclusion") and pair >= 10 - wrong
            margin = -5 + 10 * (recovery[name] if not bad else 99)
            rows.append(
                {
                    "pair": pair,
                    "skeleton": f"s{pair}",
                    "intervention": name,
                    "m_base": -5.0,
                    "m_donor": 5.0,
                    "noise_floor": 1e-6,
                    "margin": margin,
                    "flipped": margin > 0,
                    "source_right": not bad,
                }
            )
    return pd.DataFrame(rows)


def effects_of(rows: pd.DataFrame) -> dict[str, Effect]:
    return {effect.name: effect for effect in Dissociation().summarise(rows, StatisticsConfig())}


@pytest.mark.parametrize("wrong", [0, 3])
def test_summary_finds_what_was_put_in_and_counts_what_the_model_gets_wrong(wrong: int) -> None:
    recovery = {name: number / 10 for number, name in enumerate(INTERVENTIONS)}
    effects = effects_of(made_rows(recovery, wrong))
    for name, value in recovery.items():
        assert effects[f"{name}.recovery"].estimate == pytest.approx(value)
    left_out = effects["same_conclusion_notes.recovery"]
    assert (left_out.n, left_out.excluded) == (10 - wrong, wrong)
    contrast = effects["conclusion_over_content.recovery"]
    difference = recovery["other_field_notes"] - recovery["same_conclusion_notes"]
    assert contrast.estimate == pytest.approx(difference)
    assert contrast.excluded == wrong
    whole = effects["shapley_trigger.recovery"].estimate + effects["shapley_notes.recovery"].estimate
    assert whole == pytest.approx(recovery["full_downstream"])


def test_an_organism_that_notes_conclusions_follows_them_and_not_their_content() -> None:
    subject, pairs = load_subject("qwen3-note-taker"), aligned(Polarity(size=12))
    rows = labelled(Dissociation().measure(subject, pairs, lambda done, total: None), pairs)
    right = rows[(rows["m_base"] < 0) & (rows["m_donor"] > 0)]
    effects = effects_of(right)
    assert effects["notes.recovery"].estimate > 0.9
    assert effects["other_field_notes.recovery"].estimate > 0.9
    assert abs(effects["same_conclusion_notes.recovery"].estimate) < 0.1
    assert abs(effects["trigger_only.recovery"].estimate) < 0.1
