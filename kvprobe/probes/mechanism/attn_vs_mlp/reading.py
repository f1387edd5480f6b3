"""What the rows of `attn_vs_mlp` mean: the shares of attention and MLPs by layer, and where attention reads."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.by_model import DosesByModel
from kvprobe.figures.doses import Curve, Doses
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.rates import Rates, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.mechanism.attn_vs_mlp.probe import AttnVsMlp
from kvprobe.stats import NOISE, Effect, Sample, joined
from kvprobe.stats.sample import Column

_NOTE, _DECISION = ("at the note", COLORS["vermilion"]), ("at the decision", COLORS["blue"])
_SHARE = "attention_share_{layer}"
_PAPER_LAYERS = (12, 14, 16, 18, 20, 22, 28)


# A change there that is this much smaller than elsewhere is the rounding of two prefills, of which shares say nothing.
_ROUNDING = 1e-5


def effects(sample: Sample, _: AttnVsMlp) -> Iterator[Effect]:
    """Attention's share at every layer, what each layer writes, sources of attention, error of the sums."""
    largest = float(sample.rows["total"].max())
    for place, part in sample.by("place"):
        if float(part.rows["total"].max()) < _ROUNDING * largest:
            continue
        yield from _read_effects(part.of(measurement="read_layer"), place)
        for _layer, written in part.of(measurement="write_layer").by("layer"):
            for kind in ("attention", "mlp"):
                yield from _share(written, f"{place}.{kind}_of_layer_{{layer}}", kind)
        yield from _source_effects(part.of(measurement="source"), place)
    yield sample.per("pair", error="max").maximum("identity.error", "error", "fraction")
    yield sample.noise()


def names(_: AttnVsMlp) -> Iterator[str]:
    """Those of `effects`."""
    layers = (_SHARE, "attention_of_layer_{layer}", "mlp_of_layer_{layer}")
    # Sources are called by the prompt's segments.
    yield from joined(("note", "decision"), (*layers, "attention_share_middle", "attention_share_final", "from_*"))
    yield from ("identity.error", NOISE)


def middle_layer(layers: int) -> int:
    """The layer at two fifths of the depth: 12 of 32, 14 of 36, 16 of 42."""
    return 2 * layers // 5


def _share(sample: Sample, name: str, column: Column) -> Iterator[Effect]:
    """Sum of a column over the sum of the whole change; nothing where nothing changed."""
    if float(sample.rows["total"].sum()):
        yield sample.ratio(name, column, "total")


def _read_effects(sample: Sample, place: str) -> Iterator[Effect]:
    for _layer, part in sample.by("layer"):
        yield from _share(part, f"{place}.{_SHARE}", "attention")
    if len(sample):
        last = int(sample.rows["layer"].max())
        # The last layer's rows stay in the filter: they tell which one the middle is.
        both = sample.of(layer=(middle_layer(last + 1), last))
        middle = both.where(both.rows["layer"] == middle_layer(last + 1))
        yield from _share(middle, f"{place}.attention_share_middle", "attention")
        yield from _share(sample.of(layer=last), f"{place}.attention_share_final", "attention")


def _source_effects(sample: Sample, place: str) -> Iterator[Effect]:
    """What attention brings from each group of sources, all layers together, as a share of the whole change."""
    if not len(sample):
        return
    pairs = sample.per("pair", total="first")
    # A prompt without the segment brings nothing from there.
    by_source = sample.rows.pivot_table(
        index="pair", columns="source", values="attention", aggfunc="sum", fill_value=0.0
    ).loc[pairs.rows.index]
    for source in by_source:
        yield from _share(pairs, f"{place}.from_{source}", by_source[source])
    after_field = by_source.drop(columns=["before", "field", "self"], errors="ignore").sum(axis=1)
    yield from _share(pairs, f"{place}.from_after_field", after_field)


READING = Reading(
    effects,
    FigureSpec(
        "Does attention or do MLPs write what a changed field changes?",
        (
            Doses(
                {"note": _NOTE, "decision": _DECISION},
                "attention's share\nof the change",
                2.0,
                "read after layer",
                metric=_SHARE,
                whole_ticks_of="note",
                levels=(0.5,),
                ylim=(-0.05, 1.1),
            ),
            Doses(
                {
                    Curve(place, metric=f"{kind}_of_layer_{{layer}}", line=line): (f"{name} {label}", color)
                    for place, (label, color) in (("note", _NOTE), ("decision", _DECISION))
                    for kind, name, line in (("attention", "attention of one layer", "-"), ("mlp", "its MLP", ":"))
                },
                "written by one layer,\nshare of the change",
                2.0,
                "layer",
                metric="attention_of_layer_{layer}",
                marker=".",
                whole_ticks_of="decision",
                levels=(0.0,),
            ),
            Rates(
                {
                    "before": "before the field",
                    "field": "field",
                    "session_rest": "session",
                    "policy": "policy",
                    "conversation": "conversation",
                    "task": "task",
                    "self": "itself",
                },
                (
                    Series("note.from_{arm}", "to the note", _NOTE[1]),
                    Series("decision.from_{arm}", "to the decision", _DECISION[1], "s"),
                ),
                "share of the change",
                2.4,
                ylabel="brought by attention from",
                levels=(0.0,),
                xlim=(None, None),
            ),
        ),
        main=DosesByModel(
            ("note", _SHARE),
            ("decision", _SHARE),
            "Attention's share, note; dashed: decision",
            "read after layer",
            "attention's share",
            log=False,
            levels=(0.5,),
        ),
    ),
    paper={
        f"note.attention_share_{layer}": PaperEntry("attn_vs_mlp_write", f"read_layer_{layer}", "attention_share")
        for layer in _PAPER_LAYERS
    },
    names=names,
)
