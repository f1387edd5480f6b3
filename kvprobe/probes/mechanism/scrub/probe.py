"""Scrubbing the note hypothesis (protocol 4.4; critique CI7, G7): is the conclusion all that the decision reads?

The note of a prompt are the k strongest positions after its field, as pairs of other skeletons rank their slots; the
rest are all other positions after the field. Their entries are resampled from prompts of other scenarios that decide
between the same two actions (task `shared_actions`): other domain, field, values, request, and case order.

    note_same, rest_same, all_same   donors with the same conclusion, one for each node: nothing should change
    note_opposite, rest_opposite     donors with the other conclusion: the note should turn the decision, the rest
                                     should not; where it does, the hypothesis fails
    note_rewritten                   as note_same, and what the note's donor read before its field is itself resampled
                                     from any prompt before the note is recomputed
    hypothesis                       the whole claim: the note from a donor with the same conclusion; the rest, the
                                     field and all before it from any prompts whatever
    anything                         all three from any prompts: what no information at all looks like

`drift` is |margin' - margin| over the gap, `explained` the share of the way from `anything` back to the unedited
decision that `hypothesis` keeps. `..._other_wording` are the same with donors that are also worded otherwise.
`note_opposite_k`, `rest_opposite_k` sweep the note's size; `in_sample_...` ranks on the pair that is scrubbed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from kvprobe.errors import SampleError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.probes.kit.measures import decision_effects
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.ranking import held_out_orders, in_sample_order, single_positions
from kvprobe.probes.legacy import Probe
from kvprobe.probes.mechanism.injection.probe import DIRECTIONS
from kvprobe.probes.mechanism.scrub.scrubbing import (
    DonorSampler,
    Node,
    Prompt,
    Scrubbed,
    Wordings,
    conclusion,
    nothing,
    scrub,
)
from kvprobe.probes.mechanism.specificity.probe import over_draws
from kvprobe.stats import Effect, StatisticsConfig, maximum, mean, ratio_of_sums
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

ARMS = (
    "note_same",
    "rest_same",
    "all_same",
    "note_opposite",
    "rest_opposite",
    "note_rewritten",
    "hypothesis",
    "anything",
)
OTHER_WORDING = ("note_same", "rest_same", "all_same", "note_opposite", "rest_opposite")
HELD_OUT, IN_SAMPLE = "", "in_sample_"
SWEPT = {HELD_OUT: ("note_opposite", "rest_opposite"), IN_SAMPLE: ("note_opposite",)}


@PROBES.register("scrub")
class Scrub(Probe):
    """Whether the conclusion is all that the decision reads from the notes: causal scrubbing across scenarios."""

    name: ClassVar[str] = "scrub"
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        **{f"{arm}.drift": PaperEntry("scrub", f"drift_{arm}", "abs_drift_over_gap") for arm in ARMS[:3]},
        "note_opposite.recovery": PaperEntry("scrub", "rec_note_opp", "recovery_to_opposite"),
        "rest_opposite.recovery": PaperEntry("scrub", "rec_rest_opp", "recovery_to_opposite"),
    }

    class Parameters(base.Parameters):
        """The note's size and how donors are drawn."""

        note_size: int = Field(default=8, ge=1, description="positions of the note in all arms but the sweep")
        sizes: tuple[int, ...] = Field(default=(1, 2, 4, 8, 16), min_length=1, description="of the note in the sweep")
        draws: int = Field(default=1, ge=1, description="resamplings of each prompt and arm")
        minimum_donors: int = Field(default=4, ge=1, description="skeletons that must match, else it is refused")
        folds: int = Field(default=5, ge=2, description="of the cross-fitted ranking")
        seed: int = Field(default=0, ge=0, description="of folds and donors")
        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Rows `unedited` for each prompt, and `decision` for each arm and draw of the prompts that can be scrubbed.

        These are the prompts that the model decides rightly and for which enough others are, too; `donors` in the
        unedited rows is the number of donor skeletons of whatever node has fewest. `m_base` and `m_donor` are those
        of the row's direction: `m_base` of the prompt that is scrubbed. All prompts' caches are in memory at once.

        Raises:
            SampleError: the model decides most prompts rightly, and yet none has enough donors.
        """
        ways = [way for pair in pairs for way in (pair, pair.reversed())]
        singles, readings, prompts = [], [], []
        for index, pair in enumerate(ways):
            unedited = prefill_pair(subject, pair)
            singles.append(single_positions(subject, pair, unedited, self.parameters.batch_size))
            readings.append(unedited)
            prompts.append(Prompt(pair, unedited.stale))
            progress(index + 1, 3 * len(ways))
        population = [prompt for prompt, single in zip(prompts, singles, strict=True) if single.decided]
        held_out = held_out_orders(ways, singles, self.parameters.folds, self.parameters.seed)
        rows, scrubbed = [], 0
        for index, prompt in enumerate(prompts):
            orders = {HELD_OUT: held_out[index], IN_SAMPLE: in_sample_order(singles[index])}
            scrubs = _Scrubs(self.parameters, subject, prompt, orders, self._samplers(population, index))
            donors = scrubs.donors() if singles[index].decided else 0
            common = {"pair": index // 2, "direction": DIRECTIONS[index % 2], **readings[index].common()}
            rows.append({**common, "measurement": "unedited", "donors": donors})
            if donors >= self.parameters.minimum_donors:
                rows += [{**common, **row} for row in scrubs.rows(readings[index])]
                scrubbed += 1
            progress(len(ways) + 2 * (index + 1), 3 * len(ways))
        if not scrubbed and 2 * len(population) > len(prompts):
            raise SampleError(
                f"No prompt has donors from {self.parameters.minimum_donors} skeletons: add pairs, or use the task "
                "shared_actions with fewer pairs of actions."
            )
        return rows

    def _samplers(self, population: Sequence[Prompt], number: int) -> dict[Wordings, DonorSampler]:
        generator = np.random.Generator(np.random.PCG64([self.parameters.seed, number]))
        # In a task of one wording no donor is worded otherwise, and those arms are left out.
        several = len({prompt.pair.scenario.wording for prompt in population}) > 1
        wordings: tuple[Wordings, ...] = ("same", "other") if several else ("same",)
        return {kind: DonorSampler(population, kind, self.parameters.minimum_donors, generator) for kind in wordings}

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Recovery, margin shift, flip rate, drift and coverage of each arm, the sweep, and the share explained."""
        decisions = rows[rows["measurement"] == "decision"]
        floor = float(rows["noise_floor"].max())
        if decisions.empty:
            raise SampleError("No prompt was scrubbed: the model decides too few of them rightly.")
        effects: list[Effect] = []
        for name, part in decisions.groupby("intervention", sort=False):
            effects += decision_effects(over_draws(part, statistics), statistics, floor)
            effects += _drift_and_coverage(str(name), part, statistics, floor)
        effects += _explained(decisions, statistics, floor)
        unedited = rows[rows["measurement"] == "unedited"]
        left_out = len(unedited) - len(decisions.groupby(["pair", "direction"]))
        effects = [replace(effect, excluded=left_out) for effect in effects]
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Drift, interchange and the sweep of the note's size; one column for each model."""
        from kvprobe.probes.mechanism.scrub.figure import draw_scrub

        return draw_scrub(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Interchange and scrubbing of all models into one axes."""
        from kvprobe.probes.mechanism.scrub.figure import scrub_panel

        scrub_panel(axes, panels)


@dataclass(frozen=True, eq=False)
class _Scrubs:
    """All scrubs of one prompt; `orders` are its ranked positions by what the names of the arms begin with."""

    parameters: Scrub.Parameters
    subject: Subject
    prompt: Prompt
    orders: Mapping[str, list[int]]
    samplers: Mapping[Wordings, DonorSampler]

    def donors(self) -> int:
        """From how many skeletons the donors come, for the node and the wording with fewest."""
        nodes = hypotheses(self.prompt.pair, self.orders[HELD_OUT], self.parameters.note_size)
        notes = nodes["note_same"] + nodes["note_opposite"]
        return min(sampler.distinct(self.prompt, node) for sampler in self.samplers.values() for node in notes)

    def rows(self, unedited: PrefilledPair) -> list[Measurement]:
        """One row for each scrub."""
        scrubs, pair = self._all(), self.prompt.pair
        patches = [scrubbed.patches for _, _, _, scrubbed in scrubs]
        margins = patched_margins(
            self.subject, pair, pair.base, self.prompt.cache, patches, batch_size=self.parameters.batch_size
        )
        return [
            {
                "measurement": "decision",
                "intervention": name,
                "note_size": size,
                "draw": draw,
                "coverage": scrubbed.coverage,
                "margin": margin,
                "flipped": (margin > 0) != (unedited.base.margin > 0),
            }
            for (name, size, draw, scrubbed), margin in zip(scrubs, margins, strict=True)
        ]

    def _all(self) -> list[tuple[str, int, int, Scrubbed]]:
        """(name, note size, draw, what it is run with) of every scrub."""
        own, held_out = self.parameters, self.orders[HELD_OUT]
        scrubs = []
        nodes = hypotheses(self.prompt.pair, held_out, own.note_size)
        for draw in range(own.draws):
            scrubs += [(arm, own.note_size, draw, self._run(nodes[arm])) for arm in ARMS]
            for arm in OTHER_WORDING if "other" in self.samplers else ():
                scrubs.append((f"{arm}_other_wording", own.note_size, draw, self._run(nodes[arm], "other")))
        for ranking, order in self.orders.items():
            for size in (size for size in own.sizes if size < len(order)):
                nodes = hypotheses(self.prompt.pair, order, size)
                scrubs += [(f"{ranking}{arm}_{size}", size, 0, self._run(nodes[arm])) for arm in SWEPT[ranking]]
        return scrubs

    def _run(self, nodes: Sequence[Node], wordings: Wordings = "same") -> Scrubbed:
        return scrub(self.subject, self.prompt, nodes, self.samplers[wordings])


def hypotheses(pair: Pair, order: Sequence[int], size: int) -> dict[str, tuple[Node, ...]]:
    """The nodes that each arm resamples, for the prompt whose positions are ranked in `order`."""
    chosen, others = sorted(order[:size]), sorted(order[size:])
    note = Node("note", lambda _: chosen, conclusion)
    rest = Node("rest", lambda _: others, conclusion)
    prefix = Node("prefix", lambda prompt: range(prompt.pair.field.start), nothing)
    before = Node("field and before", lambda _: range(pair.field.end), nothing)
    anything = (replace(note, variable=nothing), replace(rest, variable=nothing), before)
    return {
        "note_same": (note,),
        "rest_same": (rest,),
        "all_same": (note, rest),
        "note_opposite": (replace(note, opposite=True),),
        "rest_opposite": (replace(rest, opposite=True),),
        "note_rewritten": (replace(note, reads=(prefix,)),),
        "hypothesis": (note, *anything[1:]),
        "anything": anything,
    }


def _drift_and_coverage(name: str, rows: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    distance, gap = (rows["margin"] - rows["m_base"]).abs(), rows["m_donor"] - rows["m_base"]
    clusters = rows[statistics.cluster]
    return [
        ratio_of_sums(f"{name}.drift", distance, gap, clusters=clusters, statistics=statistics, noise_floor=floor),
        mean(f"{name}.coverage", rows["coverage"], clusters=clusters, statistics=statistics),
    ]


def _explained(decisions: pd.DataFrame, statistics: StatisticsConfig, floor: float) -> list[Effect]:
    """Of the margin that is lost when everything is resampled freely, the share that the hypothesis keeps."""
    names = ["hypothesis", "anything"]
    keys = ["pair", "direction", statistics.cluster]
    part = decisions[decisions["intervention"].isin(names)]
    margin = part.pivot_table(index=keys, columns="intervention", values="margin", aggfunc="mean")
    unedited = part.groupby(keys)["m_base"].first().loc[margin.index]
    kept, whole = margin["anything"] - margin["hypothesis"], margin["anything"] - unedited
    clusters = margin.index.get_level_values(statistics.cluster)
    return [
        ratio_of_sums(
            "hypothesis.explained", kept, whole, clusters=list(clusters), statistics=statistics, noise_floor=floor
        )
    ]
