"""Stale: nothing is done; what every other method is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.engine.receipt import Receipt

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@EDIT_METHODS.register("stale")
class Stale(EditMethod):
    """Reuse the old cache as it is."""

    name: ClassVar[str] = "stale"

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The stale prompt itself."""
        return Edited(stale, Receipt(tokens_reused=len(stale.cache)))

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """None."""
        return 0
