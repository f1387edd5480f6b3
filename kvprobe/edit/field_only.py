"""Field-only (in place): the field's own keys and values, and nothing that was derived from them (section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.splicing import field_in_place

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@EDIT_METHODS.register("field_only")
class FieldOnly(EditMethod):
    """Overwrite the field's own entries; notes of the old value stay."""

    name: ClassVar[str] = "field_only"

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The new value run on the unchanged prefix, which is all it would see; the rest kept (or rotated)."""
        return field_in_place(subject, stale, edit)

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """The new value's."""
        return len(edit.new_ids)
