"""What the page shows, as plain data: a prompt file with one more key, so that an audit reads it too."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from kvprobe.errors import ConfigError
from kvprobe.tasks.own_prompt import PromptFile, prompt_file
from kvprobe.yaml_files import parse_plain

KEY = "explore"
# YAML refuses these characters or reads some as line breaks; escaped, the file is JSON and YAML alike.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class Choice(BaseModel):
    """What is done to the cache of the prompt with the old values.

    Attributes:
        model: that the state was made on.
        field: that changes; the first by default.
        positions: cache entries to take from the prompt with the new value; by default those of the field itself.
        part: what is taken of each entry.
        layers: the first and the last layer in which it is taken; all by default.
        method: the edit method that is tried beside the transplant, as an audit calls it.
        kept: another state to show beside this one, as its file holds it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str = ""
    field: str = ""
    positions: tuple[int, ...] | None = None
    part: Literal["both", "keys", "values"] = "both"
    layers: tuple[int, int] | None = None
    method: str = "erratum"
    kept: dict[str, Any] | None = None


class State(BaseModel):
    """A prompt and what is done to its cache."""

    model_config = ConfigDict(frozen=True)
    prompt: PromptFile
    choice: Choice = Choice()

    def content(self) -> dict[str, Any]:
        """Keys and values of the state's file."""
        # The prompt of a conversation is made of its messages.
        left_out = {KEY, "prompt"} if self.prompt.messages else {KEY}
        prompt = self.prompt.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
        return {**prompt, KEY: self.choice.model_dump(mode="json", exclude_defaults=True)}

    def file(self) -> str:
        """The file, which is JSON and YAML alike."""
        text = json.dumps(self.content(), ensure_ascii=False, indent=1)
        return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"

    def prompt_text(self) -> str:
        """The prompt file alone, as one would write it by hand."""
        content = self.content()
        del content[KEY]
        return yaml.dump(content, Dumper=_ByHand, allow_unicode=True, sort_keys=False, width=120)


def read_state(text: str, where: str) -> State:
    """The state in the text of a prompt file, with the key `explore` or without.

    Args:
        text: YAML or JSON.
        where: what the text is called in messages.

    Raises:
        ConfigError: it is not that; names the key and the mend.
    """
    prompt = prompt_file(parse_plain(text, where), where)
    try:
        return State(prompt=prompt, choice=Choice.model_validate(prompt.explore or {}))
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(map(str, (KEY, *found["loc"])))
        raise ConfigError(f"{where}: {key}: {found['msg'].removeprefix('Value error, ').rstrip('.')}.") from None


class _ByHand(yaml.SafeDumper):
    """Texts of several lines stand as they are under their key."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ByHand.add_representer(str, _text)
