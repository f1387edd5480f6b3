"""What one pair shows about every attention head: where notes are read (the decision) and where they are written.

A head's output is its context vector, `hook_z`: the slice of the output projection's input that belongs to a query
head (protocol 4.1). Key-value heads, which several query heads share, are patched in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.components import ActivationEdit, Components
from kvprobe.engine.forward import prefill
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.readout import Readout
from kvprobe.probes.kit.prefilled_pair import PrefilledPair
from kvprobe.probes.kit.ranking import SinglePositions, single_positions
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Head = tuple[int, int]
"""(layer, head)."""


@dataclass(frozen=True, eq=False)
class HeadReading:
    """What one pair shows about every head, kept until all pairs are measured.

    Attributes:
        base: outputs at the decision in the base prompt `[layer, head, head_dim]`.
        donor: the same in the donor prompt.
        note_reads: outputs at the decision when the head's keys and values of the notes are the donor's, and its
            query and everything else the base's.
        attention: of the decision token in the donor prompt `[layer, head, key]`.
        attribution: `[layer, head]` first-order estimate of the effect of the donor's outputs, in logits.
        read: `[layer, head]` margin shift of the base prompt by the donor's output of this one head, in logits.
        read_notes: `[layer, head]` the same by the head's `note_reads`.
        write_attribution: `[position, layer, head]` first-order estimate of the effect of the donor's outputs at each
            position after the field, in logits.
        kv: `[layer, kv_head]` margin shift by the donor's keys and values of this one head at the notes, in logits.
        positions: what each position after the field does alone.
        base_decision, donor_decision, noise_floor: as in `PrefilledPair`.
    """

    base: Tensor
    donor: Tensor
    note_reads: Tensor
    attention: Tensor
    attribution: Tensor
    read: Tensor
    read_notes: Tensor
    write_attribution: Tensor
    kv: Tensor
    positions: SinglePositions
    base_decision: Readout
    donor_decision: Readout
    noise_floor: float

    def prefilled_again(self, subject: Subject, pair: Pair) -> PrefilledPair:
        """The pair's caches anew, with the decisions as they were read."""
        stale, oracle = (prefill(subject, prompt.token_ids).cache for prompt in (pair.base, pair.donor))
        return PrefilledPair(stale, oracle, stale, self.base_decision, self.donor_decision, self.noise_floor)


def margin_of(pair: Pair) -> Callable[[Tensor], Tensor]:
    """From logits `[..., vocab]` to the margin `[...]`: the donor's answer minus the base's."""
    return lambda logits: logits[..., pair.donor_answer_id] - logits[..., pair.base_answer_id]


def z_hook(layer: int) -> str:
    """Name of the heads' outputs in a layer."""
    return f"blocks.{layer}.attn.hook_z"


def replace_heads(
    values: Mapping[int, Tensor] | Tensor, heads: Collection[Head], positions: tuple[int, ...] | None = None
) -> list[ActivationEdit]:
    """Edits that set the outputs of `heads` at `positions`.

    Args:
        values: by layer, what to set them to, `[head, head_dim]` or `[position, head, head_dim]`.
        heads: any of several layers.
        positions: absolute; None for all tokens that are run.
    """
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        by_layer.setdefault(layer, []).append(head)
    # A head whose window does not reach the field writes the same in both prompts.
    return [
        ActivationEdit(z_hook(layer), _setter(values[layer], chosen), positions, no_op=True)
        for layer, chosen in by_layer.items()
    ]


def _setter(values: Tensor, heads: list[int]) -> Callable[[Tensor], Tensor]:
    def change(activation: Tensor) -> Tensor:
        changed = activation.clone()
        changed[:, heads] = values[..., heads, :].to(activation)
        return changed

    return change


def all_heads(table: Tensor) -> list[Head]:
    """Every head of a table `[layer, head, ...]`."""
    return [(layer, head) for layer in range(table.shape[0]) for head in range(table.shape[1])]


def read_heads(subject: Subject, made: Components, pair: Pair, prefilled: PrefilledPair) -> HeadReading:
    """Measure every head of one pair alone.

    Args:
        subject: the model.
        made: its components.
        pair: of prompts.
        prefilled: the pair's caches and decisions.
    """
    hooks = [z_hook(layer) for layer in range(subject.layers)]
    stale, last = before_decision(pair, prefilled.stale), pair.base.token_ids[-1:]
    found = made.gradients(last, hooks, margin_of(pair), cache=stale)
    base = torch.stack([found[hook][0][-1] for hook in hooks])
    slope = torch.stack([found[hook][1][-1] for hook in hooks])
    donor, attention = _decision_heads(made, pair.donor, before_decision(pair, prefilled.oracle), subject.layers)
    notes = note_reads(made, pair, prefilled, subject.layers)
    heads = all_heads(base)
    rows = [replace_heads(values, [head]) for values in (donor, notes) for head in heads]
    read, read_notes = decision_shifts(made, pair, pair.base, stale, rows).reshape(2, *base.shape[:2])
    return HeadReading(
        base=base,
        donor=donor,
        note_reads=notes,
        attention=attention,
        attribution=((donor - base) * slope).sum(-1),
        read=read,
        read_notes=read_notes,
        write_attribution=write_attribution(made, pair, prefilled, subject.layers),
        kv=_kv_margins(subject, made, pair, prefilled),
        positions=single_positions(subject, pair, prefilled),
        base_decision=prefilled.base,
        donor_decision=prefilled.donor,
        noise_floor=prefilled.noise_floor,
    )


