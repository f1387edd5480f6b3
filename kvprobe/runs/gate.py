"""The inclusion gate: what can be asked of a model, its decisions or the margins alone (critique G2, G4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pandas as pd

from kvprobe.errors import GateError
from kvprobe.runs.config import GateConfig
from kvprobe.runs.records import StoredEffect
from kvprobe.stats import Effect, StatisticsConfig, proportion


class Grade(StrEnum):
    """What a model's pairs can be asked."""

    DECISION = "decision"
    """It decides them: pairs that change its decision count, for every effect."""
    MARGIN = "margin only"
    """No decision turns, but the logit difference moves: effects on margins alone are read."""


MARGIN_ONLY = "margin only, no decision turns"


@dataclass(frozen=True)
class GateReport:
    """What became of a model's pairs.

    Args:
        generated: pairs of the task.
        unaligned: of these, those whose values this tokenizer cuts into spans of different length.
        failed: aligned pairs lost with cells that could not be measured.
        measured: pairs measured.
        undecided: measured pairs with a margin within the noise floor.
        not_flipped: pairs with the same decision for base and donor.
        reversed: pairs that flip the wrong way round.
        included: pairs that count: those that flip, or on margins alone those that move.
        oracle_accuracy: share of right decisions over base and donor prompts.
        answer_mass: mean probability of the two answers together, where it was measured.
        passed: whether anything measured on this model counts.
        reason: one sentence.
        grade: what can be asked of it; `None` where nothing can.
        flipped: pairs that change its decision the right way round.
        moved: pairs whose logit difference moves the right way by far more than the noise.
    """

    generated: int
    unaligned: int
    failed: int
    measured: int
    undecided: int
    not_flipped: int
    reversed: int
    included: int
    oracle_accuracy: StoredEffect | None
    answer_mass: float | None
    passed: bool
    reason: str
    grade: Grade | None = None
    flipped: int | None = None
    moved: int | None = None

    def __post_init__(self) -> None:
        # Summaries of earlier versions know decisions alone.
        if self.passed and self.grade is None:
            object.__setattr__(self, "grade", Grade.DECISION)

    @property
    def excluded(self) -> int:
        """Measured pairs that do not count."""
        return self.measured - self.included


def apply_gate(
    rows: pd.DataFrame,
    gate: GateConfig,
    statistics: StatisticsConfig,
    *,
    generated: int,
    unaligned: int = 0,
    failed: int = 0,
) -> tuple[pd.Series, GateReport]:
    """Which rows count, and the report.

    A margin is logit(donor answer) - logit(base answer), so a pair is decided rightly when `m_base` lies below
    minus the noise floor and `m_donor` above it. A model that decides too few of them is asked for less: whether the
    margin moves from base to donor, the right way and by several noise floors.

    Args:
        rows: with `pair`, `m_base` and `m_donor` (logits), the cluster column, and optionally `noise_floor`
            (logits), `mass_base` and `mass_donor` (probabilities).
        gate: the thresholds.
        statistics: names the cluster column.
        generated: pairs that the task made.
        unaligned: of these, those that the tokenizer did not align.
        failed: of these, those lost with cells that could not be measured.

    Returns:
        [row] booleans, and the report.

    Raises:
        GateError: the rows lack what the gate reads.
    """
    if rows.empty:
        return pd.Series(dtype=bool), _nothing_measured(generated, unaligned, failed)
    missing = [name for name in ("pair", "m_base", "m_donor", statistics.cluster) if name not in rows]
    if missing:
        raise GateError(f"The probe's rows have no column {missing[0]!r}, which the inclusion gate reads; add it.")
    pairs = rows.groupby("pair", sort=True).first()
    fates = _fates(pairs, gate)
    accuracy, moved = (_share(name, fates, columns, pairs, statistics) for name, columns in _SHARES.items())
    mass = float(pairs[["mass_base", "mass_donor"]].min(axis=1).mean()) if "mass_base" in pairs else None
    flips, moves = int(fates["flipped"].sum()), int(fates["moved"].sum())
    why_no_decision = _refused(gate, accuracy, mass, flips, len(pairs))
    grade = Grade.DECISION if not why_no_decision else _on_margins(gate, moved, mass, moves, len(pairs))
    included = fates["moved"] if grade is Grade.MARGIN else fates["flipped"]
    counting = f"{included.sum()} of {len(pairs)} pairs count."
    reason = {
        Grade.DECISION: f"It decides {accuracy.estimate:.0%} of the unedited prompts rightly; {counting}",
        Grade.MARGIN: f"{why_no_decision} But the logit difference moves the right way on {moved.estimate:.0%} of the "
        f"pairs, so effects on it are read ({MARGIN_ONLY}); {counting}",
    }
    report = GateReport(
        generated=generated,
        unaligned=unaligned,
        failed=failed,
        measured=len(pairs),
        undecided=int(fates["undecided"].sum()),
        not_flipped=int(fates["not_flipped"].sum()),
        reversed=int(fates["reversed"].sum()),
        included=int(included.sum()),
        oracle_accuracy=accuracy,
        answer_mass=mass,
        passed=grade is not None,
        reason=reason[grade] if grade else why_no_decision,
        grade=grade,
        flipped=flips,
        moved=moves,
    )
    return rows["pair"].map(included).astype(bool), report


