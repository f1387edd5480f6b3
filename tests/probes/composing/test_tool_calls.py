"""The tool_calls probe and its task: right calls follow from the requests, and arms are told apart by what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from exacting_caller import DECLINED, exacting_caller
from hypothesis import given
from hypothesis import strategies as st
from worded_models import effects_of, measured, worded

from kvprobe.probes.composing.tool_calls.probe import ToolCallsProbe
from kvprobe.probes.kit.fidelity import FULL_PREFILL, REMOVED, WRONG
from kvprobe.runs.config import load_config
from kvprobe.runs.results import Status
from kvprobe.runs.runner import run_experiment
from kvprobe.tasks.pairs import align
from kvprobe.tasks.tool_calls import TOOLS, ToolCalls, dummies, right_calls, tools

PROBE = ToolCallsProbe(headers=("none", "real"))
EXPERIMENT = Path(__file__).parents[3] / "experiments/section5/tool_calls.yaml"
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


@given(seed=st.integers(0, 999))
def test_every_request_says_what_its_call_needs(seed: int) -> None:
    known = {tool.name: tool for library in ("home", "travel") for tool in tools(library)}  # type: ignore[arg-type]
    requests = []
    for pair in ToolCalls(size=30, seed=seed).prompt_pairs():
        held = {segment.name: segment.text for segment in pair.base.segments}
        lines = [json.loads(line) for line in held[TOOLS].splitlines()]
        assert len({line["name"] for line in lines}) == len(lines) == 6 + len(dummies())
        for context, call in zip((pair.base, pair.donor), right_calls(pair.scenario.attributes), strict=True):
            request = context.text.rpartition("Request:")[2]
            requests.append(request)
            arguments, tool = json.loads(call.arguments), known[call.name]
            (schema,) = (line["parameters"]["properties"] for line in lines if line["name"] == call.name)
            assert set(arguments) == set(schema)
            for name, value in arguments.items():
                assert isinstance(value, TYPES[schema[name]["type"]])
                (said,) = {text for given, text in tool.values[name] if given == value and type(given) is type(value)}
                assert said in request
    assert len(set(requests)) == 60


def test_libraries_share_their_dummies_and_no_tool() -> None:
    home, travel = ({tool.name for tool in tools(library)} for library in ("home", "travel"))
    other = {json.loads(line)["name"] for line in dummies()}
    assert len(home) == len(travel) == 6
    assert home.isdisjoint(travel)
    assert other.isdisjoint(home | travel)
    assert len(other) == 24


def test_prompts_do_not_depend_on_how_many_are_asked_for() -> None:
    assert list(ToolCalls(size=5).prompt_pairs()) == list(ToolCalls(size=50).prompt_pairs())[:5]


def test_a_model_that_reads_its_cache_calls_rightly_from_the_right_cache_alone() -> None:
    made = list(ToolCalls(size=2, dummies=1).prompt_pairs())
    subject = exacting_caller(made)
    pairs = [align(pair, subject.tokenizer) for pair in made]
    assert PROBE.refusal(subject, pairs[0]) is None
    rows = measured(PROBE, subject, pairs)
    assert len(rows) == 2 * 2 * len(PROBE.arms())
    assert set(rows["m_base"]) == {-1.0}
    assert set(rows["m_donor"]) == {1.0}
    assert PROBE.preview(subject, pairs[0]) == {"m_base": -1.0, "m_donor": 1.0, "noise_floor": 0.0}
    effects = effects_of(PROBE, rows)
    for arm in (FULL_PREFILL, "splice_real", "seam_8_real"):
        for effect in ("parsed", "accuracy", "agreement", "same_text", "kappa"):
            assert effects[f"{arm}.{effect}"].estimate == 1, (arm, effect)
    for arm in ("splice_none", "seam_8_none"):
        assert effects[f"{arm}.parsed"].estimate == effects[f"{arm}.same_name"].estimate == 1
        assert effects[f"{arm}.accuracy"].estimate == effects[f"{arm}.agreement"].estimate == 0
        assert effects[f"{arm}.arguments_right"].estimate == 0
    for arm in (WRONG, REMOVED):
        assert effects[f"{arm}.parsed"].estimate == effects[f"{arm}.accuracy"].estimate == 0
        assert set(rows[rows["arm"] == arm]["text"]) == {DECLINED}
        assert effects[f"{arm}.censored"].estimate == 0
    by_hand = {call.name for pair in pairs for call in right_calls(pair.scenario.attributes)}
    assert set(rows["reference_called"]) == by_hand


def row(number: int, arm: str, **changed: Any) -> dict[str, Any]:
    right = {"parsed": True, "name_right": True, "arguments_right": True, "correct": True, "agrees": True}
    return {"pair": number // 2, "prompt": ("base", "donor")[number % 2], "skeleton": f"tool {number % 4}", "arm": arm,
            "m_base": -1.0, "m_donor": 1.0, "noise_floor": 0.0, **right, "censored": False, "same_name": True,
            "same_text": True, "called": f"tool_{number % 4}", "reference_called": f"tool_{number % 4}", **changed}  # fmt: skip


def test_a_call_that_cannot_be_read_counts_as_wrong() -> None:
    lost = dict.fromkeys(
        ("parsed", "name_right", "arguments_right", "correct", "agrees", "same_name", "same_text"), False
    )
    rows = [row(number, arm) for number in range(16) for arm in (FULL_PREFILL, "seam_8_none")]
    rows += [row(number, "splice_none", **(lost | {"called": ""} if number < 4 else {})) for number in range(16)]
    wrong = {"correct": False, "arguments_right": False, "agrees": False, "same_text": False}
    rows += [row(number, "splice_real", **(wrong if number % 2 else {})) for number in range(16)]
    table = pd.DataFrame(rows)
    effects = effects_of(PROBE, table)
    assert effects["splice_none.accuracy"].estimate == effects["splice_none.parsed"].estimate == 0.75
    assert effects["splice_none.accuracy"].n == 16
    assert effects["splice_none.accuracy"].clusters == 4
    # 12 of 16 names are the same; by chance (4 / 16) * (3 / 16) * 4 would be.
    assert effects["splice_none.kappa"].estimate == pytest.approx((0.75 - 0.1875) / (1 - 0.1875))
    assert effects["splice_real.accuracy"].estimate == 0.5
    assert effects["splice_real.name_right"].estimate == effects["splice_real.same_name"].estimate == 1
    assert effects["seam_gain_none.accuracy"].estimate == 0.25
    assert "seam_gain_real.accuracy" not in effects
    one = table[(table["arm"] == FULL_PREFILL) & (table["called"] == "tool_1")]
    assert f"{FULL_PREFILL}.kappa" not in effects_of(PROBE, one)


def test_a_tokenizer_that_cannot_write_json_is_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was run")

    subject = worded("qwen3")
    monkeypatch.setattr("kvprobe.engine.forward.call_model", called)
    config = load_config(EXPERIMENT, models=["qwen3-note-taker"])
    result = run_experiment(config, results_dir=tmp_path, load_subject=lambda name: subject)
    (model,) = result.models.values()
    assert model.status is Status.NOT_APPLICABLE
    assert model.reason.startswith("Its tokenizer cannot write a tool call")
    assert {verdict.model for verdict in result.verdicts} <= {"qwen3-note-taker"}
    assert model.gate is not None
    assert not model.gate.passed
    assert result.rows().empty


def test_without_another_library_there_is_no_wrong_chunk() -> None:
    made = list(ToolCalls(size=1, dummies=0).prompt_pairs())
    subject = exacting_caller(made)
    pair = align(made[0], subject.tokenizer)
    probe = ToolCallsProbe(headers=("none",), limit=5)
    rows = measured(probe, subject, [pair])
    assert WRONG not in set(rows["arm"])
    # Five tokens are too few for any call, and nothing agrees with nothing.
    assert rows["censored"].all()
    assert not rows["parsed"].any()
    assert not rows["agrees"].any()
    assert set(rows["tokens"]) == {5}
    assert set(rows["m_base"]) == {0.0}
