"""What the rows of `offsets` mean: the error of moved keys, and how far decisions follow a native prefill.

    offset_N.keys.rotated_error, .unrotated_error   largest norm of a key's error over the norm of the key
    offset_N.keys.full.rotated_error                the same in the layers of one kind
    offset_N.keys.rounding_units                    rotated_error in units of the model's own rounding
    chained.excess, chained.error                   error after 64 moves beyond that after one; that of the one
    offset_N.A.kl, .agreement, ...   as `fidelity_effects`, for each arm A
    offset_N.reference.accuracy      right decisions of the reference, on pairs that it decides rightly at 0
    filler_N.A.kl, .agreement, ...; filler_N.reference.accuracy

`full` and `sliding` are kinds of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvprobe.figures.curves import Curve, Curves, CurvesByModel, Scale
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.composing.offsets.probe import ARMS, Offsets
from kvprobe.probes.kit.fidelity import REMOVED
from kvprobe.probes.kit.reading.fidelity import FIDELITY, KAPPA_MAY_LACK, fidelity_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

_LOOKS: dict[str, dict[str, Any]] = {
    "rotated": {"label": "rotated", "color": COLORS["blue"]},
    "rotated_in_context": {"label": "rotated, own context", "color": COLORS["sky"], "marker": "v", "ls": "--"},
    "no_rotation": {"label": "not rotated", "color": COLORS["vermilion"], "marker": "s"},
    "no_rotation_in_context": {
        "label": "not rotated, own context",
        "color": COLORS["orange"],
        "marker": "^",
        "ls": "--",
    },
    REMOVED: {"label": "no rule", "color": COLORS["grey"], "marker": "x", "ls": ":"},
}
_MOVED = "positions moved"


def effects(sample: Sample, _: Offsets) -> Iterator[Effect]:
    """Key errors, chained moves, fidelity by offset and by filler, and the references' accuracy."""
    for _, part in sample.of(measurement="keys").by("size"):
        for column in ("rotated_error", "unrotated_error"):
            yield part.maximum(f"offset_{{size}}.keys.{column}", column, "relative")
            for kind, layers in part.by("kind"):
                yield layers.maximum(f"offset_{{size}}.keys.{kind}.{column}", column, "relative")
        yield part.maximum("offset_{size}.keys.rounding_units", "rounding_units", "rounding")
    if len(chained := sample.of(measurement="chained")):
        yield chained.maximum("chained.excess", "excess", "relative")
        yield chained.maximum("chained.error", "rotated_error", "relative")
    for kind in ("offset", "filler"):
        for _, part in sample.of(measurement=kind).by("size"):
            for arm, some in part.by("arm"):
                yield from fidelity_effects(some, f"{kind}_{{size}}.{arm}")
            if len(reference := part.of(arm=ARMS[0])):
                yield reference.rate(f"{kind}_{{size}}.reference.accuracy", reference.rows["reference_margin"] > 0)
                yield reference.mean(f"{kind}_{{size}}.reference.margin", "reference_margin", "logits")
    yield sample.noise()


def names(_: Offsets) -> Iterator[str]:
    """Those of `effects`."""
    errors = ("rotated_error", "unrotated_error")
    # Of each kind of layer that the model's configuration names.
    yield from joined("offset_{size}.keys", (*errors, "rounding_units", *joined("*", errors)))
    moved = ("offset_{size}", "filler_{size}")
    yield from joined(moved, ARMS, FIDELITY)
    yield from joined(moved, "reference", ("accuracy", "margin"))
    yield from ("chained.excess", "chained.error", NOISE)


def _arms(kind: str, metric: str) -> tuple[Curve, ...]:
    return tuple(Curve(f"{kind}_{{size}}.{arm}", metric, **look) for arm, look in _LOOKS.items())


def _keys(metric: str, arm: str) -> Curve:
    return Curve("offset_{size}.keys", metric, **{**_LOOKS[arm], "label": ""})


_RIGHT = Curve("offset_{size}.reference", "accuracy", "accuracy of the prefill", marker="", ls=":", shaded=False)
READING = Reading(
    effects,
    FigureSpec(
        "A chunk moved to other positions",
        (
            Curves(
                (_keys("rotated_error", "rotated"), _keys("unrotated_error", "no_rotation")),
                "size",
                "largest error of a key\n(share of its norm)",
                _MOVED,
                2.0,
                Scale((1e-8, 10.0), log=True),
            ),
            Curves(
                _arms("offset", "margin_error"),
                "size",
                "error of the margin\n(logits)",
                _MOVED,
                2.0,
                Scale((1e-5, 30.0), log=True),
            ),
            Curves(
                (*_arms("offset", "agreement"), _RIGHT),
                "size",
                "agreement with\nprefill there",
                _MOVED,
                2.0,
                Scale(ylim=(-0.05, 1.08)),
            ),
            Curves(
                _arms("filler", "cosine"), "size", "cosine of logits", "tokens of filler before the chunk", 2.0, Scale()
            ),
        ),
        main=CurvesByModel(
            ("offset_{size}.rotated", "agreement"),
            ("offset_{size}.no_rotation", "agreement"),
            "size",
            "Chunks moved far",
            "agreement with prefill there",
            "positions moved (dashed: not rotated)",
            Scale(ylim=(-0.05, 1.08)),
            levels=(0.5,),
        ),
    ),
    paper={
        f"filler_{size}.{arm}.cosine": PaperEntry("portability_by_offset", f"offset_{size}/{arm}", "logit_cosine")
        for size in (64, 256, 1024, 4096)
        for arm in ("rotated", "no_rotation")
    },
    may_lack={
        "*.sliding.*": "The model has no sliding layers.",
        "*.full.*": "The model has sliding layers only.",
        **KAPPA_MAY_LACK,
    },
    step=3,
    names=names,
)
