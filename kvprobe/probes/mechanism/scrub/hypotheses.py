"""What each arm of `scrub` resamples: the note, the rest, the field and what stands before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvprobe.probes.mechanism.scrub.scrubbing import Node, conclusion, nothing
from kvprobe.tasks.pairs import Pair

ARMS = (
    "note_same",
    "rest_same",
    "all_same",
    "note_opposite",
    "rest_opposite",
    "note_rewritten",
    "hypothesis",
    "anything",
)
OTHER_WORDING = ("note_same", "rest_same", "all_same", "note_opposite", "rest_opposite")


def hypotheses(pair: Pair, order: Sequence[int], size: int) -> dict[str, tuple[Node, ...]]:
    """The nodes that each of `ARMS` resamples.

    Args:
        pair: its base prompt is scrubbed.
        order: its positions after the field, from the strongest to the weakest.
        size: how many of them are the note.
    """
    chosen, others = sorted(order[:size]), sorted(order[size:])
    note = Node("note", lambda _: chosen, conclusion)
    rest = Node("rest", lambda _: others, conclusion)
    prefix = Node("prefix", lambda prompt: range(prompt.pair.field.start), nothing)
    before = Node("field and before", lambda _: range(pair.field.end), nothing)
    anything = (replace(note, variable=nothing), replace(rest, variable=nothing), before)
    return {
        "note_same": (note,),
        "rest_same": (rest,),
        "all_same": (note, rest),
        "note_opposite": (replace(note, opposite=True),),
        "rest_opposite": (replace(rest, opposite=True),),
        "note_rewritten": (replace(note, reads=(prefix,)),),
        "hypothesis": (note, *anything[1:]),
        "anything": anything,
    }
