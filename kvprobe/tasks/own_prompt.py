"""Task `own_prompt`: a user's own prompt, one YAML file a prompt."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from kvprobe.errors import ConfigError
from kvprobe.tasks.base import TASKS, Task
from kvprobe.tasks.context import Context, Segment
from kvprobe.tasks.pairs import PromptPair, Provenance
from kvprobe.yaml_files import read_plain

_MARK = re.compile(r"\{\{(?:(?P<name>[\w][\w -]*):\s)?(?P<old>[^{}|\n]+)\|(?P<new>[^{}|\n]+)\}\}")
_BRACES = re.compile(r"\{\{.*?\}\}|\{\{|\}\}", re.DOTALL)
_LABEL = re.compile(r"(?:^|[-*•,;.(])\s*(?P<label>[^-*•,;.(:=]+?)\s*[:=]\s*$")


class Answers(BaseModel):
    """The decision that is right under the old value and the one that is right under the new value.

    With several fields, `old` is right while all hold their old values, and `new` says for each field by its name what
    is right when it alone changes.
    """

    model_config = ConfigDict(extra="forbid")
    old: str
    new: str | dict[str, str]


@dataclass(frozen=True)
class MarkedField:
    """A field as the file marks it: name, two values, the line that says a change (`{value}` in it), line number."""

    name: str
    old: str
    new: str
    erratum: str
    line: int


class Turn(BaseModel):
    """A message of a conversation: its role, its text, and what else the chat template reads (`tool_calls`, `name`)."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str

    @property
    def lines(self) -> str:
        """The text, with a line break at its end where it has none."""
        return self.content if self.content.endswith("\n") else f"{self.content}\n"


