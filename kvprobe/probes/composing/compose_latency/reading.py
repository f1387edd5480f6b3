"""What the rows of `compose_latency` mean: speed-ups and costs by the length of the chunk, and how they grow with it.

arm_L.speedup, .seconds, .flop_share   at a chunk of L tokens; against full_prefill of the same prompt
arm_text_L.speedup                     the same for plain text
arm.exponent       growth with its length of what the chunk adds (seconds less those without it, in as many passes)
arm.exponent_long  the same over chunks of `asymptote_from` tokens and more, where fixed costs of moving weigh less;
for splice up to 32k, of chunks that repeat the longest one's entries (`splice_repeated_L`)
arm.exponent_raw   growth of the whole time, overhead included
arm.flop_exponent  growth of what the chunk adds to the FLOPs
full_over_splice.exponent   by how much full_prefill's exponent is larger
compile_L.seconds, save_L.seconds, storage_L.bytes   what a chunk costs once
pays_off_L.uses             uses of a stored chunk, each against a full prefill, that win this back
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from kvprobe.figures.curves import Curve, Curves, CurvesByModel, Scale
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.composing.compose_latency.probe import (
    COMPILE,
    RANDOM,
    REPEATED,
    TEXT,
    TWO_PIECES,
    WITHOUT_CHUNK,
    ComposeLatency,
)
from kvprobe.probes.kit.fidelity import FULL_PREFILL
from kvprobe.stats import NOISE, Effect, Sample, joined
from kvprobe.stats.growth import growth_exponent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STORED = "splice_from_disk"
_GROWING = (FULL_PREFILL, "splice", _STORED)
_LOOKS = {
    FULL_PREFILL: ("full prefill", COLORS["ink"], "X"),
    "cacheblend_{percent}": ("CacheBlend-style, {percent}%", COLORS["purple"], "P"),
    "splice_seam_{seam}": ("splice, {seam} tokens of seam", COLORS["orange"], "^"),
    _STORED: ("splice from disk", COLORS["sky"], "s"),
    "splice": ("splice", COLORS["vermilion"], "o"),
    WITHOUT_CHUNK: ("no chunk", COLORS["grey"], "."),
}
_AXIS = "tokens of the chunk"


def effects(sample: Sample, probe: ComposeLatency) -> Iterator[Effect]:
    """Speed-ups, seconds and FLOPs by length, exponents, and what compiling costs."""
    kinds = {f"splice_seam_{probe.seam}": "splice_seam_{seam}", f"cacheblend_{probe.percent}": "cacheblend_{percent}"}
    sized = sample.named(seam=probe.seam, percent=probe.percent)
    for text, _, part in sized.by("text", "length"):
        words = "" if text == RANDOM else f"_{text}"
        for arm, some in part.by("arm"):
            if arm != COMPILE:
                name = f"{kinds.get(arm, arm)}{words}_{{length}}"
                yield some.mean(f"{name}.seconds", "seconds", "s")
                yield from _against_prefill(part, arm, name)
        if text == RANDOM:
            yield from _preparing(part)
    random, lengths = sample.of(text=RANDOM), sample.rows["length"].unique()
    long = sample.of(text=(RANDOM, REPEATED), length=[length for length in lengths if length >= probe.asymptote_from])
    for arm in _GROWING:
        yield from _exponent(random.of(arm=arm), f"{arm}.exponent_raw", "seconds")
        yield from _exponent(_added(random, arm), f"{arm}.exponent", "added_seconds")
        yield from _exponent(_added(random, arm), f"{arm}.flop_exponent", "added_flops")
        yield from _exponent(_added(long, arm), f"{arm}.exponent_long", "added_seconds")
    yield from _ratio_exponent(random.of(arm=(FULL_PREFILL, "splice", WITHOUT_CHUNK, TWO_PIECES)))
    yield sample.noise()


def names(probe: ComposeLatency) -> Iterator[str]:
    """Those of `effects`."""
    sized = f"splice_seam_{probe.seam}", f"cacheblend_{probe.percent}"
    for words in ("", f"_{TEXT}", f"_{REPEATED}"):
        timed = [f"{arm}{words}_{{length}}" for arm in (*_GROWING, TWO_PIECES, WITHOUT_CHUNK, *sized)]
        yield from joined(timed, ("seconds", "speedup", "flop_share"))
    yield from joined(("compile_{length}", "save_{length}"), "seconds")
    yield from ("storage_{length}.bytes", "pays_off_{length}.uses", "full_over_splice.exponent")
    yield from joined(_GROWING, ("exponent_raw", "exponent", "flop_exponent", "exponent_long"))
    yield NOISE


def _beside(sample: Sample, arm: str, other: str) -> Sample:
    """The rows of an arm with `other_seconds` and `other_flops` of the same prompt under another."""
    both, key = sample.of(arm=(arm, other)), ["pair", "text", "length"]
    rows = both.rows
    others = rows[rows["arm"] == other].set_index(key)[["seconds", "flops"]].add_prefix("other_")
    return both.table(rows[rows["arm"] == arm].join(others, on=key, how="inner"))


def _against_prefill(sample: Sample, arm: str, name: str) -> Iterator[Effect]:
    beside = _beside(sample, arm, FULL_PREFILL)
    if arm != FULL_PREFILL and len(beside):
        rows = beside.rows
        yield beside.mean(f"{name}.speedup", rows["other_seconds"] / rows["seconds"], "x")
        yield beside.mean(f"{name}.flop_share", rows["flops"] / rows["other_flops"])


def _preparing(sample: Sample) -> Iterator[Effect]:
    """What a chunk of one length costs once, and how many uses of it win that back."""
    once = sample.of(arm=COMPILE)
    if not len(once):
        return
    yield once.mean("compile_{length}.seconds", "seconds", "s")
    yield once.mean("save_{length}.seconds", "save_seconds", "s")
    yield once.mean("storage_{length}.bytes", "bytes", "bytes")
    uses = sample.of(arm=(COMPILE, _STORED, FULL_PREFILL))
    stored = _beside(uses, _STORED, FULL_PREFILL).rows
    won = stored["other_seconds"] - stored["seconds"]
    if len(won) and (won > 0).all():
        cost = float((once.rows["seconds"] + once.rows["save_seconds"]).iloc[0])
        yield uses.table(stored).mean("pays_off_{length}.uses", cost / won, "uses")


def _added(sample: Sample, arm: str) -> Sample:
    """The rows of an arm with what the chunk adds to its seconds and FLOPs."""
    added = _beside(sample, arm, WITHOUT_CHUNK if arm == FULL_PREFILL else TWO_PIECES)
    differences = {f"added_{cost}": added.rows[cost] - added.rows[f"other_{cost}"] for cost in ("seconds", "flops")}
    return added.table(added.rows.assign(**differences))


def _exponent(sample: Sample, name: str, column: str) -> Iterator[Effect]:
    """The exponent over the rows in which the chunk cost anything at all; nothing where too few are left."""
    costly = sample.where(sample.rows[column] > 0, exclude=True)
    lengths = costly.rows["length"]
    if len(lengths) >= 3 and lengths.nunique() >= 2:
        label, costs = costly.label(name), costly.rows[column]
        yield costly.made(growth_exponent(label, lengths, costs, statistics=sample.statistics))


def _ratio_exponent(sample: Sample) -> Iterator[Effect]:
    """How much faster the cost of a full prefill grows than that of a splice."""
    full, splice = (
        _added(sample, arm).rows.set_index(["pair", "length"])["added_seconds"] for arm in (FULL_PREFILL, "splice")
    )
    both = pd.DataFrame({"full": full, "splice": splice}).dropna().query("full > 0 and splice > 0").reset_index()
    both["ratio"] = both["full"] / both["splice"]
    yield from _exponent(sample.table(both), "full_over_splice.exponent", "ratio")


@dataclass(frozen=True)
class Times(Curves):
    """Seconds by length, and above the curves the exponents of their growth."""

    def draw(self, axes: Axes, panel: Panel) -> None:
        """Draw one model."""
        super().draw(axes, panel)
        found = {"full": panel.effects.get(f"{FULL_PREFILL}.exponent"), "splice": panel.effects.get("splice.exponent")}
        lines = [f"{label}: length^{e.estimate:.2f} [{e.low:.2f}, {e.high:.2f}]" for label, e in found.items() if e]
        axes.text(0.03, 0.97, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=7.5)


def _curves(metric: str) -> tuple[Curve, ...]:
    left_out = (FULL_PREFILL, WITHOUT_CHUNK) if metric == "speedup" else ()
    return tuple(Curve(f"{arm}_{{length}}", metric, *look) for arm, look in _LOOKS.items() if arm not in left_out)


READING = Reading(
    effects,
    FigureSpec(
        "Time to the first token, by the length of the chunk",
        (
            Times(
                _curves("seconds"), "length", "seconds to the first token", _AXIS, 2.9, Scale(None, log=True, room=50.0)
            ),
            Curves(
                _curves("speedup"),
                "length",
                "speed-up over full prefill",
                _AXIS,
                2.5,
                Scale(None, log=True),
                levels=(1.0, 5.0),
            ),
        ),
        main=CurvesByModel(
            ("splice_{length}", "speedup"),
            (f"{_STORED}_{{length}}", "speedup"),
            "length",
            "First token: splice (solid), from disk (dashed)",
            "speed-up over full prefill",
            _AXIS,
            Scale(None, log=True),
            levels=(1.0, 5.0),
        ),
        key_columns=3,
    ),
    paper={
        f"splice_{ours}.speedup": PaperEntry("ttft_by_length", f"L{theirs}", "speedup")
        for ours, theirs in ((512, 500), (2048, 2000), (8192, 8000))
    },
    may_lack={
        "*_[0-9]*.*": "Its eager attention holds the scores of all pairs of tokens: more than `score_bytes` at that "
        "length.",
        "pays_off_*": "Composing was no faster than a full prefill, so compiling never pays off.",
        "*.exponent*": "A chunk added no time at too many of the lengths.",
    },
    finding="The first token after a spliced chunk of 8,192 tokens comes {splice_8192.speedup} times as fast as after "
    "a full prefill.",
    step=5,
    names=names,
)
