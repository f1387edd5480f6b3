"""What all editing probes share: a pair as a stale prompt and an edit, an arm's reading, and constant baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.edit.base import CachedPrompt, Edited, FieldEdit
from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.probes.base import Measurement, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.pair_lines import subjects_of
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import WORDINGS

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

BASELINES = ("first_option", "refuse", "majority")
"""Answers that read nothing: the action offered first, the library's second action, which as a rule refuses, and the
action that is right most often in the other pairs of the scenario."""


@dataclass(frozen=True, eq=False)
class EditCase:
    """A pair seen as an edit: from the base's cache to the donor's decision.

    Attributes:
        stale: the base prompt, prefilled.
        edit: the change of the field to the donor's value.
        base, donor: decisions of the two prompts by one full prefill each.
        noise_floor: in logits, how far the stale decision from the cache and from the prefill lie apart.
    """

    pair: Pair
    stale: CachedPrompt
    edit: FieldEdit
    base: Readout
    donor: Readout
    noise_floor: float

    def read(self, subject: Subject, edited: Edited) -> Readout:
        """The decision of an edited prompt; its margin is positive when it is right under the new value."""
        return read(edited.prompt.decide(subject).logits, self.pair.base_answer_id, self.pair.donor_answer_id)

    def common(self) -> Measurement:
        """The columns that every row carries for the inclusion gate."""
        return gate_columns(self.base, self.donor, self.noise_floor)


def edit_case(subject: Subject, pair: Pair) -> EditCase:
    """Prefill the base and decide both prompts.

    Raises:
        ConfigError: the pair does not say its entity, field and values.
    """
    answers = pair.base_answer_id, pair.donor_answer_id
    old, new = (prefill(subject, prompt.token_ids) for prompt in (pair.base, pair.donor))
    stale = CachedPrompt(pair.base.token_ids, pair.base.spans, old.cache.take(slice(0, len(pair.base.token_ids) - 1)))
    base, donor = read(old.logits, *answers), read(new.logits, *answers)
    floor = abs(read(stale.decide(subject).logits, *answers).margin - base.margin)
    return EditCase(pair, stale, field_edit(pair, subject.tokenizer), base, donor, floor)


def measure_cases(
    subject: Subject,
    pairs: Sequence[Pair],
    progress: Progress,
    measure: Callable[[EditCase, int], Iterable[Measurement]],
) -> list[Measurement]:
    """The rows of every pair, each with the pair's index, the gate's columns and the constant baselines.

    Each pair is prefilled when its turn comes: the caches of all pairs of a large model would not fit in memory.

    Args:
        subject: the model.
        pairs: all pairs of the scenarios; the majority baseline is learned from the other pairs of a scenario.
        progress: called after every pair.
        measure: the rows of one pair, from its case and its index.

    Raises:
        ConfigError: a pair does not say its entity, field and values.
    """
    baselines, rows = baseline_columns(pairs, subject.tokenizer), []
    for index, pair in enumerate(pairs):
        case = edit_case(subject, pair)
        shared = {"pair": index, **case.common(), **baselines[index]}
        rows += [{**shared, **row} for row in measure(case, index)]
        progress(index + 1, len(pairs))
    return rows


def field_edit(pair: Pair, tokenizer: Any) -> FieldEdit:
    """The edit of a pair's field to the donor's value, with the erratum and the session line of its wording.

    Raises:
        ConfigError: the pair does not say its entity, field and values.
    """
    said = subjects_of(pair)
    new_ids = pair.donor.token_ids[pair.field.start : pair.field.end]
    return worded_edit("field", new_ids, said.wording, (said.entity, said.field, said.new), tokenizer)


def worded_edit(
    name: str, new_ids: Sequence[int], wording: str, about: tuple[str, str, str], tokenizer: Any
) -> FieldEdit:
    """The edit of segment `name`, with what a wording says `about` `(entity, field, new value)` of it."""
    entity, field, value = about
    style = WORDINGS.get(wording)()
    before, after = (tuple(encode_segment(text, tokenizer)) for text in style.record(entity, field))
    erratum = encode_segment(style.update(entity, field, value), tokenizer)
    return FieldEdit(name, tuple(new_ids), tuple(erratum), (before, after))


def reading_row(reading: Readout) -> Measurement:
    """The columns of one decision under the new value."""
    return {
        "margin": reading.margin,
        "probability_base": reading.probability_base,
        "probability_donor": reading.probability_donor,
        "mass": reading.mass,
        "correct": reading.margin > 0,
    }


def baseline_columns(pairs: Sequence[Pair], tokenizer: Any) -> list[Measurement]:
    """For each pair whether each constant answer would be right under the new value (0.5: a fair coin)."""
    refusals = {skeleton.name: encode_segment(f" {skeleton.actions[1]}", tokenizer) for skeleton in skeletons("all")}
    by_skeleton: dict[str, list[int]] = {}
    for pair in pairs:
        by_skeleton.setdefault(pair.scenario.skeleton, []).append(pair.donor_answer_id)
    rows = []
    for pair in pairs:
        asked = pair.base.token_ids[pair.base.spans["task"].start :] if "task" in pair.base.spans else ()
        both = pair.donor_answer_id in asked and pair.base_answer_id in asked
        refusal = refusals.get(pair.scenario.skeleton)
        same = by_skeleton[pair.scenario.skeleton]
        balance = 2 * same.count(pair.donor_answer_id) - 1 - len(same)
        rows.append(
            {
                "baseline_first_option": float(asked.index(pair.donor_answer_id) < asked.index(pair.base_answer_id))
                if both
                else None,
                "baseline_refuse": None if refusal is None else float(refusal == [pair.donor_answer_id]),
                "baseline_majority": 0.5 if not balance else float(balance > 0),
            }
        )
    return rows