class PromptFile(BaseModel):
    """The schema of a prompt file.

    Args:
        name: shown in tables and used as the cluster name; by default the file's name.
        prompt: the text, with the field marked as `{{old value|new value}}`. Several fields are marked each, with
            their names: `{{status: pending|shipped}}`. With `messages` it is their texts, one after the other.
        messages: in place of `prompt`, a conversation that the model's chat template writes, with marks in its texts.
        tools: what the chat template is told of tools, as JSON schemas.
        cue: the last words, after which the decision is the next word.
        answers: the two decisions; or a list of the possible ones, where it is the model that says which is right.
        erratum: the line that says a change, with `{value}` in it; with several fields one for each by its name.
        control_tokens: whether control tokens in the prompt (`<|im_end|>`) are meant as such; they are text unless
            told, and text in a value in any case.
        explore: what `kvprobe explore` showed of the prompt; nothing else reads it.
    """

    model_config = ConfigDict(extra="forbid")
    name: str = ""
    prompt: str = ""
    messages: tuple[Turn, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    cue: str = "Answer:"
    answers: Answers | tuple[str, ...]
    erratum: str | dict[str, str] = ""
    control_tokens: bool = False
    explore: dict[str, Any] | None = None

    @field_validator("answers", mode="before")
    @classmethod
    def _told_apart(cls, given: Any) -> Answers | tuple[str, ...]:
        if isinstance(given, Answers):
            return given
        if isinstance(given, list | tuple):
            pool = tuple(_word(answer) for answer in given)
            if len(set(pool)) < max(2, len(pool)):
                raise ValueError("name at least two different answers, each once")
            return pool
        if not isinstance(given, Mapping) or set(given) != {"old", "new"}:
            raise ValueError("write {old: cancel, new: deny}, or a list of the possible answers: [cancel, deny]")
        old, new = _word(given["old"]), given["new"]
        new = {str(name): _word(word) for name, word in new.items()} if isinstance(new, Mapping) else _word(new)
        if set(new.values() if isinstance(new, dict) else (new,)) <= {old}:
            raise ValueError(f"both answers are {old!r}; name the decision that is right under the new value")
        return Answers(old=old, new=new)

    @model_validator(mode="after")
    def _marked(self) -> PromptFile:
        if self.messages:
            told = "".join(turn.lines for turn in self.messages)
            if self.prompt and self.prompt.count("\n") != told.count("\n"):
                raise ValueError("give prompt or messages, not both")
            self.prompt = self.prompt or told
        elif self.tools:
            raise ValueError("tools go with messages, which the chat template writes; give messages in place of prompt")
        if not self.prompt.strip():
            raise ValueError("prompt is empty; write the text, with the field marked as {{old value|new value}}")
        if not self.marks:
            found = [repr(braces) for braces in _BRACES.findall(self.prompt)]
            near = (
                f"; {found[0]} is none: a mark holds two values on one line, with no | or brace in them"
                if found
                else ""
            )
            if not found and _MARK.search(self.cue):
                near = "; that of the cue does not count, put it into the prompt"
            raise ValueError(f"mark the field as {{{{old value|new value}}}}; 0 marks were found{near}")
        return self

    @property
    def marks(self) -> list[re.Match[str]]:
        """The marks in the text; groups `name`, `old` and `new`."""
        return list(_MARK.finditer(self.prompt))

    @property
    def left_over(self) -> list[str]:
        """Double braces that are no mark and so stay in the text."""
        return _BRACES.findall(_MARK.sub("", self.prompt)) + _BRACES.findall(self.cue)

    @property
    def pool(self) -> tuple[str, ...]:
        """All possible answers, each once."""
        if isinstance(self.answers, tuple):
            return self.answers
        new = self.answers.new
        return tuple(dict.fromkeys((self.answers.old, *(new.values() if isinstance(new, dict) else (new,)))))

    def expected(self, field: str) -> tuple[str, str] | None:
        """The right answers under the old and the new value of a field; `None` where the file does not say."""
        if isinstance(self.answers, tuple):
            return None
        new = self.answers.new
        return self.answers.old, new[field] if isinstance(new, dict) else new

    def apart(self) -> tuple[PromptFile, tuple[str, ...]]:
        """The same prompt with the words that all answers begin with behind the cue, and a sentence that says so.

        The choice between whole answers is then that between what is left of them: what they share cancels out.
        """
        words = [answer.split(" ") for answer in self.pool]
        alike = list(takewhile(lambda each: len(set(each)) == 1, zip(*words, strict=False)))
        shared = " ".join(each[0] for each in alike)
        if not shared or min(map(len, words)) == len(alike):
            return self, ()
        left = {answer: answer[len(shared) + 1 :] for answer in self.pool}
        if isinstance(self.answers, tuple):
            answers: Any = tuple(left.values())
        else:
            new = self.answers.new
            named = {name: left[word] for name, word in new.items()} if isinstance(new, dict) else left[new]
            answers = Answers(old=left[self.answers.old], new=named)
        blank = "" if not self.cue or self.cue[-1].isspace() else " "
        told = f"All answers begin with {shared!r}; they are compared behind it, as {' or '.join(left.values())}."
        return self.model_copy(update={"cue": f"{self.cue}{blank}{shared}", "answers": answers}), (told,)

    def with_new_value(self, field: str, value: str, where: str) -> PromptFile:
        """The same prompt with another new value of a field.

        Raises:
            ConfigError: there is no such field, or the value cannot stand in a mark.
        """
        names = [marked.name for marked in self.fields(where)]
        if field not in names:
            raise ConfigError(f"{where}: there is no field {field!r}; the marked fields are {', '.join(names)}.")
        value = value.strip()
        if not value or set(value) & set("{}|\n"):
            raise ConfigError(f"{where}: the value {value!r} cannot stand in a mark; give words without {{, }} and |.")
        number = itertools.count()

        def written(text: str) -> str:
            def mark(found: re.Match[str]) -> str:
                start, end = (place - found.start() for place in found.span("new"))
                return found[0][:start] + value + found[0][end:] if next(number) == names.index(field) else found[0]

            return _MARK.sub(mark, text)

        if not self.messages:
            return self.model_copy(update={"prompt": written(self.prompt)})
        messages = tuple(turn.model_copy(update={"content": written(turn.content)}) for turn in self.messages)
        return self.model_copy(update={"messages": messages, "prompt": "".join(turn.lines for turn in messages)})

    def fields(self, where: str) -> list[MarkedField]:
        """The marked fields, in the order of the text; one without a name is called as the label before it.

        Raises:
            ConfigError: names that are missing, used twice or used for no field, values that are empty or alike.
        """
        found = [self._field(mark, where) for mark in self.marks]
        names = [field.name for field in found]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"{where}: prompt: {names.count(name)} marks are called {name!r}; give each a name of its own, as "
                    "in {{first status: pending|shipped}}."
                )
        for key, given in (("answers.new", getattr(self.answers, "new", "")), ("erratum", self.erratum)):
            if not isinstance(given, dict):
                continue
            unknown = [name for name in given if name not in names]
            if unknown or (key == "answers.new" and len(given) < len(names)):
                wrong = f"there is no field {unknown[0]!r}" if unknown else "a field is missing"
                raise ConfigError(f"{where}: {key}: {wrong}; the marked fields are {', '.join(map(repr, names))}.")
        return found

    def _field(self, mark: re.Match[str], where: str) -> MarkedField:
        old, new = mark["old"].strip(), mark["new"].strip()
        if not old or not new or old == new:
            raise ConfigError(f"{where}: prompt: the mark {mark[0]!r} needs two different values, {{{{old|new}}}}.")
        start, end = self.prompt.rfind("\n", 0, mark.start()) + 1, self.prompt.find("\n", mark.end())
        before = self.prompt[start : mark.start()]
        after = self.prompt[mark.end() : end if end >= 0 else None]
        label = _LABEL.search(before)
        name = (mark["name"] or (label["label"] if label else "")).strip()
        if not name and len(self.marks) > 1:
            raise ConfigError(
                f"{where}: prompt: with several marks each needs a name; write {mark[0]!r} as "
                f"{{{{name: {old}|{new}}}}}."
            )
        own = self.erratum.get(name, "") if isinstance(self.erratum, dict) else self.erratum
        if own and "{value}" not in own:
            raise ConfigError(f"{where}: erratum: {own!r} has no {{value}} in it; write it where the new value goes.")
        said = own or (
            f"Update: the {name} is now {{value}}; this replaces the earlier one."
            if name
            else f"Update: {_MARK.sub(lambda other: other['old'], before).strip()} {{value}}"
            f"{_MARK.sub(lambda other: other['old'], after).rstrip(' .;')}; this replaces the earlier one."
        )
        line = self.prompt[:start].count("\n") + 1
        return MarkedField(name or "field", old, new, said.rstrip("\n") + "\n", line)


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
    """The pair of one prompt file. Segments: `before`, `field`, one `line_N` a line after it, and `cue`.

    Raises:
        ConfigError: the file is missing or not what the schema asks for, or marks more than one field.
    """
    content = read_prompt_file(path)
    if content.messages:
        raise ConfigError(f"{path}: messages: an experiment takes a prompt; `kvprobe audit` takes messages.")
    if len(content.marks) != 1:
        raise ConfigError(
            f"{path}: prompt: an experiment wants the field marked exactly once as {{{{old value|new value}}}}; "
            f"{len(content.marks)} marks were found (`kvprobe audit` takes several)."
        )
    (mark,), (field,) = content.marks, content.fields(str(path))
    expected = content.expected(field.name)
    if expected is None:
        raise ConfigError(f"{path}: answers: an experiment must know which is right; write {{old: ..., new: ...}}.")
    before, after = content.prompt[: mark.start()], content.prompt[mark.end() :]
    # The blank before a value belongs to it: most tokenizers put it into the value's first token.
    space = " " if before.endswith(" ") else ""
    before = before.rstrip(" ") if space else before
    lines = [line for line in re.split(r"(?<=\n)", after if after.endswith("\n") else after + "\n") if line]
    around = [
        ("before", before),
        *((f"line_{number}", line) for number, line in enumerate(lines)),
        ("cue", content.cue),
    ]
    named = [Segment(name, text, control=content.control_tokens) for name, text in around if text]
    place = 1 if before else 0
    base, donor = (
        Context((*named[:place], Segment("field", space + value.strip()), *named[place:]))
        for value in (mark["old"], mark["new"])
    )
    return PromptPair(base, donor, *expected, Provenance(content.name, "own", 0))


