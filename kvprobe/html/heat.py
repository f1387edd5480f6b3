"""An interactive heat map over tokens and layers."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.errors import ConfigError
from kvprobe.figures.style import COLORS
from kvprobe.html.tokens import Token, tokens_of
from kvprobe.tasks.context import TokenizedContext

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Read on white and on black alike.
_TEXT = "#7A7A7A"
_SCALE = [[0.0, COLORS["blue"]], [0.5, "#F7F7F7"], [1.0, COLORS["vermilion"]]]
_LABELLED = 40
"""Up to as many columns each have their text below them; of more, those whose values stand out."""
_STANDS_OUT = 0.1
_UPRIGHT = 12
"""Up to as many columns have their text upright."""


def heat_map(
    tokens: TokenizedContext | Sequence[str],
    values: Any,
    *,
    unit: str = "",
    title: str = "",
    columns: str = "token",
    rows: str = "layer",
    positions: Sequence[int] | None = None,
) -> Figure:
    """A plotly figure: a cell for each layer and token, blue below 0 and red above; hovering tells all of a cell.

    Args:
        tokens: a context, or the text of each column.
        values: `[layer, token]` or `[token]`, in `unit`; NaN leaves a cell empty.
        unit: such as `logits` or `recovery`.
        title: of the figure.
        columns: what a column is.
        rows: what a row is.
        positions: where the columns stand in the context; all of it by default.

    Raises:
        ConfigError: the values do not fit the tokens.
    """
    from plotly.graph_objects import Figure, Heatmap

    shown = list(tokens_of(tokens))
    if positions is not None:
        shown = _chosen(shown, positions)
    numbers = np.asarray(values, dtype=float)
    table = numbers[None] if numbers.ndim == 1 else numbers
    if table.ndim != 2 or table.shape[1] != len(shown) or not table.size:
        raise ConfigError(
            f"A heat map of {len(shown)} {columns}s needs values [{columns}] or [{rows}, {columns}], not "
            f"{list(numbers.shape)}."
        )
    finite = np.abs(table[np.isfinite(table)])
    most = (float(finite.max()) if len(finite) else 0.0) or 1.0
    labels = [_label(token) for token in shown]
    told = [f"position {token.position}{f', {html.escape(token.segment)}' if token.segment else ''}" for token in shown]
    below = f"{rows} %{{y}}<br>" if numbers.ndim == 2 else ""
    figure = Figure(
        Heatmap(
            z=table,
            x=list(range(len(shown))),
            y=list(range(len(table))),
            customdata=np.broadcast_to(np.array(list(zip(labels, told, strict=True)), dtype=object), (*table.shape, 2)),
            hovertemplate=(
                f"{html.escape(columns)} <b>%{{customdata[0]}}</b><br>%{{customdata[1]}}<br>{below}"
                f"%{{z:.3f}} {html.escape(unit)}<extra></extra>"
            ),
            zmin=-most,
            zmax=most,
            colorscale=_SCALE,
            colorbar={"title": {"text": html.escape(unit)}, "thickness": 12},
            xgap=1,
            ygap=1,
        )
    )
    ticks = _labelled(table)
    figure.update_layout(
        title={"text": html.escape(title), "font": {"size": 14}},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _TEXT, "size": 12},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": _TEXT},
        margin={"l": 50, "r": 10, "t": 40 if title else 12, "b": 80 if len(shown) > _UPRIGHT else 40},
        height=max(200, 120 + 24 * len(table)),
        xaxis={
            "showgrid": False,
            "zeroline": False,
            "tickangle": -60 if len(shown) > _UPRIGHT else 0,
            "tickvals": ticks,
            "ticktext": [labels[column] for column in ticks],
        },
        yaxis={"title": {"text": rows}, "dtick": max(1, len(table) // 12), "showgrid": False, "zeroline": False},
    )
    if numbers.ndim == 1:
        figure.update_yaxes(visible=False)
    return figure


def _labelled(table: np.ndarray) -> list[int]:
    """The columns that have their text below them."""
    if table.shape[1] <= _LABELLED:
        return list(range(table.shape[1]))
    sizes = np.nan_to_num(np.abs(table), posinf=0.0, neginf=0.0).max(axis=0)
    strongest = np.argsort(-sizes, kind="stable")[:_LABELLED]
    return sorted(int(column) for column in strongest if sizes[column] > _STANDS_OUT * sizes.max())


def _chosen(shown: Sequence[Token], positions: Sequence[int]) -> list[Token]:
    outside = [position for position in positions if not 0 <= position < len(shown)]
    if outside:
        raise ConfigError(f"There is no position {outside[0]}: the context has positions 0 to {len(shown) - 1}.")
    return [shown[position] for position in positions]


def _label(token: Token) -> str:
    """A token's text with its blanks made visible, as plotly's markup."""
    text = (token.text or token.shown).replace("\n", "↵").replace("\t", "⇥")
    text = text.strip(" ") or "␣"
    return html.escape(text)
