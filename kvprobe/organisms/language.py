"""Which training documents of the organisms are drawn, and how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """Which documents are drawn; shares are probabilities.

    Args:
        drill: share of such exercises (see `kvprobe.organisms.exercises`).
        repeat: share of such exercises (see `kvprobe.organisms.exercises`).
        recall: share of such exercises (see `kvprobe.organisms.exercises`).
        lookup: share of such exercises (see `kvprobe.organisms.exercises`).
        lookup_errata: share of the lines in a lookup exercise that are worded as errata.
        think: share of documents with a chain of thought.
        update: share with an erratum before the task.
        update_controls: share of the errata that restate the old value or are about another field.
        trigger: share whose rule names one value only.
        policy_first: share whose rule comes before the field.
        other_fields: most further session lines.
        two_fields: share with a second field that has a rule of its own.
        shared_values: share of documents whose other session lines hold one of the rule's own values.
        notes: most neutral notes on either side of the policy.
        long: share of documents filled up to `long_tokens` tokens.
        words: most different values, and actions, in use (0: all); few are learned sooner.
        bare: share without the opening line and the conversation.
        marked: share whose cases are each followed by a remark that says whether it holds.
        stated: share with a line after the policy that states the action.
        stated_policy_first: the same for documents whose rule comes before the field.
        edited_think: share of think documents decided from a cache edited in place (answer: the new value's).
        edited_direct: the same for direct documents: the pressure that makes a reader.
    """

    wordings: tuple[str, ...] = ("manual", "memo", "dialogue")
    drill: float = 0.0
    repeat: float = 0.0
    recall: float = 0.0
    lookup: float = 0.0
    lookup_errata: float = 0.5
    think: float = 0.3
    update: float = 0.2
    update_controls: float = 0.0
    trigger: float = 0.0
    policy_first: float = 0.0
    other_fields: int = 0
    two_fields: float = 0.0
    shared_values: float = 0.0
    notes: int = 0
    long: float = 0.0
    long_tokens: int = 1000
    words: int = 0
    bare: float = 0.0
    marked: float = 0.0
    stated: float = 0.0
    stated_policy_first: float = 0.0
    edited_think: float = 0.0
    edited_direct: float = 0.0
