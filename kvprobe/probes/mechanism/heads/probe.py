"""Which attention heads read the notes, and which write them? Protocol 4.1, critique CI1 to CI3.

Base and donor prompt differ in the field alone, so every difference in a head's output comes from it. Heads that *read*
are patched at the decision, heads that *write* at the positions after the field, from the donor into the base prompt.

    read_in_sample_k     the k heads with the largest effect alone, ranked on the pair they are scored on, as in the
                         paper
    read_held_out_k      ranked on pairs of other skeletons: the number to read
    read_direct_k        held out; all other heads frozen, so that later heads pass nothing on (CI3)
    read_notes_k         held out; the heads keep their queries and read the donor's keys and values after the field
    read_noising_k       held out, reversed: the base's outputs into the donor prompt
    read_random_k, read_matched_k   as many other heads, drawn at random; matched: from the same layers (CI1)
    read_single_others   single heads outside the largest held-out set, the paper's control
    ablate_held_out_k, ablate_others_k, ablate_matched_k   outputs of the top k, of all but them, or of matched ones set
                         to their mean over prompts of other skeletons, in base and donor prompt
    kv_in_sample_k, kv_held_out_k   keys and values of k key-value heads at the positions after the field
    write_held_out_k, write_in_sample_k, write_matched_k, write_random_k   query heads, patched at all positions after
                         the field while the prompt is read on
    write_one_k          held out, at one position: the one with the largest effect alone in pairs of other skeletons

All heads are scored by attribution patching. All read heads and key-value heads are also patched one at a time, and
ranked by that. Of write heads, each of which costs a prefill, only the strongest are patched alone, and they are ranked
by the first-order estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from kvprobe.engine.components import components
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.mechanism.heads.joint import Case, ablation_rows, kv_rows, read_rows, single_rows, write_rows
from kvprobe.probes.mechanism.heads.patches import read_heads
from kvprobe.probes.mechanism.heads.sets import select
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@PROBES.register("heads")
class Heads(Probe):
    """Which query heads read the notes at the decision, which write them, and which key-value heads hold them."""

    needs_all_pairs: ClassVar[bool] = True

    sizes: tuple[PositiveInt, ...] = Field((1, 2, 3, 5, 8, 12), min_length=1, description="numbers of heads")
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
        for index, (pair, selected) in enumerate(
            zip(pairs, select(pairs, readings, self.folds, self.seed), strict=True)
        ):
            generator = np.random.Generator(np.random.PCG64([self.seed, index]))
            # Prefilled anew: the caches of all pairs of a large model would not fit in memory together.
            prefilled = readings[index].prefilled_again(subject, pair)
            case = Case(made, pair, prefilled, readings[index], selected, self.sizes, generator, self.batch_size)
            rows += [{"pair": index, **prefilled.common(), **row} for row in self._measure_pair(case)]
            progress(len(pairs) + index + 1, 2 * len(pairs))
        return rows

    def _measure_pair(self, case: Case) -> list[Measurement]:
        size, further, selected = self.control_size, self.further_draws, case.selected
        readers = case.drawn("read", selected.read, size, matched=self.draws, random=further)
        ablated = case.drawn("ablate", selected.read, size, matched=further, random=0)
        writers = case.drawn("write", selected.write, size, matched=further, random=further)
        return [
            *single_rows(case, self.notes),
            *read_rows(case, readers),
            *ablation_rows(case, ablated),
            *kv_rows(case),
            *write_rows(case, self.write_heads, size, writers),
        ]
