"""Suffix concentration (protocol 1.1 c to g, 1.7, dose of 1.2): which cache entries carry a field's effect?

Entries from the field to the decision (both prompts' caches are equal before the field) are patched from the donor's
cache in many sets, and the decision is read with the last token run again.

    suffix_P, prefix_P   the last or first P percent of these positions
    position             each position alone
    segment_X            a whole segment of the prompt
    layer_L              all positions, in one layer
    up_to_layer_L, from_layer_L, early_layers, mid_layers, late_layers   all positions, in bands of layers
    top_in_sample_K      the K positions that act most alone, ranked on the pair they are scored on (as the paper does)
    top_held_out_K       the K positions whose slots act most in pairs of other skeletons (critique G7)
    random_K, matched_K  as many positions, drawn at random; matched: with as many from each third of them and of each
                         kind of token (delimiter or not)
    no_op, same_value    floors: the base's own entries, and the same values computed in another order (critique ME1)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress, Share
from kvprobe.probes.kit.aligned_positions import delimiters, slots
from kvprobe.probes.kit.decisions import margin_rows
from kvprobe.probes.kit.depth import layer_bands, third_of
from kvprobe.probes.kit.doses import suffix
from kvprobe.probes.kit.position_sets import Selection, position_sets
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.ranking import Ranking, SinglePositions, measured_alone, rankings
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

_Patch = tuple[Measurement, KVPatch]
"""A patch, and what its row says of it."""
PAPER_FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)


@PROBES.register("suffix_concentration")
class SuffixConcentration(Probe):
    """Which cache entries carry a field's effect: doses, single positions, layers, segments, top-k."""

    needs_all_pairs: ClassVar[bool] = True

    fractions: tuple[Share, ...] = Field(PAPER_FRACTIONS, description="of the positions from the field on")
    sizes: tuple[PositiveInt, ...] = Field((1, 2, 4, 8, 16, 32), description="numbers of top positions")
    control_size: int = Field(8, ge=1, description="number of positions in each random set")
    matched_draws: int = Field(100, ge=1, description="matched random sets for each pair")
    random_draws: int = Field(20, ge=1, description="unmatched random sets for each pair")
    folds: int = Field(5, ge=2, description="groups of skeletons; each is ranked by the others")
    seed: int = Field(0, ge=0, description="of the random sets and of the folds")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each patched set of entries."""
        rows: list[Measurement] = []
        singles: list[SinglePositions] = []
        for index, pair in enumerate(pairs):
            prefilled = prefill_pair(subject, pair)
            found = self._rows(subject, pair, prefilled, [*self._fixed_sets(subject, pair, prefilled)])
            alone = {row["position"]: row["margin"] for row in found if row["intervention"] == "position"}
            singles.append(measured_alone(prefilled, alone))
            rows += [{"pair": index, **row} for row in found]
            progress(index + 1, 2 * len(pairs))
        for index, ranking in enumerate(rankings(pairs, singles, self.folds, self.seed)):
            # Prefilled anew: the caches of all pairs of a large model would not fit in memory together.
            pair, prefilled = pairs[index], prefill_pair(subject, pairs[index])
            sets = self._selected_sets(subject, pair, prefilled, ranking, index)
            rows += [{"pair": index, **row} for row in self._rows(subject, pair, prefilled, [*sets])]
            progress(len(pairs) + index + 1, 2 * len(pairs))
        return rows

    def _rows(
        self, subject: Subject, pair: Pair, prefilled: PrefilledPair, patches: Sequence[_Patch]
    ) -> list[Measurement]:
        counted = [({**row, "positions": len(patch.positions)}, patch) for row, patch in patches]
        return margin_rows(subject, pair, prefilled, counted, self.batch_size)

    def _fixed_sets(self, subject: Subject, pair: Pair, prefilled: PrefilledPair) -> Iterator[_Patch]:
        """All sets that nothing has to be selected for."""
        span = range(pair.field.start, pair.decision_position)
        yield {"intervention": "no_op"}, KVPatch(tuple(span), prefilled.stale, no_op=True)
        yield {"intervention": "same_value"}, KVPatch(tuple(span), prefilled.again, no_op=True)
        for fraction in self.fractions:
            last = suffix(pair, fraction)
            for name, part in (("suffix", last), ("prefix", span[: len(last)])):
                row = {"intervention": f"{name}_{round(100 * fraction)}", "fraction": fraction}
                yield row, _patch(part, prefilled)
        for name, where in pair.base.spans.items():
            if inside := range(max(where.start, span.start), min(where.end, span.stop)):
                yield {"intervention": f"segment_{name}", "segment": name}, _patch(inside, prefilled)
        yield from _single_positions(subject, pair, prefilled)
        yield from _layers(subject, span, prefilled)

    def _selected_sets(
        self, subject: Subject, pair: Pair, prefilled: PrefilledPair, ranking: Ranking, index: int
    ) -> Iterator[_Patch]:
        """The top positions of each order, and random sets of one size."""
        for size in self.sizes:
            for how, order in (("in_sample", ranking.in_sample), ("held_out", ranking.held_out)):
                yield {"intervention": f"top_{how}_{size}", "size": size}, _patch(order[:size], prefilled)
        draws: dict[Selection, int] = {"random": self.random_draws, "matched": self.matched_draws}
        generator = np.random.Generator(np.random.PCG64([self.seed, index]))
        size = min(self.control_size, len(ranking.scores))
        for drawn in position_sets(ranking, (size,), draws, generator, delimiters(pair, subject.tokenizer)):
            row = {"intervention": f"{drawn.selection}_{self.control_size}", "draw": drawn.draw}
            yield row, _patch(drawn.positions, prefilled)


def _single_positions(subject: Subject, pair: Pair, prefilled: PrefilledPair) -> Iterator[_Patch]:
    places, marks = slots(pair), delimiters(pair, subject.tokenizer)
    for position in range(pair.field.start, pair.decision_position):
        row = {
            "intervention": "position",
            "position": position,
            "segment": places[position].segment,
            "anchor": places[position].anchor,
            "offset": places[position].offset,
            "delimiter": position in marks,
        }
        yield row, _patch([position], prefilled)


def _layers(subject: Subject, span: Sequence[int], prefilled: PrefilledPair) -> Iterator[_Patch]:
    count = subject.layers
    for layer in range(count):
        row = {"intervention": f"layer_{layer}", "layer": layer, "depth": third_of(layer, count)}
        yield row, _patch(span, prefilled, (layer,))
    for name, layers in layer_bands(count).items():
        yield {"intervention": name}, _patch(span, prefilled, layers)


def _patch(positions: Sequence[int], prefilled: PrefilledPair, layers: tuple[int, ...] | None = None) -> KVPatch:
    # A position that no sliding window connects with the field is the same in both caches.
    return KVPatch(tuple(positions), prefilled.oracle, layers, no_op=True)
