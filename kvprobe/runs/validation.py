"""Turns pydantic's findings into one sentence that names the file, the key and the mend."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvprobe.errors import ConfigError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
_MOST_SHOWN = 80


def validated(model: type[Model], values: Any, *, where: str, prefix: str = "") -> Model:
    """`values` as `model`.

    Args:
        model: the schema.
        values: what was given.
        where: the file (or other origin) the message begins with.
        prefix: dotted path of `values` inside that file, such as `task`.

    Raises:
        ConfigError: names the file, the dotted key, what is wrong and, for unknown keys, the nearest one.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(validation_sentence(error, model, where=where, prefix=prefix)) from error


def validation_sentence(error: ValidationError, model: type[BaseModel], *, where: str, prefix: str = "") -> str:
    """The first finding of `error` as a sentence, with the count of the others."""
    findings = error.errors()
    # An unknown key usually causes the "missing" finding beside it, so it is told first.
    first = next((f for f in findings if f["type"] == "extra_forbidden"), findings[0])
    path = dotted(first["loc"], prefix)
    others = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    if first["type"] == "extra_forbidden":
        owner = _model_at(model, first["loc"][:-1])
        known = sorted(owner.model_fields) if owner else []
        return f"{where}: {path!r} is not a known key; {did_you_mean(str(first['loc'][-1]), known)}{others}"
    if first["type"] == "missing":
        return f"{where}: the key {path!r} is missing; add it{others}."
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    given = "" if isinstance(first["input"], dict | list) else f" (it is {_short(repr(first['input']))})"
    return f"{where}: {path!r} is wrong: {reason[:1].lower()}{reason[1:]}{given}{others}."


def dotted(location: Sequence[int | str], prefix: str = "") -> str:
    """`("claims", 0, "statement")` as `claims[0].statement`."""
    path = prefix
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "the file"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        if current is None or part not in current.model_fields:
            return None
        current = _model_in(current.model_fields[part].annotation)
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    arguments = typing.get_args(annotation)
    if not arguments:
        return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return next(filter(None, map(_model_in, arguments)), None)
