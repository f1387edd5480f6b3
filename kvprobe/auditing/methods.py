"""Every edit method on one field: old to new, new to old, and each value restated, with what the model ran for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

from kvprobe.auditing.prompt import AuditField, AuditPrompt
from kvprobe.auditing.result import FieldAudit, MethodReading, Safety, Trial
from kvprobe.auditing.verdict import judged_safety
from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, EditMethod, FieldEdit, make_method
from kvprobe.edit.meter import Meter
from kvprobe.errors import UnsupportedError
from kvprobe.models.files import Progress
from kvprobe.models.subject import Subject
from kvprobe.probes.kit.prefilled_pair import PrefilledPair

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE = "full_reprefill"
_FURTHER = {"selective": [{"k": 32}]}
"""Parameters in which a method is tried beside its defaults."""


def methods_to_try() -> dict[str, EditMethod]:
    """Every registered method that is an edit one could make, in its defaults and further ones; the reference first."""
    found: dict[str, EditMethod] = {REFERENCE: make_method(REFERENCE)}
    for name in EDIT_METHODS.names():
        kind = EDIT_METHODS.get(name)
        required = any(given.is_required() for given in kind.Parameters.model_fields.values())
        if kind.upper_bound or required or name == REFERENCE:
            continue
        found[name] = make_method(name)
        for parameters in _FURTHER.get(name, []):
            told = ", ".join(f"{key}={value}" for key, value in parameters.items())
            found[f"{name} ({told})"] = make_method(name, **parameters)
    return found


def measure_methods(
    subject: Subject,
    prompt: AuditPrompt,
    field: AuditField,
    unedited: PrefilledPair,
    *,
    found: FieldAudit,
    progress: Progress,
) -> tuple[MethodReading, ...]:
    """Each method's trials and costs, from the cheapest on; those that cannot make the edit last.

    `tokens` are counted on the model's layers, whatever a method declares; FLOPs and seconds are the receipts'. A
    method is applied once before it is timed, and its seconds are the median of its four trials.
    """
    trials = _Trials(subject, prompt, field, unedited, found)
    methods = methods_to_try()
    readings: list[MethodReading] = []
    for number, (name, method) in enumerate(methods.items()):
        progress(f"editing, {name}", number / len(methods))
        readings.append(trials.of(name, method, readings[0] if readings else None))
    return tuple(sorted(readings, key=lambda each: (each.safety is Safety.IMPOSSIBLE, each.flops, each.tokens)))


@dataclass
class _Costs:
    """What the trials of a method cost, one entry each."""

    tokens: list[float] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Trials:
    subject: Subject
    prompt: AuditPrompt
    field: AuditField
    unedited: PrefilledPair
    found: FieldAudit

    def of(self, name: str, method: EditMethod, reference: MethodReading | None) -> MethodReading:
        what = EDIT_METHODS.describe().get(method.name, "")
        costs = _Costs()
        try:
            edited = method.apply(self.subject, self._cached(old=True), self._edit(new=True))
            self.field.check(edited, self.prompt.base, self.field.marked.new, self.subject.tokenizer)
            forward, backward, *restated = (
                self._trial(method, old=old, new=new, costs=costs)
                for old, new in ((True, True), (False, False), (True, False), (False, True))
            )
        except UnsupportedError as error:
            return MethodReading(name=name, what=what, safety=Safety.IMPOSSIBLE, reason=str(error))
        tokens, flops, seconds = fmean(costs.tokens[:2]), fmean(costs.flops[:2]), median(costs.seconds)
        safety, reason = judged_safety(forward, backward, tuple(restated))
        return MethodReading(
            name=name,
            what=what,
            forward=forward,
            backward=backward,
            restated=tuple(restated),
            tokens=tokens,
            token_share=tokens / (reference.tokens if reference else tokens),
            flops=flops,
            flops_share=flops / (reference.flops if reference else flops),
            seconds=seconds,
            seconds_share=seconds / (reference.seconds if reference else seconds),
            safety=safety,
            reason=reason,
        )

    def _trial(self, method: EditMethod, *, old: bool, new: bool, costs: _Costs) -> Trial:
        """From the cache of the old or the new value, to the new or the old one."""
        with Meter(self.subject) as meter:
            edited = method.apply(self.subject, self._cached(old=old), self._edit(new=new))
        costs.tokens.append(meter.tokens)
        costs.flops.append(edited.receipt.flops)
        costs.seconds.append(edited.receipt.seconds)
        logits = edited.prompt.decide(self.subject).logits
        at_old, at_new = self.unedited.base.margin, self.unedited.donor.margin
        start, end = (at_old, at_new) if old else (at_new, at_old)
        return Trial(
            decision=self.prompt.decision(logits),
            oracle=(self.found.oracle if new else self.found.stale).decision,
            recovery=(self._margin(logits) - start) / (end - start),
        )

    def _margin(self, logits: Tensor) -> float:
        old, new = (logits[self.prompt.answer_ids[answer]].double() for answer in self.found.answers)
        return float(new - old)

    def _cached(self, *, old: bool) -> CachedPrompt:
        if old:
            return self.prompt.cached(self.prompt.base, self.unedited.stale)
        return self.prompt.cached(self.field.donor, self.unedited.oracle)

    def _edit(self, *, new: bool) -> FieldEdit:
        marked = self.field.marked
        return self.field.edit(marked.new if new else marked.old, self.subject.tokenizer)
