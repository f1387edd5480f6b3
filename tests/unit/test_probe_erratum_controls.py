"""Laws of the erratum_controls probe, against plain Hugging Face in float64, and of its lines."""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from worded_models import TOKENIZER, plain_logits, worded

from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel
from kvprobe.probes.editing.erratum_controls.probe import EARLY, EXPECTED, ErratumControls, _arms
from kvprobe.probes.kit.edit_cases import edit_case
from kvprobe.report.reference import paper_values
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.erratum_lines import about_irrelevant_field, about_unmentioned_value, random_line_tokens
from kvprobe.tasks.extra_lines import Subjects, line_tokens
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.pairs import Pair, align
from kvprobe.tasks.wordings import WORDINGS

BASELINES = {f"baseline_{name}": 0.0 for name in ("first_option", "refuse", "majority")}


def pairs_of(size: int, **parameters: Any) -> list[Pair]:
    return [align(pair, TOKENIZER) for pair in GatedDecision(size=size, **parameters).prompt_pairs()]


@cache
def measured(family: str) -> pd.DataFrame:
    return pd.DataFrame(ErratumControls().measure(worded(family), pairs_of(1), lambda done, total: None))


def update(pair: Pair, value: str) -> list[int]:
    """The erratum with any value, written down without the probe."""
    attributes, style = pair.scenario.attributes, WORDINGS.get(pair.scenario.wording)()
    return encode_segment(style.update(attributes["entity"], attributes["field"], value), TOKENIZER)


