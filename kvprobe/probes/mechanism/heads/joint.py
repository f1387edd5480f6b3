"""Heads of one pair patched together, ablated together and written together, and the rows this gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.components import ActivationEdit, Components
from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import Measurement
from kvprobe.probes.kit.prefilled_pair import PrefilledPair
from kvprobe.probes.mechanism.heads.patches import (
    Head,
    HeadReading,
    all_heads,
    before_decision,
    decision_shifts,
    donor_writes,
    kv_heads_from,
    replace_heads,
)
from kvprobe.probes.mechanism.heads.sets import Selected, matched_heads, random_heads, ranked_heads
from kvprobe.tasks.pairs import Pair

Named = tuple[str, int, int]
"""Intervention without its size, the size, and the number of the draw."""
HeadSet = tuple[Named, list[Head]]


@dataclass(frozen=True, eq=False)
class Case:
    """One pair while its sets of heads are measured.

    Attributes:
        made: components of the model.
        pair: of prompts.
        prefilled: their caches and decisions.
        reading: what each head of the pair does alone.
        selected: heads ranked on other skeletons.
        sizes: numbers of heads in the sets.
        generator: of random sets.
        batch_size: interventions in one forward pass.
    """

    made: Components
    pair: Pair
    prefilled: PrefilledPair
    reading: HeadReading
    selected: Selected
    sizes: Sequence[int]
    generator: np.random.Generator
    batch_size: int | None

    def possible(self, table: Tensor) -> list[int]:
        """The sizes that leave at least one head of a table `[layer, head, ...]` out."""
        return [size for size in self.sizes if size < len(all_heads(table))]

    def drawn(self, kind: str, ranked: Sequence[Head], size: int, *, matched: int, random: int) -> list[HeadSet]:
        """Matched and random sets, so many of each."""
        kinds = ("matched", matched, matched_heads), ("random", random, random_heads)
        return [
            ((f"{kind}_{name}", size, draw), choose(ranked, size, self.generator))
            for name, draws, choose in kinds
            for draw in range(draws)
        ]

    def shifts(
        self,
        cache: KVCache,
        rows: Sequence[Sequence[ActivationEdit]],
        patches: Sequence[Sequence[KVPatch]] | None = None,
        *,
        donor: bool = False,
    ) -> Tensor:
        """Margin shifts `[row]` of the base prompt, or of the donor's, in logits; see `decision_shifts`."""
        prompt = self.pair.donor if donor else self.pair.base
        return decision_shifts(self.made, self.pair, prompt, cache, rows, patches=patches, batch_size=self.batch_size)

    def rows(self, names: Sequence[Named], shifts: Tensor) -> list[Measurement]:
        """A row for each set, from its margin shifts `[set]` in logits."""
        base = self.prefilled.base.margin
        return [
            {
                "measurement": "set",
                "intervention": f"{name}_{size}",
                "size": size,
                "draw": draw,
                "margin": base + shift,
                "flipped": (base + shift > 0) != (base > 0),
            }
            for (name, size, draw), shift in zip(names, shifts.tolist(), strict=True)
        ]

    def head_row(self, kind: str, head: Head, shift: float) -> Measurement:
        """The row of one head alone."""
        margin = self.prefilled.base.margin + shift
        return {"measurement": kind, "layer": head[0], "head": head[1], "margin": margin}


def single_rows(case: Case, notes: int) -> list[Measurement]:
    """A row for each query head and each key-value head alone; attention is that to so many held-out notes."""
    reading, selected = case.reading, case.selected
    attention = reading.attention[..., selected.notes[:notes]].sum(-1)
    read = {head: place for place, head in enumerate(selected.read)}
    kv = {head: place for place, head in enumerate(selected.kv)}
    rows = [
        {
            **case.head_row("head", head, float(reading.read[head])),
            "margin_notes": case.prefilled.base.margin + float(reading.read_notes[head]),
            "attribution": float(reading.attribution[head]),
            "attention": float(attention[head]),
            "rank": read[head],
        }
        for head in all_heads(reading.read)
    ]
    return rows + [
        {**case.head_row("kv_head", head, float(reading.kv[head])), "rank": kv[head]} for head in all_heads(reading.kv)
    ]


def read_rows(case: Case, controls: Sequence[HeadSet]) -> list[Measurement]:
    """Joint patches of read heads into the base prompt, and of the donor prompt's into the base's."""
    reading, best = case.reading, case.selected.read
    own, sizes = ranked_heads(reading.read), case.possible(reading.read)
    sets: list[tuple[Named, list[ActivationEdit]]] = []
    for size in sizes:
        sets += [
            (("read_in_sample", size, 0), replace_heads(reading.donor, own[:size])),
            (("read_held_out", size, 0), replace_heads(reading.donor, best[:size])),
            (("read_direct", size, 0), _only(reading, best[:size])),
            (("read_notes", size, 0), replace_heads(reading.note_reads, best[:size])),
        ]
    sets += [(name, replace_heads(reading.donor, heads)) for name, heads in controls]
    stale = before_decision(case.pair, case.prefilled.stale)
    rows = case.rows([name for name, _ in sets], case.shifts(stale, [edits for _, edits in sets]))
    return rows + _noising_rows(case, sizes)