def hopeless(
    rows: Sequence[Mapping[str, Any]], gate: GateConfig, statistics: StatisticsConfig, *, all_seen: bool = False
) -> bool:
    """Whether a model's first pairs leave no doubt that it neither decides nor moves its margins well enough to pass.

    Args:
        rows: one for each pair, as `apply_gate` reads them.
        gate: the thresholds.
        statistics: of the intervals, whose upper ends must lie below the gate.
        all_seen: there are no further pairs, so the shares themselves decide, as they do in `apply_gate`.
    """
    pairs = pd.DataFrame([dict(row) for row in rows])
    fates = _fates(pairs, gate)
    asked = {"oracle.accuracy": gate.oracle_accuracy, "moved.share": gate.moved_share}
    shares = {name: _share(name, fates, _SHARES[name], pairs, statistics) for name in asked}
    return all((shares[name].estimate if all_seen else shares[name].high) < asked[name] for name in asked)


def _fates(pairs: pd.DataFrame, gate: GateConfig) -> pd.DataFrame:
    """[pair] booleans: which prompts are decided rightly, the one fate of each pair, and whether its margin moves."""
    base, donor = pairs["m_base"], pairs["m_donor"]
    floor = pd.Series(gate.noise_floor, index=pairs.index)
    if "noise_floor" in pairs:
        floor = floor.combine(pairs["noise_floor"].fillna(0.0).abs(), max)
    fates = pd.DataFrame({"base_right": base < -floor, "donor_right": donor > floor})
    fates["flipped"] = fates["base_right"] & fates["donor_right"]
    fates["undecided"] = (base.abs() <= floor) | (donor.abs() <= floor)
    fates["reversed"] = ~fates["undecided"] & (base > 0) & (donor < 0)
    fates["not_flipped"] = ~fates["undecided"] & ~fates["flipped"] & ~fates["reversed"]
    fates["moved"] = donor - base > gate.moved_floors * floor
    return fates


_SHARES = {"oracle.accuracy": ("base_right", "donor_right"), "moved.share": ("moved",)}


def _share(
    name: str, fates: pd.DataFrame, columns: Sequence[str], pairs: pd.DataFrame, statistics: StatisticsConfig
) -> Effect:
    """The share of true ones over several columns of a pair, whose values are never independent."""
    cluster = pairs[statistics.cluster]
    labels = cluster.tolist() if cluster.nunique() < len(cluster) else list(range(len(cluster)))
    values = pd.concat([fates[column] for column in columns]).to_numpy()
    return proportion(name, values, clusters=labels * len(columns), statistics=statistics)


def _refused(gate: GateConfig, accuracy: Effect, mass: float | None, flips: int, measured: int) -> str:
    """Why the model's decisions cannot be asked about; empty where they can."""
    if accuracy.estimate < gate.oracle_accuracy:
        return (
            f"It decides {accuracy.estimate:.0%} of the unedited prompts rightly, "
            f"below the {gate.oracle_accuracy:.0%} of the gate."
        )
    if mass is not None and mass < gate.answer_mass:
        share = f"{mass:.0%} of its probability"
        return f"The two answers hold {share}, below the {gate.answer_mass:.0%} of the gate."
    if flips < min(gate.minimum_pairs, measured) or not flips:
        few = f"Only {flips} of {measured} pairs"
        return f"{few} change its decision; the gate asks for {gate.minimum_pairs}."
    return ""


def _on_margins(gate: GateConfig, moved: Effect, mass: float | None, moves: int, measured: int) -> Grade | None:
    enough = moves >= min(gate.minimum_pairs, measured) and moved.estimate >= gate.moved_share
    return Grade.MARGIN if enough and (mass is None or mass >= gate.answer_mass) else None


def _nothing_measured(generated: int, unaligned: int, failed: int) -> GateReport:
    reason = (
        f"None of its {generated} pairs could be measured."
        if failed
        else f"Its tokenizer aligns none of the {generated} pairs."
    )
    return GateReport(
        generated=generated,
        unaligned=unaligned,
        failed=failed,
        measured=0,
        undecided=0,
        not_flipped=0,
        reversed=0,
        included=0,
        oracle_accuracy=None,
        answer_mass=None,
        passed=False,
        reason=reason,
    )
