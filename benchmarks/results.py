"""What a run of the benchmarks finds."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Spread(BaseModel):
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float


class SweepLine(BaseModel):
    """One contestant in one sweep.

    Attributes:
        rows: of the whole sweep.
        measured: rows really run in each round; seconds of the sweep are extrapolated linearly from them.
        seconds: of the whole sweep.
        ratio: of its seconds to kvprobe's, round by round.
        of_limit: shortest time the machine allows for the work of this contestant over the time it took.
        bound: which rate of the machine sets that shortest time.
        difference: largest difference of a margin from kvprobe's, in logits.
        tolerance: the largest that is taken for rounding, in logits.
        effect: largest change of the margin by a patch among the rows compared, in logits.
        note: why there is no number, or what went wrong.
    """

    model: str
    tokens: int
    sweep: str
    contestant: str
    label: str
    rows: int
    measured: int = 0
    compared: int = 0
    rounds: int = 0
    seconds: Spread | None = None
    ratio: Spread | None = None
    of_limit: float | None = None
    bound: str = ""
    difference: float | None = None
    tolerance: float | None = None
    effect: float | None = None
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether its results are kvprobe's within rounding; True where nothing was measured."""
        return self.difference is None or self.tolerance is None or self.difference <= self.tolerance


class MoveLine(BaseModel):
    """Re-rotation or splice of a cache, beside a plain copy of the same bytes.

    Attributes:
        nbytes: of keys (re-rotation), or of keys and values (splice).
        rate: bytes a second.
        copy_rate: bytes a second of cloning the same tensors.
        of_copy: their ratio, round by round.
        of_limit: reading and writing these bytes once at the machine's memory rate, over the time taken.
    """

    model: str
    tokens: int
    operation: str
    nbytes: int
    rounds: int
    seconds: Spread
    rate: float
    copy_rate: float
    of_copy: Spread
    of_limit: float


class FirstTokenLine(BaseModel):
    """Time to the first token of a prompt with a compiled chunk, spliced or prefilled.

    Attributes:
        ratio: seconds of the full prefill over those of splicing, round by round.
        splice_of_limit, prefill_of_limit: shortest time the machine allows over the time taken.
    """

    model: str
    tokens: int
    rounds: int
    splice_seconds: Spread
    prefill_seconds: Spread
    ratio: Spread
    splice_of_limit: float
    prefill_of_limit: float


class Aim(BaseModel):
    """Something the project wants to reach, with what was measured."""

    text: str
    verdict: str
    measured: str


class Report(BaseModel):
    """Everything of one run."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    gflops: Spread | None = None
    memory_gb_per_s: Spread | None = None
    sweeps: list[SweepLine] = []
    moves: list[MoveLine] = []
    first_tokens: list[FirstTokenLine] = []
    aims: list[Aim] = []
    seconds: float = 0.0
    complete: bool = False

    @property
    def disagreeing(self) -> list[SweepLine]:
        """Lines whose results are not kvprobe's, and those that broke off."""
        return [line for line in self.sweeps if not line.agrees or line.note.startswith("failed")]
