"""Suffix concentration (protocol 1.1 c to g, 1.7, dose of 1.2): which cache entries carry a field's effect?

Entries from the field to the decision, both prompts' caches being equal before the field, are patched from the
donor's cache in many sets, and the decision is read with the last token run again.

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

Single positions are also summed: by segment and by kind of token as shares of all positive recovery, with the share of
tokens beside it, since delimiters are fewer than words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.aligned_positions import is_delimiter, slots
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.depth import layer_bands, third_of
from kvprobe.probes.kit.doses import suffix
from kvprobe.probes.kit.position_sets import matched_sets, random_sets
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.ranking import SinglePositions, held_out_orders, in_sample_order
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

_Set = tuple[Measurement, KVPatch]
"""A set of cache entries to patch: what its row says of it, and the patch."""
PAPER_FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)


@PROBES.register("suffix_concentration")
class SuffixConcentration(Probe):
    """Which cache entries carry a field's effect: doses, single positions, layers, segments, top-k."""

    needs_all_pairs: ClassVar[bool] = True

    fractions: tuple[float, ...] = Field(PAPER_FRACTIONS, description="of the positions from the field on")
    sizes: tuple[int, ...] = Field((1, 2, 4, 8, 16, 32), description="numbers of top positions")
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
            unedited = prefill_pair(subject, pair)
            found = self._read(subject, pair, unedited, self._fixed_sets(subject, pair, unedited))
            singles.append(_singles(unedited, found))
            rows += [{"pair": index, **row} for row in found]
            progress(index + 1, 2 * len(pairs))
        held_out = held_out_orders(pairs, singles, self.folds, self.seed)
        for index, pair in enumerate(pairs):
            # Prefilled anew: the caches of all pairs of a large model would not fit in memory together.
            unedited = prefill_pair(subject, pair)
            orders = {"in_sample": in_sample_order(singles[index]), "held_out": held_out[index]}
            sets = self._selected_sets(subject, pair, unedited, orders, index)
            rows += [{"pair": index, **row} for row in self._read(subject, pair, unedited, sets)]
            progress(len(pairs) + index + 1, 2 * len(pairs))
        return rows

    def _read(self, subject: Subject, pair: Pair, unedited: PrefilledPair, sets: Sequence[_Set]) -> list[Measurement]:
        """The decision under each patch; `sets` gives with each what its row says of it."""
        patches = [patch for _, patch in sets]
        margins = patched_margins(subject, pair, pair.base, unedited.stale, patches, batch_size=self.batch_size)
        return [
            {
                **unedited.common(),
                **described,
                "positions": len(patch.positions),
                "margin": margin,
                "flipped": (margin > 0) != (unedited.base.margin > 0),
            }
            for (described, patch), margin in zip(sets, margins, strict=True)
        ]

    def _fixed_sets(self, subject: Subject, pair: Pair, unedited: PrefilledPair) -> list[_Set]:
        """All sets that nothing has to be selected for."""
        span = range(pair.field.start, pair.decision_position)
        sets: list[_Set] = [
            ({"intervention": "no_op"}, KVPatch(tuple(span), unedited.stale, no_op=True)),
            ({"intervention": "same_value"}, KVPatch(tuple(span), unedited.again, no_op=True)),
        ]
        for fraction in self.fractions:
            last = suffix(pair, fraction)
            for name, part in (("suffix", last), ("prefix", tuple(span[: len(last)]))):
                described = {"intervention": f"{name}_{round(100 * fraction)}", "fraction": fraction}
                sets.append((described, _patch(part, unedited)))
        for name, where in pair.base.spans.items():
            inside = range(max(where.start, span.start), min(where.end, span.stop))
            if inside:
                sets.append(({"intervention": f"segment_{name}", "segment": name}, _patch(inside, unedited)))
        return sets + _single_positions(subject, pair, unedited) + _layers(subject, pair, unedited)

    def _selected_sets(
        self, subject: Subject, pair: Pair, unedited: PrefilledPair, orders: Mapping[str, list[int]], index: int
    ) -> list[_Set]:
        """The top positions of each order, and random sets of one size."""
        own, pool = self, sorted(orders["held_out"])
        sets: list[_Set] = [
            ({"intervention": f"top_{how}_{size}", "size": size}, _patch(order[:size], unedited))
            for size in own.sizes
            for how, order in orders.items()
        ]
        generator = np.random.Generator(np.random.PCG64([own.seed, index]))
        delimiters = {p for p in pool if is_delimiter(pair.base.token_ids[p], subject.tokenizer)}
        size = min(own.control_size, len(pool))
        drawn = {
            "random": random_sets(pool, size, own.random_draws, generator),
            "matched": matched_sets(orders["held_out"][:size], pool, delimiters, own.matched_draws, generator),
        }
        for name, parts in drawn.items():
            sets += [
                ({"intervention": f"{name}_{own.control_size}", "draw": draw}, _patch(part, unedited))
                for draw, part in enumerate(parts)
            ]
        return sets


def _single_positions(subject: Subject, pair: Pair, unedited: PrefilledPair) -> list[_Set]:
    places = slots(pair)
    return [
        (
            {
                "intervention": "position",
                "position": position,
                "segment": places[position].segment,
                "anchor": places[position].anchor,
                "offset": places[position].offset,
                "delimiter": is_delimiter(pair.base.token_ids[position], subject.tokenizer),
            },
            _patch([position], unedited),
        )
        for position in range(pair.field.start, pair.decision_position)
    ]


def _layers(subject: Subject, pair: Pair, unedited: PrefilledPair) -> list[_Set]:
    span = tuple(range(pair.field.start, pair.decision_position))
    single: list[tuple[Measurement, tuple[int, ...]]] = [
        (
            {"intervention": f"layer_{layer}", "layer": layer, "depth": third_of(layer, subject.layers)},
            (layer,),
        )
        for layer in range(subject.layers)
    ]
    bands: list[tuple[Measurement, tuple[int, ...]]] = [
        ({"intervention": name}, layers) for name, layers in layer_bands(subject.layers).items()
    ]
    return [(described, KVPatch(span, unedited.oracle, layers, no_op=True)) for described, layers in [*single, *bands]]


def _patch(positions: Sequence[int], unedited: PrefilledPair) -> KVPatch:
    # A position that no sliding window connects with the field is the same in both caches.
    return KVPatch(tuple(positions), unedited.oracle, no_op=True)


def _singles(unedited: PrefilledPair, rows: Sequence[Measurement]) -> SinglePositions:
    base, donor = unedited.base.margin, unedited.donor.margin
    return SinglePositions(
        shifts={row["position"]: row["margin"] - base for row in rows if row["intervention"] == "position"},
        gap=donor - base,
        decided=base < 0 < donor,
    )
