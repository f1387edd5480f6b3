"""What the rows of `keystone` mean: arms by regime, composed regimes against the recomputed one, ways there and back.

With R a regime and X an arm:

    R.X.correct_rate, R.X.recovery, R.X.token_share, R.X.kl (to the target, nats), R.X.agreement (most likely token)
    R.X.difference   recovery of a composed regime less that of `recomputed`, on the same pairs; beside it the two
                     one-sided tests that its mean lies within `equivalence_margin` gaps of 0
    R.every_arm.equivalence_p   the largest of those p values over all edits: together they are one
                     intersection-union test, which needs no adjustment; `stale` is no edit and not in it
    R.every_arm.error   the largest difference of two margins, in logits
    R.fixed_edits.equivalence_p, .error   the same of the edits that do not choose tokens by what is in the cache
    R.X.own_recovery    the paper's denominator: from the composed stale prompt to the recompiled skill (critique KS1)
    R.ahead_N.disagreement   mean absolute difference over all edits, in gaps, with N notes ahead of the skill
    R.moved, R.compose.token_share   how far the skill was moved, and what composing ran, compiling left out
    R.X.return_T.correct_rate   under the old value after T edits there and back
    R.X.return.residue  what T edits there and back leave, against one edit to the value that stands there, in gaps
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.edit_arms import Arm
from kvprobe.probes.kit.reading.editing import arm_effects
from kvprobe.probes.system.keystone.probe import RECOMPILE, RECOMPUTED, REFERENCE, STALE, Keystone
from kvprobe.stats import NOISE, Effect, Sample, equivalent, joined, maximum

# What runs other tokens when other entries are in the cache.
_CHOOSING = ("selective_{size}", "deviation_{size}", "cacheblend_{percent}")
_ARMS = {
    "stale": "stale",
    "field_only": "field only",
    "selective_{size}": "field + {size} most attended",
    "deviation_{size}": "field + {size} most deviating",
    "cacheblend_{percent}": "CacheBlend-style, {percent}%",
    "erratum": "erratum",
    "field_and_erratum": "field + erratum",
    "full_downstream": "full downstream",
    RECOMPILE: "skill recompiled",
}
_REGIMES = {
    RECOMPUTED: ("ordinary cache", COLORS["grey"], "o"),
    "composed_none": ("skill compiled behind nothing", COLORS["vermilion"], "s"),
    "composed_bos": ("skill compiled behind BOS", COLORS["orange"], "D"),
    "composed_neutral": ("skill compiled behind a neutral line", COLORS["blue"], "^"),
    "composed_real": ("skill compiled in its place", COLORS["green"], "v"),
}
_PAPER_ARMS = {"field_only": "in_place", "selective_8": "sel@8", "selective_32": "sel@32", "erratum": "erratum"}


def effects(sample: Sample, probe: Keystone) -> Iterator[Effect]:
    """Every arm in every regime, the composed regimes against `recomputed`, the ways back, and the noise."""
    edits, back, arms = sample.of(edit="new"), sample.of(edit=("once", "return")), probe.arms()
    for arm in arms:
        for regime, part in edits.of(arm=arm.name).named(**arm.parameters).by("regime"):
            yield from _arm_effects(part, f"{regime}.{arm.condition}")
            for own, tokens in _beside_reference(edits, regime, arm):
                yield own.ratio(f"{regime}.{arm.condition}.token_share", "tokens", tokens)
    for regime in edits.rows["regime"].unique():
        if regime != RECOMPUTED:
            yield from _against_recomputed(edits, regime, arms, probe.equivalence_margin)
            yield from _own_recoveries(edits, regime, arms)
            yield from _composing(edits, regime, arms)
    for arm in arms:
        for regime, part in back.of(arm=arm.name).named(**arm.parameters).by("regime"):
            yield from _returning(part, f"{regime}.{arm.condition}")
    yield sample.maximum("noise.margin", "noise_floor")


def names(probe: Keystone) -> Iterator[str]:
    """Those of `effects`."""
    arms, composed = [arm.name for arm in probe.arms()], [f"composed_{header}" for header in probe.headers]
    metrics = ("correct_rate", "recovery", "kl", "agreement", "token_share")
    yield from joined((RECOMPUTED, *composed), arms, metrics)
    yield from joined(composed, [arm for arm in arms if arm != REFERENCE], ("difference", "own_recovery"))
    yield from joined(composed, ("every_arm", "fixed_edits"), ("equivalence_p", "error"))
    yield from joined(composed, ("ahead_{notes_ahead}.disagreement", "moved", "compose.token_share"))
    trips = [f"return_{trip}.correct_rate" for trip in range(1, probe.return_trips + 1)]
    yield from joined(f"composed_{probe.return_header}", probe.return_arms, (*trips, "return.residue"))
    yield NOISE


def _arm_effects(sample: Sample, condition: str) -> Iterator[Effect]:
    yield from arm_effects(sample, condition)
    yield sample.mean(f"{condition}.kl", "kl", "nats")
    yield sample.rate(f"{condition}.agreement", "same_argmax")


def _beside_reference(edits: Sample, regime: str, arm: Arm) -> Iterator[tuple[Sample, pd.Series]]:
    """An arm's rows, and how many tokens a full prefill runs for each; nothing where that was not measured."""
    regimes, names = ([*dict.fromkeys(both)] for both in ((regime, RECOMPUTED), (arm.name, REFERENCE)))
    both = edits.of(regime=regimes, arm=names).named(**arm.parameters)
    own = both.of(regime=regime, arm=arm.name).rows
    whole = both.of(arm=REFERENCE).rows.set_index("pair")["tokens"]
    if len(own) and len(whole):
        yield both.table(own), whole.loc[own["pair"]].set_axis(own.index)


