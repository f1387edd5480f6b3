"""What the rows of `transplant` mean: fidelity of every arm, and contrasts that say what rotation and coupling do.

`X` is `self_contained` or `coupled`; each arm has the effects of `fidelity_effects`, and

    X.arm.token_share               tokens run to compose, over those of a prefill; compiling is not counted
    X.arm.cosine_above_wrong_chunk  cosine less that of the wrong chunk in the same prompt
    X.rotation.cosine_gain, .agreement_gain, .kl_gain   splice_none less no_rotation (kl: the other way round)
    coupling.agreement_loss         agreement of splice_neutral where self-contained less where coupled, by scenario
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.composing.transplant.probe import CONDITIONS, Transplant
from kvprobe.probes.kit.fidelity import FULL_PREFILL, REMOVED, WRONG
from kvprobe.probes.kit.reading.fidelity import FIDELITY, KAPPA_MAY_LACK, PROMPT, by_arm, fidelity_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLOORS = {WRONG: "wrong rule", "shuffled": "shuffled rule", REMOVED: "no rule"}
_ARMS = {
    FULL_PREFILL: "full prefill, in pieces",
    "splice_real": "compiled in its place",
    "splice_neutral": "splice, neutral header",
    "splice_bos": "splice, beginning of text",
    "splice_none": "splice, no header",
    "seam_8": "splice, 8 tokens repaired",
    "epic": "EPIC",
    "prompt_cache": "Prompt Cache",
    "cacheblend_15": "CacheBlend, 15%",
    "relative": "from another prompt",
    "no_rotation": "not rotated",
    **_FLOORS,
}
_MAIN = ("splice_real", "splice_neutral", "splice_none", "cacheblend_15", "no_rotation", WRONG)
_LAYOUTS = {
    "self_contained": ("rule before the field", COLORS["blue"], "o"),
    "coupled": ("field before the rule", COLORS["vermilion"], "s"),
}


def effects(sample: Sample, probe: Transplant) -> Iterator[Effect]:
    """Fidelity of every arm where the rule is self-contained and where it is coupled, contrasts, noise."""
    for _, part in sample.by("condition"):
        for arm, some in by_arm(part, probe.arms()):
            name = f"{{condition}}.{arm}"
            yield from fidelity_effects(some, name, equivalence=probe.equivalence)
            yield some.ratio(f"{name}.token_share", "tokens", "full_tokens")
        for reused in (reused for reused in probe.arms() if reused.name != WRONG):
            # How much of an arm's cosine any cache would have.
            name = f"{{condition}}.{reused.kind}.cosine_above_wrong_chunk"
            sized = part.named(**reused.sizes)
            yield from sized.difference(name, "cosine", "arm", reused.name, WRONG, within=PROMPT, unit="cosine")
        yield from _rotation(part)
    spliced, layouts = sample.of(arm="splice_neutral"), ("condition", *CONDITIONS)
    yield from spliced.difference("coupling.agreement_loss", "agrees", *layouts, within="scenario")
    yield sample.noise()


def names(probe: Transplant) -> Iterator[str]:
    """Those of `effects`."""
    arms = [arm.name for arm in probe.arms()]
    yield from joined(CONDITIONS, arms, (*FIDELITY, "token_share"))
    yield from joined(CONDITIONS, [arm for arm in arms if arm != WRONG], "cosine_above_wrong_chunk")
    yield from joined(CONDITIONS, "rotation", ("cosine_gain", "agreement_gain", "kl_gain"))
    yield from ("coupling.agreement_loss", NOISE)


def _rotation(sample: Sample) -> Iterator[Effect]:
    """What rotating keys is good for at the offsets of these prompts (critique CO3)."""
    gains = {"cosine_gain": ("cosine", "cosine"), "agreement_gain": ("agrees", "fraction"), "kl_gain": ("kl", "nats")}
    for gain, (column, unit) in gains.items():
        arms = ("no_rotation", "splice_none") if gain == "kl_gain" else ("splice_none", "no_rotation")
        yield from sample.difference(f"{{condition}}.rotation.{gain}", column, "arm", *arms, within=PROMPT, unit=unit)


@dataclass(frozen=True)
class AgreementByLayout(RatesByModel):
    """Agreement of some arms, self-contained on the left and coupled on the right."""

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw all models into one axes."""
        super().draw(axes, panels)
        axes.axhline(0.5, color=COLORS["ink"], lw=0.8, ls=(0, (4, 3)), zorder=1)
        place = -0.5
        for layout, (name, *_) in _LAYOUTS.items():
            names = [f"{layout}.{arm}.agreement" for arm in _MAIN]
            width = sum(any(effect in panel.effects for panel in panels) for effect in names)
            axes.text(place + width / 2, 1.1, name, ha="center", va="bottom", fontsize=7.5, color=COLORS["grey"])
            place += width
            axes.axvline(place, color=COLORS["grey"], lw=0.8)
        axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])


def _row(metric: str, xlabel: str, xlim: tuple[float, float], **axis: Any) -> Rates:
    series = tuple(Series(f"{layout}.{{arm}}.{metric}", *look) for layout, look in _LAYOUTS.items())
    return Rates(_ARMS, series, xlabel, 3.6, xlim=xlim, shaded=tuple(_FLOORS), **axis)


READING = Reading(
    effects,
    FigureSpec(
        "Does a prompt composed from a compiled rule decide like its full prefill?",
        (
            _row("agreement", "agreement with full prefill", (-0.04, 1.04), levels=(0.5,)),
            _row("kl", "KL from full prefill (nats)", (1e-5, 20.0), log=True),
            _row("cosine", "cosine of logits", (0.7, 1.01)),
        ),
        main=AgreementByLayout(
            {f"{layout}.{arm}.agreement": _ARMS[arm] for layout in CONDITIONS for arm in _MAIN},
            "Composed decisions",
            "agreement with full prefill",
            ylim=(-0.05, 1.2),
            label_size=6.5,
        ),
    ),
    paper={
        "self_contained.splice_none.agreement": PaperEntry("context_coupling", "self_contained", "agreement"),
        "coupled.splice_none.agreement": PaperEntry("context_coupling", "context_coupled", "agreement"),
        "self_contained.splice_none.accuracy": PaperEntry("transplant_domains", "all8", "transplant_correct"),
        "self_contained.splice_none.cosine": PaperEntry("transplant_domains", "all8", "mean_logit_cosine"),
        "self_contained.no_rotation.cosine": PaperEntry("transplant_domains", "all8/no_rotation", "mean_logit_cosine"),
    },
    may_lack={
        "*.splice_bos.*": "The tokenizer has no beginning-of-text token.",
        "*.relative.*": "No other prompt with that slot has a different number of tokens before the rule.",
        "self_contained.*": "No prompt of the task has the rule before the field.",
        "coupled.*": "No prompt of the task has the field before the rule.",
        "coupling.*": "The task has only one of self-contained and coupled rules.",
        **KAPPA_MAY_LACK,
    },
    finding="A spliced rule decides like a full prefill in {self_contained.splice_none.agreement} of the prompts where"
    " the rule comes first, and in {coupled.splice_none.agreement} where it comes after the field (chance: "
    "0.5).",
    step=1,
    names=names,
)
