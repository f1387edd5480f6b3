"""Editing weights or the cache: does the request switch, and which other requests change (protocol 5.8, critique ED10)?

Every pair is one request whose field changes. Arms:

    rome, memit, lora        one edit of the weights each, for all requests that the model then serves
    memit_together           several requests' edits at once
    lora_per_request         the same adapter, in force for its own request alone
    field_only, erratum, ... edits of the request's cache (`kvprobe.edit`)

and under each of them these prompts are decided:

    target          the edited request, right when it decides by the new value
    shared_prefix   concurrent requests on the same cached prefix, with the old value
    own_prefix      concurrent requests with other notes and the old value
    other_wording   the same in other words
    collateral      prompts of other skeletons
    edited_prefix   (cache edits) concurrent requests that read the edited entries, as in a server that edits a shared
                    prefix in place

Under a cache edit the concurrent requests keep their own entries; those on the shared prefix read the very tensors that
the edit started from. Nothing is assumed to be unchanged: all are decided again after the edit.

A method of editing weights must first pass validation edits on training skeletons (the request switches, neighbours
stay); the first of its candidates that does is used. Where none passes, the method counts as not usable on this model
and decides nothing.

`seconds` is the time until the request is ready to be decided, all arms warm, beside that of a full reprefill. For
weights it includes prefilling the request, whose cache the edit has invalidated; it leaves out what is done once per
model (second moments, validation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from kvprobe.baselines.base import WEIGHT_EDITS, Background, WeightEdit
from kvprobe.baselines.mlp import decisions
from kvprobe.baselines.validation import validate
from kvprobe.edit.base import EDIT_METHODS
from kvprobe.models.identity import state_sha256
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.editing.weight_editing.arms import (
    TARGET,
    Other,
    Served,
    Target,
    ValidatedEdit,
    answers_of,
    cache_rows,
    timed,
    unrelated,
    validation_edits,
    weight_rows,
)
from kvprobe.probes.editing.weight_editing.concurrent_requests import OTHER_WORDING, concurrent_requests
from kvprobe.probes.kit.edit_cases import baseline_columns, edit_case
from kvprobe.probes.kit.training_pairs import training_pairs
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

TOGETHER = "memit_together"


@PROBES.register("weight_editing")
class WeightEditing(Probe):
    """Weight edits (ROME, MEMIT, LoRA) against edits of the KV cache: efficacy, contamination, collateral, latency."""

    needs_all_pairs: ClassVar[bool] = True

    cache_edits: tuple[str, ...] = Field(
        ("field_only", "erratum", "full_downstream"), description="edit methods beside the weight edits"
    )
    weight_edits: dict[str, tuple[dict[str, Any], ...]] = Field(
        default={"rome": ({},), "memit": ({},), "lora": ({},)},
        description="parameters to try, in this order; the first that passes the validation edits is used",
    )
    concurrent: int = Field(2, ge=1, description="concurrent requests with a shared and as many with an own prefix")
    collateral: int = Field(4, ge=1, description="prompts of other skeletons")
    together: int = Field(5, ge=0, description="requests that memit_together edits at once; 0 leaves it out")
    together_groups: int = Field(2, ge=1, description="how many such groups, from the first request on")
    training_task: str = Field("gated_decision", description="task whose training skeletons weight edits use")
    training_pairs: int = Field(40, ge=2, description="pairs of training skeletons: text, retain set, validation")
    training_seed: int = Field(1, description="of that task")
    retain: int = Field(8, ge=0, description="prompts of training skeletons in LoRA's retain set")
    validation_edits: int = Field(4, ge=1, description="edits that a weight-editing method is validated on")
    validation_least: float = Field(
        0.75, ge=0, le=1, description="least share of switches, and of kept neighbours; 0 uses every method"
    )
    repeats: int = Field(3, ge=1, description="timed repetitions of a cache edit, of which the shortest counts")

    @field_validator("cache_edits")
    @classmethod
    def _known_cache_edits(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            EDIT_METHODS.get(name)
        return names

    @field_validator("weight_edits")
    @classmethod
    def _known_weight_edits(cls, tried: dict[str, tuple[dict[str, Any], ...]]) -> dict[str, Any]:
        for name, candidates in tried.items():
            for candidate in candidates:
                WEIGHT_EDITS.get(name).Parameters.model_validate(candidate)
            if not candidates:
                raise ValueError(f"{name} needs at least one set of parameters; {{}} takes the defaults")
        return tried

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair and arm one row for each prompt that is decided.

        Raises:
            ConfigError: a pair does not say its entity, field, values and rule.
            SampleError: evaluation and training share a skeleton, or there is only one to train on.
        """
        training = training_pairs(subject, self.training_task, self.training_pairs, self.training_seed, pairs)
        background = Background(tuple(context.token_ids for pair in training for context in (pair.base, pair.donor)))
        methods = list(self._validated(subject, training, background))
        steps = (len(methods) + 1) * len(pairs)
        cache_edits = [EDIT_METHODS.get(name)() for name in self.cache_edits]
        rows: list[Measurement] = []
        targets = []
        for index in range(len(pairs)):
            served = self._served(subject, index, pairs, background)
            targets.append(served.target)
            for edit in cache_edits:
                rows += cache_rows(subject, edit, served, self.repeats)
            progress(index + 1, steps)
        for number, method in enumerate(methods):
            for arm, group in self._groups(method.edit, targets):
                if method.validation.usable:
                    rows += weight_rows(subject, arm, method, group, background)
                else:
                    rows += [t.row(arm, TARGET, t.common["m_base"], None, **method.columns) for t in group]
            progress((number + 2) * len(pairs), steps)
        baselines = baseline_columns(pairs, subject.tokenizer)
        return [{**row, **baselines[row["pair"]]} for row in rows]

    def _validated(self, subject: Subject, training: Sequence[Pair], background: Background) -> Iterator[ValidatedEdit]:
        edits = validation_edits(subject, training, self.validation_edits)
        background = replace(background, retain=self._retained(background))
        fingerprint = state_sha256(subject.model)
        for name, candidates in self.weight_edits.items():
            kind = WEIGHT_EDITS.get(name)
            tried = []
            for candidate in candidates:
                edit = kind(kind.Parameters.model_validate(candidate))
                edit.prepare(subject, background)
                found = validate(subject, edit, edits, background, least=self.validation_least)
                tried.append(ValidatedEdit(edit, found, fingerprint))
                if found.usable:
                    break
            yield max(tried, key=lambda each: min(each.validation.switched, each.validation.kept))

    def _groups(self, edit: WeightEdit, targets: Sequence[Target]) -> Iterator[tuple[str, Sequence[Target]]]:
        """Which targets are edited at once, and the arm that they are a part of."""
        yield from ((edit.name, [target]) for target in targets)
        size = self.together
        if edit.name == "memit" and size:
            starts = range(0, len(targets), size)[: self.together_groups]
            yield from ((TOGETHER, targets[first : first + size]) for first in starts)

    def _served(self, subject: Subject, index: int, pairs: Sequence[Pair], background: Background) -> Served:
        pair = pairs[index]
        case = edit_case(subject, pair)
        _, reprefill = timed(subject, EDIT_METHODS.get("full_reprefill")(), case, self.repeats)
        beside = [
            Other(each.kind, each.token_ids, answers_of(pair), each.shared, pair.scenario.skeleton)
            for each in concurrent_requests(pair, subject.tokenizer, each=self.concurrent)
        ]
        beside += unrelated(pairs, index, self.collateral)
        logits = decisions(subject, [other.token_ids for other in beside])
        others = tuple(replace(other, before=other.margin(row)) for other, row in zip(beside, logits, strict=True))
        # Drawn anew, so that no evaluated prompt is trained on.
        same_field = concurrent_requests(pair, subject.tokenizer, each=1, first=self.concurrent)
        same = tuple(each.token_ids for each in same_field if each.kind != OTHER_WORDING)
        retain = (*self._retained(background), *same) if self.retain else ()
        target = Target(index, pair, others, retain, case.common(), reprefill)
        return Served.prefilled(subject, target, case)

    def _retained(self, background: Background) -> tuple[tuple[int, ...], ...]:
        """Training prompts, the last ones: validation edits take the first."""
        return background.texts[len(background.texts) - self.retain :]
