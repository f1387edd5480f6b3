"""Laws of the erratum_phrasing probe, against plain Hugging Face in float64, and of its lines."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from worded_models import TOKENIZER, plain_logits, plain_patched_logits, worded

from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel
from kvprobe.probes.editing.erratum_phrasing.probe import METHODS, NO_LINE, ErratumPhrasing
from kvprobe.report.reference import paper_values
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.erratum_lines import PHRASINGS, phrasing_tokens
from kvprobe.tasks.extra_lines import Subjects
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.pairs import Pair, align
from kvprobe.tasks.wordings import WORDINGS

BASELINES = {f"baseline_{name}": 0.0 for name in ("first_option", "refuse", "majority")}


def pairs_of(size: int) -> list[Pair]:
    return [align(pair, TOKENIZER) for pair in GatedDecision(size=size).prompt_pairs()]


@cache
def measured(family: str) -> pd.DataFrame:
    return pd.DataFrame(ErratumPhrasing().measure(worded(family), pairs_of(1), lambda done, total: None))


@pytest.mark.parametrize("line", PHRASINGS)
def test_against_plain_hugging_face(line: str) -> None:
    """The line before the task on the old prompt's cache, and on the same with one entry of the new prompt's."""
    (pair,), model = pairs_of(1), worded("qwen3").model
    attributes = pair.scenario.attributes
    said = Subjects(pair.scenario.wording, *(attributes[key] for key in ("entity", "field", "old", "new")))
    at, old, new = pair.base.spans["task"].start, pair.base.token_ids, pair.donor.token_ids
    after = [*phrasing_tokens(line, said, TOKENIZER), *old[at:]]
    found = measured("qwen3").set_index(["method", "line"])
    logits = {
        "erratum": plain_logits(model, [*old[:at], *after]),
        "field_and_erratum": plain_patched_logits(model, old[:at], new[:at], list(pair.field.positions), after),
    }
    for method, plain in logits.items():
        ought = float(plain[pair.donor_answer_id] - plain[pair.base_answer_id])
        assert found["margin"][method, line] == pytest.approx(ought, abs=1e-8)
    assert found["tokens"]["erratum", line] == len(after) - 1
    assert found["tokens"]["field_and_erratum", line] == len(after) - 1 + len(pair.field)
    assert found["cost"]["erratum", line] == pytest.approx((len(after) - 1) / (at + len(after)))


def test_without_a_line_nothing_or_the_field_alone_is_run() -> None:
    rows = measured("mistral")
    none = rows[rows["line"] == NO_LINE].set_index("method")
    assert none["tokens"].to_dict() == {"erratum": 0, "field_and_erratum": 1}
    assert none["margin"]["erratum"] == pytest.approx(none["m_base"]["erratum"], abs=1e-5)
    assert len(rows) == len(METHODS) * (1 + len(PHRASINGS))


@pytest.mark.parametrize("wording", WORDINGS.names())
@pytest.mark.parametrize("line", PHRASINGS)
def test_lines_are_words_the_organisms_know_and_name_the_new_value_once(wording: str, line: str) -> None:
    for skeleton in skeletons("held_out"):
        said = Subjects(wording, skeleton.entity, skeleton.field, *skeleton.values[:2])
        ids = phrasing_tokens(line, said, TOKENIZER)
        assert TOKENIZER.unk_token_id not in ids
        old, new = TOKENIZER.convert_tokens_to_ids(list(skeleton.values[:2]))
        assert ids.count(new) == 1
        assert old not in ids
        assert TOKENIZER.decode(ids[-1:]) == "\n"


def made_effects(turned: dict[tuple[str, str], int]) -> dict[str, Effect]:
    """Effects where the first so many pairs decide for the new value."""
    rows = [
        {
            "pair": pair,
            "skeleton": f"s{pair}",
            "method": method,
            "line": phrasing,
            "correct": pair < turned.get((method, phrasing), 0),
            "tokens": 7,
            "cost": 0.1,
            "noise_floor": 1e-6,
            **BASELINES,
        }
        for pair in range(10)
        for method in METHODS
        for phrasing in (NO_LINE, *PHRASINGS)
    ]
    return {effect.name: effect for effect in ErratumPhrasing().summarise(pd.DataFrame(rows), StatisticsConfig())}


@given(line=st.integers(0, 10), both=st.integers(0, 10))
def test_summary_finds_what_was_put_in(line: int, both: int) -> None:
    effects = made_effects({("erratum", "update"): line, ("field_and_erratum", "update"): both})
    assert effects["erratum.update.new_rate"].estimate == pytest.approx(line / 10)
    assert effects["in_place.update.difference"].estimate == pytest.approx((both - line) / 10)
    assert effects["erratum.update.tokens"].estimate == 7
    assert effects["erratum.override.new_rate"].estimate == 0.0


def test_the_figure_shows_every_arm_with_the_papers_values_and_says_why_a_model_is_missing() -> None:
    effects, paper = made_effects({}), paper_values(ErratumPhrasing.paper, "Qwen3-8B")
    panels = [Panel("measured", effects, paper=paper, paper_model="Qwen3-8B"), Panel("absent", note="fails the gate")]
    figure = ErratumPhrasing().plot(panels)
    shown = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    assert "fails the gate" in shown
    points = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert len(points) == 2 * (1 + len(PHRASINGS)) + len(ErratumPhrasing.paper)
    axes = Figure().subplots()
    ErratumPhrasing().plot_main(axes, panels)
    assert axes.get_title()


def test_the_paper_has_the_values_that_the_probe_names() -> None:
    known = paper_values(ErratumPhrasing.paper, "Qwen3-8B")
    assert set(known) == set(ErratumPhrasing.paper)
    assert known["erratum.question.new_rate"] == pytest.approx(0.88)


def test_pairs_that_do_not_say_their_field_are_refused() -> None:
    (pair,) = pairs_of(1)
    unsaid = replace(pair, scenario=replace(pair.scenario, attributes={}))
    with pytest.raises(ConfigError, match="say their entity: use task gated_decision"):
        ErratumPhrasing().measure(worded("qwen3"), [unsaid], lambda done, total: None)
