"""A user's prompt made ready for a model: tokens, fields in their places, answers, and what to warn of."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvprobe.edit.base import CachedPrompt, Edited, FieldEdit
from kvprobe.edit.fields import Field, Part, PlacedField, laid_out
from kvprobe.edit.texts import checked, field_edit
from kvprobe.engine.cache import KVCache
from kvprobe.errors import AlignmentError, ConfigError, KvprobeError
from kvprobe.models.catalogue import model_config
from kvprobe.models.subject import Subject
from kvprobe.tasks.answers import spellings
from kvprobe.tasks.chat import chat_wrapped, messages_wrapped
from kvprobe.tasks.context import Context, Segment, TokenizedContext, encode_segment, show_tokens, tokenize
from kvprobe.tasks.encoding import control_tokens
from kvprobe.tasks.own_prompt import MarkedField, PromptFile, Turn

_TOLD = 12
_RESERVED = re.compile(r"task|cue|chat_prefix|chat_middle|line \d+|(before|after|erratum of) .*")


@dataclass(frozen=True)
class AuditField:
    """One field in the prompt.

    Attributes:
        marked: as the file marks it.
        placed: as it stands in the prompt.
        context: the prompt's text, with every field at its old value.
        donor: the prompt with this field alone at its new value.
        insert_before: the segment an erratum goes in front of.
        alone: whether it is the only field in its line, so that the line can be moved.
        uneven: where the values differ in token length, so that caches cannot be compared entry by entry: their lengths
            and what would make them alike, as a sentence.
    """

    marked: MarkedField
    placed: PlacedField
    context: Context
    donor: TokenizedContext
    insert_before: str
    alone: bool
    uneven: str = ""

    def check(self, edited: Edited, start: TokenizedContext, value: str, tokenizer: Any) -> None:
        """Refuse an edit of `start` that leaves other tokens than those of the edited prompt's text.

        Raises:
            UnsupportedError: it does.
        """
        checked(edited, start.source or self.context, self.edit(value, tokenizer), self.placed.texts(value), tokenizer)

    def edit(self, value: str, tokenizer: Any) -> FieldEdit:
        """The change of the field to `value`."""
        edit = field_edit(self.context, self.placed, value, tokenizer, self.insert_before)
        return edit if self.alone else dataclasses.replace(edit, line_ids=None)


AnswerIds = tuple[dict[str, int], ...]


@dataclass(frozen=True)
class AuditPrompt:
    """A prompt file on one model's tokenizer.

    Attributes:
        content: the file.
        base: the prompt with every field at its old value.
        fields: in the order of the text.
        spelled: the first token of each possible answer, for each way to spell them all behind the prompt: with a
            blank or without.
        chat: whether it stands in the tokenizer's chat template.
        warnings: sentences on what may not be as meant.
    """

    content: PromptFile
    base: TokenizedContext
    fields: tuple[AuditField, ...]
    spelled: AnswerIds
    chat: bool
    warnings: tuple[str, ...]

    @property
    def answer_ids(self) -> Mapping[str, int]:
        """The first token of each possible answer."""
        return self.spelled[0]

    def as_written(self, logits: Tensor) -> AuditPrompt:
        """The prompt with its answers spelled as the model writes them, by logits `[vocab]` behind it."""
        likely = max(self.spelled, key=lambda ids: float(logits[list(ids.values())].double().logsumexp(0)))
        return dataclasses.replace(self, spelled=(likely, *(ids for ids in self.spelled if ids is not likely)))

    def decision(self, logits: Tensor) -> str:
        """The likeliest of the answers, by logits `[vocab]`."""
        return max(self.answer_ids, key=lambda answer: float(logits[self.answer_ids[answer]]))

    def cached(self, tokens: TokenizedContext, cache: KVCache) -> CachedPrompt:
        """A prompt on its cache, without the decision token's entry."""
        return CachedPrompt(tokens.token_ids, tokens.spans, cache.take(slice(0, tokens.decision_position)))


