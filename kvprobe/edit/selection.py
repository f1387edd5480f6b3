"""Which of the tokens after the field to run anew: criteria that need no answer (protocol 5.2, critique ED3)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvprobe.edit.base import CachedPrompt, FieldEdit
from kvprobe.engine.decision_attention import decision_attention
from kvprobe.engine.first_layers import DEVIATION_LAYER, deviation, entries_at_layer
from kvprobe.engine.operations import reposition
from kvprobe.engine.receipt import Receipt
from kvprobe.models.subject import Subject
from kvprobe.registry import KINDS, Registry

Selection = Callable[[Subject, CachedPrompt, FieldEdit], tuple[list[int], Receipt]]
"""Positions after the field in the *stale* prompt, the most wanted first, and what choosing them cost."""

SELECTIONS: Registry[Selection] = Registry(KINDS["SELECTIONS"])


def candidates(stale: CachedPrompt, edit: FieldEdit) -> range:
    """Cached positions after the field."""
    return range(stale.span(edit.field).end, len(stale.cache))


@SELECTIONS.register("suffix")
def suffix(subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> tuple[list[int], Receipt]:
    """The last tokens before the decision."""
    return list(reversed(candidates(stale, edit))), Receipt()


@SELECTIONS.register("random")
def at_random(subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> tuple[list[int], Receipt]:
    """A random order, drawn from the prompt itself."""
    order = list(candidates(stale, edit))
    random.Random(repr(stale.token_ids)).shuffle(order)
    return order, Receipt()


@SELECTIONS.register("decision_attention")
def by_decision_attention(subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> tuple[list[int], Receipt]:
    """The tokens the decision looks at most on the stale cache, mean over layers and heads.

    The attention sink at the start of the prompt comes before the field and so is no candidate. The pass that reads
    the attention is the stale decision itself, which a server has run already; it is not counted.
    """
    weights = decision_attention(subject, stale.token_ids, stale.cache).mean((0, 1))
    return sorted(candidates(stale, edit), key=lambda position: -float(weights[position])), Receipt()


@SELECTIONS.register("first_layer_deviation")
def by_first_layer_deviation(subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> tuple[list[int], Receipt]:
    """The tokens whose entries in the first attending layer change most, as CacheBlend chooses them.

    Everything from the field on runs through the first two layers; the deviation is that of layer 1.
    """
    span = stale.span(edit.field)
    prefix = stale.cache.take(slice(0, span.start))
    rest = stale.token_ids[span.end : len(stale.cache)]
    fresh, receipt = entries_at_layer(subject, (*edit.new_ids, *rest), prefix, DEVIATION_LAYER)
    kept, turning = reposition(subject, stale.cache.take(slice(span.end, None)), len(edit.new_ids) - len(span))
    change = deviation(fresh.take(slice(len(edit.new_ids), None)), kept.layers[DEVIATION_LAYER])
    order = sorted(range(len(rest)), key=lambda place: -float(change[place]))
    return [span.end + place for place in order], receipt + turning


def selected(order: Sequence[int], count: int) -> tuple[int, ...]:
    """The first `count` of an order, sorted."""
    return tuple(sorted(order[:count]))
