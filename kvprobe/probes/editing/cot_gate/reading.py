"""What the rows of `cot_gate` mean: which decisions turn directly, after a chain of thought, and after k tokens of it.

`direct.field_only.new_rate`, `think.field_only.old_rate`, `forced.field_only_8.new_rate` and so on, with a prefix
`poisoned.` where the context states the old conclusion. A censored chain counts neither for the new nor for the old
action, so that `new_rate`, `old_rate` and `censored` add up to 1. Within pairs `gate.field_only.difference` (think less
direct) and `chain.field_only.difference` (whole chain less none, same prompt).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Doses
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.cot_gate.probe import ARMS, CotGate
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, baseline_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ARMS = {
    "oracle": ("full reprefill", COLORS["green"]),
    "stale": ("stale", COLORS["grey"]),
    "field_only": ("field only", COLORS["vermilion"]),
    "erratum": ("erratum", COLORS["blue"]),
    "field_and_erratum": ("field and erratum", COLORS["purple"]),
}
_PAPER_ARMS = {"oracle": "oracle_new", "stale": "stale_full", "field_only": "field_only", "erratum": "erratum"}


def effects(sample: Sample, _: CotGate) -> Iterator[Effect]:
    """Rates by mode, arm and cut, what chains say and how they end, differences within pairs, baselines."""
    for remark, part in sample.by("remark"):
        prefix = "" if remark == "none" else "poisoned."
        for mode, arm, cell in part.by("mode", "arm"):
            if mode == "forced":
                for _cut, forced in cell.by("cut"):
                    yield from _rates(forced, f"{prefix}forced.{arm}_{{cut}}")
            else:
                yield from _rates(cell, f"{prefix}{mode}.{arm}")
            if mode == "think":
                yield from _chain_rates(cell, f"{prefix}think.{arm}")
        for arm, cell in part.by("arm"):
            yield from _differences(cell, prefix, arm)
    if len(chains := sample.of(mode="think")):
        yield chains.rate("chains.censored", "censored")
        yield chains.mean("chains.length", "length", "tokens")
    yield from baseline_effects(sample)
    yield sample.noise()


def names(probe: CotGate) -> Iterator[str]:
    """Those of `effects`."""
    before = "" if probe.remark == "none" else "poisoned."
    rates = ("new_rate", "old_rate")
    yield from joined((f"{before}direct", f"{before}think"), ARMS, rates)
    yield from joined(f"{before}think", ARMS, ("censored", "names_new", "names_old"))
    yield from joined(f"{before}forced", [f"{arm}_{cut}" for arm in ARMS for cut in probe.cut_after], rates)
    yield from joined((f"{before}gate", f"{before}chain"), ARMS, "difference")
    yield from ("chains.censored", "chains.length", *BASELINE_RATES, NOISE)


def _ended(rows: pd.DataFrame) -> pd.Series:
    """Whether a decision counts: all but those after a whole chain that did not end by itself."""
    return (rows["mode"] != "think") | ~rows["censored"].fillna(value=False).astype(bool)


def _rates(sample: Sample, condition: str) -> Iterator[Effect]:
    ended, new = _ended(sample.rows), sample.rows["margin"] > 0
    yield sample.rate(f"{condition}.new_rate", ended & new)
    yield sample.rate(f"{condition}.old_rate", ended & ~new)


def _chain_rates(sample: Sample, condition: str) -> Iterator[Effect]:
    yield sample.rate(f"{condition}.censored", ~_ended(sample.rows))
    for value in ("new", "old"):
        yield sample.rate(f"{condition}.names_{value}", sample.rows["value_said"] == value)


def _differences(sample: Sample, prefix: str, arm: str) -> Iterator[Effect]:
    """How much more often an arm decides for the new value after a chain: than directly, and than after none."""
    compared = sample.of(mode=("think", "direct"))
    new = _ended(compared.rows) & (compared.rows["margin"] > 0)
    # Where no decision changes at all, the spread is 0; still one more pair might have, which the noise floor says.
    yield from compared.difference(f"{prefix}gate.{arm}.difference", new, "mode", "think", "direct", noise_floor=None)
    # A whole chain against none is a matter of forced answers alone, whether the chain ended or not.
    compared = sample.of(mode=("think", "forced"))
    compared = compared.where(compared.rows["cut"].fillna(0) == 0)
    yield from compared.difference(
        f"{prefix}chain.{arm}.difference", compared.rows["margin"] > 0, "mode", "think", "forced", noise_floor=None
    )


class Forced(Doses):
    """Decisions forced after k tokens of a chain; the axis says how long whole chains are."""

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw the arms of one model."""
        super().draw(axes, panel)
        length = panel.effects["chains.length"].estimate
        axes.set_xlabel(f"{self.xlabel}\n(whole chains: {length:.0f} on average)")
        axes.set_xticks(self.sizes(panel))


def figure(panels: Sequence[Panel]) -> FigureSpec:
    """Above, decisions directly and after a chain for each arm; below, those forced after k chain tokens."""
    poisoned = any(panel.select("poisoned.think.oracle", "new_rate") for panel in panels)
    prefix, where = ("poisoned.", "\n(a remark in the context states the old conclusion)") if poisoned else ("", "")
    blue, vermilion = COLORS["blue"], COLORS["vermilion"]
    series = [
        Series(f"{prefix}direct.{{arm}}.new_rate", "direct: new action", blue, "s"),
        Series(f"{prefix}direct.{{arm}}.old_rate", "direct: old action", blue, "s", filled=False),
        Series(f"{prefix}think.{{arm}}.new_rate", "after a chain: new action", vermilion),
        Series(f"{prefix}think.{{arm}}.old_rate", "after a chain: old action", vermilion, filled=False),
    ]
    curves = {f"{prefix}forced.{arm}_{{cut}}": (f"{label} (below)", color) for arm, (label, color) in _ARMS.items()}
    return FigureSpec(
        f"Does editing the field alone suffice once the model thinks?{where}",
        (
            Rates({arm: label for arm, (label, _) in _ARMS.items()}, tuple(series), "share of decisions", 3.0),
            Forced(
                curves,
                "share of decisions\nfor the new value",
                2.6,
                "chain tokens before a forced answer",
                "new_rate",
                levels=(),
                ylim=(-0.05, 1.05),
                apart=0.12,
            ),
        ),
        main=DosesByModel(
            (f"{prefix}forced.field_only_{{cut}}", "new_rate"),
            (f"{prefix}forced.erratum_{{cut}}", "new_rate"),
            "Field only (solid), erratum (dashed)",
            "chain tokens before the answer",
            "share of new decisions",
            log=False,
            levels=(),
            ylim=(-0.05, 1.05),
        ),
        key_columns=3,
    )


READING = Reading(
    effects,
    figure,
    paper={
        **{
            f"{mode}.{arm}.new_rate": PaperEntry("cot_gate_diverse", f"{theirs}/{arm}", "P_correct")
            for mode, theirs in (("direct", "direct"), ("think", "cot"))
            for arm in ("oracle", "field_only", "erratum")
        },
        **{
            f"poisoned.{mode}.{arm}.old_rate": PaperEntry(
                "thinking_on_off", f"{theirs}/poison/account_role/{their_arm}", "P_unsafe"
            )
            for mode, theirs in (("direct", "direct"), ("think", "cot"))
            for arm, their_arm in _PAPER_ARMS.items()
        },
    },
    step=2,
    names=names,
)