def make_ready(subject: Subject, content: PromptFile, *, where: str, chat: bool = True) -> AuditPrompt:
    """Tokenise a prompt file for a model.

    Args:
        subject: the model.
        content: the file.
        where: its path, for messages.
        chat: whether to use the tokenizer's chat template, where it has one.

    Raises:
        ConfigError: marks, names, answers or the mark's place are not what an audit needs; names file and key.
        AlignmentError: values joined with the text beside them, or the same tokens.
    """
    content, told = content.apart()
    tokenizer, marked = subject.tokenizer, content.fields(where)
    for field in marked:
        if _RESERVED.fullmatch(field.name):
            raise ConfigError(f"{where}: prompt: the name {field.name!r} is reserved by kvprobe; rename the field.")
    template = _chat_arguments(subject) if chat and getattr(tokenizer, "chat_template", None) else None
    context, placed = _laid_out(content, marked, where)

    if content.messages and template is None:
        raise ConfigError(f"{where}: messages: they need a chat template; use the model's, or give a prompt instead.")

    def written(text: Context) -> TokenizedContext:
        if template is None:
            return tokenize(text, tokenizer, placed)
        if not content.messages:
            return tokenize(chat_wrapped(text, tokenizer, **template), tokenizer, placed)
        tools = {"tools": list(content.tools)} if content.tools else {}
        turns, cue = _by_message(content.messages, text)
        return tokenize(messages_wrapped(turns, cue, tokenizer, **template, **tools), tokenizer, placed)

    try:
        base = written(context)
        donors = [written(placed[field.name].written(context, field.new)) for field in marked]
    except (ConfigError, AlignmentError) as error:
        raise type(error)(f"{where}: prompt: {error}") from None
    lines = [field.line for field in marked]
    fields = tuple(
        _audit_field(field, placed[field.name], (base, donor), tokenizer, where, alone=lines.count(field.line) == 1)
        for field, donor in zip(marked, donors, strict=True)
    )
    return AuditPrompt(
        content,
        base,
        fields,
        _answer_ids(content, base, tokenizer, where),
        template is not None,
        (*told, *_warnings(content, marked, base, subject), *(field.uneven for field in fields if field.uneven)),
    )


def _by_message(
    messages: Sequence[Turn], context: Context
) -> tuple[list[tuple[dict[str, Any], list[Segment]]], list[Segment]]:
    """The segments of each message, without a last line break that is not its own, and the cue."""
    segments = iter(context.segments)
    turns = []
    for message in messages:
        own: list[Segment] = []
        while sum(segment.text.count("\n") for segment in own) < message.lines.count("\n"):
            own.append(next(segments))
        if message.lines != message.content:
            own[-1] = dataclasses.replace(own[-1], text=own[-1].text.removesuffix("\n"))
        turns.append((message.model_dump(exclude={"content"}), [segment for segment in own if segment.text]))
    return turns, list(segments)


def _chat_arguments(subject: Subject) -> dict[str, Any]:
    arguments: dict[str, Any] = {"enable_thinking": False}
    with contextlib.suppress(KvprobeError):
        arguments |= model_config(subject.identity.name).chat_arguments
    return arguments


def _laid_out(content: PromptFile, marked: list[MarkedField], where: str) -> tuple[Context, Mapping[str, PlacedField]]:
    try:
        context, placed = laid_out(_parts(content, marked))
    except ConfigError as error:
        raise ConfigError(f"{where}: prompt: {error}") from None
    if content.control_tokens:
        asked = (dataclasses.replace(each, control=each.name not in placed) for each in context.segments)
        context = dataclasses.replace(context, segments=tuple(asked))
    names = [segment.name for segment in context.segments]
    if names[-1] in (marked[-1].name, f"after {marked[-1].name}"):
        raise ConfigError(
            f"{where}: prompt: the mark of {marked[-1].name!r} is at the very end of the prompt, so nothing "
            "after it could depend on it; put the question after it, or give a cue."
        )
    return context, placed


