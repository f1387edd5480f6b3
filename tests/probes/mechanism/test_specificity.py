"""The specificity probe against plain Hugging Face, and the lead of held-out sets on rows made by hand."""

from __future__ import annotations

import pytest
from made_rows import made_rows
from worded_models import aligned, effects_of, measured, plain_margin, worded

from kvprobe.probes.mechanism.specificity.probe import Specificity
from kvprobe.tasks.gated_decision import GatedDecision

PAIRS = aligned(GatedDecision(size=4))
LENGTHS = sorted({len(pair.downstream) for pair in PAIRS})


def test_one_position_and_all_of_them_agree_with_the_plain_script() -> None:
    probe = Specificity(matched_draws=3, random_draws=2, folds=2, sizes=(1, *LENGTHS))
    pair, rows = PAIRS[0], measured(probe, worded(), PAIRS)
    first = rows[rows["pair"] == 0]
    decisions = first[first["measurement"] == "decision"].set_index("intervention")["margin"]
    single = first[first["measurement"] == "single_position"].set_index("position")["margin"]
    best, whole = int(single.idxmax()), len(pair.downstream)
    for name, positions in (("in_sample_1", [best]), (f"held_out_{whole}", pair.downstream.positions)):
        assert decisions[name] == pytest.approx(plain_margin(worded(), pair, positions), abs=1e-9)
    assert decisions["in_sample_1"] == pytest.approx(single.max(), abs=1e-9)
    # A set of all positions is no better than a random one.
    everything = decisions[decisions.index.str.endswith(f"_{whole}")]
    assert len(everything) == 7
    assert everything.max() - everything.min() < 1e-9


def test_the_lead_over_matched_sets_and_how_many_of_them_reach_it() -> None:
    drawn = [("in_sample", 1.0), ("held_out", 0.8), ("random", 0.0), *(("matched", r) for r in (0.0, 0.1, 0.2, 0.9))]
    rows = made_rows([{"intervention": f"{name}_8", "positions": 8, "recovery": r} for name, r in drawn])
    effects = effects_of(Specificity(), rows)
    assert effects["held_out_8.recovery"].estimate == pytest.approx(0.8)
    assert effects["matched_8.recovery"].estimate == pytest.approx(0.3)
    assert effects["matched_8.recovery"].n == 10
    assert effects["lead_8.recovery"].estimate == pytest.approx(0.5)
    assert effects["matched_8.reach_rate"].estimate == pytest.approx(0.25)
    assert effects["matched_8.reach_rate"].clusters == 10
