"""What an audit measures: both decisions of each field, every token's transplant, every edit method in both directions.

A token's recovery is what the decision's margin gains of the way to the donor's (the prompt with the new value) when
that token's keys and values alone, in all layers, come from the donor's cache and only the last token is run again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kvprobe.auditing.methods import measure_methods
from kvprobe.auditing.prompt import AuditField, AuditPrompt, make_ready
from kvprobe.auditing.result import AuditResult, Dependence, FieldAudit, Reading, SetReading, TokenReading, brief
from kvprobe.auditing.verdict import conclude, dependence, erratum_reading
from kvprobe.engine.forward import Forward, prefill
from kvprobe.engine.interventions import KVPatch
from kvprobe.errors import ConfigError, UnknownNameError
from kvprobe.models.files import Progress, no_progress
from kvprobe.models.subject import Subject
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.runs.config import GateConfig
from kvprobe.runs.provenance import code_version, identity_record, package_versions
from kvprobe.tasks.context import decoded_texts
from kvprobe.tasks.own_prompt import PromptFile, read_prompt_file
from kvprobe.tasks.pairs import Pair, Provenance

_TOP = (1, 2, 4, 8, 16)
_BLOCK = 64
_HEAT, _EDITS = 0.65, 1.0


def audit(
    subject: Subject,
    prompt: PromptFile | str | Path,
    *,
    fields: Sequence[str] | None = None,
    chat: bool = True,
    answer_mass: float | None = None,
    batch_size: int | None = None,
    progress: Progress = no_progress,
) -> AuditResult:
    """Audit one prompt on one model.

    Args:
        subject: the model.
        prompt: a prompt file, or its path.
        fields: names of those to audit; by default all. The others keep their old values in any case.
        chat: whether to use the tokenizer's chat template, where it has one.
        answer_mass: probability that all answers together need before anything is concluded, unless the likeliest
            token is one of them; by default that of the experiments' inclusion gate.
        batch_size: transplants in one forward pass; by default what memory allows.
        progress: told what is being done, and the fraction done.

    Raises:
        ConfigError: the file is not what an audit needs; names file, key and mend.
        AlignmentError: values that are the same tokens, or answers that begin with the same one.
        UnknownNameError: there is no such field; with the nearest names.
    """
    started = time.perf_counter()
    where = "the prompt" if isinstance(prompt, PromptFile) else str(prompt)
    content = prompt if isinstance(prompt, PromptFile) else read_prompt_file(Path(prompt))
    ready = make_ready(subject, content, where=where, chat=chat)
    mass = GateConfig().answer_mass if answer_mass is None else answer_mass
    chosen = _chosen(ready, fields)
    base = prefill(subject, ready.base.token_ids)
    ready = ready.as_written(base.logits)
    found = []
    for number, field in enumerate(chosen):

        def tell(stage: str, fraction: float, *, name: str = field.marked.name, done: int = number) -> None:
            progress(f"{name}: {stage}", (done + fraction) / len(chosen))

        found.append(_Measuring(subject, ready, field, mass, batch_size, tell).run(base))
    return AuditResult(
        prompt=content.name or "prompt",
        file=where,
        text=ready.base.text,
        token_sha256=ready.base.token_hash,
        tokens=len(ready.base.token_ids),
        chat=ready.chat,
        answers=ready.content.pool,
        model=identity_record(subject),
        code={**code_version(), "packages": package_versions()},
        fields=tuple(found),
        warnings=ready.warnings,
        seconds=time.perf_counter() - started,
    )


def _chosen(ready: AuditPrompt, names: Sequence[str] | None) -> list[AuditField]:
    by_name = {field.marked.name: field for field in ready.fields}
    for name in names or ():
        if name not in by_name:
            raise UnknownNameError("field", name, by_name)
    if names is not None and not names:
        raise ConfigError("An audit needs a field; name one, or leave fields out for all.")
    return [field for name, field in by_name.items() if names is None or name in names]


@dataclass(frozen=True, eq=False)
class FieldRead:
    """A field as the model decides it before any intervention.

    Attributes:
        pair: the prompts with the old and with the new value, and the two answers whose logits make the margin.
        whole: their prefills.
        unedited: their caches and decisions.
        found: the beginning of an audit: both readings, and whether the decision depends on the field.
    """

    pair: Pair
    whole: tuple[Forward, Forward]
    unedited: PrefilledPair
    found: FieldAudit


def read_field(
    subject: Subject, prompt: AuditPrompt, field: AuditField, answer_mass: float, *, base: Forward | None = None
) -> FieldRead:
    """Decide both prompts of a field.

    Args:
        subject: the model.
        prompt: the prompt.
        field: of the prompt.
        answer_mass: as in `audit`.
        base: the prefill of the prompt with the old values, where there is one.
    """
    whole = base or prefill(subject, prompt.base.token_ids), prefill(subject, field.donor.token_ids)
    base_logits, donor_logits = (each.logits for each in whole)
    decisions = tuple(prompt.decision(logits) for logits in (base_logits, donor_logits))
    expected = prompt.content.expected(field.marked.name)
    answers = _contrast(decisions, expected, prompt.answer_ids, donor_logits)
    span = prompt.base.spans[field.marked.name]
    base_id, donor_id = (prompt.answer_ids[answer] for answer in answers)
    pair = Pair(prompt.base, field.donor, span, base_id, donor_id, Provenance(prompt.content.name, "own", 0))
    unedited = prefill_pair(subject, pair, whole)
    texts = (decoded_texts(each.token_ids, subject.tokenizer) for each in (prompt.base, field.donor))
    old_tokens, new_tokens = (tuple(each[span.start : span.end]) for each in texts)
    found = FieldAudit(
        name=field.marked.name,
        old=field.marked.old,
        new=field.marked.new,
        old_tokens=old_tokens,
        new_tokens=new_tokens,
        span=(span.start, span.end),
        expected=expected,
        answers=answers,
        stale=reading(subject, prompt, base_logits, unedited.base.margin),
        oracle=reading(subject, prompt, donor_logits, unedited.donor.margin),
        noise_floor=unedited.noise_floor,
        dependence=Dependence.NONE,
    )
    return FieldRead(pair, whole, unedited, found.model_copy(update={"dependence": dependence(found, answer_mass)}))


def reading(subject: Subject, prompt: AuditPrompt, logits: Tensor, margin: float) -> Reading:
    """What logits `[vocab]` decide."""
    ids = sorted({number for spelled in prompt.spelled for number in spelled.values()})
    mass = float(logits.double().softmax(-1)[ids].sum())
    likeliest = int(logits.argmax())
    return Reading(
        decision=prompt.decision(logits),
        margin=margin,
        mass=mass,
        says=subject.tokenizer.decode([likeliest]),
        says_answer=likeliest in ids,
    )


@dataclass(frozen=True, eq=False)
class _Measuring:
    """The audit of one field."""

    subject: Subject
    prompt: AuditPrompt
    field: AuditField
    answer_mass: float
    batch_size: int | None
    progress: Progress

    def run(self, base: Forward) -> FieldAudit:
        self.progress("deciding", 0.0)
        read = read_field(self.subject, self.prompt, self.field, self.answer_mass, base=base)
        found = read.found
        if found.dependence is Dependence.DEPENDS:
            found = found.model_copy(update=self._judged(read.pair, read.unedited, found))
        elif found.dependence is Dependence.MARGIN_ONLY and not self.field.uneven:
            found = found.model_copy(update=self._heat(read.pair, read.unedited))
        self.progress("done", _EDITS)
        return conclude(found, self.answer_mass)

    def _judged(self, pair: Pair, unedited: PrefilledPair, found: FieldAudit) -> dict[str, object]:
        """What is measured only where the decision depends on the field."""
        heat = {} if self.field.uneven else self._heat(pair, unedited)

        def tell(name: str, fraction: float) -> None:
            self.progress(name, _HEAT + (_EDITS - _HEAT) * fraction)

        methods = measure_methods(self.subject, self.prompt, self.field, unedited, found=found, progress=tell)
        return {**heat, "methods": methods, "erratum": erratum_reading(self.field, methods)}

    def _heat(self, pair: Pair, unedited: PrefilledPair) -> dict[str, object]:
        """`tokens`, `segments` and `sets`."""
        reach = range(pair.field.start, pair.decision_position)
        texts = decoded_texts(pair.base.token_ids, self.subject.tokenizer)
        inside = {
            name: range(max(span.start, reach.start), min(span.end, reach.stop))
            for name, span in pair.base.spans.items()
        }
        inside = {name: places for name, places in inside.items() if places}
        regions = {"field": pair.field.positions, "downstream": pair.downstream.positions, "all": reach}
        regions = {name: places for name, places in regions.items() if places}
        patches = [
            *(KVPatch((place,), unedited.oracle, no_op=True) for place in reach),
            *(KVPatch(tuple(places), unedited.oracle, no_op=True) for places in (*inside.values(), *regions.values())),
            KVPatch(tuple(reach), unedited.stale, no_op=True),
        ]
        values = self._recoveries(pair, unedited, patches, "transplanting tokens")
        single = dict(zip(reach, values, strict=False))
        rest = iter(values[len(reach) :])
        segments = [_set_reading(name, texts, places, next(rest)) for name, places in inside.items()]
        sets = [_set_reading(name, texts, places, next(rest)) for name, places in regions.items()]
        sets.append(SetReading(name="none", text="", positions=len(reach), recovery=next(rest)))
        order = sorted(pair.downstream.positions, key=lambda place: -single[place])
        tops = {size: sorted(order[:size]) for size in _TOP if size <= len(order)}
        patches = [KVPatch(tuple(places), unedited.oracle, no_op=True) for places in tops.values()]
        for (size, places), value in zip(tops.items(), self._recoveries(pair, unedited, patches, ""), strict=True):
            sets.append(_set_reading(f"top {size}", texts, places, value))
        tokens = [
            TokenReading(position=place, text=text, segment=pair.base.segment_of(place), recovery=single.get(place))
            for place, text in enumerate(texts)
        ]
        return {"tokens": tuple(tokens), "segments": tuple(segments), "sets": tuple(sets)}

    def _recoveries(self, pair: Pair, unedited: PrefilledPair, patches: Sequence[KVPatch], stage: str) -> list[float]:
        base, gap = unedited.base.margin, unedited.donor.margin - unedited.base.margin
        values: list[float] = []
        size = max(_BLOCK, -(-len(patches) // 20))
        for start in range(0, len(patches), size):
            if stage:
                self.progress(stage, 0.05 + (_HEAT - 0.05) * start / len(patches))
            block = patches[start : start + size]
            margins = patched_margins(self.subject, pair, pair.base, unedited.stale, block, batch_size=self.batch_size)
            values += [(margin - base) / gap for margin in margins]
        return values


def _contrast(
    decisions: tuple[str, ...], expected: tuple[str, str] | None, answer_ids: Mapping[str, int], donor: Tensor
) -> tuple[str, str]:
    """The two answers whose logits make the margin: the expected ones, else those decided, else the next best."""
    if expected is not None and expected[0] != expected[1]:
        return expected
    if decisions[0] != decisions[1]:
        return decisions[0], decisions[1]
    others = [answer for answer in answer_ids if answer != decisions[0]]
    return decisions[0], max(others, key=lambda answer: float(donor[answer_ids[answer]]))


def _set_reading(name: str, texts: Sequence[str], places: Sequence[int], recovery: float) -> SetReading:
    joined = (
        "".join(texts[place] for place in places)
        if not name.startswith("top")
        else " ".join(texts[place].strip() or "⏎" for place in places)
    )
    text = " ".join(joined.split())
    return SetReading(name=name, text=brief(text), positions=len(places), recovery=recovery)
