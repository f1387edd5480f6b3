"""Old news go out: an edit of a field that an earlier erratum speaks of takes that erratum out of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.edit.base import CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.edit.erratum import erratum_name
from kvprobe.edit.splicing import moved_spans, rerun_from
from kvprobe.engine.operations import concat, reposition
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
    shorter = _closed_up(subject, stale, name)
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


def _closed_up(subject: Subject, stale: CachedPrompt, name: str) -> Edited:
    """The prompt without a segment, what follows it rotated into its place."""
    line = stale.span(name)
    spans = moved_spans(stale.spans, name, 0)
    del spans[name]
    ids = (*stale.token_ids[: line.start], *stale.token_ids[line.end :])
    cache, after = stale.cache.take(slice(0, line.start)), stale.cache.take(slice(line.end, None))
    cost = Receipt()
    if len(after):
        moved, cost = reposition(subject, after, -len(line))
        cache, _ = concat(cache, moved)
    return Edited(CachedPrompt(ids, spans, cache), cost)
