"""Conclusion direction (protocol 4.2): does one direction of the residual stream carry "this case fires"?

The residual stream is changed after one block, at the tokens of the rule where a case's value, its action and its end
stand; the rest of the prompt runs as usual. Each of these three kinds of token has a direction of its own, found with
both cases of the rule pooled, so that it stands for *this case fires* and not for *the first case fires*. Directions
are found on other skeletons, and so is the layer: the one where exchanging everything the tokens hold has the largest
effect.

    full                 everything the donor has there
    along                only the coordinate along the difference of means of firing and not firing
    orthogonal           everything but that coordinate, at its own length
    logistic             the coordinate along a logistic probe's normal, at its own length
    das                  the coordinate along the most effective direction found by gradient descent, at its own length
    in_sample            as `along`, found on all skeletons, including those it is tested on

Controls have the length of `along`, token for token, and point towards the donor (critique CI4; the paper's random step
was shorter by the root of the width):

    random               random directions
    shuffled             difference of means of shuffled labels
    other_concept        difference of means of the case stated first and the one stated last
    component            the leading principal component
    orthogonal_matched   the direction of `orthogonal`

Necessity (critique CI5): in the donor prompt the coordinate is set to its mean over firing and not firing, which keeps
the mean that zeroing would remove as well. `necessity.drop` is the share of the gap that this loses, and
`necessity_random.drop` the share lost along random directions. Which of a pair's values is the donor's is random, so
the same interventions in the other direction would add nothing.

Firing and not firing cases have the same words, so the difference of means is not one of words. It could still separate
a repeated word from a new one, since a case that fires names the word in the field; a direction is judged by what the
decision does when only this direction is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from kvprobe.engine.readout import Readout
from kvprobe.errors import SampleError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.probes.kit.decoding import trained_on
from kvprobe.probes.mechanism.direction.case_states import CaseStates, Examples, Kind, edited_readings, read_case_states
from kvprobe.probes.mechanism.direction.directions import (
    Array,
    along,
    leading_component,
    logistic_direction,
    search_directions,
    unit,
)
from kvprobe.probes.mechanism.direction.steps import Found, away_from_donor, towards_donor
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True, eq=False)
class _Case:
    """One pair, with its states and its decisions with everything exchanged after each block."""

    number: int
    pair: Pair
    states: CaseStates
    full: Sequence[Readout]


@PROBES.register("direction")
class Direction(Probe):
    """Whether moving the notes along one direction, found on other skeletons, moves the decision."""

    needs_all_pairs: ClassVar[bool] = True

    kinds: tuple[Kind, ...] = Field(
        ("value", "action", "end"), min_length=1, description="tokens of the rule's cases that are steered"
    )
    folds: int = Field(default=3, ge=2, description="sets of skeletons, each tested with directions of the others")
    random_draws: int = Field(default=4, ge=1, description="random directions for each pair")
    search_steps: int = Field(default=40, ge=1, description="of gradient descent on the direction")
    search_batch: int = Field(default=4, ge=1, description="prompts in one such step")
    search_rate: float = Field(default=0.05, gt=0, description="its learning rate")
    seed: int = Field(default=0, ge=0, description="of folds and random draws")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """A row for each pair, intervention and draw at the chosen layer; `full` and `along` at every layer."""
        cases = []
        for number, pair in enumerate(pairs):
            states = read_case_states(subject, pair, self.kinds)
            everything = [(layer, states.difference(layer)) for layer in range(subject.layers)]
            cases.append(_Case(number, pair, states, edited_readings(subject, pair, pair.base, states, everything)))
        rows: list[Measurement] = []
        done = 0
        for train, test in folds([pair.scenario.skeleton for pair in pairs], self.folds, self.seed):
            found = self._find(subject, cases, train)
            for number in test:
                measured = self._change(subject, cases[number], found)
                rows += [{"pair": number, **cases[number].states.common, **row} for row in measured]
                done += 1
                progress(done, len(pairs))
        return rows

    def _find(self, subject: Subject, cases: Sequence[_Case], train: Sequence[int]) -> Found:
        """Layer and directions from the cases `train`, with which others are tested."""
        kept = trained_on([case.states.common for case in cases])
        usable = [cases[number] for number in train if kept[number]]
        if not usable:
            raise SampleError("There is no pair to find a direction in, in one of the folds; add pairs.")
        # Chosen by the effect of everything the tokens hold, which favours no kind of direction.
        shifts = [[reading.margin - case.states.common["m_base"] for reading in case.full] for case in usable]
        layer = int(np.sum(shifts, axis=0).argmax())
        by_layer = [Examples.of([case.states for case in usable], number) for number in range(subject.layers)]
        means = [examples.means(examples.fires) for examples in by_layer]
        examples = by_layer[layer]
        everyone = Examples.of([case.states for case in cases if kept[case.number]], layer)
        directions = {
            "along": means[layer],
            "in_sample": everyone.means(everyone.fires),
            "other_concept": examples.means(examples.stated_first),
            "component": examples.by_kind(leading_component),
            "logistic": examples.by_kind(lambda rows: logistic_direction(rows, examples.fires)),
            "das": search_directions(
                subject,
                layer,
                [change for case in usable for change in case.states.interchanges(case.pair, layer)],
                means[layer],
                steps=self.search_steps,
                batch_size=self.search_batch,
                rate=self.search_rate,
                seed=self.seed,
            ),
        }
        return Found(layer, examples, directions, means)

    def _change(self, subject: Subject, case: _Case, found: Found) -> list[Measurement]:
        """All interventions on one pair, with what was found on other skeletons."""
        pair, states = case.pair, case.states
        generator = np.random.Generator(np.random.PCG64([self.seed, case.number]))
        shape = (self.random_draws, *found.means[0].shape)
        random = unit(generator.standard_normal(shape))
        shuffled = found.examples.means(generator.permutation(found.examples.fires))
        steps = towards_donor(states, found, {**found.directions, "shuffled": shuffled}, random)
        lost = away_from_donor(states, found, random)
        profile = [along(states.difference(n), states.by_position(means)) for n, means in enumerate(found.means)]
        changes = [(found.layer, step) for _, _, step in steps] + list(enumerate(profile))
        readings = edited_readings(subject, pair, pair.base, states, changes)
        losses = edited_readings(subject, pair, pair.donor, states, [(found.layer, step) for _, _, step in lost])
        rows = [
            _row(name, found.layer, reading, states, step, draw=draw, chosen=True)
            for (name, draw, step), reading in zip([*steps, *lost], [*readings[: len(steps)], *losses], strict=True)
        ]
        for name, over_layers in (("full", case.full), ("along", readings[len(steps) :])):
            for layer, reading in enumerate(over_layers):
                step = profile[layer] if name == "along" else states.difference(layer)
                chosen = name == "full" and layer == found.layer
                if chosen or layer != found.layer:
                    rows.append(_row(name, layer, reading, states, step, chosen=chosen))
        return rows


def _row(
    name: str, layer: int, reading: Readout, states: CaseStates, step: Array, *, draw: int = 0, chosen: bool
) -> Measurement:
    return {
        "measurement": "decision",
        "intervention": name,
        "layer": layer,
        "draw": draw,
        "chosen": chosen,
        "length": float(np.linalg.norm(step, axis=-1).mean()),
        "margin": reading.margin,
        "mass": reading.mass,
        "flipped": (reading.margin > 0) != (states.common["m_base"] > 0),
    }
