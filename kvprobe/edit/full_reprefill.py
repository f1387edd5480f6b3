"""Full reprefill: the cache is thrown away; the oracle of all other methods (section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.splicing import rerun_from, with_new_value

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@EDIT_METHODS.register("full_reprefill")
class FullReprefill(EditMethod):
    """Prefill the new prompt from its first token."""

    name: ClassVar[str] = "full_reprefill"

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The new prompt on an empty cache."""
        ids, spans = with_new_value(stale, edit)
        return rerun_from(subject, stale.cache, 0, ids, spans)

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """All but the decision token."""
        return len(stale.cache) - len(stale.span(edit.field)) + len(edit.new_ids)
