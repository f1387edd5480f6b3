"""Where a position stands in a prompt, said so that it can be found again in another prompt (critique G7).

A slot is the segment, the last mention of one of the two values or actions before the position in that segment, and
the distance from it: `policy, donor action, 1` is the token right after the action that the donor's value calls for.
Where nothing was mentioned yet, the distance is counted back from the segment's end. Slots carry over to other
skeletons, wordings and orders of the rule's cases, and so does a ranking of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe.tasks.encoding import is_delimiter
from kvprobe.tasks.pairs import Pair

# Tokens further from a mention share a slot: in long segments they would be seen too seldom to be ranked.
_FAR = 12


@dataclass(frozen=True)
class Slot:
    """A place in a prompt: `offset` tokens after `anchor`, or from the segment's end where `anchor` is "end"."""

    segment: str
    anchor: str
    offset: int


def slots(pair: Pair) -> list[Slot]:
    """The slot of every position of a pair's prompts, the decision position included."""
    mentions = _mentions(pair)
    spans = pair.base.spans
    found: list[Slot] = []
    segment, anchor, since = "", "end", 0
    for position, token in enumerate(pair.base.token_ids):
        here = pair.base.segment_of(position)
        if here != segment:
            segment, anchor, since = here, "end", 0
        if token in mentions and position not in pair.field.positions:
            anchor, since = mentions[token], 0
        to_end = position - spans[here].end if here in spans else 0
        offset = to_end if anchor == "end" else since
        found.append(Slot(here, anchor, max(-_FAR, min(offset, _FAR))))
        since += 1
    return found


def _mentions(pair: Pair) -> dict[int, str]:
    """Tokens that name a value or an action; of a value that is several tokens its last one."""
    last = pair.field.end - 1
    return {
        pair.base.token_ids[last]: "base value",
        pair.donor.token_ids[last]: "donor value",
        pair.base_answer_id: "base action",
        pair.donor_answer_id: "donor action",
    }


def slot_scores(
    instances: Iterable[tuple[Sequence[Slot], Mapping[int, float], float]],
) -> Callable[[Slot], float]:
    """How strongly each slot acts, learned from some pairs, to rank positions of others.

    Args:
        instances: for each pair the slots of its positions, margin shifts by position, and its gap, in logits.

    Returns:
        A slot's recovery as ratio of sums; 0 for one that was never seen.
    """
    shifts: dict[Slot, float] = {}
    gaps: dict[Slot, float] = {}
    for places, effects, gap in instances:
        for position, shift in effects.items():
            slot = places[position]
            shifts[slot] = shifts.get(slot, 0.0) + shift
            gaps[slot] = gaps.get(slot, 0.0) + gap
    scores = {slot: shifts[slot] / gaps[slot] for slot in shifts if gaps[slot]}
    return lambda slot: scores.get(slot, 0.0)


def ranked(positions: Sequence[int], score: Callable[[int], float]) -> list[int]:
    """Positions from the highest score to the lowest; of equal ones the later first."""
    return sorted(positions, key=lambda position: (-score(position), -position))


def delimiters(pair: Pair, tokenizer: Any) -> set[int]:
    """The positions of a pair's base prompt that hold delimiters."""
    return {position for position, token in enumerate(pair.base.token_ids) if is_delimiter(token, tokenizer)}
