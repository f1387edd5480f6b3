"""Field and the K most wanted tokens after it, really recomputed (section 5, critique ED2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from kvprobe.edit import base
from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.selection import SELECTIONS, candidates, selected
from kvprobe.edit.splicing import field_in_place, with_new_value
from kvprobe.engine.first_layers import DEVIATION_LAYER
from kvprobe.engine.operations import recompute

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def recompute_selected(subject: Subject, stale: CachedPrompt, edit: FieldEdit, positions: Sequence[int]) -> Edited:
    """The new value in place and the tokens at `positions` of the stale prompt run anew, layer by layer.

    The chosen tokens see the new value, one another's new entries and everyone else's stale ones.
    """
    span = stale.span(edit.field)
    delta = len(edit.new_ids) - len(span)
    moved = tuple(sorted(position + delta for position in positions))
    if delta or not moved:
        in_place = field_in_place(subject, stale, edit)
        if not moved:
            return in_place
        prompt = in_place.prompt
        cache, receipt = recompute(subject, prompt.cache, prompt.token_ids[:-1], moved)
        return in_place.then(Edited(CachedPrompt(prompt.token_ids, prompt.spans, cache), receipt, moved))
    ids, spans = with_new_value(stale, edit)
    chosen = tuple(sorted({*span.positions, *moved}))
    cache, receipt = recompute(subject, stale.cache, ids[:-1], chosen)
    return Edited(CachedPrompt(ids, spans, cache), receipt, chosen)


@EDIT_METHODS.register("selective")
class Selective(EditMethod):
    """Overwrite the field and recompute the K tokens after it that a criterion ranks first."""

    name: ClassVar[str] = "selective"

    class Parameters(base.Parameters):
        """How many tokens, chosen how."""

        k: int = Field(8, ge=0, description="tokens after the field to recompute")
        criterion: str = "decision_attention"

        @field_validator("criterion")
        @classmethod
        def _known(cls, name: str) -> str:
            SELECTIONS.get(name)
            return name

    def count(self, stale: CachedPrompt, edit: FieldEdit) -> int:
        """How many tokens after the field are recomputed."""
        return min(self.parameters.k, len(candidates(stale, edit)))

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        """The recomputed prompt; the receipt holds the cost of choosing too."""
        order, choosing = SELECTIONS.get(self.parameters.criterion)(subject, stale, edit)
        edited = self.renew(subject, stale, edit, selected(order, self.count(stale, edit)))
        return Edited(edited.prompt, choosing + edited.receipt, edited.computed)

    def renew(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit, positions: Sequence[int]) -> Edited:
        """The new value in place and the chosen positions renewed."""
        return recompute_selected(subject, stale, edit, positions)

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """The new value and the chosen tokens, and what choosing them runs."""
        return len(edit.new_ids) + self.count(stale, edit) + self.choosing_tokens(stale, edit)

    def choosing_tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """Choosing by deviation runs everything from the field on through two layers; other criteria run nothing."""
        if self.parameters.criterion != "first_layer_deviation":
            return 0
        share = (DEVIATION_LAYER + 1) / len(stale.cache.layers)
        return share * (len(edit.new_ids) + len(candidates(stale, edit)))
