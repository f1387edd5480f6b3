"""Hoist to the end: the field leaves the session and is stated right before the cue (section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvprobe.edit import base
from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit, line_segments
from kvprobe.edit.splicing import rerun_from, shared_start
from kvprobe.errors import UnsupportedError
from kvprobe.tasks.context import Span, TokenizedContext

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@EDIT_METHODS.register("hoist_to_end")
class HoistToEnd(EditMethod):
    """Rewrite the prompt so that the field's line comes last; later edits are then cheap."""

    name: ClassVar[str] = "hoist_to_end"

    class Parameters(base.Parameters):
        """Where the line goes."""

        before: str = Field("cue", description="the segment the line is put in front of")

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The prompt without the field's line up to there, the line, and the rest: all run but the shared prefix.

        Raises:
            UnsupportedError: the edit does not say the field's line, the prompt does not hold it, or it does not stand
                before the place it is to be moved to.
        """
        if edit.moved is not None and edit.line_ids is not None:
            stale.span(self.parameters.before)
            whole = edit.moved(self.parameters.before)
            return rerun_from(subject, stale.cache, self._start(stale, edit, whole), whole.token_ids, whole.spans)
        line, last = self._line(stale, edit), stale.span(self.parameters.before)
        if last.start < line.end:
            raise UnsupportedError(
                f"The line of {edit.field!r} cannot be hoisted in front of {self.parameters.before!r}, which does not "
                "come after it; name a later segment."
            )
        before, after = edit.line_ids or ((), ())
        ids = list(stale.token_ids)
        hoisted = [*before, *edit.new_ids, *after]
        rewritten = [*ids[: line.start], *ids[line.end : last.start], *hoisted, *ids[last.start :]]
        return rerun_from(subject, stale.cache, line.start, rewritten, self._spans(stale, edit, line))

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """All from the field's line on: without the line there is nothing left to reuse."""
        if edit.moved is not None and edit.line_ids is not None:
            whole = edit.moved(self.parameters.before)
            return len(whole.token_ids) - 1 - self._start(stale, edit, whole)
        value = len(edit.new_ids) - len(stale.span(edit.field))
        return len(stale.cache) - self._line(stale, edit).start + value

    def _start(self, stale: CachedPrompt, edit: FieldEdit, whole: TokenizedContext) -> int:
        """The first entry to run: that of the line, or one before it whose token is another without the line."""
        label, _ = line_segments(edit.field)
        line = stale.spans.get(label, stale.span(edit.field))
        return min(shared_start(stale.token_ids, whole.token_ids), line.start)

    def _line(self, stale: CachedPrompt, edit: FieldEdit) -> Span:
        span = stale.span(edit.field)
        if edit.line_ids is None:
            raise UnsupportedError(
                f"Hoisting {edit.field!r} needs its line: say what stands before and after its value."
            )
        before, after = edit.line_ids
        line = Span(span.start - len(before), span.end + len(after))
        held = stale.token_ids[line.start : span.start], stale.token_ids[span.end : line.end]
        if line.start < 0 or held != (tuple(before), tuple(after)):
            raise UnsupportedError(
                f"The prompt does not hold the line of {edit.field!r} as it was declared around its value."
            )
        return line

    def _spans(self, stale: CachedPrompt, edit: FieldEdit, line: Span) -> dict[str, Span]:
        """Every segment without its part of the old line, the line's own segments in their new place.

        What stands around the value becomes segments of its own, so that no later edit can be put between the two.
        """
        before, after = edit.line_ids or ((), ())
        last, spans = stale.span(self.parameters.before), dict[str, Span]()
        hoisted = len(before) + len(edit.new_ids) + len(after)
        label, end = line_segments(edit.field)

        def without_line(position: int) -> int:
            return position - min(max(0, position - line.start), len(line))

        for name, span in stale.spans.items():
            if name in (edit.field, label, end):
                continue
            if name == self.parameters.before:
                start = without_line(last.start)
                value = Span(start + len(before), start + len(before) + len(edit.new_ids))
                spans[label], spans[edit.field] = Span(start, value.start), value
                spans[end] = Span(value.end, start + hoisted)
            behind = hoisted if span.start >= last.start else 0
            spans[name] = Span(without_line(span.start) + behind, without_line(span.end) + behind)
        return spans
