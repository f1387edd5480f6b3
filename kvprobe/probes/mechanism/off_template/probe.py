"""Off-template prompts (protocol 2.5, family E): does the finding hold beyond the gated decision?

The field alone, growing suffixes, and everything from the field on are transplanted from the donor, on prompts of
another make: a two-hop question (task `two_hop`), a free conversation (`conversation`), and an attribute lookup
(`lookup`), where the field is nearly the answer and so may act for itself. Effects are named by the template, which
the task gives: `two_hop.field_only.recovery`, `lookup.suffix_10.recovery`; pairs of a task that names none are `own`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
from pydantic import Field

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.doses import dose_effects, measure_dose
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, maximum
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

_PAPER_TEMPLATES = {"two_hop": "multihop", "conversation": "natural", "lookup": "rag_lookup"}
_PAPER_CONDITIONS = {
    "field_only": "field_only",
    "suffix_10": "suffix_0.1",
    "suffix_50": "suffix_0.5",
    "full_downstream": "full_downstream",
}


@PROBES.register("off_template")
class OffTemplate(Probe):
    """The field alone and growing suffixes on two-hop questions, free conversation and attribute lookup."""

    name: ClassVar[str] = "off_template"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{template}.{ours}.recovery": PaperEntry("off_template", f"{named}/{theirs}", "decision_recovery")
        for template, named in _PAPER_TEMPLATES.items()
        for ours, theirs in _PAPER_CONDITIONS.items()
    }

    class Parameters(base.Parameters):
        """Which suffixes are transplanted."""

        fractions: tuple[float, ...] = Field(
            default=(0.05, 0.1, 0.2, 0.3, 0.5), min_length=1, description="of the changed positions"
        )
        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each transplant."""
        rows = []
        for index, pair in enumerate(pairs):
            template = pair.scenario.attributes.get("template", "own")
            dose = measure_dose(subject, pair, self.parameters.fractions, self.parameters.batch_size)
            rows += [{"pair": index, "template": template, **row} for row in dose]
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Recovery of each transplant by template, the error of the full one, noise."""
        effects: list[Effect] = []
        for template, part in rows.groupby("template", sort=False):
            effects += dose_effects(part, str(template), statistics)
        full = rows[rows["intervention"] == "full_downstream"]
        error = (full["margin"] - full["m_donor"]).abs()
        effects.append(maximum("full_downstream.error", error, clusters=full[statistics.cluster]))
        effects.append(maximum("noise.margin", full["noise_floor"], clusters=full[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Recovery by what was transplanted; one column for each model."""
        from kvprobe.probes.mechanism.off_template.figure import draw_off_template

        return draw_off_template(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Field-only recovery and suffixes of all models into one axes."""
        from kvprobe.probes.mechanism.off_template.figure import off_template_panel

        off_template_panel(axes, panels)
