"""What the rows of `image_splice` mean: how far an image's KV from elsewhere gives the answer of a full prefill.

For each arm and shift, such as `moved_256`, and for `same_place` and `swapped`:

    X.agreement, .correct_rate   the most likely token is the full prefill's; the right one
    X.kl, .logit_error           from the full prefill: in nats, and the largest, in logits
    X.recovery                   of the new picture's answer
    X.kl_share                   the KL as a share of the wrong image's
    rotation_gain_N.kl, axes_gain_N.kl   what no rotation, and one axis alone, add to the KL of `moved`
    moved.first_layer_key_error  largest difference from a native key, over the largest norm of a key
"""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.curves import Curve, Curves, CurvesByModel, Scale
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.composing.image_splice.probe import ARMS, WRONG_IMAGE, ImageSplice
from kvprobe.probes.kit.reading.fidelity import by_pair
from kvprobe.stats import NOISE, Effect, Sample, joined

GAINS = {"no_rotation": "rotation_gain", "temporal_only": "axes_gain"}
"""What the KL of an arm beyond that of `moved` is called."""
_LOOKS = {
    "moved": ("moved along all axes", COLORS["blue"], "o"),
    "temporal_only": ("temporal axis only", COLORS["orange"], "s"),
    "no_rotation": ("not rotated", COLORS["vermilion"], "^"),
    WRONG_IMAGE: ("another image", COLORS["grey"], "x"),
}
_AXIS = "further positions moved"


def effects(sample: Sample, _: ImageSplice) -> Iterator[Effect]:
    """Fidelity of every arm at every shift, its KL beside that of other arms, the error of keys, noise."""
    for arm, shift, part in sample.by("arm", "shift"):
        condition = f"{arm}_{{shift}}" if arm in ARMS else arm
        yield part.rate(f"{condition}.agreement", "agrees")
        yield part.rate(f"{condition}.correct_rate", "correct")
        yield part.mean(f"{condition}.kl", "kl", "nats")
        yield part.maximum(f"{condition}.logit_error", "logit_error")
        yield part.recovery(f"{condition}.recovery")
        here = sample.of(shift=shift)
        if arm in ARMS and arm != WRONG_IMAGE and WRONG_IMAGE in set(here.rows["arm"]):
            both = here.of(arm=(arm, WRONG_IMAGE))
            kl = by_pair(both, "kl", "arm")
            yield both.table(kl).ratio(f"{condition}.kl_share", arm, WRONG_IMAGE)
        if arm in GAINS:
            yield from here.difference(f"{GAINS[arm]}_{{shift}}.kl", "kl", "arm", arm, "moved", unit="nats")
    if len(moved := sample.of(arm="moved")):
        yield moved.maximum("moved.first_layer_key_error", "key_error")
    yield sample.noise()


def names(_: ImageSplice) -> Iterator[str]:
    """Those of `effects`."""
    moved = [f"{arm}_{{shift}}" for arm in ARMS]
    yield from joined((*moved, "same_place", "swapped"), ("agreement", "correct_rate", "kl", "logit_error", "recovery"))
    yield from joined([f"{arm}_{{shift}}" for arm in ARMS if arm != WRONG_IMAGE], "kl_share")
    yield from joined([f"{gain}_{{shift}}" for gain in GAINS.values()], "kl")
    yield from ("moved.first_layer_key_error", NOISE)


def _row(metric: str, ylabel: str, height: float, scale: Scale) -> Curves:
    curves = tuple(Curve(f"{arm}_{{shift}}", metric, *look) for arm, look in _LOOKS.items())
    # Several curves lie on one another.
    return Curves(curves, "shift", ylabel, _AXIS, height, scale, apart=0.08)


READING = Reading(
    effects,
    FigureSpec(
        "An image's KV moved away from where it was computed",
        (
            _row("kl", "KL from a full prefill\n(nats)", 2.7, Scale(None, log=True)),
            _row("agreement", "same answer as\na full prefill", 2.3, Scale(ylim=(-0.04, 1.06))),
        ),
        main=CurvesByModel(
            ("moved_{shift}", "kl"),
            ("no_rotation_{shift}", "kl"),
            "shift",
            "Image KV: moved (solid), not rotated (dashed)",
            "KL from a full prefill (nats)",
            _AXIS,
            Scale(None, log=True),
        ),
        key_columns=3,
    ),
    paper={
        "same_place.agreement": PaperEntry("image_splice_same_position", "overall", "agreement"),
        "moved_0.agreement": PaperEntry("image_position_shift", "shift_161", "agreement"),
    },
    names=names,
)
