"""Field position (protocol 1.2, critique ME2): does the field act for itself when it stands near the decision?

The task `field_position` crosses where the session block stands (before or after the rule), how many neutral notes the
prompt has, and how many of them name the field. In every cell the field alone and growing suffixes are transplanted
from the donor. `X` in an effect's name is a slot (`start`, pooled over its cells) or a cell
(`start.notes_4.mentions_0`):

    X.field_only.recovery   the field's own entries
    X.suffix_20.recovery    the last 20% of the entries from the field to the decision, and so on
    X.suffix_for_80         the smallest suffix that recovers 0.8

Each factor's effect is a difference within scenarios, between its highest and its lowest level, all else equal:
`distance.field_only_difference`, `mentions.field_only_difference`, `slot.field_only_difference`, and the same of
`suffix_for_80_difference`. On a model with sliding windows, `inside_window` and `outside_window` split the pairs by
whether the decision token itself can see the field in a sliding layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
from pydantic import Field

from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.doses import FRACTIONS, dose_effects, measure_dose, recoveries, smallest_suffix
from kvprobe.probes.kit.measures import decision_effects, pair_noise
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, mean
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

# The factors by the name they have in effects, and the column of rows that holds their levels.
FACTORS = {"distance": "notes", "mentions": "mentions", "slot": "slot_order"}
SLOTS = ("start", "after_policy", "after_filler", "end")
_PAPER_SLOTS = {
    "start": "pos0:early(before gate)",
    "after_policy": "pos1:after gate",
    "after_filler": "pos2:after filler",
    "end": "pos4:hoisted(before decision)",
}


@PROBES.register("field_position")
class FieldPositionProbe(Probe):
    """What the field's own entries do, by its place, its distance from the decision and how often it is named."""

    name: ClassVar[str] = "field_position"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"{slot}.{effect}": PaperEntry("field_position_dose", place, metric)
        for slot, place in _PAPER_SLOTS.items()
        for effect, metric in (
            ("field_only.recovery", "field_only_recovery"),
            ("suffix_for_80", "suffix_fraction_for_80pct"),
        )
    }

    class Parameters(base.Parameters):
        """Which suffixes are transplanted."""

        fractions: tuple[float, ...] = Field(default=FRACTIONS, min_length=1, description="of the changed positions")
        batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each transplant, with the pair's cell.

        Raises:
            ConfigError: the pairs are not of the task `field_position`.
        """
        window = subject.architecture.window(subject.config)
        rows = []
        for index, pair in enumerate(pairs):
            cell = _cell(pair)
            for row in measure_dose(subject, pair, self.parameters.fractions, self.parameters.batch_size):
                sees = None if window is None else row["distance"] < window
                rows.append({"pair": index, **cell, **row, "window": window, "inside_window": sees})
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Field-only recovery and suffix dose by slot and by cell, the factors' effects, windows, noise."""
        effects: list[Effect] = []
        for slot, part in rows.groupby("slot", sort=False):
            effects += dose_effects(part, str(slot), statistics)
        for cell, part in rows.groupby(["slot", "notes", "mentions"], sort=False):
            effects += dose_effects(part, cell_name(*cell), statistics)
        for factor in FACTORS:
            effects += factor_effects(rows, factor, statistics)
        effects += _window_effects(rows, statistics)
        effects.append(pair_noise(rows, statistics))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Field-only recovery by cell above, the suffix dose by cell below; one column for each model."""
        from kvprobe.probes.mechanism.field_position.figure import draw_field_position

        return draw_field_position(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Field-only recovery over the distance in tokens, all models."""
        from kvprobe.probes.mechanism.field_position.figure import field_position_panel

        field_position_panel(axes, panels)


def cell_name(slot: Hashable, notes: Hashable, mentions: Hashable) -> str:
    """What effects of one cell begin with."""
    return f"{slot}.notes_{notes}.mentions_{mentions}"


def factor_effects(rows: pd.DataFrame, factor: str, statistics: StatisticsConfig) -> list[Effect]:
    """How the highest level of a factor differs from the lowest, in scenarios that count at both; none for one level.

    Differences are between the recoveries of two single pairs, so they are means of ratios.
    """
    column = FACTORS[factor]
    pairs = rows[rows["intervention"] == "field_only"].set_index("pair")
    pairs = pairs.assign(field_only=recoveries(pairs), suffix_for_80=smallest_suffix(rows))
    levels = sorted(pairs[column].unique())
    others = ["scenario", *(other for other in FACTORS.values() if other != column)]
    effects: list[Effect] = []
    for measured in ("field_only", "suffix_for_80"):
        table = pairs.pivot_table(index=[*others, statistics.cluster], columns=column, values=measured)
        if len(levels) < 2:
            continue
        both = table[[levels[0], levels[-1]]].dropna()
        if len(both):
            effects.append(
                mean(
                    f"{factor}.{measured}_difference",
                    both[levels[-1]] - both[levels[0]],
                    clusters=list(both.index.get_level_values(statistics.cluster)),
                    statistics=statistics,
                )
            )
    return effects


def _cell(pair: Pair) -> Measurement:
    attributes = pair.scenario.attributes
    missing = [key for key in ("scenario", "slot", "notes", "mentions") if key not in attributes]
    if missing:
        raise ConfigError(f"The probe field_position needs pairs that say their {missing[0]}: use task field_position.")
    return {
        "scenario": int(attributes["scenario"]),
        "slot": attributes["slot"],
        "slot_order": SLOTS.index(attributes["slot"]),
        "notes": int(attributes["notes"]),
        "mentions": int(attributes["mentions"]),
    }


def _window_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
    field_only = rows[(rows["intervention"] == "field_only") & rows["window"].notna()]
    floor = float(rows["noise_floor"].max())
    effects: list[Effect] = []
    for sees, part in field_only.groupby("inside_window", sort=False):
        place = "inside_window" if sees else "outside_window"
        effects += decision_effects(part.assign(intervention=f"{place}.field_only"), statistics, floor)[:1]
    return effects
