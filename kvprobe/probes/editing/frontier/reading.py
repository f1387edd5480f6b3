"""What the rows of `frontier` mean: what each edit method costs, and how often it decides correctly."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.cost_gain import CostGain, CostGainByModel
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.frontier.probe import REFERENCE, Frontier
from kvprobe.probes.kit.edit_arms import Arm
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, arm_effects, baseline_effects, recovery_difference
from kvprobe.stats import NOISE, Effect, Sample, joined

_SHARES = {"token_share": "tokens", "flop_share": "flops", "seconds_ratio": "seconds"}
_UPPER_BOUND = "oracle_copy_{size}"
# Arms that differ in colour differ in marker too; those of one kind share the colour.
ARMS = {
    "stale": ("stale", COLORS["grey"], "o"),
    "field_only": ("field only", COLORS["sky"], "s"),
    "selective_{size}": ("field + K tokens", COLORS["blue"], "v"),
    "cacheblend_{percent}": ("CacheBlend-style", COLORS["purple"], "P"),
    "erratum": ("erratum", COLORS["vermilion"], "p"),
    "field_and_erratum": ("field + erratum", COLORS["orange"], "^"),
    "hoist_to_end": ("hoist to the end", COLORS["green"], "<"),
    "full_downstream": ("full downstream", COLORS["ink"], "X"),
    "full_reprefill": ("full reprefill", COLORS["ink"], "*"),
    _UPPER_BOUND: ("field + K copied (upper bound)", COLORS["blue"], "x"),
}
_PAPER_ARMS = {
    "stale": "stale",
    "field_only": "in_place",
    "cacheblend_15": "cacheblend@15%",
    "hoist_to_end": "hoist_to_end",
    "erratum": "erratum",
    "field_and_erratum": "field+erratum",
    "full_reprefill": "full_reprefill",
}


def effects(sample: Sample, probe: Frontier) -> Iterator[Effect]:
    """Correctness, recovery, agreement and costs of every arm, contrasts, baselines, the no-op and the noise."""
    edits, no_ops = sample.of(edit="new"), sample.of(edit="same")
    for arm in probe.arms():
        if len(part := edits.of(arm=arm.name).named(**arm.parameters)):
            yield from arm_effects(part, arm.condition)
            yield part.mean(f"{arm.condition}.bytes_written", "bytes_written", "bytes")
        yield from _against_reprefill(edits, arm)
    yield from _cost_of_hoisting(edits)
    size = max(probe.sizes)
    copied = f"oracle_copy_{size}", f"selective_{size}"
    yield from recovery_difference(edits.named(size=size), "oracle_copy_over_selective_{size}.recovery", *copied)
    yield from recovery_difference(edits, "field_under_erratum.recovery", "field_and_erratum", "erratum")
    yield from recovery_difference(edits, "field_alone.recovery", "field_only", "stale")
    yield from baseline_effects(edits)
    if len(no_ops):
        yield no_ops.maximum("no_op.error", (no_ops.rows["margin"] - no_ops.rows["m_base"]).abs())
    yield sample.maximum("noise.margin", "noise_floor")


def names(probe: Frontier) -> Iterator[str]:
    """Those of `effects`."""
    metrics = ("correct_rate", "recovery", "bytes_written", "agreement", *_SHARES)
    yield from joined([arm.name for arm in probe.arms()], metrics)
    differences = ("field_under_erratum", "field_alone", f"oracle_copy_over_selective_{max(probe.sizes)}")
    yield from joined(differences, "recovery")
    yield from ("hoist_over_erratum.token_share", "no_op.error", *BASELINE_RATES, NOISE)


def _against_reprefill(edits: Sample, arm: Arm) -> Iterator[Effect]:
    """`X.agreement` with the full reprefill over the whole vocabulary, and `X.token_share` and so on of its cost."""
    both = edits.of(arm=tuple({arm.name: None, REFERENCE: None})).named(**arm.parameters)
    own, whole = (both.rows[both.rows["arm"] == name] for name in (arm.name, REFERENCE))
    if own.empty or whole.empty:
        return
    ought = whole.set_index("pair").loc[own["pair"]].set_index(own.index)
    part = both.table(own)
    yield part.rate(f"{arm.condition}.agreement", own["argmax"] == ought["argmax"])
    for metric, column in _SHARES.items():
        yield part.ratio(f"{arm.condition}.{metric}", column, ought[column])


def _cost_of_hoisting(edits: Sample) -> Iterator[Effect]:
    """How much of a prefill's tokens hoisting runs more than an erratum (critique ED4)."""
    arms = "hoist_to_end", "erratum", REFERENCE
    three = edits.of(arm=arms)
    tokens = three.rows.pivot(index="pair", columns="arm", values="tokens")
    if set(arms) <= set(tokens):
        more = tokens["hoist_to_end"] - tokens["erratum"]
        pairs = three.per("pair")
        yield pairs.table(pairs.rows.loc[tokens.index]).ratio("hoist_over_erratum.token_share", more, tokens[REFERENCE])


_RIGHT = CostGain(
    ARMS,
    "token_share",
    "correct_rate",
    "tokens run after the edit\n(share of a full prefill)",
    "share of correct decisions",
    2.7,
    (-0.04, 1.06),
    bounds=(_UPPER_BOUND,),
    numbered="selective_{size}",
)
_RECOVERED = CostGain(
    ARMS,
    "flop_share",
    "recovery",
    "FLOPs of the edit\n(share of a full prefill)",
    "recovery of\nthe new decision",
    2.5,
    (-0.25, 1.4),
    bounds=(_UPPER_BOUND,),
    numbered="selective_{size}",
)

READING = Reading(
    effects,
    FigureSpec(
        "What an edit costs, and whether it turns the decision",
        (_RIGHT, _RECOVERED),
        main=CostGainByModel(
            _RIGHT, "Cost and correctness of edits", "tokens run (share of a prefill)", "share of correct decisions"
        ),
    ),
    paper={
        f"{ours}.{effect}": PaperEntry("frontier", theirs, metric)
        for ours, theirs in _PAPER_ARMS.items()
        for effect, metric in (("correct_rate", "P_correct"), ("token_share", "recompute_fraction"))
    },
    finding="The new value decides {field_only.correct_rate} of the prompts when only the field's entries are "
    "overwritten, and {erratum.correct_rate} after an erratum, which runs {erratum.token_share} of a prefill's"
    " tokens.",
    step=1,
    names=names,
)
