"""What is added to the residual stream of a pair, given what other skeletons tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.probes.mechanism.direction.case_states import CaseStates, Examples
from kvprobe.probes.mechanism.direction.directions import Array, along, matched_step, set_coordinate, unit

OWN_LENGTH = ("along", "logistic", "das", "in_sample")
MATCHED = ("shuffled", "other_concept", "component")
CONTROLS = ("random", *MATCHED, "orthogonal_matched")
INTERVENTIONS = ("full", "orthogonal", *OWN_LENGTH, *CONTROLS)


@dataclass(frozen=True, eq=False)
class Found:
    """What was found on some skeletons.

    Attributes:
        layer: where exchanging everything does most.
        examples: the cases at that layer.
        directions: `[kind, hidden]` by name at that layer.
        means: `[kind, hidden]` for each layer, differences of means of firing and not firing.
    """

    layer: int
    examples: Examples
    directions: Mapping[str, Array]
    means: Sequence[Array]


Step = tuple[str, int, Array]
"""Name, draw, and what is added `[position, hidden]`."""


def towards_donor(states: CaseStates, found: Found, directions: Mapping[str, Array], random: Array) -> list[Step]:
    """What is added to the base prompt's residual stream; `random` is `[draw, kind, hidden]`."""
    difference = states.difference(found.layer)
    placed = {name: states.by_position(direction) for name, direction in directions.items()}
    conclusion = along(difference, placed["along"])
    rest, lengths = difference - conclusion, np.linalg.norm(conclusion, axis=-1)
    steps: list[Step] = [(name, 0, along(difference, placed[name])) for name in OWN_LENGTH]
    steps += [(name, 0, matched_step(difference, placed[name], lengths)) for name in MATCHED]
    steps += [("orthogonal", 0, rest), ("orthogonal_matched", 0, lengths[:, None] * unit(rest))]
    for draw, direction in enumerate(random):
        steps.append(("random", draw, matched_step(difference, states.by_position(direction), lengths)))
    return steps


def away_from_donor(states: CaseStates, found: Found, random: Array) -> list[Step]:
    """What is added to the donor prompt's residual stream, to set coordinates to their pooled means."""
    donor, examples = states.at(1, found.layer), found.examples
    steps: list[Step] = []
    for name, draw, direction in [("necessity", 0, found.means[found.layer]), *_named("necessity_random", random)]:
        pooled = (examples.states * direction).sum(axis=-1).mean(axis=0)
        steps.append((name, draw, set_coordinate(donor, states.by_position(direction), states.by_position(pooled))))
    return steps


def _named(name: str, draws: Array) -> list[Step]:
    return [(name, draw, direction) for draw, direction in enumerate(draws)]
