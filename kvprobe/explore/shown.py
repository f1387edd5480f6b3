"""What the page is told of a state, as it is measured: one event after the other, quick things first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from kvprobe.auditing.verdict import erratum_place, resolution
from kvprobe.errors import UnsupportedError
from kvprobe.explore.session import Decided, Prepared, Session, Tried
from kvprobe.explore.state import State
from kvprobe.html import html_of
from kvprobe.html.templating import render
from kvprobe.html.tokens import Token, shown_tokens, valued_block
from kvprobe.tasks.context import decoded_texts

Event = dict[str, Any]
_VISIBLE = 0.01
"""Share of the largest recovery from which on a token is coloured."""


def events(session: Session, state: State) -> Iterator[Event]:
    """What the page shows of a state; a caller may stop after any event.

    Raises:
        KvprobeError: the state cannot be shown; in one sentence.
    """
    started, made_on = time.perf_counter(), state.choice.model
    state = state.model_copy(update={"choice": state.choice.model_copy(update={"model": session.subject.name})})
    # A state that cannot be shown does not take the place of the one that is.
    session.ready(state)
    yield {"event": "state", "file": state.file(), "prompt": state.prompt_text()}
    yield _progress("reading the prompt with both values", None)
    prepared = session.prepared(state)
    elsewhere = f"This state was made on {made_on}; it runs on {session.subject.name} here."
    told = _prompt_event(session, prepared, state)
    yield {**told, "warnings": [*told["warnings"], *([elsewhere] if made_on not in ("", session.subject.name) else [])]}
    even = not prepared.field.uneven
    if even:
        yield _progress("transplanting the chosen tokens", 0.05)
        yield _tried_event("transplant", prepared, session.transplanted(prepared, state.choice))
    yield _progress(f"editing by {state.choice.method}", 0.1)
    yield _edit_event(session, prepared, state.choice.method)
    if even and prepared.moves:
        for values in session.heat(prepared, state.choice):
            yield _progress("transplanting each token alone", 0.2 + 0.8 * len(values) / len(prepared.reach))
        yield _heat_event(prepared, values)
    yield {"event": "done", "seconds": time.perf_counter() - started}


def _progress(stage: str, fraction: float | None) -> Event:
    return {"event": "progress", "stage": stage, "fraction": fraction}


def _prompt_event(session: Session, prepared: Prepared, state: State) -> Event:
    pair, found = prepared.read.pair, prepared.read.found
    old, new = session.unedited(prepared)
    places, layers = ((), (0, 0)) if prepared.field.uneven else session.chosen(prepared, state.choice)
    return {
        "event": "prompt",
        "name": prepared.prompt.content.name or "prompt",
        "model": session.subject.name,
        "field": found.name,
        "fields": [
            {"name": each.marked.name, "old": each.marked.old, "new": each.marked.new}
            for each in prepared.prompt.fields
        ],
        "answers": list(prepared.prompt.answer_ids),
        "contrast": found.answers,
        "span": found.span,
        "end": 0 if prepared.field.uneven else pair.decision_position,
        "positions": places,
        "layers": [layers[0], layers[-1], session.subject.layers - 1],
        "tokens": _tokens_html(shown_tokens(pair.base, pair.field), np.full(len(pair.base.token_ids), np.nan)),
        "old": _bar(old),
        "new": _bar(new),
        "warnings": prepared.prompt.warnings,
        "problem": prepared.problem,
    }


def _edit_event(session: Session, prepared: Prepared, method: str) -> Event:
    field = prepared.field
    erratum = {"line": field.placed.declared.said(field.marked.new).rstrip("\n"), "before": erratum_place(field)}
    try:
        tried = session.edited(prepared, method)
    except UnsupportedError as error:
        return {"event": "edit", "method": method, "impossible": str(error), "erratum": erratum}
    assert tried.edited is not None
    prompt, computed = tried.edited.prompt, set(tried.edited.computed)
    texts = decoded_texts(prompt.token_ids, session.subject.tokenizer)
    tokens = [
        Token(text, place, token_id, "" if text else "…", marked=place in computed)
        for place, (text, token_id) in enumerate(zip(texts, prompt.token_ids, strict=True))
    ]
    told = _tried_event("edit", prepared, tried)
    return {**told, "method": method, "erratum": erratum, "tokens": _tokens_html(tokens, np.full(len(tokens), np.nan))}


def _tried_event(event: str, prepared: Prepared, tried: Tried) -> Event:
    share = tried.receipt.flops / prepared.read.whole[0].receipt.flops
    return {"event": event, "bar": _bar(tried.decided), "share": share, "receipt": html_of(tried.receipt)}


def _heat_event(prepared: Prepared, values: list[float]) -> Event:
    pair = prepared.read.pair
    numbers = np.full(len(pair.base.token_ids), np.nan)
    numbers[list(prepared.reach)] = values
    limit = float(np.abs(values).max()) or 1.0
    floor = max(resolution(prepared.read.found), _VISIBLE * limit)
    block = valued_block(
        shown_tokens(pair.base, pair.field), numbers, limit, "recovery", floor=floor, most=len(numbers)
    )
    strongest = sorted(range(len(values)), key=lambda place: -values[place])
    return {
        "event": "heat",
        "styles": [token["style"] for token in block["tokens"]],
        "titles": [token["title"] for token in block["tokens"]],
        "limit": limit,
        "strongest": [prepared.reach[place] for place in strongest if values[place] > floor][:16],
    }


def _tokens_html(tokens: list[Token], values: np.ndarray) -> str:
    block = valued_block(tokens, values, 1.0, "recovery", most=len(tokens))
    return render("explore_tokens", tokens=block["tokens"])


def _bar(decided: Decided) -> Event:
    return asdict(decided)
