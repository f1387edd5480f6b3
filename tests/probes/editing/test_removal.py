"""Deletions of a field: arms against plain Hugging Face, and what is read of them."""

from __future__ import annotations

import pytest
from made_rows import crossed
from worded_models import effects_of, gated, margin_behind, measured, worded

from kvprobe.probes.editing.removal.probe import Removal

EXACT = 1e-5
ARMS = ("none", "gap", "rotated", "recomputed", "void", "rotated_void", "policy_too")


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_arms_that_leave_nothing_stale_are_prefills_of_what_the_prompt_says(family: str) -> None:
    subject, (pair,) = worded(family), gated(1, seed=3)
    probe = Removal(counts=(8, 999))
    found = measured(probe, subject, [pair]).set_index("arm")
    assert set(ARMS) <= set(found.index)
    sides = {"margin_of_base": pair.base, "margin_of_donor": pair.donor}
    for column, prompt in sides.items():
        assert found.loc["none", column] == pytest.approx(margin_behind(subject, pair, prompt.token_ids), abs=EXACT)
    # The field's line is its value with what stands beside it in that line.
    text = pair.base.text
    line = next(line for line in text.splitlines(keepends=True) if pair.scenario.attributes["old"] in line)
    ids = list(pair.base.token_ids)
    gone = subject.tokenizer.encode(line, add_special_tokens=False)
    place = next(i for i in range(len(ids)) if ids[i : i + len(gone)] == gone)
    ought = margin_behind(subject, pair, [*ids[:place], *ids[place + len(gone) :]])
    for column in sides:
        assert found.loc["recomputed", column] == pytest.approx(ought, abs=EXACT)
    again = measured(probe, subject, [pair]).query("arm == 'rotated_then'").set_index("count")
    assert again.loc[999, "margin_of_donor"] == pytest.approx(ought, abs=EXACT)
    if family == "qwen3":  # through tiny sliding windows the field hardly reaches the decision
        assert abs(found.loc["gap", "margin_of_base"] - ought) > 100 * EXACT


def test_a_leak_is_what_is_left_of_the_difference() -> None:
    rows = crossed(arm=ARMS).assign(count=None)
    left = rows["arm"].map({"gap": 0.75, "none": 1.0}).fillna(0.0)
    rows["margin_of_base"], rows["margin_of_donor"] = 1 - 2 * left, 1 + 2 * left
    follows = {"follows_base": rows["margin_of_base"] < 0, "follows_donor": rows["margin_of_donor"] > 0}
    effects = effects_of(Removal(), rows.assign(**follows))
    assert effects["none.leak"].estimate == pytest.approx(1.0)
    assert effects["gap.leak"].estimate == pytest.approx(0.75)
    assert effects["gap.follow_rate"].estimate == 1.0
    assert effects["recomputed.leak"].estimate == pytest.approx(0.0)
    assert effects["recomputed.follow_rate"].estimate == 0.5
