"""The inclusion gate: only pairs on which the model itself changes its decision are measured on (critique G2, G4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvprobe.errors import GateError
from kvprobe.runs.config import GateConfig
from kvprobe.runs.records import StoredEffect
from kvprobe.stats import Effect, StatisticsConfig, proportion


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
        included: pairs that count.
        oracle_accuracy: share of right decisions over base and donor prompts.
        answer_mass: mean probability of the two answers together, where it was measured.
        passed: whether anything measured on this model counts.
        reason: one sentence.
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
    minus the noise floor and `m_donor` above it.

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
    included = fates["included"]
    accuracy = proportion(
        "oracle.accuracy",
        pd.concat([fates["base_right"], fates["donor_right"]]).to_numpy(),
        clusters=_paired_labels(pairs[statistics.cluster]),
        statistics=statistics,
    )
    mass = float(pairs[["mass_base", "mass_donor"]].min(axis=1).mean()) if "mass_base" in pairs else None
    passed, reason = _decide(gate, accuracy, mass, int(included.sum()), len(pairs))
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
        passed=passed,
        reason=reason,
    )
    return rows["pair"].map(included).astype(bool), report


def hopeless(
    rows: Sequence[Mapping[str, Any]], gate: GateConfig, statistics: StatisticsConfig, *, all_seen: bool = False
) -> bool:
    """Whether a model's first pairs leave no doubt that it decides too few unedited prompts rightly to pass.

    Args:
        rows: one for each pair, as `apply_gate` reads them.
        gate: the thresholds.
        statistics: of the interval, whose upper end must lie below the gate.
        all_seen: there are no further pairs, so the share itself decides, as it does in `apply_gate`.
    """
    pairs = pd.DataFrame([dict(row) for row in rows])
    fates = _fates(pairs, gate)
    right = pd.concat([fates["base_right"], fates["donor_right"]]).to_numpy()
    accuracy = proportion(
        "oracle.accuracy", right, clusters=_paired_labels(pairs[statistics.cluster]), statistics=statistics
    )
    return (accuracy.estimate if all_seen else accuracy.high) < gate.oracle_accuracy


def _fates(pairs: pd.DataFrame, gate: GateConfig) -> pd.DataFrame:
    """[pair] booleans: which prompts are decided rightly, and the one fate of each pair."""
    base, donor = pairs["m_base"], pairs["m_donor"]
    floor = pd.Series(gate.noise_floor, index=pairs.index)
    if "noise_floor" in pairs:
        floor = floor.combine(pairs["noise_floor"].fillna(0.0).abs(), max)
    fates = pd.DataFrame({"base_right": base < -floor, "donor_right": donor > floor})
    fates["included"] = fates["base_right"] & fates["donor_right"]
    fates["undecided"] = (base.abs() <= floor) | (donor.abs() <= floor)
    fates["reversed"] = ~fates["undecided"] & (base > 0) & (donor < 0)
    fates["not_flipped"] = ~fates["undecided"] & ~fates["included"] & ~fates["reversed"]
    return fates


def _paired_labels(cluster: pd.Series) -> list[Any]:
    """A label for each base and each donor prompt: the two prompts of a pair are never independent."""
    labels = cluster.tolist() if cluster.nunique() < len(cluster) else list(range(len(cluster)))
    return labels + labels


def _decide(gate: GateConfig, accuracy: Effect, mass: float | None, included: int, measured: int) -> tuple[bool, str]:
    if accuracy.estimate < gate.oracle_accuracy:
        return False, (
            f"It decides {accuracy.estimate:.0%} of the unedited prompts rightly, "
            f"below the {gate.oracle_accuracy:.0%} of the gate."
        )
    if mass is not None and mass < gate.answer_mass:
        share = f"{mass:.0%} of its probability"
        return False, f"The two answers hold {share}, below the {gate.answer_mass:.0%} of the gate."
    if included < min(gate.minimum_pairs, measured) or not included:
        few = f"Only {included} of {measured} pairs"
        return False, f"{few} change its decision; the gate asks for {gate.minimum_pairs}."
    return True, (
        f"It decides {accuracy.estimate:.0%} of the unedited prompts rightly; {included} of {measured} pairs count."
    )


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
