"""Which few tokens to recompute: criteria compared at a fixed K (protocol 5.2, critique ED2, ED3, G7).

The field and the K tokens that a criterion ranks first are really recomputed on the stale cache:

    decision_attention, first_layer_deviation, suffix   as in `kvprobe.edit.selection`; they see the stale prompt alone
    random             as many tokens drawn at random, many times
    profile            ranked by what each position's transplant does alone in pairs of *other* skeletons, by its slot
    profile_same_field ranked so in other pairs of the *same* skeleton, with other values or wordings: a profile made on
                       one new value and used again for another
    profile_kv_change  ranked by how much keys and values change in pairs of other skeletons, by slot
    kv_change          upper bound: ranked by that change against the full prefill of the new prompt itself
    in_sample          upper bound: ranked by the transplants on the very pair it is scored on

Each set but the random ones is also copied from the full prefill (`X_K.copied_recovery`), as the paper's study does,
so that what copying overstates can be read off: `X_copy_gap_K.recovery`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from kvprobe.edit.selection import candidates
from kvprobe.engine.cache import KVCache
from kvprobe.engine.first_layers import deviation
from kvprobe.engine.interventions import KVPatch
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.aligned_positions import ranked, slot_scores, slots
from kvprobe.probes.kit.edit_arms import (
    arm_effects,
    copied,
    oracle_cache,
    read_patches,
    recomputed,
    recovery_differences,
    selection_order,
)
from kvprobe.probes.kit.edit_cases import EditCase, baseline_columns, baseline_effects, edit_case, reading_row
from kvprobe.probes.kit.position_sets import random_sets
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.ranking import SinglePositions, held_out_orders, in_sample_order, single_positions
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, maximum
from kvprobe.stats.labels import Label
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

BLIND = ("decision_attention", "first_layer_deviation", "suffix")
PROFILES = ("profile", "profile_same_field", "profile_kv_change")
UPPER_BOUNDS = ("kv_change", "in_sample")
RANDOM = "random"
_COPIED = "_copied"
_CONTRASTS = (
    ("profile", "decision_attention"),
    ("profile", "first_layer_deviation"),
    ("profile", "suffix"),
    ("profile_same_field", "profile"),
    ("profile_kv_change", "profile"),
    ("profile_kv_change", "decision_attention"),
    ("decision_attention", "first_layer_deviation"),
    ("decision_attention", "kv_change"),
    ("in_sample", "profile"),
)
_PAPER_NAMES = {
    "decision_attention": "decision_attention",
    "suffix": "suffix",
    "kv_change": "kv_change",
    "in_sample": "decision_oracle",
}


@PROBES.register("selection_criterion")
class SelectionCriterion(Probe):
    """Recovery from a few recomputed tokens by how they were chosen."""

    name: ClassVar[str] = "selection_criterion"
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{ours}_{k}.copied_recovery": PaperEntry("selection_criterion", f"{theirs}@{k}", "decision_recovery")
        for ours, theirs in _PAPER_NAMES.items()
        for k in (8, 16, 32, 64)
    }

    class Parameters(base.Parameters):
        """Sizes, random sets, folds of the profile."""

        sizes: tuple[int, ...] = Field((4, 8), min_length=1, description="recomputed tokens after the field")
        draws: int = Field(8, ge=1, description="random sets for each pair and size")
        folds: int = Field(5, ge=2, description="groups of skeletons; each is ranked by the others")
        seed: int = Field(0, ge=0, description="of the random sets and of the folds")
        batch_size: int | None = Field(default=None, ge=1, description="decisions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each criterion and size, recomputed and copied, and for each random set.

        Raises:
            ConfigError: a pair does not say its entity, field and new value.
            SampleError: there are fewer skeletons than folds.
        """
        learned = self._learned(subject, pairs, progress)
        baselines, rows = baseline_columns(pairs, subject.tokenizer), []
        for index, pair in enumerate(pairs):
            # Prefilled anew: the caches of all pairs of a large model would not fit in memory together.
            case = edit_case(subject, pair)
            shared = {"pair": index, **case.common(), **baselines[index]}
            rows += [{**shared, **row} for row in self._compare(subject, case, learned[index], index)]
            progress(len(pairs) + index + 1, 2 * len(pairs))
        return rows

    def _learned(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[dict[str, list[int]]]:
        """For each pair the orders that come from the readings of all: profiles and upper bounds."""
        own = self.parameters
        singles: list[SinglePositions] = []
        changes: list[SinglePositions] = []
        for index, pair in enumerate(pairs):
            unedited = prefill_pair(subject, pair)
            singles.append(single_positions(subject, pair, unedited, own.batch_size))
            change = kv_change(unedited.stale, unedited.oracle, pair.downstream.positions)
            changes.append(replace(singles[-1], shifts=change, gap=sum(change.values())))
            progress(index + 1, 2 * len(pairs))
        by_effect, by_change = (held_out_orders(pairs, each, own.folds, own.seed) for each in (singles, changes))
        again = same_field_orders(pairs, singles)
        orders = [
            {
                "profile": by_effect[index],
                "profile_same_field": again[index],
                "profile_kv_change": by_change[index],
                "kv_change": in_sample_order(changes[index]),
                "in_sample": in_sample_order(singles[index]),
            }
            for index in range(len(pairs))
        ]
        return [{name: order for name, order in each.items() if order is not None} for each in orders]

    def _compare(
        self, subject: Subject, case: EditCase, learned: Mapping[str, list[int]], index: int
    ) -> list[Measurement]:
        """All sets of one pair, decided together."""
        oracle = oracle_cache(subject, case)
        orders = {**{name: selection_order(subject, case, name) for name in BLIND}, **learned}
        described: list[Measurement] = []
        patches: list[KVPatch] = []
        for name, order in orders.items():
            for size in self.parameters.sizes:
                row = {"criterion": name, "size": size}
                described += [{**row, "arm": f"{name}_{size}"}, {**row, "arm": f"{name}_{size}{_COPIED}"}]
                patches += [recomputed(subject, case, order, size), copied(case, oracle, order, size)]
        for size, draw, chosen in self._drawn(case, index):
            described.append({"criterion": RANDOM, "size": size, "arm": f"{RANDOM}_{size}", "draw": draw})
            patches.append(recomputed(subject, case, chosen, size))
        readings = read_patches(subject, case, patches, self.parameters.batch_size)
        return [{**row, **reading_row(reading)} for row, reading in zip(described, readings, strict=True)]

    def _drawn(self, case: EditCase, index: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Size, number and positions of each random set."""
        own, pool = self.parameters, candidates(case.stale, case.edit)
        generator = np.random.Generator(np.random.PCG64([own.seed, index]))
        return [
            (size, draw, chosen)
            for size in own.sizes
            for draw, chosen in enumerate(random_sets(pool, min(size, len(pool)), own.draws, generator))
        ]

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Correctness and recovery by criterion and size, paired differences, what copying overstates, baselines."""
        floor = float(rows["noise_floor"].max())
        effects: list[Effect] = []
        for arm, part in rows.groupby("arm", sort=False):
            name = str(arm)
            if name.endswith(_COPIED):
                effects += _copied_effects(name.removesuffix(_COPIED), part, statistics, floor)
            else:
                effects += arm_effects(name, part, statistics, floor)
        effects += recovery_differences(rows, self._contrasts(), statistics)
        effects += baseline_effects(rows, statistics)
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def _contrasts(self) -> dict[str, tuple[str, str]]:
        named = [*BLIND, *PROFILES, *UPPER_BOUNDS]
        contrasts: dict[str, tuple[str, str]] = {}
        for k in self.parameters.sizes:
            compared = [*((name, RANDOM) for name in named), *_CONTRASTS]
            contrasts |= {f"{a}_over_{b}_{k}.recovery": (f"{a}_{k}", f"{b}_{k}") for a, b in compared}
            contrasts |= {f"{a}_copy_gap_{k}.recovery": (f"{a}_{k}{_COPIED}", f"{a}_{k}") for a in named}
        return contrasts

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Recovery by criterion, one row for each size; one column for each model."""
        from kvprobe.probes.editing.selection_criterion.figure import draw_selection_criterion

        return draw_selection_criterion(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Recovery by criterion at the largest size, all models."""
        from kvprobe.probes.editing.selection_criterion.figure import selection_criterion_panel

        selection_criterion_panel(axes, panels)


def kv_change(stale: KVCache, oracle: KVCache, positions: Sequence[int]) -> dict[int, float]:
    """By position, how far keys and values of two caches lie apart: norms summed over layers."""
    layers = zip(oracle.layers, stale.layers, strict=True)
    change = torch.stack([deviation(new, old) for new, old in layers]).sum(0)
    return {position: float(change[position]) for position in positions}


def same_field_orders(pairs: Sequence[Pair], singles: Sequence[SinglePositions]) -> list[list[int] | None]:
    """For each pair its positions as other pairs of its skeleton rank their slots; `None` where there is no other.

    Args:
        pairs: of all skeletons.
        singles: of the same pairs.
    """
    places = [slots(pair) for pair in pairs]
    orders: list[list[int] | None] = []
    for index, pair in enumerate(pairs):
        others = [
            i
            for i, other in enumerate(pairs)
            if i != index and other.scenario.skeleton == pair.scenario.skeleton and singles[i].decided
        ]
        if not others:
            orders.append(None)
            continue
        score = slot_scores((places[i], singles[i].shifts, singles[i].gap) for i in others)
        scores = {position: score(places[index][position]) for position in singles[index].shifts}
        orders.append(ranked(list(scores), scores.__getitem__))
    return orders


def _copied_effects(name: str, rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """`X_K.copied_correct_rate` and `X_K.copied_recovery`: the arm's effects under names that say so."""
    found = arm_effects(name, rows, statistics, floor)
    return [replace(effect, label=Label.of(effect.name.replace(f"{name}.", f"{name}.copied_"))) for effect in found]
