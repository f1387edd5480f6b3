"""What the rows of `seam_repair` mean: what headers and repaired seams each restore, and the chunk's first token.

Effects of each cell, such as `none.seam_1`, are those of `fidelity_effects` and `token_share`: tokens run to compose
over those of a prefill. Between cells:

    H.repair_B.kl_removed, .error_removed   share of divergence and margin error at b = 0 that a seam of B removes
    header.H_over_none.kl, .margin_error    what the header alone removes, in nats and logits
    interaction.H.kl, .margin_error         how much more one token removes behind nothing than behind header H

and of the chunk's first token, averaged over layers, `R` being a header (at b = 0), `none_repaired` (b = 1) or
`full_prefill`:

    sink.R.key_norm, .value_norm   norm of its keys and values over the median of the chunk
    sink.R.attention               attention that each later token puts on it, mean over heads
    sink.R.attention_elsewhere     the same of each of the chunk's other tokens
    sink.R.attention_on_start      the same of the prompt's first token: how much of a sink the model wants at all
    sink.R_over_full.attention     the first token's, less what it gets in the full prefill; so for all of these
"""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.bars import Bars
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.curves import Curve, Curves, Scale
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.composing.seam_repair.probe import HEADERS, REPAIRED, SINK, SeamRepair
from kvprobe.probes.kit.fidelity import FULL_PREFILL
from kvprobe.probes.kit.reading.fidelity import FIDELITY, KAPPA_MAY_LACK, PROMPT, by_pair, fidelity_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

_UNITS = {"kl": "nats", "margin_error": "logits"}
_LOOKS = {
    "none": ("no header", COLORS["vermilion"], "o"),
    "bos": ("beginning of text", COLORS["orange"], "s"),
    "neutral": ("neutral header", COLORS["blue"], "v"),
    "real": ("its own context", COLORS["green"], "^"),
}
_CACHES = {
    FULL_PREFILL: ("full\nprefill", COLORS["ink"]),
    "none": ("no\nheader", COLORS["vermilion"]),
    REPAIRED: ("none, 1\nrepaired", COLORS["purple"]),
    "bos": ("start\nof text", COLORS["orange"]),
    "neutral": ("neutral\nheader", COLORS["blue"]),
    "real": ("own\ncontext", COLORS["green"]),
}


def effects(sample: Sample, _: SeamRepair) -> Iterator[Effect]:
    """Fidelity of every cell, what headers and seams remove, their interaction, the sink, noise."""
    cells = sample.of(measurement="cell")
    for header, seam, part in cells.by("header", "seam"):
        yield from fidelity_effects(part, f"{header}.seam_{{seam}}")
        yield part.ratio(f"{header}.seam_{{seam}}.token_share", "tokens", "full_tokens")
        if header != "real" and seam:
            yield from _removed_by_seam(cells.of(header=header, seam=(0, seam)), header, seam)
    for header, _ in cells.by("header"):
        if header != "none":
            yield from _removed_by_header(cells, header)
    sinks = sample.of(measurement="sink")
    for cache, part in sinks.by("cache"):
        prompts = part.per(*PROMPT, **dict.fromkeys(SINK, "mean"))
        for column in SINK:
            unit = "ratio" if column.endswith("norm") else "fraction"
            yield prompts.mean(f"sink.{cache}.{column}", column, unit)
            if cache != FULL_PREFILL:
                name = f"sink.{cache}_over_full.{column}"
                yield from sinks.difference(name, column, "cache", cache, FULL_PREFILL, within=PROMPT, unit=unit)
    yield sample.noise()


def names(probe: SeamRepair) -> Iterator[str]:
    """Those of `effects`."""
    seams = [f"seam_{size}" for size in probe.seams]
    yield from joined(HEADERS, seams, (*FIDELITY, "token_share"))
    repairs = [f"repair_{size}" for size in probe.seams if size]
    yield from joined([header for header in HEADERS if header != "real"], repairs, ("kl_removed", "error_removed"))
    behind = [header for header in HEADERS if header != "none"]
    yield from joined("header", [f"{header}_over_none" for header in behind], _UNITS)
    yield from joined("interaction", behind, _UNITS)
    caches = (REPAIRED, *HEADERS)
    yield from joined("sink", (FULL_PREFILL, *caches, *(f"{cache}_over_full" for cache in caches)), SINK)
    yield NOISE


def _removed_by_seam(sample: Sample, header: str, seam: int) -> Iterator[Effect]:
    """The share of a header's divergence and margin error that a seam removes."""
    for metric, column in (("kl_removed", "kl"), ("error_removed", "margin_error")):
        table = by_pair(sample, column, "seam")
        # Without an error at the start there is no share of it to remove.
        if 0 in table and table[0].sum() > 0:
            pairs = sample.table(table).named(seam=seam)
            yield pairs.ratio(f"{header}.repair_{{seam}}.{metric}", table[0] - table[seam], table[0])


def _removed_by_header(cells: Sample, header: str) -> Iterator[Effect]:
    """What a header alone removes, and how much more a repaired token removes where there is none."""
    for column, unit in _UNITS.items():
        name = f"header.{header}_over_none.{column}"
        yield from cells.of(seam=0).difference(name, column, "header", "none", header, within=PROMPT, unit=unit)
        both = cells.of(header=("none", header), seam=(0, 1))
        if len(both.rows[["header", "seam"]].drop_duplicates()) == 4:
            # None at 0 less none at 1, less the same behind the header.
            added = (both.rows["header"] == "none") == (both.rows["seam"] == 0)
            signed = both.rows[column].where(added, -both.rows[column])
            gains = both.table(both.rows.assign(gain=signed)).per("pair", gain="sum")
            yield gains.mean(f"interaction.{header}.{column}", "gain", unit)


def _row(metric: str, ylabel: str, scale: Scale) -> Curves:
    curves = tuple(Curve(f"{header}.seam_{{seam}}", metric, *look) for header, look in _LOOKS.items())
    return Curves(curves, "seam", ylabel, "first tokens run in place", 2.4, scale)


READING = Reading(
    effects,
    FigureSpec(
        "What a chunk is compiled behind, and how much of its seam is recomputed",
        (
            _row("margin_error", "error of the margin\n(logits)", Scale((1e-4, 10.0), log=True)),
            _row("cosine", "1 - cosine of logits", Scale((1e-6, 1.0), log=True, complement=True)),
            Bars(
                {f"sink.{cache}.attention": look for cache, look in _CACHES.items()},
                "attention of later tokens\non the chunk's first",
                2.2,
                levels=(),
                label_size=6.5,
                dots=None,
            ),
        ),
        main=EffectsByModel(
            {
                f"{header}.seam_{seam}.margin_error": f"{_LOOKS[header][0]}, {seam}"
                for header in HEADERS[:-1]
                for seam in (0, 1)
            },
            "Header, and tokens repaired",
            "error of the margin (logits)",
            levels=(0.0,),
            limits=(0.0, 10.0),
            label_size=6.5,
            slanted=True,
        ),
        key_columns=6,
    ),
    paper={
        f"none.seam_{size}.cosine": PaperEntry("seam_repair", f"recompute_first_{size}", "logit_cosine")
        for size in (0, 2, 4, 8, 16, 32)
    },
    may_lack={"*bos*": "The tokenizer has no beginning-of-text token.", **KAPPA_MAY_LACK},
    step=2,
    names=names,
)
