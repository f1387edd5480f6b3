"""Scrubbing the note hypothesis (protocol 4.4; critique CI7, G7): is the conclusion all that the decision reads?

The note of a prompt is the k strongest positions after its field, as pairs of other skeletons rank their slots; the
rest is all other positions after the field. Their entries are resampled from prompts of other scenarios that decide
between the same two actions (task `shared_actions`): other domain, field, values, request, and case order.

    note_same, rest_same, all_same   donors with the same conclusion, one for each node: nothing should change
    note_opposite, rest_opposite     donors with the other conclusion: the note should flip the decision, the rest
                                     should not; where it does, the hypothesis fails
    note_rewritten                   as note_same, and what the note's donor read before its field is itself resampled
                                     from any prompt before the note is recomputed
    hypothesis                       the whole claim: the note from a donor with the same conclusion; the rest, the
                                     field and all before it from any prompts whatever
    anything                         all three from any prompts: what no information at all looks like

`..._other_wording` are the same with donors that are also worded differently. `note_opposite_k`, `rest_opposite_k`
sweep the note's size; `in_sample_...` ranks on the pair that is scrubbed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from kvprobe.errors import SampleError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.decisions import margin_rows
from kvprobe.probes.kit.directions import both_ways
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.ranking import Ranking, rankings, single_positions
from kvprobe.probes.mechanism.scrub.hypotheses import ARMS, OTHER_WORDING, hypotheses
from kvprobe.probes.mechanism.scrub.scrubbing import DonorSampler, Node, Prompt, Scrubbed, Wordings, scrub
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@PROBES.register("scrub")
class Scrub(Probe):
    """Whether the conclusion is all that the decision reads from the notes: causal scrubbing across scenarios."""

    needs_all_pairs: ClassVar[bool] = True

    note_size: int = Field(default=8, ge=1, description="positions of the note in all arms but the sweep")
    sizes: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 4, 8, 16), min_length=1, description="of the note in the sweep"
    )
    draws: int = Field(default=1, ge=1, description="resamplings of each prompt and arm")
    minimum_donors: int = Field(default=4, ge=1, description="skeletons that must match, else it is refused")
    folds: int = Field(default=5, ge=2, description="of the cross-fitted ranking")
    seed: int = Field(default=0, ge=0, description="of folds and donors")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Rows `unedited` for each prompt, and `decision` for each arm and draw of the prompts that can be scrubbed.

        These are the prompts that the model decides correctly and for which enough others are, too; `donors` in the
        unedited rows is the number of donor skeletons of whatever node has fewest. `m_base` and `m_donor` are those
        of the row's direction: `m_base` of the prompt that is scrubbed. All prompts' caches are in memory at once.

        Raises:
            SampleError: the model decides most prompts correctly, and yet none has enough donors.
        """
        ways = both_ways(pairs)
        prefilled, singles = [], []
        for index, (_, pair) in enumerate(ways):
            prefilled.append(prefill_pair(subject, pair))
            singles.append(single_positions(subject, pair, prefilled[-1], self.batch_size))
            progress(index + 1, 3 * len(ways))
        prompts = [Prompt(pair, both.stale) for (_, pair), both in zip(ways, prefilled, strict=True)]
        population = [prompt for prompt, single in zip(prompts, singles, strict=True) if single.decided]
        rows, scrubbed = [], 0
        for index, ranking in enumerate(rankings([pair for _, pair in ways], singles, self.folds, self.seed)):
            scrubs = _Scrubs(self, subject, prompts[index], ranking, self._samplers(population, index))
            donors = scrubs.donors() if ranking.single.decided else 0
            direction, _ = ways[index]
            rows.append({**direction, **prefilled[index].common(), "measurement": "unedited", "donors": donors})
            if donors >= self.minimum_donors:
                rows += [{**direction, **row} for row in scrubs.rows(prefilled[index])]
                scrubbed += 1
            progress(len(ways) + 2 * (index + 1), 3 * len(ways))
        if not scrubbed and 2 * len(population) > len(prompts):
            raise SampleError(
                f"No prompt has donors from {self.minimum_donors} skeletons: add pairs, or use the task "
                "shared_actions with fewer pairs of actions."
            )
        return rows

    def _samplers(self, population: Sequence[Prompt], number: int) -> dict[Wordings, DonorSampler]:
        generator = np.random.Generator(np.random.PCG64([self.seed, number]))
        # In a task of one wording no donor is worded differently, and those arms are left out.
        several = len({prompt.pair.scenario.wording for prompt in population}) > 1
        wordings: tuple[Wordings, ...] = ("same", "other") if several else ("same",)
        return {kind: DonorSampler(population, kind, self.minimum_donors, generator) for kind in wordings}


@dataclass(frozen=True, eq=False)
class _Scrubs:
    """All scrubs of one prompt."""

    probe: Scrub
    subject: Subject
    prompt: Prompt
    ranking: Ranking
    samplers: dict[Wordings, DonorSampler]

    def donors(self) -> int:
        """From how many skeletons the donors come, for the node and the wording with fewest."""
        nodes = hypotheses(self.prompt.pair, self.ranking.held_out, self.probe.note_size)
        notes = nodes["note_same"] + nodes["note_opposite"]
        return min(sampler.distinct(self.prompt, node) for sampler in self.samplers.values() for node in notes)

    def rows(self, prefilled: PrefilledPair) -> list[Measurement]:
        """One row for each scrub."""
        patches = [
            (
                {
                    "measurement": "decision",
                    "intervention": name,
                    "note_size": size,
                    "draw": draw,
                    "coverage": scrubbed.coverage,
                },
                scrubbed.patches,
            )
            for name, size, draw, scrubbed in self._all()
        ]
        return margin_rows(self.subject, self.prompt.pair, prefilled, patches, self.probe.batch_size)

    def _all(self) -> Iterator[tuple[str, int, int, Scrubbed]]:
        """(name, note size, draw, what it is run with) of every scrub."""
        probe, pair = self.probe, self.prompt.pair
        nodes = hypotheses(pair, self.ranking.held_out, probe.note_size)
        for draw in range(probe.draws):
            for arm in ARMS:
                yield arm, probe.note_size, draw, self._scrub(nodes[arm])
            for arm in OTHER_WORDING if "other" in self.samplers else ():
                yield f"{arm}_other_wording", probe.note_size, draw, self._scrub(nodes[arm], "other")
        for prefix, order, arms in (
            ("", self.ranking.held_out, ("note_opposite", "rest_opposite")),
            ("in_sample_", self.ranking.in_sample, ("note_opposite",)),
        ):
            for size in (size for size in probe.sizes if size < len(order)):
                nodes = hypotheses(pair, order, size)
                for arm in arms:
                    yield f"{prefix}{arm}_{size}", size, 0, self._scrub(nodes[arm])

    def _scrub(self, nodes: Sequence[Node], wordings: Wordings = "same") -> Scrubbed:
        return scrub(self.subject, self.prompt, nodes, self.samplers[wordings])
