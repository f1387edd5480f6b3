"""Edit methods as arms on the same pairs: what each decides and costs, and sets of positions recomputed or copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvprobe.edit.base import CachedPrompt, Edited, EditMethod, make_method
from kvprobe.edit.full_reprefill import FullReprefill
from kvprobe.edit.meter import Meter
from kvprobe.edit.selection import SELECTIONS, selected
from kvprobe.edit.selective import recompute_selected
from kvprobe.engine.cache import KVCache
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.readout import Readout, read_rows
from kvprobe.engine.sweep import run_patches
from kvprobe.errors import UnsupportedError
from kvprobe.probes.base import Measurement
from kvprobe.probes.kit.edit_cases import EditCase, reading_row

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True, eq=False)
class Arm:
    """An edit method with its parameters.

    Args:
        condition: of the arm's effects, a number in it as a parameter: `selective_{size}`.
        method: carried out.
        parameters: values of the condition's parameters.
    """

    condition: str
    method: EditMethod
    parameters: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The condition with its numbers, as rows have it: `selective_8`."""
        return self.condition.format(**self.parameters)


def make_arm(condition: str, method: str, named: Mapping[str, int] | None = None, **parameters: Any) -> Arm:
    """The arm of a registered edit method; `named` are the values of the condition's parameters.

    Raises:
        UnknownNameError: there is no such method; with the nearest names.
    """
    return Arm(condition, make_method(method, **parameters), named or {})


def run_arm(subject: Subject, case: EditCase, arm: Arm) -> Measurement:
    """One arm on one pair: its decision and its cost.

    `tokens` are counted on the model's layers, whatever the method declares, without the decision token, which every
    arm runs once; `flops` and `seconds` come from the receipt; `bytes_written` are keys and values put into the cache.

    Raises:
        UnsupportedError: the method cannot make this edit.
    """
    with Meter(subject) as meter:
        edited = arm.method.apply(subject, case.stale, case.edit)
    reading = case.read(subject, edited)
    return {
        "arm": arm.name,
        **reading_row(reading),
        "argmax": reading.argmax,
        "tokens": meter.tokens,
        "flops": edited.receipt.flops,
        "bytes_written": bytes_written(case.stale, edited),
        "seconds": edited.receipt.seconds,
    }


def bytes_written(stale: CachedPrompt, edited: Edited) -> int:
    """Bytes of keys and values that an edit put into the cache: computed or copied entries, and rotated keys."""
    keys = sum(layer.keys.numel() * layer.keys.element_size() for layer in stale.cache.layers) // len(stale.cache)
    both = stale.cache.nbytes // len(stale.cache)
    return len(edited.computed) * both + edited.receipt.tokens_rotated * keys


def same_value(case: EditCase) -> EditCase:
    """The case as an edit of the field to the value it has."""
    span = case.stale.span(case.edit.field)
    return replace(case, edit=replace(case.edit, new_ids=case.stale.token_ids[span.start : span.end]))


def oracle_cache(subject: Subject, case: EditCase) -> KVCache:
    """The cache of the new prompt by a full prefill, for upper bounds."""
    return FullReprefill().apply(subject, case.stale, case.edit).prompt.cache


def selection_order(subject: Subject, case: EditCase, criterion: str) -> list[int]:
    """Positions after the field, as a registered criterion ranks them on the stale cache."""
    return SELECTIONS.get(criterion)(subject, case.stale, case.edit)[0]


def recomputed(subject: Subject, case: EditCase, order: Sequence[int], size: int) -> KVPatch:
    """The field and the first `size` of an order really recomputed, as a patch of the stale cache.

    Raises:
        UnsupportedError: the new value has another length, so that the edited cache is no patch of the stale one.
    """
    edited = recompute_selected(subject, case.stale, case.edit, selected(order, size))
    return as_patch(case, edited)


def copied(case: EditCase, oracle: KVCache, order: Sequence[int], size: int) -> KVPatch:
    """Upper bound of `recomputed`: the same entries taken from the full prefill of the new prompt."""
    span = case.stale.span(case.edit.field)
    return KVPatch(tuple(sorted({*span.positions, *order[:size]})), oracle, no_op=True)


def as_patch(case: EditCase, edited: Edited) -> KVPatch:
    """What an edit changed, without the rest of its cache.

    Raises:
        UnsupportedError: the edited prompt has another length.
    """
    if len(edited.prompt.token_ids) != len(case.stale.token_ids):
        raise UnsupportedError(
            f"An edited prompt of {len(edited.prompt.token_ids)} tokens is no patch of one of "
            f"{len(case.stale.token_ids)}; decide it by itself."
        )
    cache = edited.prompt.cache
    return KVPatch(edited.computed, cache.take(cache.index_of(edited.computed)), no_op=True)


def read_patches(
    subject: Subject, case: EditCase, patches: Sequence[KVPatch], batch_size: int | None = None
) -> list[Readout]:
    """The decision under each of many patches of the stale cache, many in one forward pass."""
    logits = run_patches(subject, case.stale.token_ids, case.stale.cache, patches, batch_size)
    return read_rows(logits, case.pair.base_answer_id, case.pair.donor_answer_id)