def decision_shifts(
    made: Components,
    pair: Pair,
    prompt: TokenizedContext,
    cache: KVCache,
    rows: Sequence[Sequence[ActivationEdit]],
    *,
    patches: Sequence[Sequence[KVPatch]] | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """How far each set of edits moves the margin of `prompt`, run from where `cache` ends, in logits `[row]`.

    The prefilled decision is a row of the same pass, so that no other kernel enters the difference.
    """
    margins = made.run(
        prompt.token_ids[len(cache) :],
        [(), *rows],
        cache=cache,
        patches=None if patches is None else [(), *patches],
        batch_size=batch_size,
        reduce=margin_of(pair),
    )
    return margins[1:] - margins[0]


def before_decision(pair: Pair, cache: KVCache) -> KVCache:
    """The entries before the decision token."""
    return cache.take(slice(0, pair.decision_position))


def _decision_heads(made: Components, prompt: TokenizedContext, cache: KVCache, layers: int) -> tuple[Tensor, Tensor]:
    """Outputs `[layer, head, head_dim]` and attention `[layer, head, key]` at the decision."""
    outputs = [z_hook(layer) for layer in range(layers)]
    patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in range(layers)]
    seen = made.capture(prompt.token_ids[-1:], [*outputs, *patterns], cache=cache).activations
    return torch.stack([seen[hook][0] for hook in outputs]), torch.stack([seen[hook][0] for hook in patterns])


def note_reads(made: Components, pair: Pair, prefilled: PrefilledPair, layers: int) -> Tensor:
    """What each head puts out at the decision when only what it reads after the field is the donor's (critique CI3).

    A layer's heads get their keys and values of all positions after the field from the donor, one layer at a time: the
    layers below are the base's, and so are the heads' queries.

    Returns:
        `[layer, head, head_dim]`.
    """
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[[Tensor], Tensor]:
        def change(activation: Tensor) -> Tensor:
            seen[layer] = activation[-1].clone()
            return activation

        return change

    made.run(
        pair.base.token_ids[-1:],
        [[ActivationEdit(z_hook(layer), keep(layer), no_op=True)] for layer in range(layers)],
        cache=before_decision(pair, prefilled.stale),
        patches=[
            [KVPatch(tuple(pair.downstream.positions), prefilled.oracle, (layer,), no_op=True)]
            for layer in range(layers)
        ],
        reduce=margin_of(pair),
    )
    return torch.stack([seen[layer] for layer in range(layers)])


def donor_writes(made: Components, pair: Pair, prefilled: PrefilledPair, layers: int) -> dict[int, Tensor]:
    """By layer, the heads' outputs in the donor prompt from the field's end up to the decision.

    Returns:
        `[position, head, head_dim]` for each layer.
    """
    start, hooks = pair.field.end, [z_hook(layer) for layer in range(layers)]
    before = prefilled.oracle.take(slice(0, start))
    seen = made.capture(pair.donor.token_ids[start:], hooks, cache=before).activations
    return {layer: seen[hook][:-1] for layer, hook in enumerate(hooks)}


def write_attribution(made: Components, pair: Pair, prefilled: PrefilledPair, layers: int) -> Tensor:
    """First-order estimate of what the donor's outputs after the field do to the base's margin.

    It is the change of a head's outputs times the margin's derivative by them, the decision left out.

    Returns:
        `[position, layer, head]`, in logits.
    """
    start, hooks = pair.field.end, [z_hook(layer) for layer in range(layers)]
    before = prefilled.stale.take(slice(0, start))
    found = made.gradients(pair.base.token_ids[start:], hooks, margin_of(pair), cache=before)
    donor = donor_writes(made, pair, prefilled, layers)
    changes = [(donor[layer] - found[hook][0][:-1]) * found[hook][1][:-1] for layer, hook in enumerate(hooks)]
    return torch.stack([change.sum(-1) for change in changes], dim=1)


def kv_heads_from(pair: Pair, prefilled: PrefilledPair, heads: Sequence[Head]) -> KVPatch:
    """A patch of the notes' keys and values of a few heads, all other heads being left as they are."""
    layers = list(prefilled.stale.layers)
    for layer in {layer for layer, _ in heads}:
        chosen = [head for where, head in heads if where == layer]
        layers[layer] = _swap_heads(prefilled.stale.layers[layer], prefilled.oracle.layers[layer], chosen)
    mixed = KVCache(tuple(layers), prefilled.stale.positions, prefilled.stale.source_positions)
    return KVPatch(tuple(pair.downstream.positions), mixed, tuple({layer for layer, _ in heads}), no_op=True)


def _swap_heads(mine: LayerKV, other: LayerKV, heads: list[int]) -> LayerKV:
    keys, values = mine.keys.clone(), mine.values.clone()
    keys[:, heads], values[:, heads] = other.keys[:, heads], other.values[:, heads]
    return LayerKV.computed(keys, values)


def _kv_margins(subject: Subject, made: Components, pair: Pair, prefilled: PrefilledPair) -> Tensor:
    shape = subject.layers, int(subject.config.num_key_value_heads)
    patches = [[kv_heads_from(pair, prefilled, [head])] for head in all_heads(torch.zeros(shape))]
    rows: list[tuple[()]] = [()] * len(patches)
    shifts = decision_shifts(made, pair, pair.base, before_decision(pair, prefilled.stale), rows, patches=patches)
    return shifts.reshape(shape)
