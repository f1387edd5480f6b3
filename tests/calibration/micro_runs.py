"""Experiments as written, run on hand-built micro-models, whose answers are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from kvprobe.models.loader import load_subject
from kvprobe.models.micro import note_positions
from kvprobe.models.subject import Subject
from kvprobe.runs.claims import Claim, Outcome, judge
from kvprobe.runs.config import load_config
from kvprobe.runs.gate import GateReport, apply_gate
from kvprobe.runs.preparation import labelled, make_cells, make_probe, make_task, prepare
from kvprobe.stats import Effect, Sample
from kvprobe.tasks.pairs import Pair

_WANT_TWO_WORDINGS = ("scrub",)
EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@dataclass(frozen=True, eq=False)
class MicroRun:
    """One experiment on one micro-model, with everything the runner would make of it."""

    pairs: tuple[Pair, ...]
    rows: pd.DataFrame
    gate: GateReport
    effects: Mapping[str, Effect]
    claims: Mapping[str, Claim]

    def estimate(self, name: str) -> float:
        return float(self.effects[name].estimate)

    def verdict(self, claim: str) -> Outcome:
        return judge(self.claims[claim], "micro", list(self.effects.values())).outcome

    def mean_over_gaps(self, values: list[float]) -> float:
        """What a ratio of sums is, when each pair has one of `values`."""
        pairs = self.rows.groupby("pair").first()
        gap = pairs["m_donor"] - pairs["m_base"]
        return float((gap * pd.Series(values, index=gap.index)).sum() / gap.sum())


@cache
def micro(kind: str) -> Subject:
    return load_subject(f"micro-{kind}", device="cpu")


def micro_run(experiment: str, kind: str, size: int = 20, **parameters: Any) -> MicroRun:
    """The experiment's own task in the wording the micro-models read, its own claims and gate."""
    return _micro_run(experiment, kind, size, tuple(sorted(parameters.items())))


@cache
def _micro_run(experiment: str, kind: str, size: int, parameters: tuple[tuple[str, Any], ...]) -> MicroRun:
    config = load_config(next(EXPERIMENTS.glob(f"*/{experiment}.yaml")), models=[f"micro-{kind}"])
    changes = {"size": size, "wordings": ("manual",)}
    task = make_task(config)
    task = task.model_copy(update={name: value for name, value in changes.items() if name in type(task).model_fields})
    config = config.model_copy(update={"parameters": {**config.parameters, **dict(parameters)}})
    probe = make_probe(config)
    prepared = prepare(f"micro-{kind}", list(task.prompt_pairs()), config, lambda name: micro(kind))
    if config.probe in _WANT_TWO_WORDINGS:
        pairs = tuple(_labelled(pair, number) for number, pair in enumerate(prepared.pairs))
        prepared = replace(prepared, pairs=pairs)
    cells = make_cells(prepared, probe, config)
    measured = [
        row
        for cell in cells
        for row in labelled(probe.measure(prepared.subject, cell.pairs, lambda done, total: None), cell)
    ]
    rows = pd.DataFrame(measured)
    included, gate = apply_gate(rows, config.gate, config.statistics, generated=size)
    if not gate.passed:
        return MicroRun(prepared.pairs, rows, gate, {}, {})
    counted = rows[included].reset_index(drop=True)
    effects = {
        effect.name: effect for effect in probe.read_by().read(probe, Sample.of_model(counted, config.statistics))
    }
    run = MicroRun(prepared.pairs, counted, gate, effects, {claim.id: claim for claim in config.claims})
    _as_declared(run, kind)
    return run


def _as_declared(run: MicroRun, kind: str) -> None:
    """No claim comes out other than it declares; few pairs may leave it open, and fewer effects unread."""
    for name, claim in run.claims.items():
        if kind in claim.calibration and claim.parsed.effect in run.effects:
            outcome = run.verdict(name)
            assert not outcome.decided or outcome == claim.calibration[kind], f"{name} {outcome} on {kind}"


def _labelled(pair: Pair, number: int) -> Pair:
    """The pair with one of two names for the one wording that the micro-models read."""
    return replace(pair, scenario=replace(pair.scenario, wording=("manual", "memo")[number // 2 % 2]))


def notes_of(pair: Pair) -> list[int]:
    """Where a note-taker takes its notes."""
    return note_positions(pair.base, micro("note-taker").tokenizer)
