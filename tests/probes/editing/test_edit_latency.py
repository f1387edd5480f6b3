"""The latency probe: lengths are reached, costs are those of the edits, nothing is timed that all arms share."""

from __future__ import annotations

import pytest
import torch
from worded_models import aligned, effects_of, measured, plain_logits, worded

from kvprobe.engine.forward import prefill
from kvprobe.probes.editing.edit_latency.probe import ARMS, REFERENCE, EditLatency, lengthened
from kvprobe.probes.editing.edit_latency.reading import METRICS
from kvprobe.probes.kit.edit_cases import edit_case
from kvprobe.tasks.gated_decision import GatedDecision


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_lengthened_prompt_says_the_same_with_notes_between(family: str) -> None:
    subject, (pair,) = worded(family), aligned(GatedDecision(size=1))
    case = edit_case(subject, pair)
    stale = lengthened(subject, case, 200)
    assert 200 <= len(stale.token_ids) < 220
    added, at = len(stale.token_ids) - len(pair.base.token_ids), pair.base.spans["task"].start
    assert stale.token_ids[:at] + stale.token_ids[at + added :] == pair.base.token_ids
    for name, span in pair.base.spans.items():
        moved = stale.spans[name]
        assert stale.token_ids[moved.start : moved.end] == pair.base.token_ids[span.start : span.end]
    torch.testing.assert_close(
        stale.decide(subject).logits.double(),
        prefill(subject, stale.token_ids).logits.double(),
        atol=1e-6,
        rtol=0,
    )
    if family == "qwen3":
        plain = plain_logits(subject.model, stale.token_ids)
        torch.testing.assert_close(stale.decide(subject).logits.double(), plain, atol=1e-9, rtol=0)


def test_shares_are_those_of_the_edits_and_fall_with_length() -> None:
    subject, pairs, probe = worded("llama"), aligned(GatedDecision(size=2)), EditLatency(lengths=(128, 400), repeats=1)
    rows = measured(probe, subject, pairs)
    assert len(rows) == 2 * 2 * (len(ARMS) + 1)
    whole = rows[rows["arm"] == REFERENCE]
    assert (whole[list(METRICS)] == 1).all(axis=None)
    assert (rows["seconds"] > 0).all()
    by_arm = rows.set_index(["arm", "pair", "length"]).sort_index()
    one = edit_case(subject, pairs[0])
    tokens = len(lengthened(subject, one, 400).token_ids)
    assert by_arm.loc[("field_only", 0, 400), "token_share"] == pytest.approx(2 / tokens)
    for arm in ("erratum", "field_only"):
        assert by_arm.loc[(arm, 0, 400), "flop_share"] < by_arm.loc[(arm, 0, 128), "flop_share"] < 1
    assert effects_of(probe, rows)["erratum.longest_less_shortest.flop_share"].estimate < 0