def _parts(content: PromptFile, marked: list[MarkedField]) -> list[Part]:
    """A part for each line without a mark, called by its number, and for each field with the rest of its line.

    The last line that says something is the task, if it has no mark; empty lines behind it belong to it.
    """
    text = content.prompt if content.messages else content.prompt.rstrip("\n") + "\n"
    lines = [(found.start(), found.end()) for found in re.finditer(r"[^\n]*\n", text)]
    marks = list(zip(content.marks, marked, strict=True))
    users = _lines_of_last_user(content.messages, len(lines))
    last = max(number for number, (start, end) in enumerate(lines, 1) if text[start:end].strip())
    task = max((number for number in users if text[slice(*lines[number - 1])].strip()), default=last)
    parts: list[Part] = []
    for number, (start, end) in enumerate(lines, 1):
        inside = [(mark, field) for mark, field in marks if field.line == number]
        if inside:
            parts += _line_parts(text, start, end, inside)
        elif number <= last or content.messages:
            parts.append(("task" if number == task else f"line {number}", text[start:end]))
    return [*parts, ("cue", content.cue)] if content.cue else parts


def _lines_of_last_user(messages: Sequence[Turn], count: int) -> range:
    """Numbers of the lines in which an erratum may stand: of the last user message, or of a prompt without any."""
    starts = [1, *itertools.accumulate((message.lines.count("\n") for message in messages), initial=1)][1:]
    spans = [range(*ends) for ends in itertools.pairwise(starts)]
    users = [span for span, message in zip(spans, messages, strict=True) if message.role == "user"]
    return users[-1] if users else range(1, count + 1)


def _line_parts(text: str, start: int, end: int, inside: Sequence[tuple[re.Match[str], MarkedField]]) -> Iterator[Part]:
    for index, (mark, field) in enumerate(inside):
        is_last = index + 1 == len(inside)
        before = text[start : mark.start()]
        if index and before:
            yield f"before {field.name}", before
            before = ""
        yield Field(field.name, field.old, before, text[mark.end() : end] if is_last else "", field.erratum)
        start = mark.end()


def _audit_field(
    field: MarkedField,
    placed: PlacedField,
    prompts: tuple[TokenizedContext, TokenizedContext],
    tokenizer: Any,
    where: str,
    *,
    alone: bool,
) -> AuditField:
    base, donor = prompts
    context = base.source or Context(())
    try:
        old, new = (placed.value_ids(context, value, tokenizer) for value in (field.old, field.new))
    except (ConfigError, AlignmentError) as error:
        raise type(error)(f"{where}: prompt: {error}") from None
    uneven = ""
    if len(old) != len(new):
        uneven = (
            f"The values of {field.name!r} differ in length: {_shown(old, tokenizer)} is {len(old)} and "
            f"{_shown(new, tokenizer)} is {len(new)} tokens long, so notes are not located and edits alone are "
            f"assessed; {_advice(field, placed, context, tokenizer)}."
        )
    if old == new:
        raise AlignmentError(
            f"{where}: prompt: both values of {field.name!r} are the same tokens for this model, "
            f"{_shown(old, tokenizer)}; choose values it can tell apart."
        )
    span = base.spans[field.name]
    if (*base.token_ids[: span.start], *new, *base.token_ids[span.end :]) != donor.token_ids:
        raise AlignmentError(
            f"{where}: prompt: the tokenizer reads the text beside {field.name!r} otherwise when its value is "
            f"{field.new!r}; put a blank or a line break around the value."
        )
    names = [segment.name for segment in context.segments]
    line_end = f"after {field.name}" if f"after {field.name}" in names else field.name
    behind = names[names.index(line_end) + 1 :]
    # Behind every field: an erratum in front of another field's line would be older news than that line.
    # Inside a turn, never between two: what a template writes behind a turn begins with its end.
    insert = next((name for name in ("task", "chat_middle", "cue") if name in behind), behind[-1])
    if insert == "chat_middle":
        insert = next(name for name in behind if name.startswith("chat"))
    return AuditField(field, placed, context, donor, insert, alone, uneven)


def _shown(ids: Sequence[int], tokenizer: Any) -> str:
    """Tokens in a message; of a long value the beginning."""
    return show_tokens(ids[:_TOLD], tokenizer) + (" ..." if len(ids) > _TOLD else "")


