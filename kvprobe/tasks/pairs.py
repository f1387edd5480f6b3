"""Pairs of prompts that differ only in the field's value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvprobe.errors import AlignmentError
from kvprobe.tasks.chat import chat_wrapped
from kvprobe.tasks.context import Context, Span, TokenizedContext, answer_token, show_tokens, tokenize


@dataclass(frozen=True)
class Provenance:
    """Where a pair comes from: its skeleton is the cluster of all statistics."""

    skeleton: str
    wording: str
    seed: int
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptPair:
    """Two contexts as text, before any tokenizer: `base` holds the old value, `donor` the new one."""

    base: Context
    donor: Context
    base_answer: str
    donor_answer: str
    scenario: Provenance


@dataclass(frozen=True)
class Pair:
    """An aligned pair: equal length, equal tokens everywhere but in the field's span.

    `base_answer_id` is the token of the decision that is right under the old value, `donor_answer_id` of
    the one that is right under the new value.
    """

    base: TokenizedContext
    donor: TokenizedContext
    field: Span
    base_answer_id: int
    donor_answer_id: int
    scenario: Provenance

    @property
    def decision_position(self) -> int:
        """The last prompt token."""
        return self.base.decision_position

    @property
    def downstream(self) -> Span:
        """All cached tokens after the field: from its end up to, not including, the decision token."""
        return Span(self.field.end, self.decision_position)

    def reversed(self) -> Pair:
        """The same pair edited the other way round."""
        return Pair(self.donor, self.base, self.field, self.donor_answer_id, self.base_answer_id, self.scenario)


def align(pair: PromptPair, tokenizer: Any, *, chat: Mapping[str, Any] | None = None) -> Pair:
    """Tokenise both prompts of a pair and check that they line up (protocol section 0.2).

    Args:
        pair: the two prompts.
        tokenizer: a Hugging Face tokenizer.
        chat: keyword arguments for the chat template (`{}` for none) when the prompt is to be put into
            the tokenizer's chat template; `None` leaves the prompt as plain text.

    Raises:
        AlignmentError: the values differ in token length, other segments differ, or an answer is not a
            single token of its own. Names the tokens.
    """
    contexts = (pair.base, pair.donor)
    if chat is not None:
        contexts = tuple(chat_wrapped(context, tokenizer, **chat) for context in contexts)  # type: ignore[assignment]
    base, donor = (tokenize(context, tokenizer) for context in contexts)
    _check(base, donor, tokenizer)
    return Pair(
        base=base,
        donor=donor,
        field=base.spans["field"],
        base_answer_id=answer_token(pair.base_answer, [pair.donor_answer], tokenizer),
        donor_answer_id=answer_token(pair.donor_answer, [pair.base_answer], tokenizer),
        scenario=pair.scenario,
    )


def _check(base: TokenizedContext, donor: TokenizedContext, tokenizer: Any) -> None:
    for context in (base, donor):
        if "field" not in context.spans:
            raise AlignmentError("The context has no segment named 'field'; mark the value that changes.")
    old, new = base.spans["field"], donor.spans["field"]
    old_ids, new_ids = base.token_ids[old.start : old.end], donor.token_ids[new.start : new.end]
    if len(old) != len(new):
        raise AlignmentError(
            f"The values differ in length: {show_tokens(old_ids, tokenizer)} is {len(old)} tokens and "
            f"{show_tokens(new_ids, tokenizer)} is {len(new)}; choose values of equal token length."
        )
    if old_ids == new_ids:
        raise AlignmentError(f"Both values are the same tokens, {show_tokens(old_ids, tokenizer)}; nothing changes.")
    before = base.token_ids[: old.start], donor.token_ids[: new.start]
    after = base.token_ids[old.end :], donor.token_ids[new.end :]
    for ours, theirs in (before, after):
        if ours != theirs:
            position = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            raise AlignmentError(
                "The prompts differ outside the field: "
                f"{show_tokens(ours[position : position + 3], tokenizer)} against "
                f"{show_tokens(theirs[position : position + 3], tokenizer)}; only the field may differ."
            )
