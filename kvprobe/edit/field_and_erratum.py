"""Field and erratum: the field in place and an erratum behind it, both on the stale cache (section 5, critique ED1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.erratum import erratum_name, erratum_tokens
from kvprobe.edit.splicing import appended, field_in_place

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@EDIT_METHODS.register("field_and_erratum")
class FieldAndErratum(EditMethod):
    """Overwrite the field's entries, then append the erratum; the stale notes in between stay."""

    name: ClassVar[str] = "field_and_erratum"
    replaces_erratum: ClassVar[bool] = True

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The erratum on top of the in-place edit."""
        in_place = field_in_place(subject, stale, edit)
        return in_place.then(appended(subject, in_place.prompt, edit, edit.erratum_ids, erratum_name(edit.field)))

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """The new value, the erratum and the task block."""
        return len(edit.new_ids) + erratum_tokens(stale, edit)
