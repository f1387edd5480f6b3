"""What the rows of `n_skills` mean: how composed prompts decide, by the number of their skills.

With more skills the full prefill itself may fail. Where its accuracy, `full_prefill_N.accuracy`, lies below `able`,
nothing else is reported for that N.

    arm_N.agreement, .accuracy, .kl, .cosine, ...   as `fidelity_effects`, with N skills
    arm_N.token_share, .flop_share   run for one prompt, over a full prefill's; compiling is not counted
    first_N.arm.agreement, between_N, last_N   by the place of the deciding skill
    arm.most_less_fewest.agreement, .kl   with the most skills less with the fewest, by scenario
"""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.curves import Curve, Curves, CurvesByModel, Scale
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.composing.n_skills.probe import ARMS, PLACES, NSkills
from kvprobe.probes.kit.fidelity import FULL_PREFILL, REMOVED
from kvprobe.probes.kit.reading.fidelity import FIDELITY, fidelity_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

_LOOKS = {
    FULL_PREFILL: ("full prefill", COLORS["ink"], "X"),
    "splice_none": ("splice, no header", COLORS["vermilion"], "o"),
    "splice_neutral": ("splice, neutral header", COLORS["blue"], "s"),
    REMOVED: ("deciding skill removed", COLORS["grey"], "v"),
}
_AXIS = "skills in the prompt"
_SHARE = Scale(ylim=(-0.05, 1.08))


def effects(sample: Sample, probe: NSkills) -> Iterator[Effect]:
    """What the full prefill can do with each number of skills, and where it can, what composing makes of it."""
    able = []
    for count, part in sample.by("skills"):
        # The reference of a prompt is the same in the rows of all arms.
        if len(once := part.of(arm=REMOVED)):
            yield once.rate(f"{FULL_PREFILL}_{{skills}}.accuracy", once.rows["reference_margin"] > 0)
        prompts = part.rows.groupby(["pair", "prompt"])["reference_margin"].first()
        if float((prompts > 0).mean()) >= probe.able:
            able.append(count)
            yield from _with_count(part, probe.equivalence)
    for arm, part in sample.by("arm") if len(able) > 1 else ():
        for metric, column, unit in (("agreement", "agrees", "fraction"), ("kl", "kl", "nats")):
            name, ends = f"{arm}.most_less_fewest.{metric}", (max(able), min(able))
            yield from part.difference(name, column, "skills", *ends, within=("scenario", "prompt"), unit=unit)
    yield sample.noise()


def names(_: NSkills) -> Iterator[str]:
    """Those of `effects`."""
    arms = [arm.name for arm in ARMS]
    yield from joined([f"{arm}_{{skills}}" for arm in arms], (*FIDELITY, "token_share", "flop_share"))
    yield from joined([f"{place}_{{skills}}" for place in PLACES], arms, "agreement")
    yield from joined(arms, "most_less_fewest", ("agreement", "kl"))
    yield from (f"{FULL_PREFILL}_{{skills}}.accuracy", NOISE)


def _with_count(sample: Sample, equivalence: float) -> Iterator[Effect]:
    for arm, part in sample.by("arm"):
        yield from fidelity_effects(part, f"{arm}_{{skills}}", equivalence=equivalence)
        yield part.ratio(f"{arm}_{{skills}}.token_share", "tokens", "full_tokens")
        yield part.ratio(f"{arm}_{{skills}}.flop_share", "flops", "full_flops")
        for place in part.rows["place"].unique():
            # Whether the full prefill is able is told by the rows of all places, so the filter keeps them.
            here = part.where(part.rows["place"] == place)
            yield here.rate(f"{place}_{{skills}}.{arm}.agreement", "agrees")


def _row(metric: str, ylabel: str, levels: tuple[float, ...] = ()) -> Curves:
    curves = tuple(Curve(f"{arm}_{{skills}}", metric, *look) for arm, look in _LOOKS.items())
    return Curves(curves, "skills", ylabel, _AXIS, 1.9, _SHARE, levels)


READING = Reading(
    effects,
    FigureSpec(
        "Several skills, each compiled separately",
        (
            _row("agreement", "agreement with\nfull prefill", (0.5, 1.0)),
            _row("accuracy", "accuracy", (0.5, 1.0)),
            _row("cosine", "cosine of logits"),
            _row("token_share", "tokens run (share\nof a full prefill)"),
        ),
        main=CurvesByModel(
            ("splice_neutral_{skills}", "agreement"),
            (f"{REMOVED}_{{skills}}", "agreement"),
            "skills",
            "N skills spliced (solid), deciding one removed (dashed)",
            "agreement with prefill",
            _AXIS,
            _SHARE,
        ),
        key_columns=3,
    ),
    paper={
        f"splice_none_{count}.cosine": PaperEntry("n_skills", f"N{count}", "logit_cosine") for count in (1, 2, 3, 4)
    },
    may_lack={
        "*_[0-9]*.*": "Its full prefill decides too few prompts with that many skills correctly.",
        "*.most_less_fewest.*": "Its full prefill is accurate enough at one number of skills only.",
    },
    step=4,
    names=names,
)
