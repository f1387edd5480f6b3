"""Facts spliced early or late in a prompt (protocol 6.5, critique CO1, CO6): is the asked one still found?

A list of facts is compiled apart and spliced right after the opening line (early) or right before the question (late).
Both prompts of a pair are decided by one full prefill and by composing the very same tokens. A greedy answer is right
when it is the one word that goes with the asked value, out of the whole vocabulary; agreement is of answers, not of
being right or wrong.

    splice_none, splice_neutral   the list compiled from behind nothing (the paper's way) and a neutral line
    seam_N                        as splice_none, its first N tokens run where they stand
    removed                       floor: no list

`X` is `early` or `late`; each arm has the effects of `fidelity_effects`, and

    X.arm.exact_match, X.full_prefill.exact_match   greedy answers that are right
    late_less_early.arm.exact_match                 by scenario
    X.seam_gain.exact_match                         seam_N less splice_none
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
from pydantic import Field

from kvprobe.composing.base import ReuseScheme, make_scheme
from kvprobe.composing.chunk import Header
from kvprobe.composing.prompts import compile_segment, composition_of
from kvprobe.edit.base import CachedPrompt
from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.fidelity import fidelity_effects, judged, paired_difference
from kvprobe.probes.kit.measures import pair_noise
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, proportion
from kvprobe.tasks.facts import FACTS
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

REFERENCE, FLOOR = "full_prefill", "removed"
Arm = tuple[ReuseScheme | None, Header]


@PROBES.register("facts")
class FactsProbe(Probe):
    """Answers from a spliced list of facts against a full prefill's, the list early or late."""

    name: ClassVar[str] = "facts"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{place}.{ours}": PaperEntry("facts_insertion_position", condition, metric)
        for place in ("early", "late")
        for ours, condition, metric in (
            (f"{REFERENCE}.exact_match", f"{place}/full", "accuracy"),
            ("splice_none.exact_match", f"{place}/transplant", "accuracy"),
            ("splice_none.agreement", place, "agreement"),
        )
    }
    may_lack: ClassVar[Mapping[str, str]] = {
        "early.*": "No prompt of the task has its list early.",
        "late.*": "No prompt of the task has its list late.",
        "late_less_early.*": "The task has its list at one place only.",
        "*.kappa": "The reference gives one of the answers in fewer than a fifth of the prompts.",
    }

    class Parameters(base.Parameters):
        """The seam."""

        seam: int = Field(8, ge=1, description="first tokens of the list that the seam arm runs")
        equivalence: float = Field(0.1, gt=0, description="share of the mean margin that counts as no difference")

    def arms(self) -> dict[str, Arm]:
        """By name the scheme, None for leaving the list out, and what the list was compiled behind."""
        splice = make_scheme("splice")
        return {
            "splice_none": (splice, "none"),
            "splice_neutral": (splice, "neutral"),
            f"seam_{self.parameters.seam}": (make_scheme("splice", seam=self.parameters.seam), "none"),
            FLOOR: (None, "none"),
        }

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each of its two prompts and each arm.

        Raises:
            ConfigError: a pair has no list or does not say where it stands.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            rows += [{"pair": index, **row} for row in self._pair_rows(subject, pair)]
            progress(index + 1, len(pairs))
        return rows

    def _pair_rows(self, subject: Subject, pair: Pair) -> Iterator[Measurement]:
        if FACTS not in pair.base.spans or "insertion" not in pair.scenario.attributes:
            raise ConfigError(f"The probe {self.name} needs pairs with a list of facts: use task facts.")
        answers = pair.base_answer_id, pair.donor_answer_id
        results = [prefill(subject, prompt.token_ids) for prompt in (pair.base, pair.donor)]
        references = [
            judged(subject, pair, donor=donor, logits=result.logits)
            for donor, result in zip((False, True), results, strict=True)
        ]
        from_cache = CachedPrompt(pair.base.token_ids, pair.base.spans, results[0].cache.take(slice(0, -1)))
        again = read(from_cache.decide(subject).logits, *answers)
        base_reading, donor_reading = (each.reading for each in references)
        shared = {
            **gate_columns(base_reading, donor_reading, abs(again.margin - base_reading.margin)),
            "insertion": pair.scenario.attributes["insertion"],
            "scenario": pair.scenario.attributes["scenario"],
        }
        # The list comes before the field and is the same in both prompts.
        chunks = {header: compile_segment(subject, pair.base, FACTS, header) for _, header in self.arms().values()}
        for reference, right in zip(references, answers, strict=True):
            own = {"reference_exact": int(reference.logits.argmax()) == right}
            for name, (scheme, header) in self.arms().items():
                held = {} if scheme is None else {FACTS: chunks[header]}
                composition = composition_of(reference.prompt, held, without=[FACTS] if scheme is None else [])
                composed = (scheme or make_scheme("full_prefill")).compose(subject, composition)
                logits = composed.decide(subject).logits
                exact = int(logits.argmax()) == right
                yield {**shared, **own, "arm": name, **reference.compare(logits), "exact": exact}

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Fidelity and exact matches of every arm with the list early and late, contrasts, the noise."""
        effects: list[Effect] = []
        for place, part in rows.groupby("insertion", sort=False):
            once = part[part["arm"] == FLOOR]
            effects.append(_matches(f"{place}.{REFERENCE}", once, "reference_exact", statistics))
            for arm, some in part.groupby("arm", sort=False):
                bound = self.parameters.equivalence
                effects += fidelity_effects(f"{place}.{arm}", some, statistics, equivalence=bound)
                effects.append(_matches(f"{place}.{arm}", some, "exact", statistics))
            arms = (f"seam_{self.parameters.seam}", "splice_none")
            effects += paired_difference(f"{place}.seam_gain.exact_match", part, "exact", arms, statistics)
        for arm, part in rows.groupby("arm", sort=False):
            name, places = f"late_less_early.{arm}.exact_match", ("late", "early")
            effects += paired_difference(name, part, "exact", places, statistics, by="insertion", within="scenario")
        effects.append(pair_noise(rows, statistics))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Exact matches and divergence of every arm, early and late; one column for each model."""
        from kvprobe.probes.composing.facts.figure import draw_facts

        return draw_facts(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Exact matches of full prefill and splice, early and late, all models."""
        from kvprobe.probes.composing.facts.figure import facts_panel

        facts_panel(axes, panels)


def _matches(name: str, rows: pd.DataFrame, column: str, statistics: StatisticsConfig) -> Effect:
    clusters = rows[statistics.cluster]
    return proportion(f"{name}.exact_match", rows[column].astype(float), clusters=clusters, statistics=statistics)
