"""Readings of a pair's decision under many interventions, and the row that each becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import prefill
from kvprobe.engine.interventions import PatchRow
from kvprobe.engine.readout import Readout, read, read_rows
from kvprobe.engine.sweep import run_patches
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def prefill_decided(subject: Subject, pair: Pair, prompt: TokenizedContext) -> tuple[KVCache, Readout]:
    """The cache of one prompt of `pair`, or of a variant, and its decision between the pair's two answers."""
    whole = prefill(subject, prompt.token_ids)
    return whole.cache, read(whole.logits, pair.base_answer_id, pair.donor_answer_id)


def read_patched(
    subject: Subject,
    pair: Pair,
    prompt: TokenizedContext,
    cache: KVCache,
    patches: Sequence[PatchRow],
    *,
    batch_size: int | None = None,
) -> list[Readout]:
    """The decision of `prompt` on its `cache` under each of the patches; see `run_patches`."""
    logits = run_patches(subject, prompt.token_ids, cache, patches, batch_size)
    return read_rows(logits, pair.base_answer_id, pair.donor_answer_id)


def patched_margins(
    subject: Subject,
    pair: Pair,
    prompt: TokenizedContext,
    cache: KVCache,
    patches: Sequence[PatchRow],
    *,
    batch_size: int | None = None,
) -> list[float]:
    """As `read_patched`, the margins alone, in logits: for many patches, of which no whole vocabulary is kept."""
    answers = torch.tensor([pair.base_answer_id, pair.donor_answer_id])

    def keep(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, answers.to(logits.device)].double()

    base, donor = run_patches(subject, prompt.token_ids, cache, patches, batch_size, reduce=keep).unbind(1)
    return [float(margin) for margin in (donor - base)]


def decision_row(intervention: str, base: Readout, reading: Readout, positions: int) -> dict[str, Any]:
    """One decision under an intervention on `positions` cache entries per layer; `base` is the unedited decision."""
    return {
        "measurement": "decision",
        "intervention": intervention,
        "positions": positions,
        "margin": reading.margin,
        "probability_base": reading.probability_base,
        "probability_donor": reading.probability_donor,
        "mass": reading.mass,
        "flipped": (reading.margin > 0) != (base.margin > 0),
        "argmax_flipped": reading.argmax != base.argmax,
    }
