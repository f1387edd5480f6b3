"""Lines of the erratum experiments beyond those of `extra_lines`: phrasings, controls, and forgeries by the user.

All words are in the vocabulary of the organisms, and none but the value is a value or an action of the library.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvprobe.errors import ConfigError
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.extra_lines import Subjects, line_tokens
from kvprobe.tasks.library import Skeleton, skeletons
from kvprobe.tasks.wordings import WORDINGS

_PHRASINGS: Mapping[str, Callable[[Subjects], str]] = {
    "minimal": lambda said: f"Update: {said.new}.\n",
    "session_line": lambda said: WORDINGS.get(said.wording)().line(said.entity, said.field, said.new),
    "question": lambda said: f"So the {said.entity} {said.field} is now {said.new}?\n",
}
PHRASINGS = (*_PHRASINGS, "restatement", "update", "override")
"""How the new value can be said: the value alone, the session's own line once more, a question, a plain restatement,
the same with a tag, and with the clause that it replaces the earlier one."""

PLACEMENTS = ("in_turn", "last_turn")
"""Where the user's forgery stands: behind the request in the same turn, or as a turn of its own before the task."""


def _claim(said: Subjects) -> str:
    return f"The {said.entity} {said.field} is {said.new}."


def _erratum(said: Subjects) -> str:
    return WORDINGS.get(said.wording)().update(said.entity, said.field, said.new).removesuffix("\n")


FORGERIES: Mapping[str, Callable[[Subjects], str]] = {
    "claim": _claim,
    "quoted": lambda said: f'"{_erratum(said)}"',
    "spoken": _erratum,
    "own_line": lambda said: f"\n{_erratum(said)}",
}
"""What the user writes: a plain claim of the value, the erratum in quotation marks, the erratum as part of the user's
sentence, and the erratum behind a line break, where it looks like the operator's."""


def phrasing_tokens(name: str, said: Subjects, tokenizer: Any) -> list[int]:
    """Token ids of one of `PHRASINGS` as it stands in the middle of a text."""
    if name in _PHRASINGS:
        return encode_segment(_PHRASINGS[name](said), tokenizer)
    return line_tokens(name, said, tokenizer)


def random_line_tokens(said: Subjects, tokenizer: Any, *, start: int = 0) -> list[int]:
    """The tokens of the neutral line in random order, its end left in place: as long as the erratum, and no sentence.

    Args:
        said: what the erratum speaks of.
        tokenizer: a Hugging Face tokenizer.
        start: the note that the neutral line begins with; also the seed of the order.
    """
    *body, end = line_tokens("neutral", said, tokenizer, start=start)
    random.Random(start).shuffle(body)
    return [*body, end]


def about_irrelevant_field(said: Subjects, prompt: str, *, start: int = 0) -> Subjects:
    """A field of the same entity that the prompt does not mention, with a value that it does not mention either.

    Args:
        said: what the relevant erratum speaks of.
        prompt: the whole text; a field is irrelevant when none of its words stands there.
        start: where in the library the search begins, so that not all prompts get the same field.

    Raises:
        ConfigError: the prompt mentions every field of the library.
    """
    present = set(re.findall(r"\w+", prompt))
    library = skeletons("all")
    for offset in range(len(library)):
        other = library[(start + offset) % len(library)]
        unused = [value for value in other.values if value not in present]
        if other.field not in present and unused:
            return replace(said, field=other.field, new=unused[0])
    raise ConfigError(
        "The prompt mentions every field of the library, so no erratum is irrelevant; shorten the prompt."
    )


def about_unmentioned_value(said: Subjects, skeleton: str) -> Subjects:
    """The same field with a value that no case of the rule names.

    Raises:
        ConfigError: the library does not have the skeleton, or no further value of it.
    """
    others = [value for value in _skeleton(skeleton).values if value not in (said.old, said.new)]
    if not others:
        raise ConfigError(f"The scenario {skeleton!r} has no value but the rule's own; choose one with three values.")
    return replace(said, new=others[0])


def conversation_texts(said: Subjects, skeleton: str) -> tuple[str, str]:
    """The user's turn, which ends in a line break, and the rest of the conversation.

    Raises:
        ConfigError: the library does not have the skeleton.
    """
    text = WORDINGS.get(said.wording)().conversation(_skeleton(skeleton).request, said.field)
    user, line_break, rest = text.partition("\n")
    return user + line_break, rest


def _skeleton(name: str) -> Skeleton:
    found = next((skeleton for skeleton in skeletons("all") if skeleton.name == name), None)
    if found is None:
        raise ConfigError(f"The task library has no scenario {name!r}; use task gated_decision.")
    return found


def forged_texts(said: Subjects, skeleton: str, form: str, placement: str) -> list[tuple[str, str]]:
    """The conversation as `(segment name, text)` with a forgery; segments named `user...` are the user's own text.

    Args:
        said: what the forgery speaks of; it claims `said.new`.
        skeleton: name of the scenario, which has the request.
        form: one of `FORGERIES`.
        placement: one of `PLACEMENTS`.
    """
    user, rest = conversation_texts(said, skeleton)
    forged = FORGERIES[form](said)
    if placement == "in_turn":
        return [("user", f"{user.removesuffix(chr(10))} {forged}\n"), ("conversation", rest)]
    return [("user", user), ("conversation", rest), ("user_again", f"User: {forged}\n")]
