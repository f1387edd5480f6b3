"""Task `tool_calls`: a library of tool definitions, and requests that one of them serves (protocol 6.6)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from kvprobe.tasks.base import TASKS, Task
from kvprobe.tasks.calls import Call
from kvprobe.tasks.context import Context
from kvprobe.tasks.pairs import PromptPair, Provenance

TOOLS = "tools"
"""The segment that holds the definitions."""
LibraryName = Literal["home", "travel"]
_SYSTEM = "You serve requests by calling one of these tools.\n"
_FORMAT = (
    "Serve the request with one call of one tool: a JSON object on one line, with the tool's name and all of its "
    'arguments, such as {"name": "some_tool", "arguments": {"first": "some text", "second": 5}}. '
    "Write nothing else.\n"
)


@dataclass(frozen=True)
class Tool:
    """A tool of the library.

    Args:
        name: of the tool.
        description: one sentence.
        parameters: JSON schema of each argument.
        changed: the argument in which the two prompts of a pair differ.
        requests: ways to ask for it; each has all arguments in braces.
        values: of each argument, with what is said for it.
    """

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    changed: str
    requests: tuple[str, ...]
    values: Mapping[str, tuple[tuple[Any, str], ...]]

    @property
    def definition(self) -> str:
        """Its definition as one line of JSON."""
        return definition(self.name, self.description, self.parameters)


def definition(name: str, description: str, properties: Mapping[str, Any]) -> str:
    """A tool's definition as one line of JSON; all arguments are required."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return json.dumps({"name": name, "description": description, "parameters": schema})


@lru_cache
def tools(library: LibraryName) -> tuple[Tool, ...]:
    """The tools of a library that requests are about."""
    return tuple(
        Tool(
            entry["name"],
            entry["description"],
            entry["parameters"],
            entry["changed"],
            tuple(entry["requests"]),
            {name: tuple(_said(value) for value in values) for name, values in entry["values"].items()},
        )
        for entry in _data()["libraries"][library]
    )


def dummies() -> tuple[str, ...]:
    """Definitions of the tools that no request is about."""
    return tuple(
        definition(name, description, {key: {"type": kind} for key, kind in arguments.items()})
        for name, description, arguments in _data()["dummies"]
    )


@TASKS.register("tool_calls")
class ToolCalls(Task):
    """The prompts of a pair ask for the same tool and differ in one word, the value of one of its arguments.

    Segments are `system`, `tools`, `format`, `request`, `field`, `request_rest` and `cue`. The definitions are the same
    for all requests of a library, of which there are two with the same dummy tools, so that the other one is a chunk in
    which everything is there but the tool. No request comes twice. Attributes say `library`, `scenario`, and the right
    calls as JSON, `base_call` and `donor_call`. The skeleton is the tool.
    """

    size: Annotated[int, Field(ge=1, le=120)] = Field(54, description="pairs of requests")
    seed: int = 0
    dummies: Annotated[int, Field(ge=0, le=24)] = Field(24, description="tools that are never asked for")
    libraries: tuple[LibraryName, ...] = Field(("home", "travel"), min_length=1, description="they take turns")

    def prompt_pairs(self) -> Iterator[PromptPair]:
        """Pairs whose `base` asks for one call and whose `donor` for one with another value."""
        chunks = {library: self._chunk(library) for library in self.libraries}
        asked: set[str] = set()
        for number in range(self.size):
            turn, which = divmod(number, len(self.libraries))
            library = self.libraries[which]
            own = list(tools(library))
            random.Random(f"order {self.seed} {library}").shuffle(own)
            rng = random.Random(f"tool_calls {self.seed} {number}")
            tool = own[turn % len(own)]
            request = _new_request(rng, tool, asked)
            asked |= set(request.texts)
            yield self._pair(tool, request, library, chunks[library], number)

    def _chunk(self, library: LibraryName) -> str:
        lines = [tool.definition for tool in tools(library)] + list(dummies()[: self.dummies])
        random.Random(f"library {self.seed} {library}").shuffle(lines)
        return "".join(f"{line}\n" for line in lines)

    def _pair(self, tool: Tool, request: _Request, library: str, chunk: str, number: int) -> PromptPair:
        calls = [Call.of(tool.name, arguments) for arguments in request.arguments]
        base, donor = (
            Context.of(
                ("system", _SYSTEM),
                (TOOLS, chunk),
                ("format", _FORMAT),
                ("request", f"Request:{before}"),
                ("field", field),
                ("request_rest", f"{after}\n"),
                ("cue", "Call:"),
            )
            for before, field, after in request.pieces
        )
        old, new = (str(arguments[tool.changed]) for arguments in request.arguments)
        attributes = {
            "library": library,
            "scenario": str(number),
            "old": old,
            "new": new,
            "base_call": calls[0].text,
            "donor_call": calls[1].text,
        }
        wording = f"request {request.wording}"
        return PromptPair(base, donor, old, new, Provenance(tool.name, wording, self.seed, attributes))


@dataclass(frozen=True)
class _Request:
    """A request twice, with two values of one argument.

    `pieces` are what stands before the changed value, the value with the blank before it, and what stands behind.
    """

    wording: int
    pieces: tuple[tuple[str, str, str], ...]
    arguments: tuple[dict[str, Any], ...]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple("".join(piece) for piece in self.pieces)


def _new_request(rng: random.Random, tool: Tool, asked: set[str]) -> _Request:
    """A request of which neither text is among those `asked` before."""
    while True:
        request = _request(rng, tool)
        if asked.isdisjoint(request.texts):
            return request


def _request(rng: random.Random, tool: Tool) -> _Request:
    wording = rng.randrange(len(tool.requests))
    before, after = f" {tool.requests[wording]}".split(f" {{{tool.changed}}}")
    given = {name: rng.choice(values) for name, values in tool.values.items() if name != tool.changed}
    words = {name: said for name, (_, said) in given.items()}
    rest = {name: value for name, (value, _) in given.items()}
    chosen = rng.sample(tool.values[tool.changed], 2)
    return _Request(
        wording,
        tuple((before.format(**words), f" {said}", after.format(**words)) for _, said in chosen),
        tuple({**rest, tool.changed: value} for value, _ in chosen),
    )


def _said(value: Any) -> tuple[Any, str]:
    if isinstance(value, dict):
        return value["value"], str(value["say"])
    return value, str(value)


def right_calls(attributes: Mapping[str, str]) -> Sequence[Call]:
    """The right calls of a pair's base and donor, from its attributes.

    Raises:
        KeyError: it has none.
    """
    loaded = (json.loads(attributes[key]) for key in ("base_call", "donor_call"))
    return [Call.of(call["name"], call["arguments"]) for call in loaded]


@lru_cache
def _data() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((files("kvprobe.tasks") / "data/tools.yaml").read_text())
    return content
