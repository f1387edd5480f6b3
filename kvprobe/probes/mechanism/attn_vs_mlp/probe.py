"""Does attention or do MLPs write the change? Protocol 4.5, critique CI8.

Base and donor prompt differ in the field alone. At a position after it, the difference of their residual streams after
layer T is the sum of what the attention and the MLP of every layer up to T add to it; each is projected onto the
difference itself. Two positions are read:

    note        the position after the field with the largest effect alone, found on pairs of other skeletons
    decision    the last token of the prompt

`X.attention_share_T` is attention's share up to layer T, for every T (critique: the share depends on the layer);
`middle` is the layer at two fifths of the depth, where the paper reads it, `final` the last. A share says by which way
the change arrives at this position, not where it was computed; so attention is split further by the position it comes
from: before the field, the field, the segments after it, and the position itself. What each layer writes, and from
where, is reported for the change that matters: at the decision after the last layer; at the note after the last but
one, since no later token reads further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvprobe.engine.components import Components, components
from kvprobe.engine.forward import prefill
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.ranking import held_out_orders, single_positions
from kvprobe.probes.mechanism.attn_vs_mlp.residual_parts import Change, change_of, read_parts
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@PROBES.register("attn_vs_mlp")
class AttnVsMlp(Probe):
    """Whether attention or MLPs write the change of the residual stream, by layer and by source position."""

    needs_all_pairs: ClassVar[bool] = True

    folds: int = Field(5, ge=2, description="groups of skeletons; the note of each is found on the others")
    seed: int = Field(0, ge=0, description="of the folds")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """For each pair and place a row `read_layer` and `write_layer` per layer, and `source` per segment too."""
        made, singles, common = components(subject), [], []
        for index, pair in enumerate(pairs):
            unedited = prefill_pair(subject, pair)
            singles.append(single_positions(subject, pair, unedited, self.batch_size))
            common.append(unedited.common())
            progress(index + 1, 2 * len(pairs))
        orders = held_out_orders(pairs, singles, self.folds, self.seed)
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            places = {"note": orders[index][0], "decision": pair.decision_position}
            found = _measure_pair(subject, made, pair, places)
            rows += [{"pair": index, **common[index], **row} for row in found]
            progress(len(pairs) + index + 1, 2 * len(pairs))
        return rows


def source_groups(pair: Pair, position: int) -> list[str]:
    """Where each source position up to `position` lies: `before`, `field`, a segment after it, or `self`."""
    names = []
    for source in range(position + 1):
        if source == position:
            names.append("self")
        elif source in pair.field.positions:
            names.append("field")
        else:
            names.append("before" if source < pair.field.start else pair.base.segment_of(source))
    return names


def _measure_pair(subject: Subject, made: Components, pair: Pair, places: Mapping[str, int]) -> list[Measurement]:
    prompts = pair.base.token_ids, pair.donor.token_ids
    caches = [prefill(subject, ids).cache for ids in prompts]
    rows: list[Measurement] = []
    for place, position in places.items():
        base, donor = (
            read_parts(made, subject.layers, ids, cache, position) for ids, cache in zip(prompts, caches, strict=True)
        )
        last = subject.layers - (1 if place == "decision" else min(2, subject.layers))
        change = change_of(made, base, donor, last, subject.dtype)
        shared = {"place": place, "position": position, "segment_of_place": pair.base.segment_of(position)}
        found = [*_layer_rows(change), *_source_rows(change, source_groups(pair, position))]
        rows += [{**shared, "error": change.error, **row} for row in found]
    return rows


def _layer_rows(change: Change) -> list[Measurement]:
    """Up to each layer what attention and MLPs add along the change there; of each layer, along the change read."""
    sizes = change.stream.norm(dim=-1)
    rows: list[Measurement] = []
    for layer, (stream, size) in enumerate(zip(change.stream, sizes, strict=True)):
        along = stream / size if size > 0 else stream
        attention = float((change.attention[: layer + 1] @ along).sum())
        mlp = float((change.mlp[: layer + 1] @ along).sum())
        rows.append(
            {"measurement": "read_layer", "layer": layer, "attention": attention, "mlp": mlp, "total": float(size)}
        )
    rows += [
        {
            "measurement": "write_layer",
            "layer": layer,
            "attention": attention,
            "mlp": mlp,
            "total": float(sizes[change.last]),
        }
        for layer, (attention, mlp) in enumerate(change.written.tolist())
    ]
    return rows


def _source_rows(change: Change, groups: Sequence[str]) -> list[Measurement]:
    total = float(change.stream[change.last].norm())
    return [
        {
            "measurement": "source",
            "layer": layer,
            "source": name,
            "attention": sum(float(value) for value, group in zip(line, groups, strict=True) if group == name),
            "total": total,
        }
        for layer, line in enumerate(change.sources.tolist())
        for name in dict.fromkeys(groups)
    ]
