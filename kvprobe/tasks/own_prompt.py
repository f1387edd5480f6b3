"""Task `own_prompt`: a user's own prompt, one YAML file a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kvprobe.errors import ConfigError
from kvprobe.tasks.base import TASKS, Task
from kvprobe.tasks.context import Context
from kvprobe.tasks.pairs import PromptPair, Provenance

_MARK = re.compile(r"\{\{(?P<old>[^{}|]+)\|(?P<new>[^{}|]+)\}\}")


class Answers(BaseModel):
    """The decision that is right under the old value and the one that is right under the new value."""

    model_config = ConfigDict(extra="forbid")
    old: str
    new: str


class PromptFile(BaseModel):
    """The schema of a prompt file.

    Args:
        name: shown in tables and used as the cluster name.
        prompt: the text, with the field marked once as `{{old value|new value}}`.
        cue: the last words, after which the decision is the next word.
        answers: the two decisions.
    """

    model_config = ConfigDict(extra="forbid")
    name: str
    prompt: str
    cue: str = "Answer:"
    answers: Answers

    @model_validator(mode="after")
    def _one_field(self) -> PromptFile:
        marks = _MARK.findall(self.prompt)
        if len(marks) != 1:
            raise ValueError(
                f"mark the field exactly once as {{{{old value|new value}}}}; {len(marks)} marks were found"
            )
        return self


@TASKS.register("own_prompt")
class OwnPrompt(Task):
    """Your own prompts: a file or a list of files, each with one marked field and two decisions."""

    files: tuple[Path, ...]

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """One pair a file.

        Raises:
            ConfigError: a file is missing or not what the schema asks for.
        """
        for path in self.files:
            yield prompt_pair(path)


def prompt_pair(path: Path) -> PromptPair:
    """The pair of one prompt file. Segments: `before`, `field`, one `line_N` a line after it, and `cue`."""
    content = _read(path)
    mark = _MARK.search(content.prompt)
    assert mark is not None
    before, after = content.prompt[: mark.start()], content.prompt[mark.end() :]
    # The blank before a value belongs to it: most tokenizers put it into the value's first token.
    space = " " if before.endswith(" ") else ""
    before = before.rstrip(" ") if space else before
    lines = [line for line in re.split(r"(?<=\n)", after if after.endswith("\n") else after + "\n") if line]
    base, donor = (
        Context.of(
            ("before", before),
            ("field", space + value.strip()),
            *((f"line_{number}", line) for number, line in enumerate(lines)),
            ("cue", content.cue),
        )
        for value in (mark["old"], mark["new"])
    )
    return PromptPair(base, donor, content.answers.old, content.answers.new, Provenance(content.name, "own", 0))


def _read(path: Path) -> PromptFile:
    try:
        content: Any = yaml.safe_load(path.read_text())
        return PromptFile.model_validate(content)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such prompt file; check the path.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not valid YAML ({str(error).splitlines()[0]}); mend the file.") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "prompt"
        raise ConfigError(f"{path}: {key}: {first['msg']}.") from None
