"""What edits make of a prompt's text: every edited prompt is tokenised whole, as if it had been written so at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvprobe.edit.base import CachedPrompt, Edited, FieldEdit, line_segments
from kvprobe.edit.erratum import erratum_name
from kvprobe.edit.fields import PlacedField
from kvprobe.edit.splicing import shared_start
from kvprobe.errors import AlignmentError, ConfigError, UnsupportedError
from kvprobe.tasks.context import Context, Segment, TokenizedContext, encode_segment, show_tokens, tokenize

_SHOWN = 4


def field_edit(context: Context, placed: PlacedField, value: str, tokenizer: Any, insert_before: str) -> FieldEdit:
    """The change to a value, with everything that any method may say of it, in the tokens of the whole prompt.

    Raises:
        AlignmentError, ConfigError: see `PlacedField.value_ids`.
    """
    name = placed.declared.name
    # Methods take out an earlier erratum of the field.
    plain = context.without(erratum_name(name))
    ids = placed.value_ids(plain, value, tokenizer)
    _, said = placed.texts(value)
    told = tokenize(plain.insert_before(insert_before, said), tokenizer)
    label, end = line_segments(name)
    line = told.ids_of(label), told.ids_of(end)

    def moved(before: str) -> TokenizedContext:
        return tokenize(_hoisted(placed.written(plain, value), name, before), tokenizer)

    return FieldEdit(name, ids, told.ids_of(said.name), line if any(line) else None, insert_before, moved)


def checked(edited: Edited, context: Context, edit: FieldEdit, texts: Sequence[Segment], tokenizer: Any) -> Context:
    """The edited prompt's text.

    Args:
        edited: what a method made of the prompt.
        context: the text before the edit.
        edit: the edit.
        texts: the field's segment with the new value and its erratum's.
        tokenizer: the model's.

    Raises:
        UnsupportedError: the edited prompt's tokens are not those of its text.
    """
    prompt, known = edited.prompt, {segment.name: segment for segment in context.segments}
    for ids, segment in zip((edit.new_ids, edit.erratum_ids), texts, strict=True):
        span = prompt.spans.get(segment.name)
        if span is not None and prompt.token_ids[span.start : span.end] == ids:
            known[segment.name] = segment
    for name, span in prompt.spans.items():
        if name not in known:
            # A method may add segments of names that it alone knows, such as errata that are all kept.
            ids = tuple(prompt.token_ids[span.start : span.end])
            said = texts[-1] if ids == tuple(edit.erratum_ids) else Segment(name, tokenizer.decode(ids), ids=ids)
            known[name] = dataclasses.replace(said, name=name)
    text = dataclasses.replace(context, segments=tuple(known[name] for name in prompt.spans))
    whole = tokenize(text, tokenizer)
    if whole.token_ids != prompt.token_ids:
        at = shared_start(whole.token_ids, prompt.token_ids)
        ours, theirs = (ids[max(0, at - 1) :][:_SHOWN] for ids in (prompt.token_ids, whole.token_ids))
        raise UnsupportedError(
            f"This edit of {edit.field!r} would leave the tokens {show_tokens(ours, tokenizer)} where the tokenizer "
            f"reads the edited text as {show_tokens(theirs, tokenizer)}; put a line break before the joint, or use a "
            "method that moves nothing there, such as full_downstream."
        )
    return text


def with_lines_apart(
    context: Context, fields: Sequence[PlacedField], tokenizer: Any
) -> tuple[Context, list[PlacedField]]:
    """The context with the rest of each field's line as segments of its own, and the fields with their blanks.

    Raises:
        AlignmentError: the context does not hold what the fields declare.
        ConfigError: there is no segment of a field's name.
    """
    settled = []
    for placed in fields:
        declared, names = placed.declared, [segment.name for segment in context.segments]
        if declared.name not in names:
            raise ConfigError(f"The prompt has no segment {declared.name!r}; it has {', '.join(names)}.")
        label, end = line_segments(declared.name)
        place, segments = names.index(declared.name), list(context.segments)
        own = _own_text(segments[place], declared.value, tokenizer)
        segments[place] = own
        if declared.after and end not in names:
            segments[place + 1 : place + 2] = _cut(segments[place + 1], declared.after, end, tokenizer, front=True)
        if declared.before and label not in names:
            earlier = segments[place - 1] if place else Segment(declared.name, "")
            segments[max(0, place - 1) : place] = _cut(earlier, declared.before, label, tokenizer, front=False)
        context = dataclasses.replace(context, segments=tuple(segments))
        settled.append(dataclasses.replace(placed, blank=own.text.removesuffix(declared.value)))
    return context, settled


def fixed(prompt: CachedPrompt | TokenizedContext, tokenizer: Any) -> Context:
    """A prompt whose text is not known, in segments of given tokens; those of no segment get one of their own."""
    pieces, end = [], 0
    for name, span in sorted(prompt.spans.items(), key=lambda item: item[1]):
        if span.start > end:
            pieces.append((f"tokens {end}:{span.start}", end, span.start))
        pieces.append((name, span.start, span.end))
        end = max(end, span.end)
    if end < len(prompt.token_ids):
        pieces.append((f"tokens {end}:{len(prompt.token_ids)}", end, len(prompt.token_ids)))
    return Context(
        tuple(
            Segment(name, tokenizer.decode(prompt.token_ids[start:stop]), ids=tuple(prompt.token_ids[start:stop]))
            for name, start, stop in pieces
        ),
        opened=True,
        apart=True,
    )


def _hoisted(context: Context, field: str, before: str) -> Context:
    names = [segment.name for segment in context.segments]
    line = [name for name in names if name in (field, *line_segments(field))]
    if names.index(before) <= names.index(line[-1]):
        raise UnsupportedError(
            f"The line of {field!r} cannot be hoisted in front of {before!r}, which does not come after it; name a "
            "later segment."
        )
    _check_line(context, field, line)
    rest = context.without(*line).segments
    at = [segment.name for segment in rest].index(before)
    moved = tuple(segment for segment in context.segments if segment.name in line)
    return dataclasses.replace(context, segments=(*rest[:at], *moved, *rest[at:]))


def _check_line(context: Context, field: str, line: Sequence[str]) -> None:
    """A line that shares its words with what stands beside it cannot be taken out."""
    segments = list(context.segments)
    names = [segment.name for segment in segments]
    first, last = names.index(line[0]), segments[names.index(line[-1])]
    before = segments[first - 1] if first else Segment("", "\n")
    for beside in (before, last):
        if beside.ids is None and not beside.control and beside.text == beside.text.rstrip():
            raise UnsupportedError(
                f"The field {field!r} shares its line with other text, so the line cannot be moved; put it in a line "
                "of its own."
            )


def _own_text(segment: Segment, value: str, tokenizer: Any) -> Segment:
    """The segment of a field as text."""
    for text in (segment.text, value, f" {value}"):
        if segment.ids is None and text.strip() != value:
            break
        if segment.ids is None or tuple(encode_segment(text, tokenizer)) == segment.ids:
            return Segment(segment.name, text)
    raise _not_held(segment, value, "at")


def _cut(segment: Segment, said: str, name: str, tokenizer: Any, *, front: bool) -> list[Segment]:
    """What stands beside a value cut off its segment."""
    where = "after" if front else "before"
    if segment.ids is None:
        if not (segment.text.startswith(said) if front else segment.text.endswith(said)):
            raise _not_held(segment, said, where)
        rest = segment.text.removeprefix(said) if front else segment.text.removesuffix(said)
        pieces = [dataclasses.replace(segment, text=rest), Segment(name, said)]
    else:
        ids = tuple(encode_segment(said, tokenizer))
        held, rest_ids = (
            (segment.ids[: len(ids)], segment.ids[len(ids) :])
            if front
            else (segment.ids[-len(ids) :], segment.ids[: -len(ids)])
        )
        if held != ids:
            raise _not_held(segment, said, where)
        pieces = [dataclasses.replace(segment, ids=rest_ids), Segment(name, said, ids=ids)]
    kept = [piece for piece in pieces if (piece.text if piece.ids is None else piece.ids)]
    return kept[::-1] if front else kept


def _not_held(segment: Segment, said: str, where: str) -> AlignmentError:
    return AlignmentError(
        f"A field declares {said!r} {where} its value and the prompt holds {segment.text!r} in {segment.name!r}; "
        "declare what stands there."
    )
