"""Attention knockout at the decision (protocol 1.4, critique ME3): what is decided when the notes cannot be read?

The decision token is kept from attending to a set of positions after the field, in the same way on four caches:

    stale        the old value and its notes
    field_only   the new value with the old notes
    new          the new value and its notes
    swapped      the old value under a rule whose two actions are exchanged, so that its notes name the other action

A model that falls back on one action whenever it is kept from reading moves on all four alike, and only differences
between caches tell of the notes. `default_shift` is the half sum of the shifts on `stale` and `swapped`, where the
notes call for opposite actions: what masking does whatever they say. `erased` is the share of the gap between `new` and
`stale` that masking removes. `field_difference` is by how much more masking moves `field_only` than `stale`, caches
that differ in the field alone: whether the new field is read once the notes are not.

Sets of P percent of the positions after the field:

    attention_P          those the decision attends to most, on the field-only cache
    effect_P             those whose slots carry most of the field's effect in pairs of other skeletons
    effect_P_in_sample   those that carry most of it in this very pair
    low_effect_P         those whose slots carry least
    random_P             drawn at random
    equal_mass_P         drawn from all but `effect_P` until they hold the attention that `effect_P` holds
    early_layers, mid_layers, late_layers, all_layers   all positions, in some layers
    empty                no position: a floor
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from kvprobe.engine.cache import KVCache
from kvprobe.engine.decision_attention import decision_attention
from kvprobe.engine.forward import prefill
from kvprobe.engine.interventions import AttentionKnockout
from kvprobe.engine.operations import overwrite
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.aligned_positions import ranked
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.depth import layer_thirds
from kvprobe.probes.kit.position_sets import random_sets
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.ranking import (
    SinglePositions,
    held_out_scores,
    in_sample_order,
    single_positions,
)
from kvprobe.probes.legacy import Probe
from kvprobe.probes.mechanism.knockout.effects import knockout_effects
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

_FRACTIONS = (0.1, 0.25, 0.5, 0.75, 1.0)
_BANDS = ("early", "mid", "late", "all")


@dataclass(frozen=True)
class _Keys:
    """A set of positions to hide: what its rows say of it, and in which layers."""

    described: Measurement
    positions: tuple[int, ...]
    layers: tuple[int, ...] | None = None


@PROBES.register("knockout")
class Knockout(Probe):
    """What is decided when the decision token cannot attend to the notes, by key set and cache."""

    name: ClassVar[str] = "knockout"
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        "none.field_only.follows_new": PaperEntry(
            "graded_knockout", "mask_top_0.0_of_downstream_by_attention", "P_safe"
        ),
        **{
            f"attention_{round(100 * f)}.field_only.follows_new": PaperEntry(
                "graded_knockout", f"mask_top_{f}_of_downstream_by_attention", "P_safe"
            )
            for f in _FRACTIONS
        },
        **{
            f"{band}_layers.field_only.follows_new": PaperEntry(
                "layerband_knockout", f"mask_downstream_in_{band}_layers", "P_safe"
            )
            for band in _BANDS
        },
    }

    class Parameters(base.Parameters):
        """Doses and random controls."""

        fractions: tuple[float, ...] = Field(_FRACTIONS, description="of the positions after the field")
        draws: int = Field(4, ge=1, description="random sets for each pair and fraction, and as many of equal mass")
        folds: int = Field(5, ge=2, description="groups of skeletons; each is ranked by the others")
        seed: int = Field(0, ge=0, description="of the random sets and of the folds")
        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each cache and key set."""
        batch_size = self.parameters.batch_size
        singles = []
        for index, pair in enumerate(pairs):
            singles.append(single_positions(subject, pair, prefill_pair(subject, pair), batch_size))
            progress(index + 1, 2 * len(pairs))
        scores = held_out_scores(pairs, singles, self.parameters.folds, self.parameters.seed)
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            # Prefilled anew: the caches of all pairs of a large model would not fit in memory together.
            unedited = prefill_pair(subject, pair)
            caches = four_caches(subject, pair, unedited)
            attention = decision_attention(subject, pair.base.token_ids, caches["field_only"][1]).mean(dim=(0, 1))
            mass = {position: float(attention[position]) for position in pair.downstream.positions}
            sets = self._key_sets(subject, mass, singles[index], scores[index], index)
            for name, (prompt, cache) in caches.items():
                found = self._mask(subject, pair, prompt, cache, sets)
                rows += [{"pair": index, **unedited.common(), "cache": name, **row} for row in found]
            progress(len(pairs) + index + 1, 2 * len(pairs))
        return rows

    def _key_sets(
        self,
        subject: Subject,
        mass: Mapping[int, float],
        single: SinglePositions,
        score: Mapping[int, float],
        index: int,
    ) -> list[_Keys]:
        """All key sets of one pair.

        Args:
            subject: the model.
            mass: attention that the decision pays to each position after the field.
            single: what each of them does alone in this pair.
            score: and what it does in pairs of other skeletons.
            index: of the pair.
        """
        span = list(mass)
        orders = {
            "attention_{}": ranked(span, lambda position: mass[position]),
            "effect_{}": ranked(span, lambda position: score[position]),
            "effect_{}_in_sample": in_sample_order(single),
            "low_effect_{}": ranked(span, lambda position: -abs(score[position])),
        }
        generator = np.random.Generator(np.random.PCG64([self.parameters.seed, index]))
        sets = [_Keys({"intervention": "none"}, ()), _Keys({"intervention": "empty"}, ())]
        for fraction in self.parameters.fractions:
            percent, size = round(100 * fraction), math.ceil(fraction * len(span) - 1e-9)
            chosen: dict[str, Sequence[Sequence[int]]]
            chosen = {name.format(percent): [order[:size]] for name, order in orders.items()}
            if size == len(span):
                chosen = {f"attention_{percent}": [span]}
            else:
                acting, draws = orders["effect_{}"][:size], range(self.parameters.draws)
                chosen[f"random_{percent}"] = random_sets(span, size, self.parameters.draws, generator)
                chosen[f"equal_mass_{percent}"] = [equal_mass(acting, mass, generator) for _ in draws]
            for name, drawn in chosen.items():
                sets += [_Keys({"intervention": name, "fraction": fraction}, tuple(keys)) for keys in drawn]
        bands = {**layer_thirds(subject.layers), "all_layers": tuple(range(subject.layers))}
        sets += [_Keys({"intervention": name}, tuple(span), layers) for name, layers in bands.items()]
        for keys in sets:
            keys.described["attention_mass"] = sum(mass[position] for position in keys.positions)
        return sets

    def _mask(
        self, subject: Subject, pair: Pair, prompt: TokenizedContext, cache: KVCache, sets: Sequence[_Keys]
    ) -> list[Measurement]:
        """The decision on one cache under each key set; the first of them is no knockout at all."""
        # A window may hide all of a set already; where it does, the knockout rightly changes nothing.
        hidden = [
            AttentionKnockout((pair.decision_position,), keys.positions, keys.layers, no_op=True) for keys in sets[1:]
        ]
        unmasked, *masked = patched_margins(
            subject, pair, prompt, cache, [(), *hidden], batch_size=self.parameters.batch_size
        )
        return [
            {
                **keys.described,
                "keys": len(keys.positions),
                "margin": margin,
                "unmasked": unmasked,
                "flipped": (margin > 0) != (unmasked > 0),
            }
            for keys, margin in zip(sets, [unmasked, *masked], strict=True)
        ]

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Shifts, flips and their differences between caches and between key sets."""
        return knockout_effects(rows, statistics)

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Decisions by dose and cache, and what masking erases by key set; one column for each model."""
        from kvprobe.probes.mechanism.knockout.figure import draw_knockout

        return draw_knockout(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """What masking erases, by dose, of all models."""
        from kvprobe.probes.mechanism.knockout.figure import knockout_panel

        knockout_panel(axes, panels)


def four_caches(subject: Subject, pair: Pair, unedited: PrefilledPair) -> dict[str, tuple[TokenizedContext, KVCache]]:
    """Prompt and cache of each condition by name; `swapped` is left out where the prompt has no rule to swap."""
    field_only, _ = overwrite(unedited.stale, pair.field, unedited.oracle)
    caches = {
        "stale": (pair.base, unedited.stale),
        "field_only": (pair.base, field_only),
        "new": (pair.donor, unedited.oracle),
    }
    swapped = with_actions_exchanged(pair)
    if swapped is not None:
        caches["swapped"] = (swapped, prefill(subject, swapped.token_ids).cache)
    return caches


def with_actions_exchanged(pair: Pair) -> TokenizedContext | None:
    """The base prompt's tokens with the two actions exchanged in its rule, segment `policy`.

    None where the prompt has no such segment or it does not name both actions by their answer tokens.
    """
    policy = pair.base.spans.get("policy")
    exchange = {pair.base_answer_id: pair.donor_answer_id, pair.donor_answer_id: pair.base_answer_id}
    ids = list(pair.base.token_ids)
    if policy is None or not set(exchange) <= set(ids[policy.start : policy.end]):
        return None
    for position in policy.positions:
        ids[position] = exchange.get(ids[position], ids[position])
    return replace(pair.base, token_ids=tuple(ids))


def equal_mass(acting: Sequence[int], mass: Mapping[int, float], generator: np.random.Generator) -> list[int]:
    """Positions drawn from all but `acting` until they hold the attention that `acting` holds.

    All others are taken where they hold less altogether; the rows' `attention_mass` says so. At least one is taken
    where there is one.

    Args:
        acting: the positions to match.
        mass: attention mass of every position that may be drawn.
        generator: draws.
    """
    wanted = sum(mass[position] for position in acting)
    others = [position for position in mass if position not in set(acting)]
    drawn: list[int] = []
    held = 0.0
    for position in generator.permutation(others).tolist():
        if drawn and held >= wanted:
            break
        drawn.append(int(position))
        held += mass[position]
    return drawn
