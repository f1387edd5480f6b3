"""What can be known of an edit before anything is run for it (critique ED7)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvprobe.edit.base import CachedPrompt, FieldEdit
from kvprobe.engine.decision_attention import decision_attention
from kvprobe.models.subject import Subject

FREE = ("old_value_mentions", "new_value_mentions", "distance", "attention", "attention_to_mentions")
"""Signals that cost no forward pass: they come from the tokens and from the stale decision that was run anyway."""


def free_signals(
    subject: Subject, stale: CachedPrompt, edit: FieldEdit, attention: Tensor | None = None
) -> dict[str, float]:
    """The signals of `FREE`.

    Args:
        subject: the model.
        stale: the prompt before the edit.
        edit: the edit.
        attention: `[layer, head, key]` of the stale decision, where it was kept; read again otherwise.

    Returns:
        `old_value_mentions`, `new_value_mentions`: how often the old and the new value's tokens stand after the field,
        as they do in a rule that asks for them; `distance`: share of the prompt after the field; `attention`: mean
        attention of the stale decision to the field, in shares; `attention_to_mentions`: to the tokens right after a
        mention, where a note about it may stand.
    """
    span = stale.span(edit.field)
    after = stale.token_ids[span.end : -1]
    old = stale.token_ids[span.start : span.end]
    weights = (decision_attention(subject, stale.token_ids, stale.cache) if attention is None else attention).mean(
        (0, 1)
    )
    places = [place for value in (old, edit.new_ids) for place in _places(after, value)]
    near = {span.end + place + step for place in places for step in range(1, 5) if place + step < len(after)}
    return {
        "old_value_mentions": float(len(_places(after, old))),
        "new_value_mentions": float(len(_places(after, edit.new_ids))),
        "distance": len(after) / len(stale.token_ids),
        "attention": float(weights[span.start : span.end].sum()),
        "attention_to_mentions": float(weights[sorted(near)].sum()) if near else 0.0,
    }


def _places(tokens: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Where `wanted` ends in `tokens`."""
    size = len(wanted)
    if not size:
        return []
    return [i + size - 1 for i in range(len(tokens) - size + 1) if tuple(tokens[i : i + size]) == tuple(wanted)]
