"""Tool calls as JSON: found in what a model writes, and compared by value (critique CO6).

Two calls are the same when their names and all of their arguments are, whatever the order of keys and the blanks. Types
count: the number 3 is not the string "3", nor is the number 1 `true`, but 3 is 3.0. Text is compared to the letter.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """A tool call.

    Args:
        name: of the tool.
        arguments: as canonical JSON (see `canonical`), so that calls are equal when they are the same by value.
    """

    name: str
    arguments: str

    @classmethod
    def of(cls, name: str, arguments: dict[str, Any]) -> Call:
        """A call with its arguments as plain values."""
        return cls(name, canonical(arguments))

    @property
    def text(self) -> str:
        """The call as one line of JSON, as models are asked to write it."""
        return json.dumps({"name": self.name, "arguments": json.loads(self.arguments)})


def find_call(text: str) -> Call | None:
    """The first JSON object in a text, as a call; None where it is not one.

    Whatever stands around it does not matter. It must have a `name` that is printable text and `arguments` that are an
    object, and nothing else; a text whose first object is something else has no call, for that object comes first.
    """
    return locate_call(text)[0]


def locate_call(text: str) -> tuple[Call | None, int]:
    """As `find_call`, with the index behind the call in the text; without a call, the text's length."""
    start = text.find("{")
    # What is inside a broken or unfinished object is a part of it, not a call of its own.
    while start >= 0 and not _opened(text[:start]):
        try:
            found, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        call = _as_call(found)
        return call, len(text) if call is None else end
    return None, len(text)


def canonical(value: Any) -> str:
    """A JSON value as text that is the same for the same value and for no other.

    Raises:
        ValueError: a number is not finite, or the value is none of JSON's.
    """
    try:
        return json.dumps(_plain(value), sort_keys=True, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"this is no JSON value: {error}") from None


def _as_call(found: Any) -> Call | None:
    if set(found) != {"name", "arguments"}:
        return None
    name, arguments = found["name"], found["arguments"]
    if not isinstance(name, str) or not name.isprintable() or not isinstance(arguments, dict):
        return None
    return Call.of(name, arguments)


def _plain(value: Any) -> Any:
    """The value with whole numbers written one way."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _opened(before: str) -> bool:
    """Whether an object is still open at the end of a text, strings aside."""
    depth, in_string, escaped = 0, False, False
    for mark in before:
        if in_string:
            escaped, in_string = mark == "\\" and not escaped, mark != '"' or escaped
        elif mark == '"' and depth:
            in_string = True
        elif mark in "{}":
            depth = max(0, depth + (1 if mark == "{" else -1))
    return depth > 0


def _unambiguous(items: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in items}) < len(items):
        raise ValueError("a key stands twice in one object")
    return dict(items)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unambiguous, parse_float=_finite, parse_constant=_finite)
