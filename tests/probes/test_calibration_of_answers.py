"""Contextual calibration: content-free prompts prefer neither answer, and no difference of margins changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from worded_models import TOKENIZER, worded

from kvprobe.engine.forward import prefill
from kvprobe.engine.prefills import share_prefixes
from kvprobe.engine.readout import read
from kvprobe.errors import UnsupportedError
from kvprobe.probes.calibration import CONTENT_FREE, answer_offsets, calibrated
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, align

PAIRS = [align(pair, TOKENIZER) for pair in GatedDecision(size=4, wordings=("memo",)).prompt_pairs()]


def margin(subject, pair: Pair, ids) -> float:  # type: ignore[no-untyped-def]
    return read(prefill(subject, ids).logits, pair.base_answer_id, pair.donor_answer_id).margin


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_calibration_takes_off_the_bias_and_nothing_else(family: str) -> None:
    subject = replace(worded(family), kept={})
    share_prefixes(subject, [PAIRS[0].base.token_ids[:3]])
    offsets = answer_offsets(subject, PAIRS)
    neutral = encode_segment(CONTENT_FREE, TOKENIZER)
    for pair in PAIRS:
        ids, field = pair.base.token_ids, pair.field
        prompts = [ids, pair.donor.token_ids, (*ids[: field.start], *neutral, *ids[field.end :])]
        before = [margin(subject, pair, prompt) for prompt in prompts]
        with calibrated(subject, offsets):
            after = [margin(subject, pair, prompt) for prompt in prompts]
        assert after[2] == pytest.approx(0, abs=1e-5)
        assert after[1] - after[0] == pytest.approx(before[1] - before[0], abs=1e-9)
        assert [margin(subject, pair, prompt) for prompt in prompts] == before


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    subject, ids = worded(), PAIRS[0].base.token_ids
    before = prefill(subject, ids).logits
    with pytest.raises(UnsupportedError), calibrated(subject, {PAIRS[0].base_answer_id: 3.0}):
        prefill(subject, ())
    with calibrated(subject, {PAIRS[0].base_answer_id: 3.0}):
        assert not torch.equal(prefill(subject, ids).logits, before)
    assert torch.equal(prefill(subject, ids).logits, before)