def _advice(field: MarkedField, placed: PlacedField, context: Context, tokenizer: Any) -> str:
    """Another writing of one of the values that makes them equally long, or how to find one."""
    lengths: dict[str, int] = {}
    for value in (field.old, field.new):
        for written in dict.fromkeys((value, value.lower(), value.capitalize(), value.upper(), value.title())):
            with contextlib.suppress(KvprobeError):
                lengths[written] = len(placed.value_ids(context, written, tokenizer))
    olds = [text for text in lengths if text.lower() == field.old.lower()]
    news = [text for text in lengths if text.lower() == field.new.lower()]
    pairs = [(old, new) for old in olds for new in news if lengths[old] == lengths[new]]
    if pairs:
        old, new = min(pairs, key=lambda pair: (pair[0] != field.old) + (pair[1] != field.new))
        return f"{{{{{old}|{new}}}}} would be {lengths[old]} tokens each"
    return "choose values of equal token length: common words are mostly one token, and numbers one a digit or group"


def _answer_ids(content: PromptFile, base: TokenizedContext, tokenizer: Any, where: str) -> AnswerIds:
    """The first token of each answer as it would follow the prompt, for each way to spell them behind it."""
    spelled = {answer: spellings(answer, base.token_ids, tokenizer) for answer in content.pool}
    unknown = getattr(tokenizer, "unk_token_id", None)
    ways = range(min(map(len, spelled.values())))
    found = [{answer: ids[way][0] for answer, ids in spelled.items()} for way in ways]
    for answer, first in found[0].items():
        if unknown is not None and first == unknown:
            raise ConfigError(
                f"{where}: answers: this model's tokenizer does not know {answer!r}; choose another word."
            )
        same = next((other for other in found[0] if other != answer and found[0][other] == first), None)
        if same is not None:
            raise AlignmentError(
                f"{where}: answers: {answer!r} and {same!r} begin with the same token, "
                f"{show_tokens([first], tokenizer)}, so the next token cannot tell them apart; choose answers that "
                "begin differently."
            )
    return tuple(ids for ids in found if len(set(ids.values())) == len(ids))


def _warnings(
    content: PromptFile, marked: list[MarkedField], base: TokenizedContext, subject: Subject
) -> Iterator[str]:
    plain = content.prompt
    for mark in reversed(content.marks):
        plain = plain[: mark.start()] + "\0" + plain[mark.end() :]
    for field in marked:
        lines = _lines_with(field.old, plain)
        if lines:
            balanced = len(_lines_with(field.new, plain)) >= len(lines)
            where = f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
            yield (
                f"The old value {field.old!r} of {field.name!r} also appears in {where}; only the marked occurrence is "
                + (
                    "changed."
                    if balanced
                    else "changed, so the prompts contradict themselves if another line states the field too."
                )
            )
    for braces in dict.fromkeys(content.left_over):
        yield f"{braces!r} is not a mark of the form {{{{old|new}}}} and is kept as text."
    controls = [] if content.control_tokens else control_tokens(content.prompt + content.cue, subject.tokenizer)
    if controls:
        yield (
            f"{', '.join(map(repr, controls))} in the prompt is read as text, not as a control token; write "
            "control_tokens: true if it is meant as one."
        )
    if content.cue != content.cue.rstrip():
        yield "The cue ends in a space, which most tokenizers attach to the answer; remove it."
    tokenizer = subject.tokenizer
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown in base.token_ids:
        yield _unknown_words(base, subject)


def _unknown_words(base: TokenizedContext, subject: Subject) -> str:
    tokenizer = subject.tokenizer
    unknown = tokenizer.unk_token_id
    words = [
        word
        for word in dict.fromkeys(re.findall(r"\w+|[^\w \n]", base.text))
        if unknown in encode_segment(word, tokenizer)
    ]
    shown = ", ".join(map(repr, words[:8])) + (", ..." if len(words) > 8 else "")
    return (
        f"{subject.name} does not know {len(words)} word{'s' * (len(words) != 1)} of the prompt ({shown}) and reads "
        f"{'them' if len(words) != 1 else 'it'} as unknown; an "
        "organism knows only the words of kvprobe's task library, so use a pocket model for other texts."
    )


def _lines_with(value: str, text: str) -> list[int]:
    whole = re.compile(rf"(?<!\w){re.escape(value)}(?!\w)")
    return [number for number, line in enumerate(text.split("\n"), 1) if whole.search(line)]
