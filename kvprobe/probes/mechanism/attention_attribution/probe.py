"""Attention attribution (protocol 1.3): where does the decision look, and does it act from there?

The last token is run on the field-only cache (new field, everything else stale), and for comparison on the stale and
on the new one. A region's attention mass is the attention that the decision token pays to its positions, the mean over
heads, layer by layer.

    sink         the first three positions, whatever they hold
    before       from there to the field
    field        the field's value
    X            a segment after the field, by its name; all of them together are `downstream`
    self         the decision token itself

Attention says where information could come from, not whether it is used. So each position from the field on is also
acted on alone: patched from the donor's cache into the stale one, and hidden from the decision token on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.decision_attention import decision_attention
from kvprobe.engine.interventions import AttentionKnockout, KVPatch
from kvprobe.engine.operations import overwrite
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

SINK = 3
"""Positions that count as the attention sink."""
_OUTSIDE = ("sink", "before", "self")


@PROBES.register("attention_attribution")
class AttentionAttribution(Probe):
    """Where the decision token looks, and whether what it looks at acts on the decision."""

    top: int = Field(8, ge=1, description="most attended positions whose share of all effect is reported")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair a row for each cache, region and layer, and one for each position from the field on."""
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            prefilled = prefill_pair(subject, pair)
            field_only, _ = overwrite(prefilled.stale, pair.field, prefilled.oracle)
            caches = {"field_only": field_only, "stale": prefilled.stale, "new": prefilled.oracle}
            attention = {name: _attention(subject, pair, name, cache) for name, cache in caches.items()}
            found = [row for name in caches for row in _masses(pair, name, attention[name])]
            found += self._positions(subject, pair, prefilled, attention["field_only"])
            rows += [{"pair": index, **prefilled.common(), **row} for row in found]
            progress(index + 1, len(pairs))
        return rows

    def _positions(
        self, subject: Subject, pair: Pair, prefilled: PrefilledPair, attention: Tensor
    ) -> list[Measurement]:
        span = range(pair.field.start, pair.decision_position)
        # A position that no sliding window connects with the field, or with the decision, changes nothing.
        patches = [KVPatch((position,), prefilled.oracle, no_op=True) for position in span]
        hidden = [AttentionKnockout((pair.decision_position,), (position,), no_op=True) for position in span]
        margins = patched_margins(
            subject, pair, pair.base, prefilled.stale, [*patches, *hidden], batch_size=self.batch_size
        )
        return [
            {
                "measurement": "position",
                "position": position,
                "segment": pair.base.segment_of(position),
                "attention": float(attention[..., position].mean()),
                "margin_transplanted": transplanted,
                "margin_hidden": masked,
            }
            for position, transplanted, masked in zip(span, margins[: len(span)], margins[len(span) :], strict=True)
        ]


def regions(pair: Pair) -> dict[str, list[int]]:
    """Positions of each region, in the order of the prompt; every position is in exactly one."""
    found: dict[str, list[int]] = {"sink": [], "before": []}
    for position in range(pair.decision_position):
        if position < SINK:
            name = "sink"
        elif position < pair.field.start:
            name = "before"
        else:
            name = pair.base.segment_of(position)
        found.setdefault(name, []).append(position)
    found["self"] = [pair.decision_position]
    return {name: positions for name, positions in found.items() if positions}


def _attention(subject: Subject, pair: Pair, name: str, cache: KVCache) -> Tensor:
    return decision_attention(subject, (pair.donor if name == "new" else pair.base).token_ids, cache)


def _masses(pair: Pair, cache: str, attention: Tensor) -> list[Measurement]:
    """Rows of one cache from `attention` `[layer, head, key]`."""
    by_layer = attention.double().mean(dim=1)
    return [
        {
            "measurement": "mass",
            "cache": cache,
            "region": region,
            "downstream": region not in (*_OUTSIDE, "field"),
            "layer": layer,
            "tokens": len(positions),
            "mass": float(by_layer[layer, positions].sum()),
        }
        for region, positions in regions(pair).items()
        for layer in range(len(by_layer))
    ]
