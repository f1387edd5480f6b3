"""The residual stream at the cases of a rule, and the decision after changing it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvprobe.engine.components import ActivationEdit, add, components
from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import Readout, read_rows
from kvprobe.errors import UnsupportedError
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.rule_positions import Case, rule_cases
from kvprobe.probes.mechanism.direction.directions import Array, Interchange, difference_of_means
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Kind = Literal["value", "action", "end"]
"""A token of a case: the value it names, its action, or the token right after the last of them."""
Change = tuple[int, Array]
"""A layer, and what is added `[position, hidden]` to the residual stream after its block."""


@dataclass(frozen=True, eq=False)
class CaseStates:
    """What one pair has at the tokens of its rule's cases.

    Attributes:
        positions: by case and, within it, by kind.
        states: `[side, case, kind, layer, hidden]`, base before donor; layer l is after block l.
        fires: `[side, case]` whether the case fires in that prompt.
        common: columns that all rows of the pair carry.
    """

    positions: tuple[int, ...]
    states: Array
    fires: NDArray[np.bool_]
    common: Mapping[str, float]

    def at(self, side: int, layer: int) -> Array:
        """`[position, hidden]` of the base (0) or the donor (1)."""
        return np.asarray(self.states[side, :, :, layer].reshape(len(self.positions), -1))

    def difference(self, layer: int) -> Array:
        """`[position, hidden]` donor minus base."""
        return self.at(1, layer) - self.at(0, layer)

    def by_position(self, of_kinds: Array) -> Array:
        """`[kind, ...]` repeated for both cases: `[position, ...]`."""
        return np.concatenate([of_kinds, of_kinds])

    def interchanges(self, pair: Pair, layer: int) -> list[Interchange]:
        """The base with what the donor has, and the donor with what the base has."""
        answers = pair.base_answer_id, pair.donor_answer_id
        kinds = [*range(self.states.shape[2])] * 2
        difference = torch.from_numpy(self.difference(layer)).float()
        return [
            Interchange(pair.base.token_ids, self.positions, kinds, difference, answers),
            Interchange(pair.donor.token_ids, self.positions, kinds, -difference, answers[::-1]),
        ]


@dataclass(frozen=True, eq=False)
class Examples:
    """What directions are found in: the cases of some pairs after one block.

    Attributes:
        states: `[row, kind, hidden]`, a row for each pair, side and case.
        fires: `[row]` whether the case fires.
        stated_first: `[row]` whether it is the rule's first.
    """

    states: Array
    fires: NDArray[np.bool_]
    stated_first: NDArray[np.bool_]

    @classmethod
    def of(cls, pairs: Sequence[CaseStates], layer: int) -> Examples:
        """All cases of `pairs` after block `layer`."""
        states = np.stack([pair.states[:, :, :, layer] for pair in pairs])
        fires = np.stack([pair.fires for pair in pairs])
        stated_first = np.broadcast_to(np.array([True, False]), fires.shape)
        return cls(states.reshape(fires.size, *states.shape[3:]), fires.reshape(-1), stated_first.reshape(-1))

    def by_kind(self, find: Callable[[Array], Array]) -> Array:
        """`[kind, ...]` what `find` makes of the states `[row, hidden]` of each kind."""
        return np.stack([find(self.states[:, kind]) for kind in range(self.states.shape[1])])

    def means(self, holds: NDArray[np.bool_]) -> Array:
        """`[kind, hidden]` differences of means of the rows where a concept holds and those where it does not."""
        return self.by_kind(lambda states: difference_of_means(states, holds))


def read_case_states(subject: Subject, pair: Pair, kinds: Sequence[Kind]) -> CaseStates:
    """Read both prompts of a pair.

    Raises:
        UnsupportedError: a case has no token of some kind, or the prompts have no rule of two cases.
    """
    cases = rule_cases(pair)
    positions = [_position(case, kind) for case in cases for kind in kinds]
    hooks = [f"blocks.{layer}.hook_resid_post" for layer in range(subject.layers)]
    sides = []
    for prompt in (pair.base, pair.donor):
        activations = components(subject).capture(prompt.token_ids, hooks).activations
        layers = torch.stack([activations[hook][positions] for hook in hooks], dim=1)
        sides.append(layers.double().cpu().numpy().reshape(2, len(kinds), len(hooks), -1))
    fires = np.array([[case.fires_in_base for case in cases], [not case.fires_in_base for case in cases]])
    return CaseStates(tuple(positions), np.stack(sides), fires, prefill_pair(subject, pair).common())


def edited_readings(
    subject: Subject, pair: Pair, prompt: TokenizedContext, states: CaseStates, changes: Sequence[Change]
) -> list[Readout]:
    """The decision of `prompt` under each change; what comes before the first changed token is run once for all."""
    first = min(states.positions)
    # Prompts do not differ in a layer whose windows do not reach the field.
    rows = [
        [
            ActivationEdit(
                f"blocks.{layer}.hook_resid_post",
                add(torch.from_numpy(step).to(subject.dtype)),
                states.positions,
                no_op=True,
            )
        ]
        for layer, step in changes
    ]
    cache = prefill(subject, prompt.token_ids[:first]).cache
    logits = components(subject).run(prompt.token_ids[first:], rows, cache=cache)
    return read_rows(logits, pair.base_answer_id, pair.donor_answer_id)


def _position(case: Case, kind: Kind) -> int:
    position: int | None = getattr(case, kind)
    if position is None:
        raise UnsupportedError(f"A case of the rule names no {kind}; leave {kind!r} out of the probe's kinds.")
    return position
