"""Prompts as coloured tokens: contexts, pairs, editable contexts, and a value for every token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvprobe.edit.context import EditableContext
from kvprobe.edit.erratum import erratum_name
from kvprobe.errors import ConfigError
from kvprobe.figures.style import COLORS
from kvprobe.html.style import signed_tint, tint
from kvprobe.html.templating import Html, render
from kvprobe.report.tables import number
from kvprobe.tasks.context import Span, TokenizedContext, decoded_texts
from kvprobe.tasks.pairs import Pair

MOST_TOKENS = 3000
"""Of a longer prompt only the beginning and the end are shown."""
_STRONG = ("vermilion", "purple", "orange")
_QUIET = ("sky", "green", "blue", "grey")
_BLANKS = {" ": "blank", "\n": "line", "\t": "tab"}


@dataclass(frozen=True)
class Token:
    """One token as it is shown.

    Attributes:
        text: what it stands for in the prompt; empty for a special token, or a further token of the same character.
        shown: in place of an empty text.
        segment: that it belongs to.
        marked: whether it stands out.
    """

    text: str
    position: int
    token_id: int | None = None
    shown: str = ""
    segment: str = ""
    marked: bool = False


def context_html(context: TokenizedContext) -> str:
    """A prompt, coloured by segment; a token tells its position and id."""
    return _page(_head(context), [_block(shown_tokens(context), "")], context.spans, ["field"])


def pair_html(pair: Pair) -> str:
    """Both prompts of a pair; the tokens that differ are marked."""
    changed = pair.base.segment_of(pair.field.start)
    values = ["".join(token.text for token in _inside(context, pair.field)) for context in (pair.base, pair.donor)]
    decisions = [_word(pair.base, answer) for answer in (pair.base_answer_id, pair.donor_answer_id)]
    head = [
        (changed, f"{values[0].strip()} → {values[1].strip()}"),
        ("decision", f"{decisions[0].strip()} → {decisions[1].strip()}"),
        ("", f"{len(pair.base.token_ids)} tokens"),
        ("scenario", f"{pair.scenario.skeleton}, {pair.scenario.wording}"),
    ]
    blocks = [
        _block(shown_tokens(pair.base, pair.field), "base"),
        _block(shown_tokens(pair.donor, pair.field), "donor"),
    ]
    blocks[1]["folded"] = True
    return _page(head, blocks, pair.base.spans, [changed])


def editable_html(context: EditableContext) -> str:
    """An editable context: the prompt as it is, with fields and errata marked."""
    prompt, fields = context.prompt, list(context.state)
    strong = [*fields, *(erratum_name(name) for name in fields)]
    texts = decoded_texts(prompt.token_ids, context.tokenizer)
    tokens = [
        Token(text, position, token_id, "" if text else "…", _segment(prompt.spans, position))
        for position, (text, token_id) in enumerate(zip(texts, prompt.token_ids, strict=True))
    ]
    tokens = [Token(**{**vars(token), "marked": token.segment in strong}) for token in tokens]
    head: list[tuple[str, str]] = [(name, value) for name, value in context.state.items()]
    behind = [
        f"{name} still reads {context.written[name]}" for name in fields if context.written[name] != context.state[name]
    ]
    head += [("", told) for told in behind] + [("", f"{len(tokens)} tokens")]
    errata = "; ".join(text.strip() for text in context.errata.values())
    return _page(head, [_block(tokens, "")], prompt.spans, strong, note=f"erratum: {errata}" if errata else "")


def token_map(
    tokens: TokenizedContext | Sequence[str],
    values: Any,
    *,
    unit: str = "",
    title: str = "",
    limit: float | None = None,
) -> Html:
    """A prompt whose tokens are coloured by a value: blue below 0, red above, as strong as the value is large.

    Args:
        tokens: a context, or the text of each token.
        values: `[token]`, in `unit`; NaN where there is none.
        unit: such as `logits`, told on hover.
        title: what the values are.
        limit: the value that is coloured in full; the largest one by default.

    Raises:
        ConfigError: as many values as tokens are needed.
    """
    shown = list(tokens_of(tokens))
    numbers = np.asarray(values, dtype=float)
    if numbers.shape != (len(shown),):
        raise ConfigError(f"A token map of {len(shown)} tokens needs one value for each, not {list(numbers.shape)}.")
    finite = np.abs(numbers[np.isfinite(numbers)])
    most = limit or (float(finite.max()) if len(finite) else 0.0) or 1.0
    block = valued_block(shown, numbers, most, unit)
    scale = f"full colour: {number(most)} {unit}".strip()
    head = [("", title)] if title else [("", f"{len(shown)} tokens")]
    page = render("tokens", head=[*head, ("", scale)], blocks=[block], colors={}, note=block["cut"])
    strongest = np.argsort(-np.nan_to_num(np.abs(numbers)))[:3]
    told = ", ".join(f"{shown[i].text.strip()!r} at {i}: {number(float(numbers[i]))}" for i in strongest)
    return Html(page, f"token map of {len(shown)} tokens; largest {told}")


def valued_block(
    tokens: Sequence[Token],
    values: np.ndarray,
    limit: float,
    unit: str,
    *,
    floor: float = 0.0,
    most: int = MOST_TOKENS,
) -> dict[str, Any]:
    """Tokens for the macro `tokens`, coloured by their values.

    Args:
        tokens: of a prompt.
        values: `[token]`, in `unit`; NaN where there is none.
        limit: the value that is coloured in full.
        unit: told on hover.
        floor: a value below it is not coloured.
        most: of more tokens the middle is left out.
    """
    block = _block(tokens, "", most)
    for drawn, value in zip(block["tokens"], _kept(values, most), strict=True):
        told = "no value" if np.isnan(value) else f"{number(float(value))} {unit}".strip()
        drawn["title"] += f" · {told}"
        if np.isfinite(value) and abs(value) >= floor:
            drawn["style"] = f"background:{signed_tint(float(value), limit)}"
    return block


def tokens_of(tokens: TokenizedContext | Sequence[str]) -> Iterator[Token]:
    """The tokens of a context, or those given as text."""
    if isinstance(tokens, TokenizedContext):
        yield from shown_tokens(tokens)
    else:
        for position, text in enumerate(tokens):
            yield Token(str(text), position, shown="" if str(text) else "…")


def shown_tokens(context: TokenizedContext, marked: Span | None = None) -> list[Token]:
    """Every token of a context with its share of the text; the shares joined are the whole text."""
    texts = context.token_texts()
    shown = []
    for position, (text, token_id) in enumerate(zip(texts, context.token_ids, strict=True)):
        instead = "" if text else (_word(context, token_id) if position == 0 else "…")
        inside = marked is not None and position in marked.positions
        shown.append(Token(text, position, token_id, instead, context.segment_of(position), inside))
    return shown


def _page(
    head: Sequence[tuple[str, str]],
    blocks: Sequence[Mapping[str, Any]],
    spans: Mapping[str, Span],
    strong: Iterable[str],
    note: str = "",
) -> str:
    colors = _colors(spans, strong)
    for block in blocks:
        before = None
        for drawn in block["tokens"]:
            name = drawn["segment"]
            if name in colors:
                # Neighbouring tokens of one segment must be told apart as well.
                drawn["style"] = f"background:{tint(colors[name], 0.36 if drawn['odd'] else 0.2)}"
            drawn["css"] += " first" if name != before and before is not None else ""
            before = name
    notes = [note, *(block["cut"] for block in blocks[:1])]
    return render("tokens", head=head, blocks=blocks, colors=colors, note=" ".join(filter(None, notes)))


def _colors(spans: Mapping[str, Span], strong: Iterable[str]) -> dict[str, str]:
    """A colour for each segment in the order of the prompt; those that stand out have colours of their own."""
    chosen, quiet = set(strong), 0
    colors: dict[str, str] = {}
    for name in sorted(spans, key=lambda name: spans[name]):
        if name in chosen:
            color = _STRONG[sum(other in chosen for other in colors) % len(_STRONG)]
        else:
            color, quiet = _QUIET[quiet % len(_QUIET)], quiet + 1
        colors[name] = COLORS[color]
    return colors


def _block(tokens: Sequence[Token], title: str, most: int = MOST_TOKENS) -> dict[str, Any]:
    kept = _kept(tokens, most)
    cut = f"{len(tokens) - len(kept)} tokens are left out of the middle, from position {most * 2 // 3} on."
    return {
        "tokens": [_drawn(token) for token in kept],
        "title": title,
        "folded": False,
        "cut": cut if len(kept) < len(tokens) else "",
    }


def _drawn(token: Token) -> dict[str, Any]:
    where = [f"position {token.position}"]
    where += [f"id {token.token_id}"] if token.token_id is not None else []
    where += [token.segment] if token.segment else []
    return {
        "runs": _runs(token.text),
        "shown": token.shown,
        "segment": token.segment,
        "css": "token mark" if token.marked else "token",
        "odd": token.position % 2 == 1,
        "style": "",
        "title": " · ".join([repr(token.text or token.shown), *where]),
    }


def _runs(text: str) -> list[tuple[str, str]]:
    """A text cut where blanks are, each with the class that makes it visible."""
    return [(_BLANKS.get(run, ""), run) for run in re.findall(r"[ \n\t]|[^ \n\t]+", text)]


def _kept(items: Any, most: int) -> Any:
    if len(items) <= most:
        return items
    head, tail = items[: most * 2 // 3], items[len(items) - most // 3 :]
    return np.concatenate([head, tail]) if isinstance(items, np.ndarray) else [*head, *tail]


def _head(context: TokenizedContext) -> list[tuple[str, str]]:
    return [("", f"{len(context.token_ids)} tokens"), ("", f"{len(context.spans)} segments")]


def _inside(context: TokenizedContext, span: Span) -> list[Token]:
    return shown_tokens(context)[span.start : span.end]


def _segment(spans: Mapping[str, Span], position: int) -> str:
    return next((name for name, span in spans.items() if position in span.positions), "")


def _word(context: TokenizedContext, token_id: int) -> str:
    return str(context.tokenizer.decode([token_id])) if context.tokenizer is not None else f"#{token_id}"
