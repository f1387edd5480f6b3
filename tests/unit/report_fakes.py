"""Finished runs without a model, for the tests of reports and commands."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from locality_rows import made_rows
from runs_fakes import FakeProbe, load_subject

from kvprobe.figures.panel import Panel
from kvprobe.probes.base import Reading
from kvprobe.probes.mechanism.locality.probe import Locality
from kvprobe.probes.mechanism.locality.reading import READING
from kvprobe.runs import ExperimentConfig, RunResult, run_experiment
from kvprobe.stats import Sample, StatisticsConfig

CLAIMS = [
    {
        "id": "local",
        "kind": "paper",
        "statement": "field_only.recovery < 0.15",
        "source": "section 3",
        "paper_value": 0.009,
    },
    {
        "id": "wrong",
        "kind": "critique",
        "statement": "downstream_only.recovery < 0.5",
        "source": "made up | on purpose",
    },
]


def panel(model: str = "a-model", field: float = 0.05) -> Panel:
    """A measured model that recovers `field` from the field alone."""
    rows = made_rows(field, 1 - field, [float(gap) for gap in range(4, 16)])
    sample = Sample.of_model(rows, StatisticsConfig())
    effects = {effect.name: effect for effect in READING.read(Locality(), sample)}
    return Panel(model, effects, rows, {"field_only.recovery": 0.01}, "Qwen3-8B")


class MadeLocality(Locality):
    """The locality probe with rows made by hand in place of a model."""

    reading: ClassVar[Reading] = READING

    def refusal(self, subject, pair):  # type: ignore[no-untyped-def]
        return None

    def preview(self, subject, pair):  # type: ignore[no-untyped-def]
        return None

    def measure(self, subject, pairs, progress):  # type: ignore[no-untyped-def]
        rows = made_rows(0.05, 0.96, [10.0 + index % 3 for index in range(len(pairs))])
        return rows.drop(columns="skeleton").astype(object).where(rows.notna(), None).to_dict("records")


def finished_run(results: Path, monkeypatch) -> RunResult:  # type: ignore[no-untyped-def]
    """A run of two fake models, `red` measured and `broken` not to be loaded."""
    from kvprobe.runs import preparation

    monkeypatch.setattr(preparation, "make_probe", lambda config: MadeLocality())
    config = ExperimentConfig.model_validate(
        {
            "name": "locality",
            "question": "Where does it act from?",
            "probe": "locality",
            "models": ["red", "broken"],
            "task": {"name": "gated_decision", "size": 24, "split": "all"},
            "block_size": 12,
            "claims": CLAIMS,
        }
    )
    return run_experiment(config, results_dir=results, load_subject=load_subject)


__all__ = ["FakeProbe", "finished_run", "panel"]
