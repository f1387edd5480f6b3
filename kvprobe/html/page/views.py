"""Which effects of an experiment an interactive figure shows together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvprobe.runs.claims import Claim
from kvprobe.runs.results import RunResult

MOST_ROWS = 16
"""Effects in one view: more would not fit on a screen."""
_FAMILY = 3
"""Effects of one metric that make a view of their own."""


@dataclass(frozen=True)
class View:
    """Effects in one unit, drawn on one axis.

    Args:
        label: what the reader chooses it by.
        unit: of all of them.
        effects: their names, from the top.
    """

    label: str
    unit: str
    effects: tuple[str, ...]


def views_of(result: RunResult) -> list[View]:
    """Claimed effects first, then families of one metric (`*.recovery`), then the others, unit by unit."""
    effects = {effect.name: effect for model in result.models.values() for effect in model.effects}
    units = {name: effect.unit for name, effect in effects.items()}
    claimed = dict.fromkeys(claim.parsed.effect for claim in result.config.claims)
    # What is claimed in the unit of most claims is seen first.
    claimed_units = Counter(units[name] for name in claimed if name in units)
    groups = {("claimed effects", unit): list[str]() for unit, _ in claimed_units.most_common()}
    for name in claimed:
        if name in units:
            groups["claimed effects", units[name]].append(name)
    sizes = Counter((effect.metric, effect.unit) for effect in effects.values())
    others: dict[tuple[str, str], list[str]] = {}
    for name, effect in effects.items():
        if sizes[effect.metric, effect.unit] >= _FAMILY:
            groups.setdefault((f"*.{effect.metric}", effect.unit), []).append(name)
        else:
            others.setdefault(("other effects", effect.unit), []).append(name)
    return [view for (label, unit), names in (groups | others).items() for view in _parts(label, unit, names)]


def regions_of(claim: Claim) -> list[tuple[float | None, float | None]]:
    """Where an effect's value satisfies a claim, as intervals from the left; `None` where one is unbounded."""
    statement = claim.parsed
    low, high = (end if abs(end) != float("inf") else None for end in (statement.lower, statement.upper))
    if not statement.absolute:
        return [(low, high)]
    if low is not None and low > 0:
        return [(None if high is None else -high, -low), (low, high)]
    return [(None if high is None else -high, high)]


def _parts(label: str, unit: str, names: Sequence[str]) -> Iterator[View]:
    # Parts of equal size, so that none of them is a single row.
    count = -(-len(names) // MOST_ROWS)
    size = -(-len(names) // count)
    for first in range(0, len(names), size):
        part = tuple(names[first : first + size])
        which = f", {first + 1} to {first + len(part)} of {len(names)}" if count > 1 else ""
        yield View(f"{label} ({unit}){which}", unit, part)
