"""One kind of plugin registry for probes, tasks, architectures and edit methods."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from kvprobe.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind of plugin.

    A plugin registers itself beside its definition (`@PROBES.register("locality")`). All modules of
    `package` are imported on the first look-up (where `module` is given, all of that name in its folders), then third
    parties' entry points of `entry_point_group`.
    """

    def __init__(self, kind: str, package: str, entry_point_group: str, *, module: str | None = None) -> None:
        self.kind = kind
        self._package = package
        self._module = module
        self._entry_point_group = entry_point_group
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files the decorated object under `name`."""

        def file(entry: T) -> T:
            if name in self._entries and not _same_place(self._entries[name], entry):
                raise ValueError(f"two {self.kind}s are named {name!r}")
            self._entries[name] = entry
            return entry

        return file

    def get(self, name: str) -> T:
        """The entry called `name`.

        Raises:
            UnknownNameError: with the nearest names.
        """
        self._load()
        if name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries)
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load()
        return sorted(self._entries)

    def describe(self) -> dict[str, str]:
        """Each name with the first line of its docstring."""
        return {name: (inspect.getdoc(self._entries[name]) or "").split("\n")[0] for name in self.names()}

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        package = importlib.import_module(self._package)
        if self._module is None:
            for found in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{found.name}")
        else:
            for found in pkgutil.walk_packages(package.__path__, f"{self._package}."):
                if found.name.endswith(f".{self._module}"):
                    importlib.import_module(found.name)
        for entry_point in entry_points(group=self._entry_point_group):
            entry_point.load()


def _same_place(one: object, other: object) -> bool:
    """Whether both are one plugin: the same object, or one cell of a notebook run again."""
    if one is other:
        return True
    places = {(getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)) for entry in (one, other)}
    return len(places) == 1 and places.pop()[0] == "__main__"