def _noising_rows(case: Case, sizes: Sequence[int]) -> list[Measurement]:
    """The base's outputs of the top heads in the donor prompt: how much of the donor's decision they take away."""
    edits = [replace_heads(case.reading.base, case.selected.read[:size]) for size in sizes]
    shifts = case.shifts(before_decision(case.pair, case.prefilled.oracle), edits, donor=True)
    rows, donor = case.rows([("read_noising", size, 0) for size in sizes], -shifts), case.prefilled.donor.margin
    return [
        {**row, "flipped": (donor + shift > 0) != (donor > 0)} for row, shift in zip(rows, shifts.tolist(), strict=True)
    ]


def ablation_rows(case: Case, controls: Sequence[HeadSet]) -> list[Measurement]:
    """Outputs of some heads at their mean over prompts of other skeletons, in both prompts of the pair."""
    ranked, prefilled = case.selected.read, case.prefilled
    sets: list[HeadSet] = []
    for size in case.possible(case.reading.read):
        sets += [(("ablate_held_out", size, 0), ranked[:size]), (("ablate_others", size, 0), ranked[size:])]
    sets += controls
    edits = [replace_heads(case.selected.mean, heads) for _, heads in sets]
    base = prefilled.base.margin + case.shifts(before_decision(case.pair, prefilled.stale), edits)
    donor = prefilled.donor.margin + case.shifts(before_decision(case.pair, prefilled.oracle), edits, donor=True)
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


def kv_rows(case: Case) -> list[Measurement]:
    """Joint patches of key-value heads at the positions after the field."""
    orders = {"in_sample": ranked_heads(case.reading.kv), "held_out": case.selected.kv}
    sets: list[HeadSet] = [
        ((f"kv_{how}", size, 0), order[:size])
        for size in case.possible(case.reading.kv)
        for how, order in orders.items()
    ]
    patches = [[kv_heads_from(case.pair, case.prefilled, heads)] for _, heads in sets]
    stale = before_decision(case.pair, case.prefilled.stale)
    return case.rows([name for name, _ in sets], case.shifts(stale, [()] * len(sets), patches))


def write_rows(case: Case, singles: int, control_size: int, controls: Sequence[HeadSet]) -> list[Measurement]:
    """Patches of write heads while the prompt is read on: at all positions after the field, or at one of them.

    Args:
        case: the pair.
        singles: how many of the strongest heads are patched one at a time.
        control_size: number of heads in the set that is ranked on the pair itself.
        controls: random sets.
    """
    pair, selected = case.pair, case.selected
    attribution = case.reading.write_attribution.sum(0)
    donor = donor_writes(case.made, pair, case.prefilled, attribution.shape[0])
    notes = tuple(pair.downstream.positions)
    alone = selected.write[:singles]
    sets: list[HeadSet] = [(("write_held_out", size, 0), selected.write[:size]) for size in case.possible(attribution)]
    # By the pair's own first-order estimate, at one size: these are whole prefills.
    sets.append((("write_in_sample", control_size, 0), ranked_heads(attribution)[:control_size]))
    sets += controls
    edits = [replace_heads(donor, heads, notes) for heads in [*([head] for head in alone), *(h for _, h in sets)]]
    shifts = case.shifts(case.prefilled.stale.take(slice(0, notes[0])), edits)
    rows = [
        {
            **case.head_row("write_head", head, shift),
            "attribution": float(attribution[head]),
            "rank": selected.write.index(head),
        }
        for head, shift in zip(alone, shifts[: len(alone)].tolist(), strict=True)
    ]
    return rows + case.rows([name for name, _ in sets], shifts[len(alone) :]) + _write_one_rows(case, donor)


def _write_one_rows(case: Case, donor: Mapping[int, Tensor]) -> list[Measurement]:
    """Write heads at one position, found on other skeletons."""
    place = case.selected.notes[0]
    at = {layer: outputs[place - case.pair.field.end] for layer, outputs in donor.items()}
    sizes = case.possible(case.reading.read)
    edits = [replace_heads(at, case.selected.write_one[:size], (place,)) for size in sizes]
    shifts = case.shifts(case.prefilled.stale.take(slice(0, place)), edits)
    return case.rows([("write_one", size, 0) for size in sizes], shifts)


def _only(reading: HeadReading, heads: list[Head]) -> list[ActivationEdit]:
    """The donor's outputs of `heads`, and those of all others frozen as they are in the base prompt."""
    frozen = reading.base.clone()
    for head in heads:
        frozen[head] = reading.donor[head]
    return replace_heads(frozen, all_heads(frozen))