def _against_recomputed(edits: Sample, regime: str, arms: Sequence[Arm], margin: float) -> Iterator[Effect]:
    """A composed regime against the recomputed one on the same pairs, arm by arm and over all edits."""
    apart, p_values = _apart(edits, regime), {}
    for arm in arms:
        if len(part := apart.of(arm=arm.name).named(**arm.parameters)):
            tested = _equivalence(part, margin)
            p_values[arm.name] = tested.get("equivalence_p")
            effect = part.recovery(f"{regime}.{arm.condition}.difference", "apart")
            yield replace(effect, extra={**effect.extra, **tested})
    ran = [arm for arm in arms if arm.name in p_values and arm.name != STALE]
    fixed = [arm for arm in ran if arm.condition not in _CHOOSING]
    for group, members in (("every_arm", ran), ("fixed_edits", fixed)):
        if len(some := apart.of(arm=[arm.name for arm in members])):
            known = [p for arm in members if (p := p_values[arm.name]) is not None]
            if known:
                yield some.made(maximum(some.label(f"{regime}.{group}.equivalence_p"), known, unit="p"))
            yield some.maximum(f"{regime}.{group}.error", some.rows["apart"].abs())
    for _, some in apart.of(arm=[arm.name for arm in ran]).by("notes_ahead"):
        part = some.with_floor(float(some.rows["noise_floor"].max()))
        yield part.recovery(f"{regime}.ahead_{{notes_ahead}}.disagreement", part.rows["apart"].abs())


def _apart(edits: Sample, regime: str) -> Sample:
    """A composed regime's rows with `apart`, their margin less that of the same arm in the recomputed regime."""
    both = edits.of(regime=(regime, RECOMPUTED))
    recomputed, composed = (both.of(regime=name).rows for name in (RECOMPUTED, regime))
    paired = composed.merge(recomputed[["arm", "pair", "margin"]], on=["arm", "pair"], suffixes=("", "_recomputed"))
    return both.table(paired.assign(apart=paired["margin"] - paired["margin_recomputed"]))


def _equivalence(sample: Sample, margin: float) -> dict[str, float]:
    """Two one-sided tests on differences in units of the mean gap; nothing with fewer than two clusters."""
    if sample.clusters.nunique() < 2:
        return {}
    test = equivalent(sample.rows["apart"] / float(sample.gap.mean()), margin, clusters=list(sample.clusters))
    return {"equivalence_p": test.p_value, "equivalence_margin": margin, "equivalence_n": float(test.n)}


