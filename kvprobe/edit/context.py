r"""A prompt whose fields can be changed after its prefill.

context = EditableContext.prefill(subject, [
    "You work at the shipping desk.\nOrder status: ",
    Field("order_status", "pending"),
    "\nIf the order status is pending, then cancel. If it is shipped, then deny.\n",
    ("task", "Task: Reply with cancel or deny.\n"),
    ("cue", "Answer:"),
])
context.decide(["cancel", "deny"]).answer            # "cancel"
context.set("order_status", "shipped")               # exact; everything from the field on is run again
context.set("order_status", "pending", "erratum")    # cheaper: a line before the task says the change
context.state                                        # {"order_status": "pending"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from kvprobe.edit.base import CachedPrompt, EditMethod, chosen_method, line_segments
from kvprobe.edit.erratum import erratum_name
from kvprobe.edit.fields import Field, Part, PlacedField, laid_out, pair_fields
from kvprobe.edit.hugging_face import imported, model_inputs
from kvprobe.edit.readings import Cost, Decision, Seam, Written, decide_between
from kvprobe.edit.retraction import apply_without_old_news
from kvprobe.edit.spans import Insertion, Removal, inserted, removed
from kvprobe.edit.splicing import rerun_from, shared_start
from kvprobe.edit.texts import checked, field_edit, fixed, with_lines_apart
from kvprobe.engine.generation import generate
from kvprobe.errors import AlignmentError, ConfigError
from kvprobe.models.subject import Subject
from kvprobe.tasks.context import Context, Segment, Span, TokenizedContext, tokenize
from kvprobe.tasks.pairs import Pair
from kvprobe.viewing import Viewable

__all__ = ["EditableContext", "Field"]


class EditableContext(Viewable):
    """A cached prompt with declared fields, their values, and the edits between them.

    Caches are never written into: an edit replaces them, and one that fails leaves the context as it was. Edits by
    `full_downstream`, `full_reprefill`, `erratum` and `hoist_to_end` leave the cache of a prefill of the prompt's own
    text, as long as no cheaper edit came before. An erratum and a hoisted line stay where they are until their field is
    set again or moved. `seam` measures how far the context is from a prefill.
    """

    def __init__(
        self,
        subject: Subject,
        prompt: CachedPrompt,
        fields: Sequence[PlacedField],
        errata_before: str | None = None,
        *,
        written: Context | None = None,
    ) -> None:
        """A context of an already cached prompt; see `prefill`, `from_pair` and `from_hugging_face`.

        Args:
            subject: the model.
            prompt: the prompt and its cache.
            fields: as they stand in the prompt.
            errata_before: the segment that errata are put in front of; by default `task`, else the last one.
            written: the prompt's text; by default segments of the given tokens, which are then not tokenised whole.

        Raises:
            AlignmentError: the prompt's tokens are not what the fields declare, or not those of the text.
        """
        tokenizer = subject.tokenizer
        self._subject = subject
        self._context, fields = with_lines_apart(written or fixed(prompt, tokenizer), fields, tokenizer)
        names = tuple(placed.declared.name for placed in fields)
        self._prompt = prompt = _respanned(prompt, tokenize(self._context, tokenizer, names))
        self._fields = {placed.declared.name: placed for placed in fields}
        last = max(prompt.spans, key=lambda name: prompt.spans[name])
        self._errata_before = errata_before or ("task" if "task" in prompt.spans else last)
        prompt.span(self._errata_before)
        self._state = {placed.declared.name: placed.declared.value for placed in fields}
        self._written = dict(self._state)

    @classmethod
    def prefill(cls, subject: Subject, parts: Sequence[Part], *, errata_before: str | None = None) -> EditableContext:
        """Prefill a prompt made of texts, named texts and fields.

        Raises:
            ConfigError: no field, a name twice, or a prompt that ends in a field.
            AlignmentError: a value's tokens merge with the text beside it.
        """
        tokens, fields = cls.tokenized(subject, parts)
        prompt = CachedPrompt.prefilled(subject, tokens.token_ids, tokens.spans)
        return cls(subject, prompt, fields, errata_before, written=tokens.source)

    @staticmethod
    def tokenized(subject: Subject, parts: Sequence[Part]) -> tuple[TokenizedContext, list[PlacedField]]:
        """The tokens that `prefill` runs for these parts, and the fields in them."""
        context, fields = laid_out(parts)
        return tokenize(context, subject.tokenizer, fields), list(fields.values())

    @classmethod
    def from_prompt(
        cls,
        subject: Subject,
        prompt: TokenizedContext | CachedPrompt,
        fields: Sequence[Field],
        *,
        errata_before: str | None = None,
    ) -> EditableContext:
        """From a tokenised prompt, prefilled here unless it is cached; fields are called as the segments they are.

        Raises:
            AlignmentError: the prompt's tokens are not what the fields declare.
        """
        written = None
        if isinstance(prompt, TokenizedContext):
            written, prompt = prompt.source, CachedPrompt.prefilled(subject, prompt.token_ids, prompt.spans)
        return cls(subject, prompt, [PlacedField.of(field) for field in fields], errata_before, written=written)

    @classmethod
    def from_pair(cls, subject: Subject, pair: Pair) -> EditableContext:
        """The base prompt of a task's pair; fields `field` and, in task two_fields, `second_field`.

        Raises:
            ConfigError: the pair does not say its entity, field and old value.
        """
        return cls.from_prompt(subject, pair.base, pair_fields(pair))

    @classmethod
    def from_hugging_face(
        cls, subject: Subject, parts: Sequence[Part], past: Any, *, errata_before: str | None = None
    ) -> EditableContext:
        """From a Hugging Face cache of the prompt, of all its tokens or of all but the last; it is copied.

        Its tokens must be those that `prefill` would run for the same parts, `tokenized(subject, parts)`.

        Raises:
            UnsupportedError: the cache is of another length, another model or other tokens, or not a full one.
        """
        tokens, fields = cls.tokenized(subject, parts)
        prompt = CachedPrompt(tokens.token_ids, tokens.spans, imported(subject, tokens.token_ids, past))
        return cls(subject, prompt, fields, errata_before, written=tokens.source)

    @property
    def state(self) -> Mapping[str, str]:
        """The current value of every field, whatever method set it."""
        return MappingProxyType(dict(self._state))

    @property
    def written(self) -> Mapping[str, str]:
        """The value whose tokens stand in each field's place; after an erratum it is not that of `state`."""
        return MappingProxyType(dict(self._written))

    @property
    def errata(self) -> Mapping[str, str]:
        """The erratum that the prompt holds of a field, for those that have one."""
        names = {name: erratum_name(name) for name in self._fields}
        return MappingProxyType(
            {name: self._decoded(line) for name, line in names.items() if line in self._prompt.spans}
        )

    @property
    def text(self) -> str:
        """What the prompt really says, decoded from its tokens."""
        return str(self._subject.tokenizer.decode(self._prompt.token_ids))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt as it is."""
        return self._prompt.token_ids

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._subject.tokenizer

    @property
    def prompt(self) -> CachedPrompt:
        """Tokens, spans and cache, to be treated as read-only."""
        return self._prompt

    def copy(self) -> EditableContext:
        """Another context that starts as this one is now; they share storage and not their edits."""
        return copy(self)

    def set(self, field: str, value: str, method: str | EditMethod = "full_downstream", **parameters: Any) -> Cost:
        """Change a field.

        An earlier erratum of the field is taken out, so that the context never holds old news, and what came after it
        is run anew; `stale` alone does nothing at all.

        Args:
            field: its name.
            value: its new value, of any length in tokens: keys of what follows are rotated where they are kept.
            method: a registered name or a method.
            parameters: of a method given by its name, such as `k=16` for `selective`.

        Raises:
            ConfigError: no such field, a value that is empty, or parameters that the method does not have.
            AlignmentError: the value's tokens would merge with the text beside it.
            UnsupportedError: the method cannot make this edit.
        """
        placed, tokenizer = self._field(field), self._subject.tokenizer
        self._prompt.refuse_gaps()
        edit = field_edit(self._context, placed, value, tokenizer, self._insertion_point(field))
        chosen = chosen_method(method, parameters)
        edited = apply_without_old_news(self._subject, chosen, self._prompt, edit)
        span = edited.prompt.span(field)
        self._context = checked(edited, self._context, edit, placed.texts(value), tokenizer)
        self._prompt = _respanned(edited.prompt, tokenize(self._context, tokenizer))
        self._state = {**self._state, field: value}
        if edited.prompt.token_ids[span.start : span.end] == edit.new_ids:
            self._written = {**self._written, field: value}
        return Cost(chosen.name, edited.receipt, len(edited.prompt.token_ids))

    def remove(self, name: str, behind: Removal = "recomputed") -> Cost:
        """Take a field's whole line, or another segment, out of the prompt.

        Only `recomputed` is exact: entries that stay keep what they noted of the removed text (experiment `removal`).

        Args:
            name: of a field, whose erratum goes too, or of a segment.
            behind: what becomes of the entries behind it: `recomputed`, `rotated` into its place, or kept where they
                are with a `gap`, after which the context can be read and no longer edited.

        Raises:
            ConfigError: there is no such segment, or it is part of a field's line.
            AlignmentError: the text without it is read as other tokens.
            UnsupportedError: the entries cannot be moved, or there is a gap already.
        """
        names = {name}
        if name in self._fields:
            names = {*line_segments(name), name, erratum_name(name)} & {*self._prompt.spans}
        elif any(name in line_segments(field) for field in self._fields):
            raise ConfigError(f"The segment {name!r} belongs to the line of a field; remove the field.")
        edited = removed(self._subject, self._prompt, tuple(names), behind)
        self._settle(edited.prompt, self._context.without(*names))
        self._fields = {own: placed for own, placed in self._fields.items() if own != name}
        self._state = {own: value for own, value in self._state.items() if own != name}
        self._written = {own: value for own, value in self._written.items() if own != name}
        return Cost(f"remove, {behind}", edited.receipt, len(edited.prompt.token_ids))

    def insert(self, name: str, text: str, before: str, behind: Insertion = "recomputed") -> Cost:
        """Put a new segment in front of another.

        Args:
            name: of the new segment.
            text: what it says.
            before: the segment that it is put in front of.
            behind: what becomes of the entries behind it: `recomputed`, which is exact, or `rotated`: they have not
                read it.

        Raises:
            ConfigError: there is a segment of that name already, none to put it before, or no text.
            AlignmentError: the text with it is read as other tokens.
            UnsupportedError: the entries cannot be moved, or there is a gap.
        """
        prompt = self._prompt
        if name in prompt.spans:
            raise ConfigError(f"The context has a segment {name!r} already; choose another name.")
        if not text:
            raise ConfigError(f"The text of segment {name!r} is empty; give at least one word.")
        prompt.span(before)
        context = self._context.insert_before(before, Segment(name, text))
        ids = tokenize(context, self._subject.tokenizer).ids_of(name)
        edited = inserted(self._subject, prompt, name, ids, before=before, behind=behind)
        self._settle(edited.prompt, context)
        return Cost(f"insert, {behind}", edited.receipt, len(edited.prompt.token_ids))

    def with_segment(self, name: str, text: str) -> EditableContext:
        """Another context in which one segment, such as the task, has another text; it and all after it are run.

        Raises:
            ConfigError: there is no such segment, or it belongs to a field.
        """
        if name not in self._prompt.spans:
            raise ConfigError(f"The context has no segment {name!r}; it has {', '.join(self._prompt.spans)}.")
        if any(name in (own, *line_segments(own)) for own in self._fields):
            raise ConfigError(f"The segment {name!r} belongs to the line of a field; change it with set.")
        other = copy(self)
        other._context = self._context.replace(name, text)
        whole = tokenize(other._context, self._subject.tokenizer, self._fields)
        if not whole.ids_of(name):
            raise ConfigError(f"The new text of segment {name!r} is empty; give at least one word.")
        start = min(shared_start(whole.token_ids, self._prompt.token_ids), self._prompt.span(name).start)
        other._prompt = rerun_from(self._subject, self._prompt.cache, start, whole.token_ids, whole.spans).prompt
        return other

    def decide(self, answers: Sequence[str]) -> Decision:
        """The choice between answers, each read as a whole behind the prompt; only the last token is run.

        Raises:
            ConfigError: fewer than two answers, or some that cannot be told apart.
        """
        return decide_between(self._subject, self._prompt, answers)[0]

    def generate(
        self,
        limit: int = 64,
        *,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Written:
        """Continue the prompt; the context itself stays as it is.

        Args:
            limit: most tokens.
            stop: texts that end it, beside the model's own end of text.
            temperature: 0 for the most likely token.
            generator: on the CPU; needed with a temperature.
        """
        (made,) = generate(
            self._subject,
            self._prompt.token_ids,
            self._prompt.cache,
            [()],
            limit=limit,
            stop=stop,
            temperature=temperature,
            generator=generator,
        )
        return Written.of(made, stop, self._subject.tokenizer)

    def seam(self, answers: Sequence[str], against: Literal["state", "text"] = "state") -> Seam:
        """How far the decision is from that of a full prefill, which is run for it.

        Args:
            answers: as in `decide`.
            against: `state` prefills the prompt without errata, with the current values in the fields' places (a
                hoisted field's is where its line stands now); `text` prefills the very tokens of the prompt as it is.
        """
        ids, spans = (self._prompt.token_ids, self._prompt.spans) if against == "text" else self._as_written()
        edited, mine = decide_between(self._subject, self._prompt, answers)
        full, theirs = decide_between(self._subject, CachedPrompt.prefilled(self._subject, ids, spans), answers)
        return Seam(edited, full, float((mine.exp() - theirs.exp()).abs().sum() / 2))

    def to_hugging_face(self) -> dict[str, Any]:
        """What `model.generate(**inputs)` needs to go on from here: ids, mask, positions, and a cache of its own.

        `input_ids`, `attention_mask` and `position_ids` are `[1, token]`, under M-RoPE `position_ids` `[4, 1, token]`:
        place in the prompt, time, height and width. `past_key_values` holds all tokens but the last.
        """
        return model_inputs(self._subject, self._prompt)

    def __repr__(self) -> str:
        state = ", ".join(f"{name}={value!r}" for name, value in self._state.items())
        return f"EditableContext({state}; {len(self.token_ids)} tokens on {self._subject.name})"

    def _settle(self, prompt: CachedPrompt, context: Context) -> None:
        """Take an edited prompt and its text for this context's own."""
        self._prompt = _respanned(prompt, tokenize(context, self._subject.tokenizer))
        self._context = context

    def _field(self, name: str) -> PlacedField:
        if name not in self._fields:
            raise ConfigError(f"The context has no field {name!r}; it has {', '.join(self._fields)}.")
        return self._fields[name]

    def _insertion_point(self, field: str) -> str:
        """The segment an erratum of the field goes before: a field that was hoisted behind it gets its own after it."""
        spans = self._prompt.spans
        label, end = (spans.get(name, spans[field]) for name in line_segments(field))
        if label.start < spans[self._errata_before].start:
            return self._errata_before
        own = erratum_name(field)
        behind = [name for name, span in spans.items() if span.start >= end.end and len(span) and name != own]
        if not behind:
            raise ConfigError(f"Nothing stands behind the field {field!r}; put the task or a cue after it.")
        return min(behind, key=lambda name: spans[name])

    def _as_written(self) -> tuple[tuple[int, ...], dict[str, Span]]:
        context = self._context.without(*map(erratum_name, self.errata))
        for name, value in self._state.items():
            context = self._fields[name].written(context, value)
        whole = tokenize(context, self._subject.tokenizer)
        return whole.token_ids, whole.spans

    def _decoded(self, segment: str) -> str:
        span = self._prompt.spans[segment]
        return str(self._subject.tokenizer.decode(self._prompt.token_ids[span.start : span.end]))


def _respanned(prompt: CachedPrompt, whole: TokenizedContext) -> CachedPrompt:
    """The prompt with the segments of its text."""
    if whole.token_ids != prompt.token_ids:
        raise AlignmentError(
            "The prompt's tokens are not those that the model's tokenizer reads in its text; use that tokenizer, and "
            "let segments begin and end with a line break."
        )
    return replace(prompt, spans=whole.spans)
