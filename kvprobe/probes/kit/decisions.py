"""Readings of a pair's decision under many interventions, and the row that each becomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import prefill
from kvprobe.engine.interventions import KVPatch, PatchRow
from kvprobe.engine.readout import Readout, read, read_rows
from kvprobe.engine.sweep import run_patches
from kvprobe.probes.base import Measurement
from kvprobe.probes.kit.prefilled_pair import PrefilledPair
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


def margin_rows(
    subject: Subject,
    pair: Pair,
    prefilled: PrefilledPair,
    patches: Iterable[tuple[Measurement, PatchRow]],
    batch_size: int | None = None,
) -> list[Measurement]:
    """A row for each patch of the base prompt: what its row says of it, and the decision's margin."""
    described, sets = zip(*patches, strict=True)
    margins = patched_margins(subject, pair, pair.base, prefilled.stale, sets, batch_size=batch_size)
    flips = [(margin > 0) != (prefilled.base.margin > 0) for margin in margins]
    common = prefilled.common()
    return [
        {**common, **row, "margin": margin, "flipped": flipped}
        for row, margin, flipped in zip(described, margins, flips, strict=True)
    ]


def decision_rows(
    subject: Subject,
    pair: Pair,
    prefilled: PrefilledPair,
    patches: Iterable[tuple[Measurement, KVPatch]],
    batch_size: int | None = None,
) -> list[Measurement]:
    """As `margin_rows`, with all of `decision_row`; what a patch's row says of it includes its `intervention`."""
    described, sets = zip(*patches, strict=True)
    readings = read_patched(subject, pair, pair.base, prefilled.stale, sets, batch_size=batch_size)
    common = prefilled.common()
    return [
        {**common, **decision_row(row["intervention"], prefilled.base, reading, len(patch.positions)), **row}
        for row, patch, reading in zip(described, sets, readings, strict=True)
    ]


def decision_row(intervention: str, base: Readout, reading: Readout, positions: int) -> Measurement:
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
