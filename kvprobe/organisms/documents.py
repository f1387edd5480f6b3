"""Documents as they are written: token ids, each with the weight of predicting it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvprobe.tasks.tokenizer import BOS, END, HOLDS, UNKNOWN, VOID, vocabulary, words

ANSWER_WEIGHT, ANNOTATION_WEIGHT, CHAIN_WEIGHT, STRUCTURE_WEIGHT = 1.0, 0.5, 0.1, 0.02


@dataclass(frozen=True)
class Document:
    """Token ids with a loss weight each (the weight of *predicting* that token) and its kind.

    `answer_index` is where the decision stands: the answer, or in a chain of thought the action it names.
    `old`, `new` are the indices of the two field copies of a document edited in place (-1: not edited);
    tokens from `decision` on see the new copy, earlier ones the old.
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    kind: str
    answer: int
    rival: int
    answer_index: int
    old: int
    new: int
    decision: int


class Draft:
    """A document while it is written."""

    def __init__(self) -> None:
        self.ids, self.weights = [token_table()[BOS]], [0.0]
        self.field, self.new, self.decision, self.answer_index = -1, -1, 0, 0

    def add(self, segment: str, tokens: list[int]) -> None:
        """Append a segment of the prompt."""
        if segment == "field":
            self.field = len(self.ids)
        self.ids += tokens
        self.weights += [_weight(segment, token) for token in tokens]
        self.decision = len(self.ids) - 1

    def think(self, chain: list[int], value: str, action: str) -> None:
        """Append a chain of thought: its value and its action are decisions, the rest is form."""
        self.answer_index = len(self.ids) + len(chain) - 1 - chain[::-1].index(encode(action)[0])
        self.ids += chain
        weights = [CHAIN_WEIGHT] * len(chain)
        weights[chain.index(encode(value)[0])] = ANSWER_WEIGHT
        self.weights += weights
        self.weights[self.answer_index] = ANSWER_WEIGHT

    def answer(self, token: int, *, copied: bool) -> None:
        """Append the answer; one copied from a chain is no decision of its own."""
        if not copied:
            self.answer_index = len(self.ids)
        self.ids += [token, token_table()[END]]
        self.weights += [CHAIN_WEIGHT if copied else ANSWER_WEIGHT, STRUCTURE_WEIGHT]

    def edit(self, token: int) -> None:
        """Put the new value beside the old one."""
        self.new = self.field + 1
        self.ids.insert(self.new, token)
        self.weights.insert(self.new, 0.0)
        self.weights[self.new + 1] = 0.0
        self.decision += 1
        self.answer_index += 1

    def document(self, kind: str, answer: int, rival: int) -> Document:
        """The finished document."""
        old = self.field if self.new >= 0 else -1
        return Document(
            tuple(self.ids), tuple(self.weights), kind, answer, rival, self.answer_index, old, self.new, self.decision
        )


def _weight(segment: str, token: int) -> float:
    if segment.startswith("filler"):
        return 0.0
    if segment == "lookup":
        return ANSWER_WEIGHT
    annotation = segment == "status" or token in (token_table()[HOLDS], token_table()[VOID])
    return ANNOTATION_WEIGHT if annotation else STRUCTURE_WEIGHT


@lru_cache
def token_table() -> dict[str, int]:
    """The token id of every word."""
    return vocabulary()


def encode(text: str) -> list[int]:
    """Token ids of a text, as the organisms' tokenizer gives them (it is tested to agree)."""
    table = token_table()
    return [table.get(word, table[UNKNOWN]) for word in words(text)]
