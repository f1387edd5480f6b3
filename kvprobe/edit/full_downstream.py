"""Full-downstream: everything from the field on is run anew; equal to a prefill of the new prompt (section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.splicing import rerun_from, with_new_value

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@EDIT_METHODS.register("full_downstream")
class FullDownstream(EditMethod):
    """Keep what comes before the field, run all that follows."""

    name: ClassVar[str] = "full_downstream"

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The new prompt on the prefix of the stale cache."""
        ids, spans = with_new_value(stale, edit)
        return rerun_from(subject, stale.cache, stale.span(edit.field).start, ids, spans)

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """The new value and all after it, but for the decision token."""
        span = stale.span(edit.field)
        return len(edit.new_ids) + len(stale.cache) - span.end
