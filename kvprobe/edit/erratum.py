"""Erratum: one appended line says that the field has changed (section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.splicing import appended

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def erratum_name(field: str) -> str:
    """Name of the segment that holds the erratum of a field."""
    return f"erratum of {field}"


def erratum_tokens(stale: CachedPrompt, edit: FieldEdit) -> int:
    """Tokens run for an erratum: the line and all that comes after it, but for the decision token."""
    earlier = stale.spans.get(erratum_name(edit.field))
    start = stale.span(edit.insert_before).start if earlier is None else earlier.start
    return len(edit.erratum_ids) + len(stale.cache) - start - (0 if earlier is None else len(earlier))


@EDIT_METHODS.register("erratum")
class Erratum(EditMethod):
    """Append the erratum before the task and run the task block again; an earlier erratum of the field is taken out."""

    name: ClassVar[str] = "erratum"
    replaces_erratum: ClassVar[bool] = True

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The stale cache up to the task, then erratum and task."""
        return appended(subject, stale, edit, edit.erratum_ids, erratum_name(edit.field))

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """The erratum and the task block."""
        return erratum_tokens(stale, edit)
