"""What can be known of an edit from its tokens alone, before anything is run for it (critique ED7)."""

from __future__ import annotations

from collections.abc import Sequence

from kvprobe.edit.base import CachedPrompt, FieldEdit

FREE = ("old_value_mentions", "new_value_mentions", "distance")
"""Names of the signals."""


def free_signals(stale: CachedPrompt, edit: FieldEdit) -> dict[str, float]:
    """The signals of `FREE`, which need no model.

    Returns:
        `old_value_mentions`, `new_value_mentions`: how often the old and the new value's tokens stand after the field,
        as they do in a rule that asks for them; `distance`: share of the prompt after the field.
    """
    span = stale.span(edit.field)
    after = stale.token_ids[span.end : -1]
    return {
        "old_value_mentions": float(_count(after, stale.token_ids[span.start : span.end])),
        "new_value_mentions": float(_count(after, edit.new_ids)),
        "distance": len(after) / len(stale.token_ids),
    }


def _count(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    size = len(wanted)
    return sum(tuple(tokens[i : i + size]) == tuple(wanted) for i in range(len(tokens) - size + 1)) if size else 0
