"""Loaded models kept from one experiment to the next, as long as memory allows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kvprobe.errors import OutOfMemoryError

SubjectLoader = Callable[[str], Any]
"""Loads a model by its name; called again and again, so it may keep what it loaded."""
MEMORY_SHARE = 0.25
"""What the kept models may take of the memory, the rest being for caches and activations."""


class SubjectCache:
    """A loader that keeps the models it loaded last.

    However little memory there is, the last one is kept; those before it only while all together take at most
    `MEMORY_SHARE` of what would be free without them.

    Args:
        load: loads a model by its name.
        keep: models at most.
    """

    def __init__(self, load: SubjectLoader, keep: int = 8) -> None:
        self._load = load
        self._keep = keep
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def __call__(self, name: str) -> Any:
        """The model called `name`, loaded now or before; raises what the loader raises."""
        if name in self._kept:
            self._kept.move_to_end(name)
        else:
            self._kept[name] = self._loaded(name)
            self._make_room(self._kept[name])
        return self._kept[name]

    def _loaded(self, name: str) -> Any:
        while True:
            try:
                return self._load(name)
            except OutOfMemoryError:
                if not self._kept:
                    raise
                self._kept.popitem(last=False)

    def _make_room(self, subject: Any) -> None:
        from kvprobe.models.memory import available_bytes

        free = available_bytes(subject.device)
        while len(self._kept) > 1:
            taken = sum(map(weight_bytes, self._kept.values()))
            if len(self._kept) <= self._keep and (free is None or taken <= MEMORY_SHARE * (free + taken)):
                return
            dropped = weight_bytes(self._kept.popitem(last=False)[1])
            free = None if free is None else free + dropped


def weight_bytes(subject: Any) -> int:
    """What a model's weights take."""
    return int(subject.identity.parameters * subject.dtype.itemsize)
