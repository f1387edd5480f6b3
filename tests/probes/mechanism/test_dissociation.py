"""Laws of the dissociation probe, and one number against plain Hugging Face."""

from __future__ import annotations

import pytest
from made_rows import made_rows
from worded_models import aligned, effects_of, measured, plain_margin, worded

from kvprobe.probes.mechanism.dissociation.probe import INTERVENTIONS, Dissociation
from kvprobe.tasks.polarity import Polarity

PAIRS = aligned(Polarity(size=3))


def test_notes_agree_with_the_plain_script_and_all_entries_together_are_the_donor() -> None:
    pair, rows = PAIRS[0], measured(Dissociation(), worded(), PAIRS)
    margins = rows.pivot(index="pair", columns="intervention", values="margin")
    common = rows.groupby("pair").first()
    assert margins["full_downstream"].sub(common["m_donor"]).abs().max() < 1e-9
    assert margins["notes"].sub(common["m_base"]).abs().max() > 1e-3
    for name, source in (
        ("notes", pair.donor),
        ("other_field_notes", pair.variants["field_changed"]),
        ("same_conclusion_notes", pair.variants["both_changed"]),
    ):
        expected = plain_margin(worded(), pair, pair.downstream.positions, source)
        assert margins.loc[0, name] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("wrong", [0, 3])
def test_summary_finds_what_was_put_in_and_counts_what_the_model_gets_wrong(wrong: int) -> None:
    recovery = {name: number / 10 for number, name in enumerate(INTERVENTIONS)}
    rows = made_rows({"intervention": name, "recovery": value} for name, value in recovery.items())
    # The last skeletons decide the prompt with both changed wrongly.
    bad = rows["intervention"].str.startswith("same_conclusion") & (rows["pair"] >= 10 - wrong)
    rows = rows.assign(source_right=~bad, margin=rows["margin"].mask(bad, 985.0))
    effects = effects_of(Dissociation(), rows)
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
