"""What an effect is called: a condition and a metric with their parameters; the printed name follows from them."""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Scalar = str | int | float | bool
_NUMBER = r"-?\d+(?:\.\d+)?"


@dataclass(frozen=True)
class Label:
    """The parts of an effect's name.

    `Label("suffix_{percent}", "recovery", {"percent": 10})` prints as `suffix_10.recovery`. Figures and tables ask for
    the parts (all effects of a condition and metric, ordered by a parameter) and never take a name apart.

    Args:
        condition: what was done, dotted where it has parts; a parameter stands in it as `{parameter}`.
        metric: what was read; it may have parameters too (`attention_share_{layer}`).
        parameters: the values of both.

    Raises:
        ValueError: a parameter has no value.
    """

    condition: str
    metric: str
    parameters: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in fields_of(self.template) if name not in self.parameters]
        if missing:
            raise ValueError(f"the effect {self.template!r} has no value for {missing[0]!r}")

    @property
    def template(self) -> str:
        """The name with its parameters unfilled: `suffix_{percent}.recovery`."""
        return f"{self.condition}.{self.metric}" if self.condition else self.metric

    @classmethod
    def of(cls, name: str | Label, parameters: Mapping[str, Any] | None = None) -> Label:
        """A label from `condition.metric`, with the values of the parameters that it names.

        Args:
            name: the parts joined by a dot; the metric is what follows the last one.
            parameters: by name; those that it does not name are left out.
        """
        if isinstance(name, Label):
            return name
        condition, _, metric = name.rpartition(".")
        known = parameters or {}
        return cls(condition, metric, {key: known[key] for key in fields_of(name) if key in known})

    def __str__(self) -> str:
        return self.template.format(**{key: _shown(value) for key, value in self.parameters.items()})


def joined(*parts: str | Iterable[str]) -> Iterator[str]:
    """Every way to join one of each of the parts by a dot: names of effects from conditions and metrics."""
    choices = ((part,) if isinstance(part, str) else tuple(part) for part in parts)
    yield from map(".".join, itertools.product(*choices))


def is_declared(name: str, declared: Iterable[str]) -> bool:
    """Whether an effect's name is one of those declared.

    Args:
        name: of an effect.
        declared: names, in which `{parameter}` stands for any number and `*` for any word.
    """
    return any(_pattern(template).fullmatch(name) for template in declared)


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(re.sub(r"\{\w+\}", "{}", template))
    return re.compile(escaped.replace(re.escape("{}"), _NUMBER).replace(re.escape("*"), r"\w+"))


def fields_of(template: str) -> list[str]:
    """The parameters that a template names, in order: `["percent"]` of `suffix_{percent}`."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def _shown(value: Scalar) -> Scalar:
    """A whole number that a table holds as a float is printed without its point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
