"""Several finished experiments, such as all of a section, and their claims judged together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvprobe.runs.claims import Verdict, adjust_headlines
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.results import Failure, RunResult
from kvprobe.stats.proportions import EXACT_SHARE


@dataclass(frozen=True)
class SectionResult:
    """The finished experiments of a section.

    Args:
        name: such as `section3`.
        results: of the experiments, in the paper's order; p values adjusted within each.
        failures: of the experiments that have no result.
    """

    name: str
    results: tuple[RunResult, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether something could not be measured: the exit code is then not 0."""
        return bool(self.failures) or any(result.failed for result in self.results)

    def verdicts(self) -> list[tuple[RunResult, Verdict]]:
        """The section's registry of claims: all verdicts, those on headline claims with Holm's p over all of them.

        A measurement that several experiments show counts in the first: the verdicts of the others say so.
        """
        first: dict[tuple[Any, ...], str] = {}
        pairs = []
        for result in self.results:
            for verdict in result.verdicts:
                shown_in = first.setdefault(_measurement(result, verdict), result.config.name)
                again = shown_in != result.config.name
                pairs.append((result, replace(verdict, shown_in=shown_in) if again else verdict))
        adjusted = adjust_headlines([verdict for _, verdict in pairs])
        return [(result, verdict) for (result, _), verdict in zip(pairs, adjusted, strict=True)]


def _measurement(result: RunResult, verdict: Verdict) -> tuple[Any, ...]:
    """The same for one measurement that two experiments show: one effect of one model, equal to the last digit."""
    effect = verdict.effect
    # Shares of all or none, and what describes its rows alone, are equal by chance.
    if effect is None or effect.method in (EXACT_SHARE, "exact"):
        return result.hash, verdict.claim, verdict.model
    return verdict.model, effect.name, effect.estimate, effect.low, effect.high, effect.n, effect.clusters


def section_name(configs: Sequence[ExperimentConfig]) -> str:
    """`section3` where all are of section 3 or of a part of it, such as 3.1; else `experiments`."""
    sections = {config.section.split(".")[0].strip() for config in configs}
    section = sections.pop() if len(sections) == 1 else ""
    return f"section{section}" if section else "experiments"


def sections_of(results: Sequence[RunResult]) -> list[SectionResult]:
    """Finished runs by section, each in order."""
    by_name: dict[str, list[RunResult]] = {}
    for result in sorted(results, key=lambda result: _place(result.config)):
        by_name.setdefault(section_name([result.config]), []).append(result)
    return [SectionResult(name, tuple(of_section)) for name, of_section in by_name.items()]


def in_order(configs: Sequence[ExperimentConfig]) -> list[ExperimentConfig]:
    """By section, then by name, numbers by size: 3.2 before 3.10."""
    return sorted(configs, key=_place)


def _place(config: ExperimentConfig) -> tuple[list[tuple[int, int, str]], str]:
    parts = re.findall(r"\d+|[^\d.]+", config.section)
    # Numbers by their size and before words.
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts], config.name
