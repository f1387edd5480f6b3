"""The sweeps that are timed, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.case import Case


@dataclass(frozen=True)
class KVRow:
    """Keys and values at `positions` in `layers` (None for all) are the donor's; all other entries stay the base's."""

    positions: tuple[int, ...]
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class HeadRow:
    """The output of one head (`hook_z`) at the last token is the donor's."""

    layer: int
    head: int


@dataclass(frozen=True)
class SuffixRow:
    """The prompt ends in other tokens, which are run anew on the entries before them."""

    token_ids: tuple[int, ...]


Row = KVRow | HeadRow | SuffixRow


@dataclass(frozen=True)
class Size:
    """How large sweeps are: positions of a position sweep, suffixes of a suffix sweep."""

    positions: int = 256
    suffixes: int = 8


def position_rows(case: Case, size: Size) -> list[Row]:
    """One position in all layers, for positions spread over the prompt."""
    last = case.length - 2
    count = min(size.positions, last)
    return [KVRow((1 + number * last // count,)) for number in range(count)]


def head_rows(case: Case, size: Size) -> list[Row]:  # noqa: ARG001 - all layers, all heads
    """Every head of every layer."""
    heads = int(case.subject.config.num_attention_heads)
    return [HeadRow(layer, head) for layer in range(case.subject.layers) for head in range(heads)]


def layer_rows(case: Case, size: Size) -> list[Row]:  # noqa: ARG001 - all layers
    """The second quarter of the prompt, in one layer after the other."""
    span = tuple(range(case.length // 4, case.length // 2))
    return [KVRow(span, (layer,)) for layer in range(case.subject.layers)]


def suffix_rows(case: Case, size: Size) -> list[Row]:
    """The last eighth of the prompt in several variants."""
    length = max(2, case.length // 8)
    return [SuffixRow(case.suffix(number, length)) for number in range(size.suffixes)]


SWEEPS: dict[str, Callable[[Case, Size], Sequence[Row]]] = {
    "position": position_rows,
    "head": head_rows,
    "layer": layer_rows,
    "suffix": suffix_rows,
}
