"""Which attention heads read the notes, and which write them? Protocol 4.1, critique CI1 to CI3.

Base and donor prompt differ in the field alone, and so does what every head puts out after it. Heads that *read* are
patched at the decision, heads that *write* at the positions after the field, from the donor into the base prompt.

    read_in_sample_k     the k heads that act most alone, ranked on the pair they are scored on, as in the paper
    read_held_out_k      ranked on pairs of other skeletons: the figure to read
    read_direct_k        held out; all other heads frozen as they are, so that later heads pass nothing on (CI3)
    read_notes_k         held out; the heads keep their queries and read the donor's keys and values after the field
    read_noising_k       held out, the other way round: the base's outputs into the donor prompt
    read_random_k, read_matched_k   as many other heads, drawn at random; matched: from the same layers (CI1)
    read_single_others   single heads outside the largest held-out set, the paper's control
    ablate_held_out_k, ablate_others_k, ablate_matched_k   outputs of the top k, of all but them, or of matched ones set
                         to their mean over prompts of other skeletons, in base and donor prompt
    kv_in_sample_k, kv_held_out_k   keys and values of k key-value heads at the positions after the field
    write_held_out_k, write_in_sample_k, write_matched_k, write_random_k   query heads, patched at all positions after
                         the field while the prompt is read on
    write_one_k          held out, at one position: the one that acts most alone in pairs of other skeletons

All heads are scored by attribution patching. Read heads and key-value heads are also patched one at a time, all of
them, and ranked by that; of write heads, each of which costs a prefill, the strongest are, and they are ranked by the
first-order estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.components import ActivationEdit, Components, components
from kvprobe.engine.forward import prefill
from kvprobe.engine.interventions import KVPatch
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.ranking import held_out_orders
from kvprobe.probes.legacy import Probe
from kvprobe.probes.mechanism.heads.effects import head_effects
from kvprobe.probes.mechanism.heads.patches import (
    Head,
    HeadReading,
    all_heads,
    before_decision,
    decision_shifts,
    donor_writes,
    kv_heads_from,
    read_heads,
    replace_heads,
)
from kvprobe.probes.mechanism.heads.sets import (
    held_out_means,
    held_out_ranks,
    matched_heads,
    random_heads,
    ranked_heads,
)
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

_PAPER_SIZES = (1, 2, 3, 5, 8, 12)
_Named = tuple[str, int, int]
"""Intervention without its size, the size, and the number of the draw."""


@dataclass(frozen=True, eq=False)
class _Selected:
    """What other skeletons say about one pair.

    Attributes:
        read, write, write_one, kv: all heads, the strongest first; `write_one` at the single position.
        mean: outputs at the decision `[layer, head, head_dim]` over prompts of both kinds.
        notes: positions after the field, the strongest first.
    """

    read: list[Head]
    write: list[Head]
    write_one: list[Head]
    kv: list[Head]
    mean: Tensor
    notes: list[int]


@dataclass(frozen=True, eq=False)
class _Case:
    """One pair while its sets of heads are measured."""

    made: Components
    pair: Pair
    unedited: PrefilledPair
    reading: HeadReading
    selected: _Selected
    generator: np.random.Generator


@PROBES.register("heads")
class Heads(Probe):
    """Which query heads read the notes at the decision, which write them, and which key-value heads hold them."""

    name: ClassVar[str] = "heads"
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        **{
            f"read_in_sample_{k}.recovery": PaperEntry("read_heads_joint", f"top_{k}_heads", "decision_recovery")
            for k in _PAPER_SIZES
        },
        **{
            f"write_one_{k}.recovery": PaperEntry(
                "write_heads_joint", f"top_{k}_heads_at_1_aggregator", "decision_recovery"
            )
            for k in _PAPER_SIZES
        },
        "read_single_others.recovery": PaperEntry("read_heads_control", "random_single_heads", "decision_recovery"),
    }

    class Parameters(base.Parameters):
        """Sizes of the sets of heads and how they are drawn."""

        sizes: tuple[int, ...] = Field(_PAPER_SIZES, min_length=1, description="numbers of heads")
        control_size: int = Field(5, ge=1, description="number of heads in each random set")
        draws: int = Field(20, ge=1, description="matched random sets of read heads for each pair, new ones for each")
        further_draws: int = Field(4, ge=1, description="the same of ablated and of write heads, and unmatched sets")
        write_heads: int = Field(6, ge=1, description="write heads that are patched exactly, one at a time")
        notes: int = Field(8, ge=1, description="positions whose attention is set against a head's effect")
        folds: int = Field(5, ge=2, description="groups of skeletons; each is ranked by the others")
        seed: int = Field(0, ge=0, description="of the random sets and of the folds")
        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair a row `head`, `kv_head` or `write_head` for each head, `set` or `ablation` for each set of them."""
        made, readings = components(subject), []
        for index, pair in enumerate(pairs):
            readings.append(read_heads(subject, made, pair, prefill_pair(subject, pair)))
            progress(index + 1, 2 * len(pairs))
        rows: list[Measurement] = []
        for index, (pair, selected) in enumerate(zip(pairs, self._select(pairs, readings), strict=True)):
            # Prefilled anew: the caches of all pairs of a large model would not fit in memory together.
            stale, oracle = (prefill(subject, prompt.token_ids).cache for prompt in (pair.base, pair.donor))
            reading = readings[index]
            unedited = PrefilledPair(
                stale, oracle, stale, reading.base_decision, reading.donor_decision, reading.noise_floor
            )
            generator = np.random.Generator(np.random.PCG64([self.parameters.seed, index]))
            case = _Case(made, pair, unedited, reading, selected, generator)
            found = [*_head_rows(case, self.parameters.notes), *self._read(case), *self._ablate(case)]
            found += [*self._kv(case), *self._write(case)]
            rows += [{"pair": index, **case.unedited.common(), **row} for row in found]
            progress(len(pairs) + index + 1, 2 * len(pairs))
        return rows

    def _select(self, pairs: Sequence[Pair], readings: Sequence[HeadReading]) -> list[_Selected]:
        names = [pair.scenario.skeleton for pair in pairs]
        usable = [reading.positions.decided for reading in readings]
        split: dict[str, int] = {"count": self.parameters.folds, "seed": self.parameters.seed}
        orders = held_out_orders(pairs, [reading.positions for reading in readings], **split)
        read = [reading.read for reading in readings]
        kv = [reading.kv for reading in readings]
        write = [reading.write_attribution.sum(0) for reading in readings]
        at_one = [
            reading.write_attribution[order[0] - pair.field.end]
            for pair, reading, order in zip(pairs, readings, orders, strict=True)
        ]
        ranks = [held_out_ranks(names, scores, usable, **split) for scores in (read, write, at_one, kv)]
        means = held_out_means(names, [(one.base + one.donor) / 2 for one in readings], usable, **split)
        return [_Selected(*found) for found in zip(*ranks, means, orders, strict=True)]

    def _read(self, case: _Case) -> list[Measurement]:
        """Joint patches of read heads into the base prompt, and of the donor prompt's into the base's."""
        reading, own = case.reading, self.parameters
        orders = {"in_sample": ranked_heads(reading.read), "held_out": case.selected.read}
        sets: list[tuple[_Named, list[ActivationEdit]]] = []
        for size in _possible(own.sizes, reading.read):
            sets += [
                ((f"read_{how}", size, 0), replace_heads(reading.donor, order[:size])) for how, order in orders.items()
            ]
            best = case.selected.read[:size]
            sets.append((("read_direct", size, 0), _only(reading, best)))
            sets.append((("read_notes", size, 0), replace_heads(reading.note_reads, best)))
        sets += [
            ((f"read_{name}", own.control_size, draw), replace_heads(reading.donor, heads))
            for name, draw, heads in self._drawn(case, case.selected.read, own.draws)
        ]
        stale = before_decision(case.pair, case.unedited.stale)
        rows = _set_rows(case, sets, self._shifts(case, stale, [edits for _, edits in sets]))
        return rows + self._noising(case)

    def _noising(self, case: _Case) -> list[Measurement]:
        """The base's outputs of the top heads in the donor prompt: how much of the donor's decision they take away."""
        sizes = _possible(self.parameters.sizes, case.reading.read)
        rows = [replace_heads(case.reading.base, case.selected.read[:size]) for size in sizes]
        oracle = before_decision(case.pair, case.unedited.oracle)
        shifts = decision_shifts(
            case.made, case.pair, case.pair.donor, oracle, rows, batch_size=self.parameters.batch_size
        )
        named: list[tuple[_Named, list[ActivationEdit]]] = [
            (("read_noising", size, 0), row) for size, row in zip(sizes, rows, strict=True)
        ]
        found = _set_rows(case, named, -shifts)
        for row, shift in zip(found, shifts.tolist(), strict=True):
            row["flipped"] = (case.unedited.donor.margin + shift > 0) != (case.unedited.donor.margin > 0)
        return found

    def _ablate(self, case: _Case) -> list[Measurement]:
        """Outputs of some heads at their mean over prompts of other skeletons, in both prompts of the pair."""
        ranked, own = case.selected.read, self.parameters
        sets: list[tuple[_Named, list[Head]]] = []
        for size in _possible(own.sizes, case.reading.read):
            sets.append((("ablate_held_out", size, 0), ranked[:size]))
            sets.append((("ablate_others", size, 0), ranked[size:]))
        matched = [matched_heads(ranked, own.control_size, case.generator) for _ in range(own.further_draws)]
        sets += [(("ablate_matched", own.control_size, draw), heads) for draw, heads in enumerate(matched)]
        edits = [replace_heads(case.selected.mean, heads) for _, heads in sets]
        pair, unedited = case.pair, case.unedited
        sides = (pair.base, unedited.stale, unedited.base), (pair.donor, unedited.oracle, unedited.donor)
        base, donor = (
            decision.margin
            + decision_shifts(case.made, pair, prompt, before_decision(pair, cache), edits, batch_size=own.batch_size)
            for prompt, cache, decision in sides
        )
        return [
            {
                "measurement": "ablation",
                "intervention": f"{name}_{size}",
                "size": size,
                "draw": draw,
                "margin_base_ablated": float(base[place]),
                "margin_donor_ablated": float(donor[place]),
            }
            for place, ((name, size, draw), _) in enumerate(sets)
        ]

    def _kv(self, case: _Case) -> list[Measurement]:
        """Joint patches of key-value heads at the positions after the field."""
        orders = {"in_sample": ranked_heads(case.reading.kv), "held_out": case.selected.kv}
        sets: list[tuple[_Named, list[Head]]] = [
            ((f"kv_{how}", size, 0), order[:size])
            for size in _possible(self.parameters.sizes, case.reading.kv)
            for how, order in orders.items()
        ]
        patches = [[kv_heads_from(case.pair, case.unedited, heads)] for _, heads in sets]
        stale = before_decision(case.pair, case.unedited.stale)
        return _set_rows(case, sets, self._shifts(case, stale, [()] * len(sets), patches))

    def _write(self, case: _Case) -> list[Measurement]:
        """Patches of write heads while the prompt is read on: all positions after the field, or one of them."""
        own, pair, selected = self.parameters, case.pair, case.selected
        attribution = case.reading.write_attribution.sum(0)
        donor = donor_writes(case.made, pair, case.unedited, attribution.shape[0])
        notes = tuple(pair.downstream.positions)
        singles = selected.write[: own.write_heads]
        sets: list[tuple[_Named, list[Head]]] = [
            (("write_held_out", size, 0), selected.write[:size]) for size in _possible(own.sizes, attribution)
        ]
        # By the pair's own first-order estimate, at one size: these are whole prefills.
        sets.append((("write_in_sample", own.control_size, 0), ranked_heads(attribution)[: own.control_size]))
        sets += [
            ((f"write_{name}", own.control_size, draw), heads)
            for name, draw, heads in self._drawn(case, selected.write, own.further_draws)
        ]
        edits = [replace_heads(donor, heads, notes) for heads in [*([head] for head in singles), *(h for _, h in sets)]]
        shifts = self._shifts(case, case.unedited.stale.take(slice(0, notes[0])), edits)
        alone, joint = shifts[: len(singles)], shifts[len(singles) :]
        rows = [
            {
                **_head_row("write_head", head, case, shift),
                "attribution": float(attribution[head]),
                "rank": selected.write.index(head),
            }
            for head, shift in zip(singles, alone.tolist(), strict=True)
        ]
        return rows + _set_rows(case, sets, joint) + self._write_one(case, donor)

    def _write_one(self, case: _Case, donor: Mapping[int, Tensor]) -> list[Measurement]:
        """Write heads at one position, found on other skeletons."""
        place = case.selected.notes[0]
        at = {layer: outputs[place - case.pair.field.end] for layer, outputs in donor.items()}
        sets: list[tuple[_Named, list[Head]]] = [
            (("write_one", size, 0), case.selected.write_one[:size])
            for size in _possible(self.parameters.sizes, case.reading.read)
        ]
        edits = [replace_heads(at, heads, (place,)) for _, heads in sets]
        return _set_rows(case, sets, self._shifts(case, case.unedited.stale.take(slice(0, place)), edits))

    def _shifts(
        self,
        case: _Case,
        cache: KVCache,
        rows: Sequence[Sequence[ActivationEdit]],
        patches: Sequence[Sequence[KVPatch]] | None = None,
    ) -> Tensor:
        return decision_shifts(
            case.made, case.pair, case.pair.base, cache, rows, patches=patches, batch_size=self.parameters.batch_size
        )

    def _drawn(self, case: _Case, ranked: Sequence[Head], matched: int) -> list[tuple[str, int, list[Head]]]:
        """Matched and random sets as (name, draw, heads)."""
        own = self.parameters
        kinds = ("matched", matched, matched_heads), ("random", own.further_draws, random_heads)
        return [
            (name, draw, choose(ranked, own.control_size, case.generator))
            for name, draws, choose in kinds
            for draw in range(draws)
        ]

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Recovery of every set, what ablation leaves, rank correlations of single heads."""
        return head_effects(rows, statistics)

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Joint patches of read and write heads, ablations, single heads; one column for each model."""
        from kvprobe.probes.mechanism.heads.figure import draw_heads

        return draw_heads(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Recovery by the number of read heads, all models."""
        from kvprobe.probes.mechanism.heads.figure import heads_panel

        heads_panel(axes, panels)


def _possible(sizes: Sequence[int], table: Tensor) -> list[int]:
    """The sizes that leave at least one head of a table `[layer, head, ...]` out."""
    return [size for size in sizes if size < len(all_heads(table))]


def _only(reading: HeadReading, heads: list[Head]) -> list[ActivationEdit]:
    """The donor's outputs of `heads`, and those of all others frozen as they are in the base prompt."""
    frozen = reading.base.clone()
    for head in heads:
        frozen[head] = reading.donor[head]
    return replace_heads(frozen, all_heads(frozen))


def _head_rows(case: _Case, notes: int) -> list[Measurement]:
    """A row for each query head and each key-value head alone."""
    reading, selected = case.reading, case.selected
    attention = reading.attention[..., selected.notes[:notes]].sum(-1)
    read = {head: place for place, head in enumerate(selected.read)}
    kv = {head: place for place, head in enumerate(selected.kv)}
    rows = [
        {
            **_head_row("head", head, case, float(reading.read[head])),
            "margin_notes": case.unedited.base.margin + float(reading.read_notes[head]),
            "attribution": float(reading.attribution[head]),
            "attention": float(attention[head]),
            "rank": read[head],
        }
        for head in all_heads(reading.read)
    ]
    return rows + [
        {**_head_row("kv_head", head, case, float(reading.kv[head])), "rank": kv[head]}
        for head in all_heads(reading.kv)
    ]


def _head_row(kind: str, head: Head, case: _Case, shift: float) -> Measurement:
    return {"measurement": kind, "layer": head[0], "head": head[1], "margin": case.unedited.base.margin + shift}


def _set_rows(case: _Case, sets: Sequence[tuple[_Named, object]], shifts: Tensor) -> list[Measurement]:
    base = case.unedited.base.margin
    return [
        {
            "measurement": "set",
            "intervention": f"{name}_{size}",
            "size": size,
            "draw": draw,
            "margin": base + shift,
            "flipped": (base + shift > 0) != (base > 0),
        }
        for ((name, size, draw), _), shift in zip(sets, shifts.tolist(), strict=True)
    ]