@pytest.mark.parametrize("arm", ["stale", "new_value", "old_value", "old_then_new", "new_then_old", "early_recomputed"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_arms_that_are_prompts_one_could_write_against_plain_hugging_face(family: str, arm: str) -> None:
    (pair,) = pairs_of(1)
    old, new = (update(pair, pair.scenario.attributes[name]) for name in ("old", "new"))
    lines = {"stale": [], "new_value": new, "old_value": old, "old_then_new": old + new, "new_then_old": new + old}
    at = pair.base.spans["session_rest"].end if arm in EARLY else pair.base.spans["task"].start
    ids = [*pair.base.token_ids[:at], *lines.get(arm, new), *pair.base.token_ids[at:]]
    plain = plain_logits(worded(family).model, ids)
    ought = float(plain[pair.donor_answer_id] - plain[pair.base_answer_id])
    found = measured(family).set_index("arm")["margin"]
    assert found[arm] == pytest.approx(ought, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_an_early_line_whose_rest_is_reused_leaves_every_stale_note_as_it_was(family: str) -> None:
    subject, (pair,) = worded(family), pairs_of(1)
    case = edit_case(subject, pair)
    edited = dict(_arms(subject, case, 0))["early_reused"].prompt
    line, end = update(pair, pair.scenario.attributes["new"]), pair.base.spans["session_rest"].end
    assert list(edited.token_ids) == [*pair.base.token_ids[:end], *line, *pair.base.token_ids[end:]]
    for mine, stale in zip(edited.cache.layers, case.stale.cache.layers, strict=True):
        assert torch.equal(mine.values[:, :, end + len(line) :], stale.values[:, :, end:])
        assert torch.equal(mine.source_keys[:, :, end + len(line) :], stale.keys[:, :, end:])
        assert not torch.equal(mine.keys[:, :, end + len(line) :], stale.keys[:, :, end:])
    # What stood behind the field in its line is run anew with the line, on what it saw before.
    fresh, held = edited.cache.layers[-1].values[:, :, :end], case.stale.cache.layers[-1].values[:, :, :end]
    torch.testing.assert_close(fresh, held, atol=5e-6, rtol=0)


def test_every_arm_once() -> None:
    rows = measured("qwen3")
    assert sorted(rows["arm"]) == sorted(EXPECTED)
    unjudged = rows[rows["as_expected"].isna()]
    assert list(unjudged["arm"]) == ["unmentioned_value"]


@pytest.mark.parametrize("wording", WORDINGS.names())
@given(start=st.integers(0, 99))
def test_control_lines_are_as_long_as_the_erratum_and_say_nothing_relevant(wording: str, start: int) -> None:
    for skeleton in skeletons("held_out")[:8]:
        said = Subjects(wording, skeleton.entity, skeleton.field, *skeleton.values[:2])
        erratum = line_tokens("override", said, TOKENIZER)
        shuffled = random_line_tokens(said, TOKENIZER, start=start)
        neutral = line_tokens("neutral", said, TOKENIZER, start=start)
        prompt = f"The {said.entity} {said.field} is {said.old}."
        elsewhere = about_irrelevant_field(said, prompt, start=start)
        other = about_unmentioned_value(said, skeleton.name)
        assert sorted(shuffled) == sorted(neutral)
        assert shuffled[-1] == neutral[-1] == erratum[-1]
        assert shuffled == random_line_tokens(said, TOKENIZER, start=start)
        about = [line_tokens("override", each, TOKENIZER) for each in (elsewhere, other)]
        for ids in (shuffled, neutral, *about):
            assert len(ids) == len(erratum)
            assert TOKENIZER.unk_token_id not in ids
        assert elsewhere.field != said.field
        assert elsewhere.new not in (said.old, said.new)
        assert other.new in skeleton.values
        assert other.new not in (said.old, said.new)


def test_prompts_that_leave_no_control_are_refused() -> None:
    said = Subjects("manual", "order", "status", "pending", "shipped")
    everything = " ".join(skeleton.field for skeleton in skeletons("all"))
    with pytest.raises(ConfigError, match="mentions every field"):
        about_irrelevant_field(said, everything)
    with pytest.raises(ConfigError, match="no scenario 'tea'"):
        about_unmentioned_value(said, "tea")


def made_effects(turned: dict[str, int]) -> dict[str, Effect]:
    """Effects where the first so many pairs decide for the new value; other arms do what they ought to."""
    rows = []
    for pair in range(10):
        for arm, expected in EXPECTED.items():
            correct = pair < turned.get(arm, 10 if expected else 0)
            row = {"pair": pair, "skeleton": f"s{pair}", "arm": arm, "correct": correct, **BASELINES}
            as_expected = None if expected is None else correct == expected
            margin = 2.0 if correct else -2.0
            rows.append({**row, "as_expected": as_expected, "margin": margin, "m_base": -2.0, "noise_floor": 1e-6})
    return {effect.name: effect for effect in ErratumControls().summarise(pd.DataFrame(rows), StatisticsConfig())}


@given(new=st.integers(0, 10), neutral=st.integers(0, 10))
def test_summary_finds_what_was_put_in(new: int, neutral: int) -> None:
    effects = made_effects({"new_value": new, "neutral": neutral, "unmentioned_value": 5})
    assert effects["neutral.new_rate"].estimate == pytest.approx(neutral / 10)
    assert effects["neutral.margin_shift"].estimate == pytest.approx(0.4 * neutral)
    assert effects["value.against_neutral.difference"].estimate == pytest.approx((new - neutral) / 10)
    judged = 10 * (len(EXPECTED) - 1)
    assert effects["as_expected"].estimate == pytest.approx((judged - neutral - (10 - new)) / judged)


def test_the_figure_shows_every_arm_with_the_papers_values_and_says_why_a_model_is_missing() -> None:
    effects, paper = made_effects({}), paper_values(ErratumControls.paper, "Qwen3-8B")
    panels = [Panel("measured", effects, paper=paper, paper_model="Qwen3-8B"), Panel("absent", note="fails the gate")]
    figure = ErratumControls().plot(panels)
    shown = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    assert "fails the gate" in shown
    points = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert len(points) == len(EXPECTED) + len(ErratumControls.paper)
    axes = Figure().subplots()
    ErratumControls().plot_main(axes, panels)
    assert axes.get_title()


def test_the_paper_has_the_values_that_the_probe_names() -> None:
    known = paper_values(ErratumControls.paper, "Qwen3-8B")
    assert set(known) == set(ErratumControls.paper)
    assert known["old_value.new_rate"] == 0.0
