"""Errors a user can act on: one sentence that names what is wrong, where, and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_LONGEST = 200
"""Characters that names are compared by, which takes a time that grows with their square."""
_MOST = 80
"""Names that a sentence lists."""


class KvprobeError(Exception):
    """Base of every error kvprobe raises on purpose; the CLI shows it as one sentence."""


class ConfigError(KvprobeError):
    """A YAML file or a parameter is not what its schema asks for."""


class UnknownNameError(KvprobeError):
    """A name is not registered; the message carries the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f"There is no {kind} named {name!r}; {did_you_mean(name, self.known)}")

    def __reduce__(self) -> tuple[Any, ...]:
        # An error of a worker reaches the user through a pickle, which by default remembers the message only.
        return type(self), (self.kind, self.name, self.known)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as the end of a sentence; where none is near, all of them."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name[:_LONGEST], known, n=3, cutoff=0.4)
    if nearest:
        return f"did you mean {' or '.join(map(repr, nearest))}?"
    others = f" and {len(known) - _MOST} others" if len(known) > _MOST else ""
    return f"known: {', '.join(known[:_MOST]) or 'none'}{others}."


class AlignmentError(KvprobeError):
    """Two contexts of a pair do not differ in exactly one span of equal length."""


class UnsupportedError(KvprobeError):
    """The operation would silently be wrong for this cache, model or RoPE scaling."""


class ModelSourceError(KvprobeError):
    """A model cannot be found, is damaged, does not fit in memory or is not known."""


class NumericsError(KvprobeError):
    """A model or an operation produced NaN or infinity."""


class StoreError(KvprobeError):
    """The results folder cannot be read or written."""


class NoEffectError(KvprobeError):
    """An intervention that was not declared a no-op changes nothing."""


class GateError(KvprobeError):
    """The subject cannot do the task, so nothing measured on it would mean anything."""


class SampleError(KvprobeError):
    """There are too few independent instances for what is asked of them."""


class OutOfMemoryError(KvprobeError):
    """The work does not fit in memory even at the smallest batch."""


class WorkerLostError(KvprobeError):
    """Work was not done because the process or the node that did it is gone, or there is none that could."""
