"""What the weight-editing probe decides: the edited request, what is served beside it, and both kinds of edit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvprobe.baselines.base import Background, WeightEdit, WeightRequest
from kvprobe.baselines.mlp import decisions
from kvprobe.baselines.validation import Choice, Validation, ValidationEdit
from kvprobe.edit.base import Edited, EditMethod
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import clock, forward, prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.errors import SampleError
from kvprobe.models.identity import state_sha256
from kvprobe.probes.base import Measurement
from kvprobe.probes.editing.weight_editing.concurrent_requests import SHARED_PREFIX
from kvprobe.probes.kit.edit_cases import EditCase
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

TARGET, COLLATERAL, EDITED_PREFIX = "target", "collateral", "edited_prefix"


@dataclass(frozen=True)
class Other:
    """A prompt beside the target, the two answers it can get, and its margin before any edit."""

    kind: str
    token_ids: tuple[int, ...]
    answers: tuple[int, int]
    shared: int
    skeleton: str
    before: float = 0.0

    def margin(self, logits: Tensor) -> float:
        """Logit of the second answer less that of the first."""
        return read(logits, *self.answers).margin


@dataclass(frozen=True, eq=False)
class Target:
    """One edited request and all that is decided beside it."""

    index: int
    pair: Pair
    others: tuple[Other, ...]
    retain: tuple[tuple[int, ...], ...]
    common: Measurement
    reprefill: float

    @property
    def request(self) -> WeightRequest:
        """The edit as it is put to the weights."""
        return request_of(self.pair)

    def row(self, arm: str, prompt: str, before: float, after: float | None, **more: Any) -> Measurement:
        """One decision under an arm, `before` and `after` it in logits."""
        decided = {} if after is None else {"new": after > 0, "changed": (after > 0) != (before > 0)}
        return {
            "pair": self.index,
            "arm": arm,
            "prompt": prompt,
            "margin_before": before,
            "margin": after,
            "new_before": before > 0,
            "new": None,
            "changed": None,
            "seconds": None,
            "reprefill_seconds": self.reprefill,
            "weights_equal": None,
            "usable": True,
            "validation_switched": None,
            "validation_kept": None,
            "validation_edits": None,
            "validation_neighbours": None,
            **decided,
            **more,
            **self.common,
        }


@dataclass(frozen=True, eq=False)
class ValidatedEdit:
    """A weight edit with the validation it went through, and the fingerprint of the weights before any edit."""

    edit: WeightEdit
    validation: Validation
    fingerprint: str

    @property
    def columns(self) -> Measurement:
        """The validation, as every row of the arm carries it."""
        found = self.validation
        return {
            "usable": found.usable,
            "validation_switched": found.switched,
            "validation_kept": found.kept,
            "validation_edits": found.edits,
            "validation_neighbours": found.neighbours,
        }


@dataclass(frozen=True, eq=False)
class Served:
    """A target and the prompts beside it, with the entries each of them reads.

    Attributes:
        target: the edited request.
        case: its stale cache and its edit.
        caches: of the other prompts, without the tokens that are run for a decision; for one on the shared prefix they
            are the target's own tensors.
    """

    target: Target
    case: EditCase
    caches: Sequence[KVCache]

    @classmethod
    def prefilled(cls, subject: Subject, target: Target, case: EditCase) -> Served:
        """Every prompt but those on the shared prefix prefilled on its own."""
        caches = [
            case.stale.cache.take(slice(0, other.shared))
            if other.kind == SHARED_PREFIX
            else prefill(subject, other.token_ids[:-1]).cache
            for other in target.others
        ]
        return cls(target, case, caches)

    def margins(self, subject: Subject) -> list[float]:
        """Of all prompts, from their own entries as they are now."""
        return [
            other.margin(forward(subject, other.token_ids[len(cache) :], cache).logits)
            for other, cache in zip(self.target.others, self.caches, strict=True)
        ]


def request_of(pair: Pair) -> WeightRequest:
    """The pair's edit as a request to the weights: the base prompt shall get the donor's answer."""
    return WeightRequest(pair.base.token_ids, pair.field.end - 1, (pair.donor_answer_id,))


def answers_of(pair: Pair) -> tuple[int, int]:
    """The answers under the old and under the new value."""
    return pair.base_answer_id, pair.donor_answer_id


def validation_edits(subject: Subject, pairs: Sequence[Pair], count: int) -> list[ValidationEdit]:
    """Edits of training prompts to the answer that they do not get now, one for each skeleton as far as they go.

    Neighbours are both prompts of pairs of other skeletons, which must keep the answers they get now. Pairs that the
    model decides rightly come first.

    Raises:
        SampleError: the pairs are of one skeleton.
    """
    logits = decisions(subject, [context.token_ids for pair in pairs for context in (pair.base, pair.donor)])
    margins = [read(row, *answers_of(pairs[number // 2])).margin for number, row in enumerate(logits)]
    right = [margins[2 * number] < 0 < margins[2 * number + 1] for number in range(len(pairs))]
    chosen: dict[str, int] = {}
    for number in sorted(range(len(pairs)), key=lambda number: not right[number]):
        chosen.setdefault(pairs[number].scenario.skeleton, number)
    numbers = list(chosen.values())
    if len(numbers) < 2:
        raise SampleError("Validating a weight edit takes pairs of two training skeletons; raise training_pairs.")

    def prompt(number: int, which: int) -> Choice:
        pair = pairs[number]
        old, new = answers_of(pair)
        now, other = (old, new) if margins[2 * number + which] < 0 else (new, old)
        return (pair.base, pair.donor)[which].token_ids, now, other

    edits = []
    for place, number in enumerate(numbers[:count]):
        ids, now, other = prompt(number, 0)
        near = [numbers[(place + step) % len(numbers)] for step in range(1, min(3, len(numbers)))]
        neighbours = tuple(prompt(neighbour, which) for neighbour in near for which in (0, 1))
        edits.append(ValidationEdit(WeightRequest(ids, pairs[number].field.end - 1, (other,)), now, neighbours))
    return edits


def unrelated(pairs: Sequence[Pair], index: int, count: int) -> list[Other]:
    """Prompts of other skeletons, old and new values in turn."""
    own = pairs[index].scenario.skeleton
    others = [pair for pair in pairs if pair.scenario.skeleton != own]
    chosen = random.Random(f"collateral {index}").sample(others, min(count, len(others)))
    return [
        Other(
            COLLATERAL, (pair.donor if place % 2 else pair.base).token_ids, answers_of(pair), 0, pair.scenario.skeleton
        )
        for place, pair in enumerate(chosen)
    ]


def timed(subject: Subject, method: EditMethod, case: EditCase, repeats: int) -> tuple[Edited, float]:
    """The edited prompt and how long it takes, after one time that does not count.

    The shortest of the repetitions: whatever else the machine does only makes it longer.
    """
    edited = method.apply(subject, case.stale, case.edit)
    seconds = []
    for _ in range(repeats):
        started = clock(subject)
        method.apply(subject, case.stale, case.edit)
        seconds.append(clock(subject) - started)
    return edited, min(seconds)


def cache_rows(subject: Subject, method: EditMethod, served: Served, repeats: int) -> Iterator[Measurement]:
    """The target under an edit of its cache, everything beside it, and what requests on the edited prefix decide."""
    target, case = served.target, served.case
    edited, seconds = timed(subject, method, case, repeats)
    reading = case.read(subject, edited)
    yield target.row(method.name, TARGET, case.base.margin, reading.margin, seconds=seconds)
    for other, margin in zip(target.others, served.margins(subject), strict=True):
        yield target.row(method.name, other.kind, other.before, margin)
    for other in target.others:
        if other.kind == SHARED_PREFIX and len(case.edit.new_ids) == len(case.pair.field):
            prefix = edited.prompt.cache.take(slice(0, other.shared))
            margin = other.margin(forward(subject, other.token_ids[other.shared :], prefix).logits)
            yield target.row(method.name, EDITED_PREFIX, other.before, margin)


def weight_rows(
    subject: Subject, arm: str, method: ValidatedEdit, group: Sequence[Target], background: Background
) -> list[Measurement]:
    """All targets of a group under one edit of the weights, with everything beside them."""
    edited_skeletons = {target.pair.scenario.skeleton for target in group}
    # A prompt of another target's skeleton is no bystander of an edit that includes that target.
    others = [
        [other for other in target.others if other.kind != COLLATERAL or other.skeleton not in edited_skeletons]
        for target in group
    ]
    prompts = [other.token_ids for each in others for other in each]
    background = replace(background, retain=group[0].retain)
    started = clock(subject)
    with method.edit.applied(subject, [target.request for target in group], background) as change:
        edit_seconds = (clock(subject) - started) / len(group)
        readings = [_prefilled(subject, target) for target in group]
        after = {arm: decisions(subject, prompts)}
        if change.suspended is not None:
            with change.suspended():
                after[f"{arm}_per_request"] = decisions(subject, prompts)
    equal = state_sha256(subject.model) == method.fingerprint
    rows = []
    for name, logits in after.items():
        found = iter(logits)
        for target, (reading, seconds), each in zip(group, readings, others, strict=True):
            more = {**method.columns, "weights_equal": equal}
            base_margin, took = target.common["m_base"], edit_seconds + seconds
            rows.append(target.row(name, TARGET, base_margin, reading.margin, seconds=took, **more))
            rows += [target.row(name, other.kind, other.before, other.margin(next(found)), **more) for other in each]
    return rows


def _prefilled(subject: Subject, target: Target) -> tuple[Readout, float]:
    """The target's decision by the weights as they are, and how long its prefill took."""
    started = clock(subject)
    result = prefill(subject, target.pair.base.token_ids)
    return read(result.logits, *answers_of(target.pair)), clock(subject) - started
