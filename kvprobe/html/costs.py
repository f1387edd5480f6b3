"""Costs, decisions, caches and forward passes as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.edit.readings import Cost, Decision, Seam
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import Forward
from kvprobe.engine.receipt import Receipt
from kvprobe.figures.style import COLORS
from kvprobe.html.templating import render

_TOKENS = {
    "tokens_reused": ("reused", COLORS["grey"]),
    "tokens_rotated": ("rotated", COLORS["sky"]),
    "tokens_copied": ("copied", COLORS["green"]),
    "tokens_recomputed": ("recomputed", COLORS["orange"]),
    "tokens_appended": ("appended", COLORS["vermilion"]),
}


def receipt_html(receipt: Receipt, head: Sequence[tuple[str, str]] = ()) -> str:
    """What an operation cost: a bar of its tokens, FLOPs and seconds."""
    counts = {key: getattr(receipt, key) for key in _TOKENS if getattr(receipt, key)}
    whole = sum(counts.values())
    shares = [
        {"label": _TOKENS[key][0], "color": _TOKENS[key][1], "count": count, "percent": round(100 * count / whole, 2)}
        for key, count in counts.items()
    ]
    rows = [_row([share["label"], f"{share['count']}"], share["color"]) for share in shares]
    cost = [("", f"{_scaled(receipt.flops)}FLOP"), ("", _time(receipt.seconds))]
    return _facts([*head, *cost], rows, shares=shares, columns=("cache entries", "tokens") if rows else ())


def cost_html(cost: Cost) -> str:
    """What an edit cost, as a share of a new prefill of the prompt."""
    share = f"{cost.tokens} of {cost.prompt_tokens} tokens ({cost.fraction:.0%})"
    return receipt_html(cost.receipt, [("", cost.method), ("run", share)])


def decision_html(decision: Decision) -> str:
    """A choice between answers, each with its probability."""
    head = [("", decision.answer), ("leads by", f"{decision.margin:.2f} nats"), ("next", repr(decision.next_token))]
    rows = _answers(decision.log_probabilities, decision.probabilities)
    return _facts(head, rows, columns=("answer", "log-probability", "probability", ""))


def seam_html(seam: Seam) -> str:
    """How a decision on the edited cache differs from one on a full prefill."""
    alike = "same answer" if seam.same_answer else "another answer"
    head = [("", alike), ("total variation", f"{seam.total_variation:.3f}")]
    rows = [
        _row([name, _nats(value), _nats(seam.reprefilled.log_probabilities[name]), _nats(seam.shifts[name], "+")])
        for name, value in seam.edited.log_probabilities.items()
    ]
    return _facts(head, rows, columns=("answer", "edited cache", "full prefill", "shift (nats)"))


def cache_html(cache: KVCache) -> str:
    """What a cache holds: layers, entries and where they stand, heads, bytes."""
    return _facts([("", "KVCache")], _cache_rows(cache))


def forward_html(result: Forward) -> str:
    """What a forward pass gave: its cache and what it cost; logits by shape."""
    best = int(result.logits.argmax())
    rows = _cache_rows(result.cache)
    rows.append(_row(["logits", f"[{len(result.logits)}], most likely token id {best}"], words=True))
    if result.attention is not None:
        rows.append(
            _row(["attention", f"{len(result.attention)} layers of {list(result.attention[0].shape)}"], words=True)
        )
    head = [("", "Forward"), ("ran", f"{result.receipt.tokens_appended} tokens")]
    cost = [("", f"{_scaled(result.receipt.flops)}FLOP"), ("", _time(result.receipt.seconds))]
    return _facts([*head, *cost], rows)


def _cache_rows(cache: KVCache) -> list[dict[str, Any]]:
    told = {**cache.describe(), "size": f"{_scaled(cache.nbytes)}B"}
    return [_row([name, value], words=True) for name, value in told.items()]


def _answers(logs: Mapping[str, float], chances: Mapping[str, float]) -> list[dict[str, Any]]:
    ordered = sorted(logs, key=lambda answer: -logs[answer])
    return [
        {**_row([name, _nats(logs[name]), f"{chances[name]:.3f}"]), "gauge": round(100 * chances[name], 1)}
        for name in ordered
    ]


def _nats(value: float, sign: str = "") -> str:
    # Rounded first, or else a probability next to 1 would read -0.00.
    return f"{round(value, 2) + 0.0:{sign}.2f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _scaled(count: float) -> str:
    """A count in the largest metric unit that leaves a number above 1: `3.2 G`."""
    prefixes, step = ("", "k", "M", "G", "T", "P"), 0
    while abs(count) >= 1000 and step < len(prefixes) - 1:
        count, step = count / 1000, step + 1
    digits = f"{count:.0f}" if step == 0 else f"{count:.3g}"
    return f"{digits} {prefixes[step]}"


def _row(cells: Sequence[str], color: str = "", *, words: bool = False) -> dict[str, Any]:
    return {"cells": cells, "color": color, "numbers": () if words else range(1, len(cells)), "gauge": None}


def _facts(
    head: Sequence[tuple[str, str]],
    rows: Sequence[dict[str, Any]],
    *,
    shares: Sequence[dict[str, Any]] = (),
    columns: Sequence[str] = (),
    note: str = "",
) -> str:
    return render("facts", head=head, rows=rows, shares=shares, columns=columns, note=note)
