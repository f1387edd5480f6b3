"""Records: strict JSON that gives back what was written, whatever it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.runs import Claim, ExperimentConfig, ModelResult, Outcome, RunResult, Status, load_result
from kvprobe.runs.claims import not_applicable
from kvprobe.runs.gate import GateReport
from kvprobe.runs.results import SUMMARY
from kvprobe.runs.store import json_bytes
from kvprobe.stats import Effect, Label
from kvprobe.stats.rows import RowFilter

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
counts = st.integers(0, 10**6)
texts = st.text(st.characters(codec="utf-8"), max_size=12)


labels = st.sampled_from([Label.of("field_only.recovery"), Label("of_layer_{layer}", "recovery", {"layer": 3})])
filters = st.builds(RowFilter, st.dictionaries(texts, st.lists(texts | counts, max_size=2).map(tuple), max_size=2))


@st.composite
def effects(draw: st.DrawFn) -> Effect:
    low, estimate, high = sorted(draw(st.lists(st.floats(allow_nan=False), min_size=3, max_size=3)))
    extra = draw(st.dictionaries(texts, st.floats(allow_nan=False), max_size=2))
    rows = draw(st.none() | filters)
    return Effect(draw(labels), estimate, low, high, draw(counts), draw(counts), extra=extra, rows=rows)


gates = st.builds(GateReport, oracle_accuracy=st.none() | effects(), answer_mass=st.none() | numbers)
models = st.builds(
    ModelResult,
    name=texts,
    status=st.sampled_from(Status),
    identity=st.dictionaries(texts, texts | counts, max_size=2),
    gate=st.none() | gates,
    effects=st.lists(effects(), max_size=2, unique_by=lambda effect: effect.name).map(tuple),
    failures=st.lists(texts, max_size=2).map(tuple),
)
p_values = st.none() | st.floats(0, 1)
CLAIM = Claim(id="c", statement="x.y < 1", source="section 3", paper_values={"m": 0.5}, headline=True)
CONFIG = ExperimentConfig.model_validate(
    {"name": "e", "probe": "p", "models": ["m"], "task": "t", "claims": [CLAIM.model_dump()]}
)


@st.composite
def results(draw: st.DrawFn, folder: Path) -> RunResult:
    measured = draw(st.lists(models, max_size=2, unique_by=lambda model: model.name))
    judged = [
        replace(
            not_applicable(CLAIM, model.name, draw(texts)),
            outcome=draw(st.sampled_from(Outcome)),
            effect=draw(st.sampled_from([None, *model.effects])),
            p_value=draw(p_values),
            p_holm=draw(p_values),
        )
        for model in measured
    ]
    by_name = {model.name: model for model in measured}
    return RunResult(CONFIG, CONFIG.hash, folder, by_name, tuple(judged), {"threads": 1})


@settings(max_examples=50)
@given(st.data(), st.booleans())
def test_a_result_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, light: bool
) -> None:
    result = data.draw(results(tmp_path_factory.mktemp("run")))
    file = result.folder / SUMMARY
    file.write_bytes(json_bytes(result.to_record(light=light)))
    read = load_result(result.folder)
    assert read.verdicts == result.verdicts
    # Effects whose rows are not told are read again from the run's rows, and here there are none.
    stored = {name: replace(model, effects=model.stored_effects) for name, model in read.models.items()}
    if not light:
        assert replace(read, models=stored) == result
    for name, model in result.models.items():
        claimed = {verdict.effect.name for verdict in result.verdicts if verdict.effect and verdict.model == name}
        kept = [effect for effect in model.effects if effect.name in claimed or not light]
        assert list(read.models[name].stored_effects) == kept
    json.loads(file.read_bytes(), parse_constant=pytest.fail)  # `NaN` and `Infinity` are not JSON
    # Written again it is the same, and nothing is read from rows for it.
    assert json_bytes(read.to_record(light=light)) == file.read_bytes()
