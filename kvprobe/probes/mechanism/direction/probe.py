"""Conclusion direction (protocol 4.2): does one direction of the residual stream carry "this case fires"?

The residual stream is changed after one block, at the tokens of the rule where a case's value, its action and its end
stand; the rest of the prompt is run as usual. A direction is found for each of these three kinds of token, with both
cases of the rule pooled, so that it stands for *this case fires* and not for *the first case fires*. It is found on
other skeletons, and so is the layer: the one where exchanging all that the tokens hold does most.

    full                 everything the donor has there
    along                only the coordinate along the difference of means of firing and not firing
    orthogonal           everything but that coordinate, at its own length
    logistic             the coordinate along a logistic probe's normal, at its own length
    das                  the coordinate along the direction that gradient descent finds to act most, at its own length
    in_sample            as `along`, found on all skeletons, those that it is tested on included

Controls have the length of `along`, token for token, and point towards the donor (critique CI4; the paper's random step
was shorter by the root of the width):

    random               random directions
    shuffled             difference of means of shuffled labels
    other_concept        difference of means of the case stated first and the one stated last
    component            the leading principal component
    orthogonal_matched   the direction of `orthogonal`

Necessity (critique CI5): in the donor prompt the coordinate is set to its mean over firing and not firing, which keeps
the mean that zeroing would remove as well. `necessity.drop` is the share of the gap that is lost so, and
`necessity_random.drop` that along random directions. Which of a pair's values is the donor's is random, so the same
interventions the other way round would tell nothing new.

Firing and not firing cases have the same words, so the difference of means is not one of words. It could still be that
of a repeated word and a new one, since a case that fires names the word in the field; a direction counts by what the
decision does when only it is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from kvprobe.engine.readout import Readout
from kvprobe.errors import SampleError
from kvprobe.figures.panel import Panel
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.probes.kit.decoding import trained_on
from kvprobe.probes.kit.measures import decision_effects
from kvprobe.probes.legacy import Probe
from kvprobe.probes.mechanism.direction.case_states import CaseStates, Examples, Kind, edited_readings, read_case_states
from kvprobe.probes.mechanism.direction.directions import (
    Array,
    along,
    leading_component,
    logistic_direction,
    matched_step,
    search_directions,
    set_coordinate,
    unit,
)
from kvprobe.stats import Effect, StatisticsConfig, mean, ratio_of_sums
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

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


@PROBES.register("direction")
class Direction(Probe):
    """Whether moving the notes along one direction, found on other skeletons, moves the decision."""

    name: ClassVar[str] = "direction"
    needs_all_pairs: ClassVar[bool] = True

    class Parameters(base.Parameters):
        """Where the residual stream is changed, and how directions are found."""

        kinds: tuple[Kind, ...] = Field(("value", "action", "end"), min_length=1)
        folds: int = Field(default=3, ge=2, description="sets of skeletons, each tested with directions of the others")
        random_draws: int = Field(default=4, ge=1, description="random directions for each pair")
        search_steps: int = Field(default=40, ge=1, description="of gradient descent on the direction")
        search_batch: int = Field(default=4, ge=1, description="prompts in one such step")
        search_rate: float = Field(default=0.05, gt=0, description="its learning rate")
        seed: int = Field(default=0, ge=0)

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """A row for each pair, intervention and draw at the chosen layer; `full` and `along` at every layer."""
        states = [read_case_states(subject, pair, self.parameters.kinds) for pair in pairs]
        full = [
            edited_readings(subject, pair, pair.base, own, [(n, own.difference(n)) for n in range(subject.layers)])
            for pair, own in zip(pairs, states, strict=True)
        ]
        skeletons = [pair.scenario.skeleton for pair in pairs]
        rows: list[Measurement] = []
        done = 0
        for train, test in folds(skeletons, self.parameters.folds, self.parameters.seed):
            found = self._find(subject, pairs, states, full, train)
            for number in test:
                measured = self._change(
                    subject, pairs[number], states[number], full[number], found=found, number=number
                )
                rows += [{"pair": number, **states[number].common, **row} for row in measured]
                done += 1
                progress(done, len(pairs))
        return rows

    def _find(
        self,
        subject: Subject,
        pairs: Sequence[Pair],
        states: Sequence[CaseStates],
        full: Sequence[Sequence[Readout]],
        train: Sequence[int],
    ) -> Found:
        """Layer and directions from the pairs `train`, by which others are tested."""
        kept = trained_on([own.common for own in states])
        usable = [number for number in train if kept[number]]
        if not usable:
            raise SampleError("There is no pair to find a direction in, in one of the folds; add pairs.")
        # Chosen by what all that the tokens hold does, so that no kind of direction has a hand in it.
        shifts = [[reading.margin - states[n].common["m_base"] for reading in full[n]] for n in usable]
        layer = int(np.sum(shifts, axis=0).argmax())
        by_layer = [Examples.of([states[n] for n in usable], n_layer) for n_layer in range(subject.layers)]
        means = [examples.means(examples.fires) for examples in by_layer]
        examples, everyone = (
            by_layer[layer],
            Examples.of([own for own, known in zip(states, kept, strict=True) if known], layer),
        )
        interchanges = [change for n in usable for change in states[n].interchanges(pairs[n], layer)]
        directions = {
            "along": means[layer],
            "in_sample": everyone.means(everyone.fires),
            "other_concept": examples.means(examples.stated_first),
            "component": examples.by_kind(leading_component),
            "logistic": examples.by_kind(lambda rows: logistic_direction(rows, examples.fires)),
            "das": search_directions(
                subject,
                layer,
                interchanges,
                means[layer],
                steps=self.parameters.search_steps,
                batch_size=self.parameters.search_batch,
                rate=self.parameters.search_rate,
                seed=self.parameters.seed,
            ),
        }
        return Found(layer, examples, directions, means)

    def _change(
        self,
        subject: Subject,
        pair: Pair,
        states: CaseStates,
        full: Sequence[Readout],
        *,
        found: Found,
        number: int,
    ) -> list[Measurement]:
        """All that is done to one pair with what was found on other skeletons."""
        generator = np.random.Generator(np.random.PCG64([self.parameters.seed, number]))
        shape = (self.parameters.random_draws, *found.means[0].shape)
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
        for name, over_layers in (("full", full), ("along", readings[len(steps) :])):
            for layer, reading in enumerate(over_layers):
                step = profile[layer] if name == "along" else states.difference(layer)
                chosen = name == "full" and layer == found.layer
                if chosen or layer != found.layer:
                    rows.append(_row(name, layer, reading, states, step, chosen=chosen))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Recovery, margin shift and flip rate of each intervention, leads over the controls, and necessity."""
        chosen = rows[rows["chosen"].astype(bool)]
        floor = float(rows["noise_floor"].max())
        effects: list[Effect] = []
        for name in INTERVENTIONS:
            effects += decision_effects(chosen[chosen["intervention"] == name], statistics, floor)
        effects += [_lead(name, chosen, statistics, floor) for name in CONTROLS]
        for name in ("necessity", "necessity_random"):
            part = chosen[chosen["intervention"] == name]
            loss, gap = part["m_donor"] - part["margin"], part["m_donor"] - part["m_base"]
            clusters = part[statistics.cluster]
            effects.append(
                ratio_of_sums(f"{name}.drop", loss, gap, clusters=clusters, statistics=statistics, noise_floor=floor)
            )
        layers = chosen[chosen["intervention"] == "full"]
        depth = (layers["layer"] + 1) / (rows["layer"].max() + 1)
        effects.append(mean("chosen.depth", depth, clusters=layers[statistics.cluster], statistics=statistics))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Recovery by intervention above, that of everything and of the direction by layer below."""
        from kvprobe.probes.mechanism.direction.figure import draw_direction

        return draw_direction(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Recovery of everything, of the direction and of the random directions, by model."""
        from kvprobe.probes.mechanism.direction.figure import direction_panel

        direction_panel(axes, panels)


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


def _lead(control: str, rows: pd.DataFrame, statistics: StatisticsConfig, noise_floor: float) -> Effect:
    """Recovery of `along` beyond that of a control of the same length."""
    by_pair = rows.pivot_table(index="pair", columns="intervention", values="margin", aggfunc="mean")
    pairs = rows.groupby("pair")[["m_base", "m_donor", statistics.cluster]].first().loc[by_pair.index]
    return ratio_of_sums(
        f"lead_over_{control}.recovery",
        by_pair["along"] - by_pair[control],
        pairs["m_donor"] - pairs["m_base"],
        clusters=pairs[statistics.cluster],
        statistics=statistics,
        noise_floor=noise_floor,
    )
