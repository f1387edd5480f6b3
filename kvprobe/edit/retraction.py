"""Old news go out: an edit of a field that an earlier erratum speaks of takes that erratum out of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.edit.base import CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.erratum import erratum_name
from kvprobe.edit.spans import removed
from kvprobe.edit.splicing import rerun_from
from kvprobe.engine.receipt import Receipt

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def apply_without_old_news(subject: Subject, method: EditMethod, stale: CachedPrompt, edit: FieldEdit) -> Edited:
    """What `method` makes of the prompt without the field's earlier erratum, if it has one.

    What comes after the erratum has read it and so is run anew, by the method itself or behind it: a
    full-downstream edit pays nothing for it. A method that does nothing leaves the erratum where it is.

    Raises:
        UnsupportedError: as `method.apply`, or the model's RoPE scaling does not allow moving what comes after.
    """
    name = erratum_name(edit.field)
    if method.replaces_erratum or name not in stale.spans:
        return method.apply(subject, stale, edit)
    line = stale.span(name)
    shorter = removed(subject, stale, (name,), "rotated")
    edited = method.apply(subject, shorter.prompt, edit)
    prompt = edited.prompt
    if prompt is shorter.prompt:
        return Edited(stale, Receipt(tokens_reused=len(stale.cache)))
    grown = len(prompt.token_ids) - len(shorter.prompt.token_ids)
    place = line.start + (grown if stale.span(edit.field).start < line.start else 0)
    edited = shorter.then(edited)
    if set(range(place, len(prompt.cache))) <= set(edited.computed):
        return edited
    return edited.then(rerun_from(subject, prompt.cache, place, prompt.token_ids, prompt.spans))
