"""A prompt whose skill was compiled elsewhere, seen as an edit, and the edit that only a composed prompt has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvprobe.composing.base import compose
from kvprobe.composing.chunk import Header, header_ids, precompile
from kvprobe.composing.prompts import as_cached_prompt, compile_segment, composition_of, merged, span_of_neighbours
from kvprobe.composing.splice import Splice
from kvprobe.edit.base import CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.splicing import rerun_from, with_new_value
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError
from kvprobe.probes.kit.edit_cases import EditCase
from kvprobe.tasks.context import Span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvprobe.models.subject import Subject

_SKILL = "skill"


@dataclass(frozen=True)
class SkillLayout:
    """What the skill is made of and how it is put into a prompt.

    Args:
        segments: those that make up the skill where a prompt has them, in order; they must be neighbours.
        header: what the skill is compiled behind.
        seam: its first tokens that are run where they stand.
    """

    segments: tuple[str, ...]
    header: Header
    seam: int = 0


@dataclass(frozen=True, eq=False)
class ComposedCase:
    """A pair as an edit inside a composed skill.

    Attributes:
        case: as `edit_case` makes it, with the composed prompt as the stale one; what the unedited prompts decide is
            that of their full prefills.
        skill: where the skill stands.
        head: the tokens it was compiled behind.
        receipt: of composing, without compiling.
    """

    case: EditCase
    skill: Span
    head: tuple[int, ...]
    receipt: Receipt

    @property
    def moved(self) -> int:
        """By how many positions the skill was moved."""
        return self.skill.start - len(self.head)


def composed_case(subject: Subject, case: EditCase, layout: SkillLayout) -> ComposedCase:
    """The case with its stale prompt composed: the prefix run, the skill moved behind it, the rest run.

    Raises:
        ConfigError: the field is not in the skill, or its segments are no neighbours.
        UnsupportedError: as `precompile`; the RoPE scaling does not allow moving.
    """
    prompt = case.pair.base
    present = tuple(name for name in layout.segments if name in prompt.spans)
    skill = skill_span(prompt.spans, present, case.edit.field)
    whole = merged(prompt, _SKILL, present)
    chunk = compile_segment(subject, whole, _SKILL, layout.header)
    composed = compose(subject, composition_of(whole, {_SKILL: chunk}), Splice.name, seam=layout.seam)
    stale = as_cached_prompt(composed, case.stale.spans)
    head = prompt.token_ids[: skill.start] if layout.header == "real" else header_ids(subject, layout.header)
    return ComposedCase(replace(case, stale=stale), skill, head, composed.receipt)


def skill_span(spans: Mapping[str, Span], segments: Sequence[str], field: str) -> Span:
    """Where a skill made of these segments stands.

    Raises:
        ConfigError: the field is not one of them, or they are no neighbours.
    """
    if field not in segments:
        raise ConfigError(f"The skill is made of {', '.join(segments) or 'nothing'} and does not hold {field!r}.")
    return span_of_neighbours(spans, segments)


class RecompiledSkill(EditMethod):
    """Compile the skill anew with the new value, move it to its place, and run what follows.

    It is made for one prompt, for it knows what is a skill in it, so it is an arm and not a registered method.
    """

    name: ClassVar[str] = "recompile"

    def __init__(self, segments: Sequence[str], head: Sequence[int] = (), seam: int = 0) -> None:
        """A skill of these neighbouring segments, compiled behind the tokens `head`."""
        super().__init__()
        self._segments = tuple(segments)
        self._head = tuple(head)
        self._splice = Splice(Splice.Parameters(seam=seam))

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The prompt with the new skill; everything from the skill on is computed for this edit.

        Raises:
            ConfigError: the field is not in the skill.
        """
        ids, spans = with_new_value(stale, edit)
        skill = self._skill(spans, edit)
        header: Header = "real" if self._head else "none"
        chunk = precompile(subject, ids[skill.start : skill.end], header, before=self._head)
        placed = self._splice.place(subject, stale.cache.take(slice(0, skill.start)), chunk)
        rest = rerun_from(subject, placed.cache, skill.end, ids, spans)
        cost = chunk.receipt + placed.receipt + rest.receipt
        return Edited(rest.prompt, cost, tuple(range(skill.start, len(ids) - 1)))

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """What the skill is compiled behind, the skill, its seam once more, and all after it."""
        ids, spans = with_new_value(stale, edit)
        skill = self._skill(spans, edit)
        return len(self._head) + min(self._splice.parameters.seam, len(skill)) + len(ids) - 1 - skill.start

    def _skill(self, spans: Mapping[str, Span], edit: FieldEdit) -> Span:
        return skill_span(spans, tuple(name for name in self._segments if name in spans), edit.field)
