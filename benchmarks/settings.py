"""How much a run of the benchmarks measures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from benchmarks.sweeps import SWEEPS, Size

PARTS = (*SWEEPS, "move", "first_token")
"""What can be asked for with `--only`."""


class Settings(BaseModel):
    """Lengths, repetitions and shares of time.

    Attributes:
        models: names or folders, as `kvprobe` takes them.
        parts: of `PARTS`.
        tokens: prompt lengths of the sweeps.
        size: of the sweeps.
        rounds: in which all contestants take turns.
        slow_rounds: the same where one patch of some contestant takes longer than `slow_seconds`.
        slow_seconds: see `slow_rounds`.
        share_seconds: about how long a contestant may take in each round; slower ones run a part of the sweep.
        own_seconds: the same for kvprobe.
        least_rows: that kvprobe runs together at least.
        move_tokens: entries of the caches that are moved.
        move_bytes: largest cache that is moved.
        move_rounds: rounds of moving.
        first_tokens: lengths of chunks whose time to the first token is taken.
        prefill_seconds: longest full prefill that is measured, as estimated from the shorter lengths.
    """

    model_config = ConfigDict(frozen=True)

    models: tuple[str, ...] = ("qwen3-note-taker", "smollm2-135m")
    parts: tuple[str, ...] = PARTS
    tokens: tuple[int, ...] = (128, 512, 2048)
    size: Size = Size()
    rounds: int = 5
    slow_rounds: int = 3
    slow_seconds: float = 1.5
    share_seconds: float = 0.4
    own_seconds: float = 6.0
    least_rows: int = 64
    move_tokens: tuple[int, ...] = (512, 2048, 8192, 32768)
    move_bytes: int = 2**29
    move_rounds: int = 15
    first_tokens: tuple[int, ...] = (512, 2048, 8192, 32768)
    prefill_seconds: float = 25.0


QUICK = Settings(
    tokens=(128, 512),
    size=Size(positions=256, suffixes=4),
    rounds=3,
    slow_rounds=2,
    share_seconds=0.1,
    own_seconds=1.0,
    least_rows=32,
    move_tokens=(2048,),
    move_rounds=7,
    first_tokens=(512, 2048),
    prefill_seconds=4.0,
)
"""A first look in under two minutes."""
