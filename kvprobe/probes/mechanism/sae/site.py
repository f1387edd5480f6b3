"""Where an SAE is read: the places that hold the note and the layer at which it lies there.

Both are chosen on training skeletons, which no evaluation sees. Places are ranked as in the protocol (section 4), by
the recovery of a patch of that one position's keys and values, and named by slots so that they are found again in other
prompts. The layer is the one after which the donor's residual stream at these places recovers most: earlier the note is
not written yet, later it has already been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvprobe.engine.components import ActivationEdit, components, set_to
from kvprobe.errors import SampleError, UnsupportedError
from kvprobe.probes.kit.aligned_positions import Slot, ranked, slot_scores, slots
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.ranking import single_positions
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True)
class Site:
    """A hook and the slots that hold notes.

    Attributes:
        hook: TransformerLens name of the residual stream after the chosen layer.
        layer: its number.
        scores: by slot, the recovery of one position there.
        recovery_by_layer: of the donor's residual stream at the places, for every layer but the last.
    """

    hook: str
    layer: int
    scores: dict[Slot, float]
    recovery_by_layer: tuple[float, ...]

    def places(self, pair: Pair, count: int) -> tuple[int, ...]:
        """The `count` best positions of a pair, in the order of the prompt.

        Raises:
            UnsupportedError: its prompts have fewer places that the training prompts have too.
        """
        return _best(pair, self.scores, count)


def find_site(subject: Subject, pairs: Sequence[Pair], count: int) -> Site:
    """The places of notes and their layer, from pairs of training skeletons.

    Raises:
        SampleError: the model decides none of the pairs correctly.
    """
    decided = []
    for pair in pairs:
        unedited = prefill_pair(subject, pair)
        single = single_positions(subject, pair, unedited)
        if single.decided:
            decided.append((pair, slots(pair), single))
    if not decided:
        raise SampleError(
            f"{subject.name} decides none of the {len(pairs)} training pairs correctly, so no place can be chosen."
        )
    score = slot_scores((places, single.shifts, single.gap) for _, places, single in decided)
    seen = {places[position] for _, places, single in decided for position in single.shifts}
    scores = {slot: score(slot) for slot in seen}
    shifts = torch.stack([_shift_by_layer(subject, pair, _best(pair, scores, count)) for pair, _, _ in decided])
    recovery = shifts.sum(0) / sum(single.gap for _, _, single in decided)
    layer = int(recovery.argmax())
    return Site(residual_hook(layer), layer, scores, tuple(recovery.tolist()))


def residual_hook(layer: int) -> str:
    """The residual stream after a layer."""
    return f"blocks.{layer}.hook_resid_post"


def _shift_by_layer(subject: Subject, pair: Pair, places: tuple[int, ...]) -> torch.Tensor:
    """Margin shift `[layer]`, in logits, by the donor's residual stream at the places, but of the last layer."""
    engine, hooks = components(subject), [residual_hook(layer) for layer in range(subject.layers - 1)]
    donor = engine.capture(pair.donor.token_ids, hooks).activations
    # A first layer whose window does not reach the field leaves the same at the places.
    edits = [[ActivationEdit(hook, set_to(donor[hook][list(places)]), places, no_op=True)] for hook in hooks]
    logits = engine.run(pair.base.token_ids, [[], *edits]).double()
    margins = logits[:, pair.donor_answer_id] - logits[:, pair.base_answer_id]
    return margins[1:] - margins[0]


def _best(pair: Pair, scores: dict[Slot, float], count: int) -> tuple[int, ...]:
    names = slots(pair)
    known = [position for position in pair.downstream.positions if names[position] in scores]
    if len(known) < count:
        raise UnsupportedError(
            f"Only {len(known)} positions of a prompt of {pair.scenario.skeleton!r} are of a kind that the training "
            "prompts have; train on a task with the same segments."
        )
    return tuple(sorted(ranked(known, lambda position: scores[names[position]])[:count]))
