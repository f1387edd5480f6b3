"""Upper bound: the chosen tokens' entries are copied from the full prefill of the new prompt (critique ED2).

No edit can do this, for the prefill it copies from is what an edit avoids. The paper's selective arms are this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, FieldEdit
from kvprobe.edit.selective import Selective
from kvprobe.edit.splicing import rerun_from, with_new_value
from kvprobe.engine.operations import overwrite
from kvprobe.errors import UnsupportedError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def copy_selected(subject: Subject, stale: CachedPrompt, edit: FieldEdit, positions: Sequence[int]) -> Edited:
    """The new value's entries and those at `positions`, all copied from a full prefill, at its cost.

    Raises:
        UnsupportedError: the new value has another length.
    """
    span = stale.span(edit.field)
    if len(edit.new_ids) != len(span):
        raise UnsupportedError(
            f"Copying from the full prefill needs a new value of {edit.field!r} of {len(span)} tokens, not "
            f"{len(edit.new_ids)}."
        )
    ids, spans = with_new_value(stale, edit)
    oracle = rerun_from(subject, stale.cache, 0, ids, spans)
    chosen = tuple(sorted({*span.positions, *positions}))
    cache, copying = overwrite(stale.cache, chosen, oracle.prompt.cache)
    return Edited(CachedPrompt(ids, spans, cache), oracle.receipt + copying, chosen)


@EDIT_METHODS.register("oracle_copy")
class OracleCopy(Selective):
    """Upper bound of selective: the K tokens' entries come from the answer itself."""

    name: ClassVar[str] = "oracle_copy"
    upper_bound: ClassVar[bool] = True

    def renew(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit, positions: Sequence[int]) -> Edited:
        """The chosen entries of the full prefill."""
        return copy_selected(subject, stale, edit, positions)

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        """Choosing, and a full prefill."""
        return self.choosing_tokens(stale, edit) + len(stale.cache)
