"""What the rows of `attn_vs_mlp` mean: attention's share by layer, what each layer writes, where attention reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.figures.by_model import model_color
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS, levels
from kvprobe.probes.base import Reading
from kvprobe.probes.mechanism.attn_vs_mlp.probe import PLACES, AttnVsMlp
from kvprobe.stats import Effect, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAPER_LAYERS = (12, 14, 16, 18, 20, 22, 28)
_PLACES = {
    "note": ("at the note", COLORS["vermilion"], "o"),
    "decision": ("at the decision", COLORS["blue"], "s"),
}
_SOURCES = {
    "before": "before\nthe field",
    "field": "field",
    "session_rest": "session",
    "policy": "policy",
    "conversation": "conver-\nsation",
    "task": "task",
    "self": "itself",
}
_HALF = 0.4


def effects(sample: Sample, _: AttnVsMlp) -> Iterator[Effect]:
    """Attention's share at every layer, what each layer writes, sources of attention, error of the sums."""
    for place in PLACES:
        part = sample.of(place=place)
        yield from _read(part.of(measurement="read_layer"))
        yield from _written(part.of(measurement="write_layer"))
        yield from _sources(part.of(measurement="source"))
    if len(sample):
        pairs = sample.per("pair", error="max", noise_floor="max")
        yield pairs.maximum("identity.error", "error", "fraction")
        yield pairs.maximum("noise.margin", "noise_floor")


def middle_layer(layers: int) -> int:
    """The layer at two fifths of the depth: 12 of 32, 14 of 36, 16 of 42."""
    return 2 * layers // 5


def _share(sample: Sample, name: str, column: str) -> Iterator[Effect]:
    """Sum of a column over the sum of the whole change; nothing where nothing changed."""
    if float(sample.rows["total"].sum()):
        yield sample.ratio(name, column, "total")


def _read(sample: Sample) -> Iterator[Effect]:
    for layer, part in sample.by("layer"):
        yield from _share(part.named(layer=int(layer)), "{place}.attention_share_{layer}", "attention")
    if not len(sample):
        return
    last = int(sample.rows["layer"].max())
    yield from _share(sample.of(layer=last), "{place}.attention_share_final", "attention")
    # Where the middle is follows from the last layer, so both are rows of the effect.
    middle = middle_layer(last + 1)
    both = sample.of(layer=(middle, last))
    yield from _share(both.where(both.rows["layer"] == middle), "{place}.attention_share_middle", "attention")


def _written(sample: Sample) -> Iterator[Effect]:
    for layer, part in sample.by("layer"):
        for kind in ("attention", "mlp"):
            yield from _share(part.named(layer=int(layer)), f"{{place}}.{kind}_of_layer_{{layer}}", kind)


def _sources(sample: Sample) -> Iterator[Effect]:
    """What attention brings from each group of sources, all layers together, as a share of the whole change."""
    if not len(sample):
        return
    rows = sample.rows
    pairs = sample.per("pair", total="first")
    after = ~rows["source"].isin(["before", "field", "self"])
    groups = {str(name): rows["source"] == name for name in rows["source"].unique()} | {"after_field": after}
    for name, inside in groups.items():
        # A prompt without the segment brings nothing from there.
        brought = rows[inside].groupby("pair")["attention"].sum().reindex(pairs.rows.index, fill_value=0.0)
        yield from _share(pairs.table(pairs.rows.assign(brought=brought)), f"{{place}}.from_{name}", "brought")