def _own_recoveries(edits: Sample, regime: str, arms: Sequence[Arm]) -> Iterator[Effect]:
    """The paper's estimator: each regime's own shift over its own gap, and the mean of ratios that it takes."""
    for arm in (arm for arm in arms if arm.name not in {STALE, RECOMPILE}):
        three = edits.of(regime=regime, arm=(arm.name, STALE, RECOMPILE)).named(**arm.parameters)
        margins = three.rows.pivot(index="pair", columns="arm", values="margin")
        if not {arm.name, STALE, RECOMPILE} <= {*margins}:
            continue
        gap = margins[RECOMPILE] - margins[STALE]
        if (gap != 0).all():
            pairs = three.per("pair")
            ratios = ((margins[arm.name] - margins[STALE]) / gap).loc[pairs.rows.index]
            yield pairs.mean(f"{regime}.{arm.condition}.own_recovery", ratios)


def _composing(edits: Sample, regime: str, arms: Sequence[Arm]) -> Iterator[Effect]:
    """How far skills were moved, and the tokens that composing ran as a share of a prefill."""
    if len(stale := edits.of(regime=regime, arm=STALE)):
        yield stale.mean(f"{regime}.moved", "moved", "tokens")
    (unedited,) = (arm for arm in arms if arm.name == STALE)
    for own, tokens in _beside_reference(edits, regime, unedited):
        yield own.ratio(f"{regime}.compose.token_share", "compose_tokens", tokens)


def _returning(sample: Sample, condition: str) -> Iterator[Effect]:
    """Right decisions under the old value after ways there and back, and what these leave beside one edit."""
    back = sample.of(edit="return")
    for _, after in back.by("trip"):
        yield after.rate(f"{condition}.return_{{trip}}.correct_rate", after.rows["margin"] < 0)
    if not len(back):
        return
    both = sample.of(trip=(0, back.rows["trip"].max()))
    margins = both.rows.pivot(index="pair", columns="edit", values="margin")
    if {"once", "return"} <= {*margins}:
        pairs = both.per("pair", m_base="first", m_donor="first", noise_floor="first")
        left = (margins["return"] - margins["once"]).loc[pairs.rows.index]
        pairs = pairs.with_floor(float(pairs.rows["noise_floor"].max()))
        yield pairs.recovery(f"{condition}.return.residue", left)


def figure(panels: Sequence[Panel]) -> FigureSpec:
    """Recovery, right decisions and cost of every arm, regimes beside each other."""
    arms = {
        condition.format(**effect.parameters): label.format(**effect.parameters)
        for condition, label in _ARMS.items()
        for panel in panels
        for effect in panel.select(f"{RECOMPUTED}.{condition}", "recovery")
    }
    composed = [r for r in _REGIMES if any(panel.select(f"{r}.{STALE}", "difference") for panel in panels)]
    main = "composed_neutral" if "composed_neutral" in composed or not composed else composed[0]

    def row(metric: str, xlabel: str, xlim: tuple[float, float]) -> Rates:
        series = tuple(Series(f"{regime}.{{arm}}.{metric}", *look) for regime, look in _REGIMES.items())
        return Rates(arms, series, xlabel, 4.2, levels=(0.0, 1.0), xlim=xlim)

    return FigureSpec(
        "An edit inside a composed skill, beside the same edit in an ordinary cache\n"
        "(the paper's recoveries have denominators of their own)",
        (
            row("recovery", "recovery of the new decision", (-0.25, 1.35)),
            row("correct_rate", "share of correct decisions", (-0.04, 1.04)),
            row("token_share", "tokens run by the edit\n(share of a full prefill)", (-0.04, 1.2)),
        ),
        main=RatesByModel(
            {f"{main}.{arm}.difference": label for arm, label in arms.items()},
            "Edit inside a composed skill",
            "recovery, composed less ordinary",
            levels=(0.0,),
            limits=(-0.5, 0.5),
            ylim=(-0.55, 0.55),
        ),
    )


READING = Reading(
    effects,
    figure,
    # The paper compiles in isolation and divides each regime by its own denominators (critique KS1).
    paper={
        f"{ours}.{arm}.recovery": PaperEntry("edit_inside_transplant", f"{name}/{theirs}", "decision_recovery")
        for ours, theirs in ((RECOMPUTED, "recomputed"), ("composed_none", "composed"))
        for arm, name in _PAPER_ARMS.items()
    },
    may_lack={
        "*.equivalence_p": "An equivalence test needs two skeletons.",
        "*.own_recovery": "The composed decisions do not move, so the paper's denominator is 0.",
    },
    step=1,
    names=names,
)
