"""Reading YAML that anyone may have written: plain data of bounded size, and no key twice in one mapping."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from kvprobe.errors import ConfigError

MOST_BYTES = 1 << 20
MOST_VALUES = 20_000
"""Keys and values, each alias counted as all that it stands for."""
MOST_LEVELS = 50
# The same loader in C, where PyYAML was built with it, is ten times faster.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: see `read_plain`; or it is no mapping.
    """
    return mapping(read_plain(file), file, "the file")


def read_plain(file: Path) -> Any:
    """The plain data in a YAML file: mappings, lists, text, finite numbers of at most 64 bits, true, false, null.

    Raises:
        ConfigError: the file is missing, too large, no UTF-8 or no YAML, asks for objects, nests too deeply, or gives
            a key twice, of which plain YAML silently keeps the last.
    """
    return parse_plain(read_text(file), file)


def read_text(file: Path) -> str:
    """The text of a file that may be YAML.

    Raises:
        ConfigError: the file is missing, too large or no UTF-8.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file; check the path.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file}: cannot be read ({reason}); check the path.") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{file}: is larger than {MOST_BYTES >> 20} MB; name a YAML file.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start + 1} is not UTF-8; save the file as UTF-8 text.") from error


def parse_plain(text: str, where: Path | str) -> Any:
    """The plain data in `text`, which messages call `where`; see `read_plain`.

    Raises:
        ConfigError: it is not that.
    """
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {_finding(error)}.") from error


def parse_yaml(text: str) -> Any:
    """The plain data in `text`; see `read_plain`.

    Raises:
        yaml.YAMLError: it is not that.
    """
    _check_size(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _refuse_repeated_keys(node)
        data = None if node is None else loader.construct_document(node)
    except (ValueError, AttributeError, LookupError) as error:
        # Of PyYAML's own constructors: `2026-13-99`, `!!int x`.
        raise yaml.YAMLError(f"a value is not of the type that it is written as: {error}") from error
    finally:
        loader.dispose()
    _check_values(data, "the file")
    return data


def mapping(content: Any, file: Path, what: str) -> dict[str, Any]:
    """`content`, read from `file`, as a mapping with text keys.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: {what} is wrong: it must be keys with values, not {type(content).__name__}.")
    return {str(key): value for key, value in content.items()}


def _check_size(text: str) -> None:
    """Count what the text would become before any of it is made: a few aliases can stand for billions of values."""
    loader, count, levels = _Loader(text), 0, list[tuple[str | None, int]]()
    sizes: dict[str | None, int] = {}
    try:
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in {anchor for anchor, _ in levels}:
                    raise _marked(f"the alias *{event.anchor} stands inside what it names", event)
                # One that no anchor declares is refused by the loader itself.
                count += sizes.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                count += 1
                sizes[event.anchor] = 1
            elif isinstance(event, yaml.CollectionStartEvent):
                levels.append((event.anchor, count))
                count += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = levels.pop()
                sizes[anchor] = count - before
            if len(levels) > MOST_LEVELS:
                raise _marked(f"it nests more than {MOST_LEVELS} levels deep", event)
            if count > MOST_VALUES:
                raise _marked(f"it holds more than {MOST_VALUES:,} values, aliases included", event)
    finally:
        loader.dispose()


def _refuse_repeated_keys(node: Any) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value!r} stands twice; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
            _refuse_repeated_keys(value)


def _check_values(value: Any, key: Any) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_values(inner, repr(name))
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, key)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise yaml.YAMLError(f"a number of {key} does not fit into 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise yaml.YAMLError(f"{key} is {value}; give a finite number")
    elif value is not None and not isinstance(value, str | int | float):
        raise yaml.YAMLError(f"{key} is read as a {type(value).__name__}; put it in quotes")


def _marked(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _finding(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None:
        return " ".join(str(error).split()).rstrip(".")
    if type(error) is yaml.MarkedYAMLError:
        return f"line {mark.line + 1}: {problem}"
    return (
        f"line {mark.line + 1} is not valid YAML ({problem}); write longer texts indented under a key with '|' and put "
        "short ones in quotes"
    )