@dataclass(frozen=True)
class _Shares:
    """Attention's share of the change up to each layer."""

    ylabel: str = "attention's share\nof the change"
    height: float = 2.0

    def draw(self, axes: Axes, panel: Panel) -> None:
        levels(axes, 0.5)
        for place, (_, color, marker) in _PLACES.items():
            curve = panel.curve("{place}", "attention_share_{layer}", place=place)
            layers, effects = list(curve), list(curve.values())
            ends = np.array([(effect.low, effect.high) for effect in effects])
            # Where next to nothing has changed yet the share is unbounded.
            bounded = np.isfinite(ends).all(axis=1)
            axes.fill_between(
                layers, ends[:, 0], ends[:, 1], where=list(bounded), color=color, alpha=0.18, lw=0, zorder=2
            )
            estimates = [effect.estimate for effect in effects]
            axes.plot(layers, estimates, color=color, marker=marker, ms=4, lw=1.5, zorder=3)
            paper = {layer: panel.paper[effect.name] for layer, effect in curve.items() if effect.name in panel.paper}
            axes.plot(list(paper), list(paper.values()), "D", ms=5, mfc="white", mec=color, mew=1.2, zorder=4)
            axes.set_xticks(layers[:: max(1, len(layers) // 6)])
        axes.set_ylim(-0.05, 1.1)
        axes.set_xlabel("read after layer")

    def handles(self, panels: Sequence[Panel]) -> list[Any]:  # noqa: ARG002
        from matplotlib.lines import Line2D

        return [
            Line2D([], [], color=color, marker=marker, ms=4, label=label) for label, color, marker in _PLACES.values()
        ]


@dataclass(frozen=True)
class _Written:
    """What attention and MLP of each layer write."""

    ylabel: str = "written by one layer,\nshare of the change"
    height: float = 2.0

    def draw(self, axes: Axes, panel: Panel) -> None:
        for place, (_, color, _) in _PLACES.items():
            for kind, style in (("attention", "-"), ("mlp", ":")):
                curve = panel.curve("{place}", f"{kind}_of_layer_{{layer}}", place=place)
                layers, heights = list(curve), [effect.estimate for effect in curve.values()]
                axes.plot(layers, heights, color=color, ls=style, lw=1.6, marker=".", ms=5, zorder=3)
                axes.set_xticks(layers[:: max(1, len(layers) // 6)])
        levels(axes, 0.0)
        axes.set_xlabel("layer")

    def handles(self, panels: Sequence[Panel]) -> list[Any]:  # noqa: ARG002
        from matplotlib.lines import Line2D

        return [
            Line2D([], [], color=COLORS["ink"], ls="-", label="attention of one layer"),
            Line2D([], [], color=COLORS["ink"], ls=":", label="MLP of one layer"),
        ]


@dataclass(frozen=True)
class _Sources:
    """What attention brings from each source, all layers together; the segments that every prompt has."""

    ylabel: str = "brought by attention,\nshare of the change"
    height: float = 2.0

    def draw(self, axes: Axes, panel: Panel) -> None:
        levels(axes, 0.0)
        for number, (place, (_, color, _)) in enumerate(_PLACES.items()):
            for at, source in enumerate(_SOURCES):
                effect = panel.effects.get(f"{place}.from_{source}")
                if effect is None:
                    continue
                middle = at + (number - 0.5) * _HALF
                ends = np.clip([effect.low, effect.high], -0.5, 1.5)
                axes.bar(middle, effect.estimate, _HALF, color=color, alpha=0.8, zorder=2)
                axes.plot([middle] * 2, ends, color=COLORS["ink"], lw=1, zorder=3)
        axes.set_xticks(range(len(_SOURCES)), list(_SOURCES.values()), fontsize=6.5, rotation=60)
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel("where attention brings it from")

    def handles(self, panels: Sequence[Panel]) -> list[Any]:  # noqa: ARG002
        return []


@dataclass(frozen=True)
class _ShareByDepth:
    """Attention's share at the note (solid) and at the decision (dashed) over the depth, all models."""

    title: str = "Attention's share, note; dashed: decision"

    def draw(self, axes: Axes, panels: Sequence[Panel]) -> None:
        levels(axes, 0.5)
        for panel in (panel for panel in panels if panel.effects):
            color = model_color(panels, panel)
            for place, style in (("note", "-"), ("decision", "--")):
                curve = panel.curve("{place}", "attention_share_{layer}", place=place)
                shares = [effect.estimate for effect in curve.values()]
                depth = [layer / max(1, *curve) for layer in curve]
                axes.plot(depth, shares, color=color, ls=style, lw=1.5, label=panel.model if style == "-" else None)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("depth of the read layer")
        axes.set_ylabel("attention's share")
        axes.set_title(self.title)


READING = Reading(
    effects,
    FigureSpec(
        "Does attention or do MLPs write what a changed field changes?",
        (_Shares(), _Written(), _Sources()),
        main=_ShareByDepth(),
    ),
    paper={
        f"note.attention_share_{layer}": PaperEntry("attn_vs_mlp_write", f"read_layer_{layer}", "attention_share")
        for layer in _PAPER_LAYERS
    },
)
