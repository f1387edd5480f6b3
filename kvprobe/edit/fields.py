"""Declared fields of a prompt: their value, the words around it, and the line that says a change."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe.edit.base import line_segments
from kvprobe.edit.erratum import erratum_name
from kvprobe.errors import ConfigError
from kvprobe.tasks.context import Context, Segment, tokenize
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import WORDINGS


@dataclass(frozen=True)
class Field:
    """A value in a prompt that may change later.

    Args:
        name: what the field is called, and the name of the segment that holds its value.
        value: its first value, without blanks around it.
        before: what stands before the value in its line; a blank at the end goes to the value, as tokenizers have it.
        after: what stands after it in its line, as a rule its end of line.
        erratum: the line that says a change, with `{value}` where the new value goes.
    """

    name: str
    value: str
    before: str = ""
    after: str = ""
    erratum: str = ""

    def said(self, value: str) -> str:
        """The erratum with a value in it.

        Raises:
            ConfigError: the erratum has no place for the value.
        """
        name = self.name.replace("_", " ")
        template = self.erratum or f"Update: the {name} is now {{value}}; this replaces the earlier one.\n"
        if "{value}" not in template:
            raise ConfigError(f"The erratum of field {self.name!r} has no {{value}} in it; say where the value goes.")
        return template.replace("{value}", value)


Part = str | tuple[str, str] | Segment | Field
"""A piece of a prompt: plain text, text with a segment's name, or a field."""


@dataclass(frozen=True)
class PlacedField:
    """A field as it stands in a prompt.

    Attributes:
        declared: the field; its `before` has no blank at its end.
        blank: the blank between `before` and the value, which is part of the value's tokens.
    """

    declared: Field
    blank: str

    @classmethod
    def of(cls, declared: Field) -> PlacedField:
        """The field between the texts of its line."""
        before, blank = _split_blank(declared.before)
        return cls(dataclasses.replace(declared, before=before), blank)

    def written(self, context: Context, value: str) -> Context:
        """The prompt with another value in the field's place.

        Raises:
            ConfigError: the value is empty or has blanks around it.
        """
        if not value or value != value.strip():
            raise ConfigError(
                f"The value {value!r} of field {self.declared.name!r} is empty or has blanks around it; give bare "
                "words."
            )
        return context.replace(self.declared.name, self.blank + value)

    def texts(self, value: str) -> tuple[Segment, Segment]:
        """The field's segment with a value, and that of the erratum that says it."""
        return Segment(self.declared.name, self.blank + value), Segment(
            erratum_name(self.declared.name), self.declared.said(value)
        )

    def value_ids(self, context: Context, value: str, tokenizer: Any) -> tuple[int, ...]:
        """Tokens of a value in the field's place, from the whole prompt's.

        Raises:
            ConfigError: the value is empty, has blanks around it, or has a word that the tokenizer does not know.
            AlignmentError: a token reaches over the value's edges.
        """
        name = self.declared.name
        ids = tokenize(self.written(context, value), tokenizer, (name,)).ids_of(name)
        unknown = tokenizer.unk_token_id
        if unknown is not None and unknown in ids:
            raise ConfigError(
                f"The value {value!r} of field {name!r} has a word that the model's tokenizer does not know; choose "
                "another."
            )
        return ids


def laid_out(parts: Sequence[Part]) -> tuple[Context, dict[str, PlacedField]]:
    """The parts as named segments, and the fields among them.

    A field without `before` or `after` takes the rest of its line from the texts beside it: its line is then moved
    whole where a method moves it. Those pieces become segments (`line_segments`).

    Raises:
        ConfigError: no field, two of one name, or a prompt that ends in a field.
    """
    if not any(isinstance(part, Field) for part in parts):
        raise ConfigError("The prompt declares no field; put a Field(name, value) among its parts.")
    pieces = [_as_piece(part, number) for number, part in enumerate(parts)]
    for index, piece in enumerate(pieces):
        if isinstance(piece, Field):
            pieces[index] = _with_line(pieces, index, piece)
    context = Context(tuple(named for piece in _without_blanks(pieces) for named in _segments(piece) if named.text))
    fields = [piece for piece in pieces if isinstance(piece, Field)]
    placed = {field.name: PlacedField.of(field) for field in fields}
    names = [segment.name for segment in context.segments]
    if names[-1] in placed:
        raise ConfigError(f"The prompt ends in field {names[-1]!r}; put the question after it.")
    for name, following in itertools.pairwise(names):
        if name in placed and following in placed:
            raise ConfigError(f"Nothing stands between the fields {name!r} and {following!r}; put a text there.")
    return context, placed


def pair_fields(pair: Pair) -> list[Field]:
    """The fields that a task's pair declares, with their old values and in the words of its wording.

    They are called as their segments: `field`, and in task two_fields `second_field`.

    Raises:
        ConfigError: the pair does not say its entity, field and old value.
    """
    attributes = pair.scenario.attributes
    missing = [key for key in ("entity", "field", "old") if key not in attributes]
    if missing:
        raise ConfigError(f"A context from a pair needs one that says its {missing[0]}: use task gated_decision.")
    style = WORDINGS.get(pair.scenario.wording)()
    about = {"field": ("entity", "field", "old")}
    if "second_entity" in attributes:
        about["second_field"] = ("second_entity", "second_field", "second_old")
    fields = []
    for name, keys in about.items():
        entity, field, value = (attributes[key] for key in keys)
        before, after = style.record(entity, field)
        fields.append(Field(name, value, f"{before} ", after, style.update(entity, field, "{value}")))
    return fields


def _split_blank(text: str) -> tuple[str, str]:
    return (text[:-1], " ") if text.endswith(" ") else (text, "")


def _as_piece(part: Part, number: int) -> Segment | Field:
    if isinstance(part, str):
        return Segment(f"text {number}", part)
    return Segment(*part) if isinstance(part, tuple) else part


def _with_line(pieces: list[Segment | Field], index: int, field: Field) -> Field:
    """The field with the rest of its line, which is cut off the texts beside it."""
    earlier = pieces[index - 1] if index else None
    if not field.before and isinstance(earlier, Segment) and not earlier.control:
        kept, broken, line = earlier.text.rpartition("\n")
        pieces[index - 1] = dataclasses.replace(earlier, text=kept + broken)
        field = dataclasses.replace(field, before=line)
    later = pieces[index + 1] if index + 1 < len(pieces) else None
    if not field.after and isinstance(later, Segment) and not later.control:
        line, broken, kept = later.text.partition("\n")
        if broken and (kept or index + 2 < len(pieces)):
            pieces[index + 1] = dataclasses.replace(later, text=kept)
            field = dataclasses.replace(field, after=line + broken)
    return field


def _without_blanks(pieces: Sequence[Segment | Field]) -> list[Segment | Field]:
    """The pieces with the blank before each value moved to the value."""
    moved = list(pieces)
    for index, piece in enumerate(pieces):
        if not isinstance(piece, Field):
            continue
        before, blank = _split_blank(piece.before)
        moved[index] = dataclasses.replace(piece, before=before, value=blank + piece.value)
    return moved


def _segments(piece: Segment | Field) -> list[Segment]:
    if isinstance(piece, Segment):
        return [piece]
    label, end = line_segments(piece.name)
    return [Segment(label, piece.before), Segment(piece.name, piece.value), Segment(end, piece.after)]
