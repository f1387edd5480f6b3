"""Reading YAML: plain data only, and no key twice in one mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvprobe.errors import ConfigError

# The same loader in C, where PyYAML was built with it, is ten times faster.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str) -> Any:
    """The plain data in `text`.

    Raises:
        yaml.YAMLError: it is not valid YAML, asks for objects, or gives a key twice, of which plain YAML silently
            keeps the last.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _refuse_repeated_keys(node)
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file is missing, is not YAML, or is not a mapping.
    """
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text; give a YAML file.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" on line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{file}: is not valid YAML{line}: {problem}.") from error
    return mapping(content, file, "the file")


def mapping(content: Any, file: Path, what: str) -> dict[str, Any]:
    """`content`, read from `file`, as a mapping with text keys.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: {what} is wrong: it must be keys with values, not {type(content).__name__}.")
    return {str(key): value for key, value in content.items()}


def _refuse_repeated_keys(node: Any) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
            _refuse_repeated_keys(value)