def read_prompt_file(path: Path) -> PromptFile:
    """A prompt file.

    Raises:
        ConfigError: it is missing, no UTF-8, no YAML, or not what the schema asks for; names the key or the line.
    """
    found = prompt_file(read_plain(path), path)
    return found if found.name else found.model_copy(update={"name": path.stem})


def prompt_file(content: Any, where: Path | str) -> PromptFile:
    """A prompt file of the plain data in it, which messages call `where`.

    Raises:
        ConfigError: it is not what the schema asks for; names the key.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{where} must hold the keys prompt and answers; `kvprobe audit --example` shows a file.")
    try:
        return PromptFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_finding(error)}") from None


def _word(given: Any) -> str:
    if isinstance(given, bool):
        raise ValueError("YAML reads a bare yes, no, on or off as true or false; put the answer in quotes, 'yes'")
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{given!r} is no word; put each answer in quotes")
    return given.strip()


def _finding(error: ValidationError) -> str:
    """The first finding as a sentence that names the key; an unknown key is told before what it makes missing."""
    findings = error.errors()
    first = next((found for found in findings if found["type"] == "extra_forbidden"), findings[0])
    key = str(first["loc"][0]) if first["loc"] else "prompt"
    if first["type"] == "extra_forbidden":
        known = sorted(PromptFile.model_fields)
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        return f"there is no key {key!r}; " + (
            f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}."
        )
    if first["type"] == "missing":
        return f"the key {key!r} is missing; add it."
    if first["type"] == "string_type":
        return f"{key}: {first['input']!r} is no text; put it in quotes."
    return f"{key}: {first['msg'].removeprefix('Value error, ').rstrip('.')}."
