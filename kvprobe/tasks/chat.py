"""Chat templates: a context inside the last user turn, word for word as `apply_chat_template` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from kvprobe.errors import AlignmentError
from kvprobe.tasks.context import Context, Segment

_PLACEHOLDER = "\u2063kvprobe\u2063"
_OPEN_THOUGHT = re.compile(
    r"[<\[](think|thinking|thought|reasoning)[>\]](?!.*[<\[]/\1[>\]])", re.DOTALL | re.IGNORECASE
)
_SHOWN = 40
WORKED_CASES = "worked_cases"
"""The segment of the turns before the context's own."""
Message = dict[str, str]


def chat_wrapped(context: Context, tokenizer: Any, **template_arguments: Any) -> Context:
    """The context inside the tokenizer's chat template, as the last user turn and an open assistant turn.

    The context's `turns` before it become the segment `worked_cases`, with what opens the prompt. The segment `cue`
    goes into the assistant's turn, so that the next token is the decision; the template's own text becomes the segments
    `chat_prefix`, `chat_middle`. Blanks and line breaks that the template takes off the text's ends are taken off its
    segments. A tokenizer without a template returns the context, with its turns as plain text. Templates with a
    thinking switch need `enable_thinking=False` for direct answers, else the next token opens a think block (protocol
    section 0.3).

    Raises:
        AlignmentError: the template fails, rewrites the text that it is given, or leaves a thought open.
    """
    if not getattr(tokenizer, "chat_template", None):
        return told_plainly(context)
    body = [segment for segment in context.segments if segment.name != "cue"]
    content = "".join(segment.text for segment in body)
    roles = ("user", "assistant")
    before = [{"role": role, "content": said} for turn in context.turns for role, said in zip(roles, turn, strict=True)]
    text = _rendered(content, tokenizer, template_arguments, before)
    prefix, _, middle = _rendered(_PLACEHOLDER, tokenizer, template_arguments, before).partition(_PLACEHOLDER)
    said = text[len(prefix) : len(text) - len(middle)]
    start = content.find(said.strip()) - (len(said) - len(said.lstrip()))
    if f"{prefix}{said}{middle}" != text or not said.strip() or _trimmed(content, start, said) != said:
        raise AlignmentError(
            f"The tokenizer's chat template rewrites the text that it is given ({content.strip()[:_SHOWN]!r}); use "
            "chat: false for this model."
        )
    _refuse_open_thought(middle)
    cue = [segment for segment in context.segments if segment.name == "cue"]
    kept = _cut_to(body, start, start + len(said))
    around = Segment("chat_prefix", prefix, control=True), Segment("chat_middle", middle, control=True)
    opening: tuple[Segment, ...] = (around[0],)
    if context.turns:
        first = _rendered(_PLACEHOLDER, tokenizer, template_arguments).partition(_PLACEHOLDER)[0]
        header = _common_end(first, prefix)
        opening = (
            Segment(WORKED_CASES, prefix.removesuffix(header), control=True),
            Segment("chat_prefix", header, control=True),
        )
    return Context((*opening, *kept, around[1], *cue), opened=True)


def messages_wrapped(
    turns: Sequence[tuple[Mapping[str, Any], Sequence[Segment]]],
    cue: Sequence[Segment],
    tokenizer: Any,
    **arguments: Any,
) -> Context:
    """A conversation as the tokenizer's chat template writes it, and the cue in the assistant's turn behind it.

    Args:
        turns: each message without its text, and the segments of its text. The template's own text between them becomes
            the segments `chat_prefix`, `chat 1`, `chat 2`, ... and `chat_middle`.
        cue: what the assistant's turn begins with.
        tokenizer: with a chat template.
        arguments: of the template, such as `tools`.

    Raises:
        AlignmentError: there is no template, it fails, rewrites a text that it is given, or leaves a thought open.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise AlignmentError("The tokenizer has no chat template to write messages with; give a prompt instead.")
    said = ["".join(segment.text for segment in segments) for _, segments in turns]
    messages = [{**message, "content": text} for (message, _), text in zip(turns, said, strict=True)]
    text, end, written = _from_template(messages, tokenizer, arguments), 0, []
    for number, ((message, segments), content) in enumerate(zip(turns, said, strict=True)):
        start = text.find(content.strip(), end)
        if start < 0 or not content.strip():
            raise AlignmentError(
                f"The tokenizer's chat template rewrites the {message.get('role')} message "
                f"{content.strip()[:_SHOWN]!r}, or it is empty; write it as plain text."
            )
        kept = (text[start:].startswith(content.lstrip()) and content.lstrip()) or content.strip()
        written.append(Segment(f"chat {number}" if number else "chat_prefix", text[end:start], control=True))
        at = content.find(kept)
        written += _cut_to(segments, at, at + len(kept))
        end = start + len(kept)
    _refuse_open_thought(text[end:])
    return Context((*written, Segment("chat_middle", text[end:], control=True), *cue), opened=True)


def told_plainly(context: Context) -> Context:
    """The context with the turns before it as plain text, a blank line after each, in the segment `worked_cases`."""
    if not context.turns:
        return context
    told = "".join(f"{user}{answer}\n\n" for user, answer in context.turns)
    return replace(context, segments=(Segment(WORKED_CASES, told), *context.segments), turns=())


def _common_end(first: str, second: str) -> str:
    """The longest text that both end in."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False))
    return "".join(character for character, _ in alike)[::-1]


def _rendered(content: str, tokenizer: Any, arguments: dict[str, Any], before: Sequence[Message] = ()) -> str:
    return _from_template([*before, {"role": "user", "content": content}], tokenizer, arguments)


def _refuse_open_thought(text: str) -> None:
    if _OPEN_THOUGHT.search(text):
        raise AlignmentError(
            f"The tokenizer's chat template opens a thought and leaves it open ({text[-_SHOWN:]!r}), so the next "
            "token is no decision; give the argument that closes it (enable_thinking: false), or use chat: false."
        )


def _from_template(messages: Sequence[Mapping[str, Any]], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments))
    except Exception as error:
        # A template is a program of the model's, and may raise anything.
        raise AlignmentError(
            f"The tokenizer's chat template fails ({' '.join(str(error).split())}); give the arguments it needs, or "
            "use chat: false for this model."
        ) from error


def _trimmed(content: str, start: int, said: str) -> str:
    """The content from `start` on, if nothing but blanks would be cut off it to be `said`."""
    end = start + len(said)
    return "" if start < 0 or content[:start].strip() or content[end:].strip() else content[start:end]


def _cut_to(segments: Sequence[Segment], start: int, end: int) -> Iterator[Segment]:
    """The segments without their text outside `[start, end)`; those of which nothing is left go."""
    place = 0
    for segment in segments:
        text = segment.text[max(0, start - place) : max(0, end - place)]
        place += len(segment.text)
        if text:
            yield replace(segment, text=text)
