"""The paper's own numbers, for comparison only; nothing that kvprobe measures depends on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import pandas as pd

from kvprobe.figures.panel import PaperEntry
from kvprobe.models.catalogue import paper_model_of

_TUNED = re.compile(r"-(instruct|it|chat)\b")


@cache
def reference() -> pd.DataFrame:
    """The paper's records: section, experiment, model, condition, metric, value, ci_low, ci_high, n, unit, note."""
    with (files("kvprobe.report") / "reference.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)


def paper_model(name: str, architecture: str = "") -> str | None:
    """The model of the paper that `name` is, or else its main model of the same architecture; `None` for neither.

    Args:
        name: of a model of kvprobe or a hub id.
        architecture: its Hugging Face `model_type`.
    """
    known = {_plain(model): model for model in reference()["model"].dropna().unique()}
    return known.get(_plain(name)) or known.get(_plain(paper_model_of(architecture) or ""))


def paper_value(entry: PaperEntry, model: str) -> float | None:
    """The paper's value of one quantity on one of its models; `None` where it gives none."""
    value = _values().get((entry.experiment, model, entry.condition, entry.metric))
    return None if value is None else float(value)


@cache
def _values() -> dict[tuple[str, ...], str]:
    """The first value of each experiment, model, condition and metric; some are words."""
    columns = ["experiment", "model", "condition", "metric"]
    return dict(reference().drop_duplicates(columns).set_index(columns)["value"].dropna())


def paper_values(entries: Mapping[str, PaperEntry], model: str | None) -> dict[str, float]:
    """The paper's values on one of its models, by the effect's name."""
    found = {name: paper_value(entry, model) if model else None for name, entry in entries.items()}
    return {name: value for name, value in found.items() if value is not None}


def _plain(name: str) -> str:
    return _TUNED.sub("", name.rsplit("/", 1)[-1].lower()).replace("meta-", "")
