"""Records: strict JSON that gives back what was written, whatever it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.runs import ExperimentConfig, ModelResult, Outcome, RunResult, Status, Verdict, load_result
from kvprobe.runs.gate import GateReport
from kvprobe.runs.results import SUMMARY
from kvprobe.runs.store import json_bytes
from kvprobe.stats import Effect, Label

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
counts = st.integers(0, 10**6)
texts = st.text(st.characters(codec="utf-8"), max_size=12)


@st.composite
def effects(draw: st.DrawFn) -> Effect:
    low, estimate, high = sorted(draw(st.lists(st.floats(allow_nan=False), min_size=3, max_size=3)))
    extra = draw(st.dictionaries(texts, st.floats(allow_nan=False), max_size=2))
    return Effect(Label.of("field_only.recovery"), estimate, low, high, draw(counts), draw(counts), extra=extra)


gates = st.builds(GateReport, oracle_accuracy=st.none() | effects(), answer_mass=st.none() | numbers)
models = st.builds(
    ModelResult,
    name=texts,
    status=st.sampled_from(Status),
    identity=st.dictionaries(texts, texts | counts, max_size=2),
    gate=st.none() | gates,
    effects=st.lists(effects(), max_size=2).map(tuple),
    failures=st.lists(texts, max_size=2).map(tuple),
)
p_values = st.none() | st.floats(0, 1)
verdicts = st.builds(
    Verdict,
    outcome=st.sampled_from(Outcome),
    effect=st.none() | effects(),
    paper_value=st.none() | numbers,
    p_value=p_values,
    p_benjamini_hochberg=p_values,
    p_holm=p_values,
    level=st.floats(0, 1),
)
CONFIG = ExperimentConfig.model_validate({"name": "e", "probe": "p", "models": ["m"], "task": "t"})


@settings(max_examples=50)
@given(st.lists(models, max_size=2, unique_by=lambda model: model.name), st.lists(verdicts, max_size=2).map(tuple))
def test_a_result_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, measured: list[ModelResult], judged: tuple[Verdict, ...]
) -> None:
    folder: Path = tmp_path_factory.mktemp("run")
    result = RunResult(CONFIG, CONFIG.hash, folder, {model.name: model for model in measured}, judged, {"threads": 1})
    (folder / SUMMARY).write_bytes(json_bytes(result.to_record()))
    assert load_result(folder) == result
    json.loads((folder / SUMMARY).read_bytes(), parse_constant=pytest.fail)  # `NaN` and `Infinity` are not JSON
