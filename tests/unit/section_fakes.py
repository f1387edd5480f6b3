"""Small probes on fake models, for the tests of sections; a worker that loads its models from here knows them too.

As a script, `python section_fakes.py RESULTS JOBS`, it runs a section; the tests stop it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runs_fakes import PROVENANCE, FakeProbe, contents, fake_effects, load_subject  # noqa: F401 - contents is offered too

from kvprobe.figures.bars import Bars
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel
from kvprobe.figures.spec import FigureSpec
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress, Reading
from kvprobe.runs import ExperimentConfig, SectionResult, provenance, run_section

LABELS = {"field_only.recovery": "field\nonly", "downstream.recovery": "downstream"}
PAUSE = "KVPROBE_TEST_SECONDS_A_CELL"
CLAIMS = [
    {
        "id": "local",
        "kind": "paper",
        "statement": "field_only.recovery < 0.15",
        "paper_value": 0.02,
        "source": "section 3",
    },
    {"id": "rest", "kind": "critique", "statement": "downstream.recovery < 0.5", "headline": True},
    {"id": "edge", "kind": "critique", "statement": "field_only.recovery < 0.075", "headline": True},
    {"id": "sure", "kind": "identity", "statement": "field_only.recovery < 5"},
]


@dataclass(frozen=True)
class Undrawable:
    """Axes that cannot be drawn."""

    title: str = ""

    def draw(self, axes: Any, panels: Sequence[Panel]) -> None:
        raise ValueError("nothing to draw")


MAIN = EffectsByModel(LABELS, "What the fakes recover")
PARTS = (Bars({name: (label, "black") for name, label in LABELS.items()}, "recovery", 2.0, dots=None),)


@PROBES.register("test_blocks")
class Blocks(Probe):
    """Measures as the fake probe does, and dies, breaks or takes its time where it is told to."""

    reading: ClassVar[Reading] = Reading(fake_effects, FigureSpec("What the fakes recover", PARTS, MAIN))

    model: str = "blue"
    error: str = ""
    kill: str = ""
    times: int = 1
    after: str = ""

    def refusal(self, subject: Any, pair: Any) -> None:
        return None

    def preview(self, subject: Any, pair: Any) -> None:
        """The fake subject has nothing to run."""

    def measure(self, subject: Any, pairs: Sequence[Any], progress: Progress) -> list[Measurement]:
        time.sleep(float(os.environ.get(PAUSE, "0")))
        if subject.name == self.model:
            self._go_wrong()
        return FakeProbe().measure(subject, pairs, progress)

    def _go_wrong(self) -> None:
        if self.error:
            raise RuntimeError(self.error)
        if self.kill:
            deaths = Path(self.kill)
            while self.after and not Path(self.after).exists():
                time.sleep(0.01)
            died = len(deaths.read_text()) if deaths.exists() else 0
            if died < self.times:
                deaths.write_text("x" * (died + 1))
                os.kill(os.getpid(), signal.SIGKILL)


@PROBES.register("test_together")
class Together(Blocks):
    """The same with all pairs at once, and a main plot that cannot be drawn."""

    needs_all_pairs: ClassVar[bool] = True
    reading: ClassVar[Reading] = Reading(fake_effects, FigureSpec("What the fakes recover", PARTS, Undrawable()))


def fix_provenance() -> None:
    """The tree under test may be edited while the tests run."""
    for name in ("source_hash", "code_version"):
        setattr(provenance, name, lambda value=PROVENANCE[name]: value)


def experiment(name: str, section: str = "3", **changes: Any) -> ExperimentConfig:
    """A small experiment on both fake models."""
    values = {
        "name": name,
        "section": section,
        "question": f"What does {name} recover?",
        "probe": "test_blocks",
        "models": ["red", "blue"],
        "task": {"name": "gated_decision", "size": 12, "split": "all"},
        "block_size": 4,
        "claims": CLAIMS,
    }
    return ExperimentConfig.model_validate(values | changes)


def run(results: Path, configs: Sequence[ExperimentConfig], jobs: int, **arguments: Any) -> SectionResult:
    """Run them on the fakes."""
    return run_section(
        configs, results_dir=results, jobs=jobs, load_subject=load_subject, start_worker=fix_provenance, **arguments
    )


def group_is_gone(group: int, seconds: float) -> bool:
    """Whether no process of the group is left within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def main() -> None:
    fix_provenance()
    task = {"name": "gated_decision", "size": 12, "split": "all"}
    configs = [experiment(name, task={**task, "seed": seed}) for seed, name in enumerate(("one", "two"))]
    try:
        run(Path(sys.argv[1]), configs, int(sys.argv[2]))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
