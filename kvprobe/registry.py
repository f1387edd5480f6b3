"""Plugins by name: probes, tasks, edit methods, architectures and all other kinds.

A plugin registers itself beside its definition (`@PROBES.register("locality")`). kvprobe's own are found by reading
their source, so that listing all imports nothing, and using one imports its module alone.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from kvprobe.errors import ConfigError, UnknownNameError

T = TypeVar("T")
PLUGINS = "KVPROBE_PLUGINS"
"""The environment variable with further files that register plugins, set apart as in PATH."""


@dataclass(frozen=True)
class Kind:
    """A kind of plugin.

    Args:
        name: in messages, such as `edit method`.
        registry: what the registry is called beside decorators, such as `EDIT_METHODS`; third parties register
            through the entry point group `kvprobe.edit_methods`.
        package: where those that come with the package are defined.
        modules: pattern of their files in the package's folder.
    """

    name: str
    registry: str
    package: str
    modules: str = "*.py"

    @property
    def entry_point_group(self) -> str:
        """The group third parties register through."""
        return f"kvprobe.{self.registry.lower()}"


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.registry: kind
        for kind in (
            Kind("probe", "PROBES", "kvprobe.probes", "**/probe.py"),
            Kind("task", "TASKS", "kvprobe.tasks"),
            Kind("wording", "WORDINGS", "kvprobe.tasks"),
            Kind("edit method", "EDIT_METHODS", "kvprobe.edit"),
            Kind("selection criterion", "SELECTIONS", "kvprobe.edit"),
            Kind("eviction method", "EVICTION_METHODS", "kvprobe.eviction"),
            Kind("weight edit", "WEIGHT_EDITS", "kvprobe.baselines"),
            Kind("reuse scheme", "REUSE_SCHEMES", "kvprobe.composing"),
            Kind("agent", "AGENTS", "kvprobe.agents"),
            Kind("architecture", "ARCHITECTURES", "kvprobe.models.architectures"),
            Kind("model source", "MODEL_SOURCES", "kvprobe.models.sources"),
        )
    }
)
"""All kinds by the name of their registry."""


class Registry(Generic[T]):
    """The plugins of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        _REGISTRIES[kind] = self

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files the decorated object under `name`.

        Raises:
            ValueError: another plugin has the name.
        """

        def file(entry: T) -> T:
            known = self._entries.get(name)
            if (known is not None and not _same_place(known, entry)) or self._is_taken(name, entry):
                raise ValueError(f"two {self.kind.name}s are named {name!r}")
            self._entries[name] = entry
            return entry

        return file

    def get(self, name: str) -> T:
        """The entry called `name`.

        Raises:
            UnknownNameError: with the nearest names.
        """
        if name not in self._entries and name in (own := _definitions(self.kind)):
            # What the decorator filed may be gone: tests put a registry back as it was, but no module is run twice.
            self._entries[name] = getattr(importlib.import_module(own[name].module), own[name].attribute)
        if name not in self._entries:
            _load_third_parties(self.kind)
        if name not in self._entries:
            raise UnknownNameError(self.kind.name, name, self.names())
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        _load_third_parties(self.kind)
        return sorted({*_definitions(self.kind), *self._entries})

    def describe(self) -> dict[str, str]:
        """Each name with the first line of its docstring."""
        _load_third_parties(self.kind)
        own = {name: definition.summary for name, definition in _definitions(self.kind).items()}
        registered = {name: (inspect.getdoc(entry) or "").split("\n")[0] for name, entry in self._entries.items()}
        return dict(sorted({**own, **registered}.items()))

    def _is_taken(self, name: str, entry: T) -> bool:
        """Whether one of kvprobe's own, which may not be imported yet, is called the same."""
        module = getattr(entry, "__module__", "")
        return not module.startswith(f"{self.kind.package}.") and name in _definitions(self.kind)


_REGISTRIES: dict[Kind, Registry[Any]] = {}


def describe(kind: Kind) -> dict[str, str]:
    """As `Registry.describe`, without importing the module of the registry where no third party needs it."""
    _load_third_parties(kind)
    registry = _REGISTRIES.get(kind)
    return registry.describe() if registry else {name: own.summary for name, own in sorted(_definitions(kind).items())}


@dataclass(frozen=True)
class _Definition:
    """Where a plugin is defined, and the first line of its docstring."""

    module: str
    attribute: str
    summary: str


@functools.cache
def _definitions(kind: Kind) -> Mapping[str, _Definition]:
    """The plugins that come with the package, by name, from their source."""
    found: dict[str, _Definition] = {}
    spec = importlib.util.find_spec(kind.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob(kind.modules)):
            module = ".".join((kind.package, *file.relative_to(folder).with_suffix("").parts))
            for name, definition in _registered(file.read_text(encoding="utf-8"), kind.registry, module):
                if name in found:
                    raise ValueError(f"two {kind.name}s are named {name!r}: in {found[name].module} and {module}")
                found[name] = definition
    return MappingProxyType(found)


def _registered(source: str, registry: str, module: str) -> Iterator[tuple[str, _Definition]]:
    """Classes and functions of a module below `@REGISTRY.register("name")`.

    Raises:
        ValueError: a name is not written out.
    """
    if f"@{registry}.register(" not in source:
        return
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=found), attr="register"), args=[name]) if (
                        found == registry
                    ):
                        if not isinstance(name, ast.Constant):
                            raise ValueError(f"{module}: write out the name under which {node.name} is registered")
                        summary = (ast.get_docstring(node) or "").split("\n")[0]
                        yield str(name.value), _Definition(module, node.name, summary)


def use_plugin(file: Path) -> None:
    """Run a Python file that registers plugins, here and in the worker processes that are started from here.

    Raises:
        ConfigError: there is no such file, or it fails.
    """
    path = str(file.expanduser().absolute())
    _run_file(path)
    known = [other for other in os.environ.get(PLUGINS, "").split(os.pathsep) if other]
    os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys((*known, path)))


def run_plugins() -> None:
    """Run the files of `PLUGINS`, each once: what a worker unpickles may come from them.

    Raises:
        ConfigError: one is not there, or fails.
    """
    for file in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
        _run_file(file)


@functools.cache
def _run_file(path: str) -> None:
    name = f"kvprobe_plugin_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"There is no Python file {path}; give the file that registers your plugin.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be used as a plugin ({type(error).__name__}: {error}).") from error


def _load_third_parties(kind: Kind) -> None:
    run_plugins()
    for entry_point in _entry_points().select(group=kind.entry_point_group):
        entry_point.load()


@functools.cache
def _entry_points() -> Any:
    """Those of all installed packages, which are read once for all kinds."""
    return entry_points()


def _same_place(one: object, other: object) -> bool:
    """Whether both are one plugin: the same object, or one cell of a notebook run again."""
    if one is other:
        return True
    places = {(getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)) for entry in (one, other)}
    return len(places) == 1 and places.pop()[0] == "__main__"
