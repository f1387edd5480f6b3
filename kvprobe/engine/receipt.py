"""What an operation on a cache cost."""

from __future__ import annotations

from dataclasses import dataclass

from kvprobe.viewing import Viewable


@dataclass(frozen=True)
class Receipt(Viewable):
    """Tokens, FLOPs and seconds of one operation; receipts add up.

    Attributes:
        tokens_reused: cache entries kept as they were.
        tokens_recomputed: entries the model computed anew in place.
        tokens_rotated: entries whose keys were moved to another position.
        tokens_appended: entries the model computed at the end.
        flops: floating point operations, multiply and add counted apart.
        seconds: wall time.
        tokens_copied: entries taken over from another cache.
    """

    tokens_reused: int = 0
    tokens_recomputed: int = 0
    tokens_rotated: int = 0
    tokens_appended: int = 0
    flops: int = 0
    seconds: float = 0.0
    tokens_copied: int = 0

    def __add__(self, other: Receipt) -> Receipt:
        return Receipt(
            self.tokens_reused + other.tokens_reused,
            self.tokens_recomputed + other.tokens_recomputed,
            self.tokens_rotated + other.tokens_rotated,
            self.tokens_appended + other.tokens_appended,
            self.flops + other.flops,
            self.seconds + other.seconds,
            self.tokens_copied + other.tokens_copied,
        )
