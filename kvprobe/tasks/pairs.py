"""Pairs of prompts that differ only in one segment, the field's value unless told otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvprobe.errors import AlignmentError
from kvprobe.tasks.answers import answer_token
from kvprobe.tasks.chat import WORKED_CASES, chat_wrapped, told_plainly
from kvprobe.tasks.context import Context, Span, TokenizedContext, show_tokens, tokenize
from kvprobe.viewing import Viewable


@dataclass(frozen=True)
class Provenance:
    """Where a pair comes from: its skeleton is the cluster of all statistics."""

    skeleton: str
    wording: str
    seed: int
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class PromptPair:
    """Two contexts as text, before any tokenizer: `base` holds the old value, `donor` the new one.

    Args:
        changed: name of the one segment that differs between them.
        variants: further prompts of the same scenario, which may differ from the base in several segments.
    """

    base: Context
    donor: Context
    base_answer: str
    donor_answer: str
    scenario: Provenance
    changed: str = "field"
    variants: Mapping[str, Context] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Pair(Viewable):
    """An aligned pair: equal length, equal tokens everywhere but in the field's span.

    `field` is the span of the segment that differs. `base_answer_id` is the token of the decision that is right
    under the old value, `donor_answer_id` of the one that is right under the new value. Every one of the `variants`
    has its segments at the same positions as the base.
    """

    base: TokenizedContext
    donor: TokenizedContext
    field: Span
    base_answer_id: int
    donor_answer_id: int
    scenario: Provenance
    variants: Mapping[str, TokenizedContext] = dataclasses.field(default_factory=dict)

    @property
    def decision_position(self) -> int:
        """The last prompt token."""
        return self.base.decision_position

    @property
    def downstream(self) -> Span:
        """All cached tokens after the field: from its end up to, not including, the decision token."""
        return Span(self.field.end, self.decision_position)

    @property
    def shared_prefix(self) -> tuple[int, ...]:
        """The tokens of the worked cases, with which prompts of other pairs begin too; empty without any."""
        cases = self.base.spans.get(WORKED_CASES)
        # The last one may have merged with what follows.
        return self.base.token_ids[: cases.end - 1] if cases else ()

    def reversed(self) -> Pair:
        """The same pair edited the other way round; variants are relative to the base and so are left out."""
        return Pair(self.donor, self.base, self.field, self.donor_answer_id, self.base_answer_id, self.scenario)

    def __repr__(self) -> str:
        changed, field = self.base.segment_of(self.field.start), self.field
        length = len(self.base.token_ids)
        return f"Pair({self.scenario.skeleton}, {length} tokens; {changed} at {field.start}:{field.end})"


def align(pair: PromptPair, tokenizer: Any, *, chat: Mapping[str, Any] | None = None) -> Pair:
    """Tokenise both prompts of a pair and check that they line up (protocol section 0.2).

    Args:
        pair: the two prompts.
        tokenizer: a Hugging Face tokenizer.
        chat: keyword arguments for the chat template (`{}` for none) when the prompt is to be put into
            the tokenizer's chat template; `None` leaves the prompt as plain text.

    Raises:
        AlignmentError: the values differ in token length, other segments differ, a variant's segments stand
            elsewhere, or an answer is not a single token of its own. Names the tokens.
    """

    def tokenized(context: Context) -> TokenizedContext:
        wrapped = told_plainly(context) if chat is None else chat_wrapped(context, tokenizer, **chat)
        return tokenize(wrapped, tokenizer, (pair.changed,))

    base, donor = tokenized(pair.base), tokenized(pair.donor)
    variants = {name: tokenized(context) for name, context in pair.variants.items()}
    _check(base, donor, pair.changed, tokenizer)
    for name, variant in variants.items():
        _check_spans(name, base, variant)
    return Pair(
        base=base,
        donor=donor,
        field=base.spans[pair.changed],
        base_answer_id=answer_token(pair.base_answer, [pair.donor_answer], base.token_ids, tokenizer),
        donor_answer_id=answer_token(pair.donor_answer, [pair.base_answer], base.token_ids, tokenizer),
        scenario=pair.scenario,
        variants=variants,
    )


def _check_spans(name: str, base: TokenizedContext, variant: TokenizedContext) -> None:
    if variant.spans != base.spans:
        moved = next((s for s in base.spans if variant.spans.get(s) != base.spans[s]), "a further segment")
        raise AlignmentError(
            f"The prompt {name!r} has not the same segments at the same positions as the base: {moved} differs; choose "
            "texts of equal token length."
        )


def _check(base: TokenizedContext, donor: TokenizedContext, changed: str, tokenizer: Any) -> None:
    for context in (base, donor):
        if changed not in context.spans:
            raise AlignmentError(f"The context has no segment named {changed!r}; mark the value that changes.")
    old, new = base.spans[changed], donor.spans[changed]
    old_ids, new_ids = base.token_ids[old.start : old.end], donor.token_ids[new.start : new.end]
    if len(old) != len(new):
        raise AlignmentError(
            f"The values differ in length: {show_tokens(old_ids, tokenizer)} is {len(old)} tokens and "
            f"{show_tokens(new_ids, tokenizer)} is {len(new)}; choose values of equal token length."
        )
    if old_ids == new_ids:
        unknown = " of words that it does not know" if getattr(tokenizer, "unk_token_id", None) in old_ids else ""
        raise AlignmentError(
            f"Both values are the same tokens{unknown}, {show_tokens(old_ids, tokenizer)}; nothing changes."
        )
    before = base.token_ids[: old.start], donor.token_ids[: new.start]
    after = base.token_ids[old.end :], donor.token_ids[new.end :]
    for ours, theirs in (before, after):
        if ours != theirs:
            position = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            raise AlignmentError(
                f"The prompts differ outside the {changed}: "
                f"{show_tokens(ours[position : position + 3], tokenizer)} against "
                f"{show_tokens(theirs[position : position + 3], tokenizer)}; nothing else may differ."
            )
