"""Verdicts follow from intervals alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvprobe.errors import ConfigError
from kvprobe.models.catalogue import Standing, standing
from kvprobe.runs.claims import Claim, Outcome, adjust, judge, not_applicable, parse_statement
from kvprobe.stats import Effect, Label

numbers = st.floats(-5, 5, allow_nan=False)


def effect(low: float, high: float, **more: object) -> Effect:
    values = {
        "label": Label.of("x.y"),
        "estimate": (low + high) / 2,
        "low": low,
        "high": high,
        "n": 20,
        "clusters": 10,
    } | more
    return Effect(**values)  # type: ignore[arg-type]


def outcome(statement: str, measured: Effect) -> Outcome:
    return judge(Claim(id="c", statement=statement), "m", [measured]).outcome


@pytest.mark.parametrize(
    ("statement", "low", "high", "expected"),
    [
        ("x.y < 0.15", -0.1, 0.1, Outcome.REPRODUCED),
        ("x.y < 0.15", 0.1, 0.15, Outcome.INCONCLUSIVE),
        ("x.y <= 0.15", 0.1, 0.15, Outcome.REPRODUCED),
        ("x.y < 0.15", 0.15, 0.3, Outcome.CONTRADICTED),
        ("x.y <= 0.15", 0.15, 0.3, Outcome.INCONCLUSIVE),
        ("x.y >= 0.85", 0.9, 1.1, Outcome.REPRODUCED),
        ("x.y >= 0.85", 0.1, 0.8, Outcome.CONTRADICTED),
        ("x.y == 0", 0.0, 0.0, Outcome.REPRODUCED),
        ("x.y == 0", 0.1, 0.1, Outcome.CONTRADICTED),
        ("x.y == 0", -0.1, 0.1, Outcome.INCONCLUSIVE),
        ("abs(x.y) < 0.1", -0.05, 0.02, Outcome.REPRODUCED),
        ("abs(x.y) < 0.1", -0.5, -0.2, Outcome.CONTRADICTED),
        ("abs( x.y ) < 0.1", -0.5, 0.02, Outcome.INCONCLUSIVE),
        ("0.85 <= x.y <= 1.15", 0.9, 1.1, Outcome.REPRODUCED),
        ("0.85 <= x.y <= 1.15", 1.2, 1.3, Outcome.CONTRADICTED),
        ("-1e-3 < x.y < .5", 0.0, 0.6, Outcome.INCONCLUSIVE),
        ("x.y < 0.15", -math.inf, math.inf, Outcome.INCONCLUSIVE),
    ],
)
def test_outcomes(statement: str, low: float, high: float, expected: Outcome) -> None:
    estimate = {"estimate": 0.0} if math.isinf(low) else {}
    assert outcome(statement, effect(low, high, **estimate)) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "x <",
        "x < y",
        "x = 1",
        "abs(x < 1",
        "x) < 1",
        "1 < 2",
        "2 <= x <= 1",
        "x < 1 and y < 2",
        "__import__('os').system('true') < 1",
        "x..y < 1",
        "x < nan",
        "x < 1 # really",
    ],
)
def test_unreadable_statements(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read|no value lies"):
        parse_statement(text)


@given(numbers, numbers, numbers)
def test_a_statement_and_its_negation_never_agree(bound: float, a: float, b: float) -> None:
    measured = effect(min(a, b), max(a, b), estimate=min(a, b))
    claim, negation = outcome(f"x.y < {bound!r}", measured), outcome(f"x.y >= {bound!r}", measured)
    opposite = {Outcome.REPRODUCED: Outcome.CONTRADICTED, Outcome.CONTRADICTED: Outcome.REPRODUCED}
    assert negation is opposite.get(claim, Outcome.INCONCLUSIVE)


@given(numbers, numbers, numbers, st.floats(0, 1))
def test_a_narrower_interval_never_reverses_a_verdict(bound: float, a: float, b: float, inner: float) -> None:
    low, high = min(a, b), max(a, b)
    wide = outcome(f"x.y < {bound!r}", effect(low, high, estimate=low))
    middle = min(max(low + inner * (high - low), low), high)
    narrow = outcome(f"x.y < {bound!r}", effect(middle, high, estimate=high))
    assume(wide is not Outcome.INCONCLUSIVE)
    assert narrow is wide


@pytest.mark.parametrize(("clusters", "expected"), [(1, "inconclusive"), (5, "inconclusive"), (6, "reproduced")])
def test_a_range_needs_six_clusters_to_say_anything(clusters: int, expected: str) -> None:
    assert outcome("x.y < 0.15", effect(-0.1, 0.1, method="range", clusters=clusters)) == expected


def test_an_unknown_effect_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Claim 'c' is about 'x.z'.*did you mean 'x.y'"):
        judge(Claim(id="c", statement="x.z < 1"), "m", [effect(0, 1)])
    with pytest.raises(ConfigError, match=r"x\.y"):
        judge(Claim(id="c", statement="x.z < 1"), "m", [effect(0, 1)], {"y.*": "y failed"})
    excused = judge(Claim(id="c", statement="x.z < 1"), "m", [effect(0, 1)], {"x.*": "x failed"})
    assert (excused.outcome, excused.reason) == (Outcome.NOT_APPLICABLE, "x failed")
    assert judge(Claim(id="c", statement="x.y < 2"), "m", [effect(0, 1)], {"x.*": "x failed"}).effect is not None


def test_paper_values_by_model() -> None:
    claim = Claim(id="c", statement="x.y < 1", paper_values={"m": 0.3})
    assert judge(claim, "m", [effect(0, 1)]).paper_value == 0.3
    assert judge(claim, "other", [effect(0, 1)]).paper_value is None
    with pytest.raises(ValueError, match="not both"):
        Claim(id="c", statement="x.y < 1", paper_values={"m": 0.3}, paper_value=0.2)


def test_adjustment_families() -> None:
    spread = {"standard_error": 0.1, "degrees_of_freedom": 9.0}
    verdicts = [
        judge(Claim(id=f"c{i}", statement=f"x.y < {bound}", headline=i < 2), "m", [effect(-0.2, 0.2, extra=spread)])
        for i, bound in enumerate((0.25, 0.3, 0.5))
    ]
    verdicts.append(not_applicable(Claim(id="n", statement="x.y < 1", headline=True), "m", "gate"))
    adjusted = adjust(verdicts)
    assert [v.outcome for v in adjusted] == [v.outcome for v in verdicts]
    for verdict in adjusted[:3]:
        assert verdict.p_value is not None
        assert verdict.p_benjamini_hochberg is not None
        assert verdict.p_value <= verdict.p_benjamini_hochberg <= 1
    assert adjusted[0].p_holm == pytest.approx(adjusted[0].p_value)
    assert adjusted[1].p_holm is not None
    assert adjusted[2].p_holm is None
    assert adjusted[3].p_benjamini_hochberg is None


def test_p_agrees_with_the_interval() -> None:
    spread = {"standard_error": 0.1, "degrees_of_freedom": 9.0}
    half = 2.262157 * 0.1
    on_the_edge = judge(Claim(id="c", statement=f"x.y < {half}"), "m", [effect(-half, half, extra=spread)])
    assert on_the_edge.p_value == pytest.approx(0.05, abs=1e-4)


def test_no_p_where_the_data_bound_nothing() -> None:
    spread = {"standard_error": 0.1, "degrees_of_freedom": 9.0}
    unbounded = effect(-math.inf, math.inf, estimate=0.0, extra=spread)
    assert judge(Claim(id="c", statement="x.y < 0.5"), "m", [unbounded]).p_value is None


@pytest.mark.parametrize(("p", "outcome"), [(0.01, Outcome.REPRODUCED), (0.6, Outcome.INCONCLUSIVE)])
def test_a_test_that_does_not_reject_contradicts_nothing(p: float, outcome: Outcome) -> None:
    effect = Effect(Label.of("x.p"), p, p, p, n=3, clusters=3, excluded=0, unit="p", method="exact", confidence=0.95)
    assert judge(Claim(id="c", statement="x.p < 0.05"), "m", [effect]).outcome is outcome


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (
            {"paper_values": {"llama-3.1-8b-instruct": 0.0}},
            "the paper's own value 0 for llama-3.1-8b-instruct violates",
        ),
        ({"paper_value": -0.9}, "the paper's own value -0.9 violates"),
        ({}, "needs the paper's value"),
        ({"models": ["qwen3-note-taker"], "paper_values": {"llama-3.1-8b-instruct": 1.0}}, "needs the paper's value"),
        ({"models": ["qwen3-note-taker"], "paper_values": {"qwen3-8b": 0.1}}, "value 0.1 for qwen3-8b violates"),
    ],
)
def test_what_the_papers_own_number_violates_is_not_the_papers_claim(keys: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Claim(id="c", kind="paper", statement="x.y > 0.85", **keys)  # type: ignore[arg-type]


def test_a_claim_that_names_its_models_may_quote_the_others() -> None:
    quoted = {"qwen3-8b": 1.0, "llama-3.1-8b-instruct": 0.0}
    for about in ("qwen3-8b", "qwen3-note-taker"):
        claim = Claim(id="c", kind="paper", statement="x.y > 0.85", models=[about], paper_values=quoted)  # type: ignore[arg-type]
        assert claim.about("qwen3-note-taker", "qwen3-8b")
        assert not claim.about("llama-note-taker", "llama-3.1-8b-instruct")
    assert Claim(id="c", kind="critique", statement="x.y > 0.85", paper_values=quoted).paper_values == quoted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-note-taker", Standing("organism", "qwen3-8b")),
        ("qwen3-14b", Standing("paper", "qwen3-14b")),
        ("Qwen/Qwen3-14B", Standing("paper", "qwen3-14b")),
        ("smollm2-135m", Standing("pocket", "llama-3.1-8b-instruct")),
        ("micro-reader", Standing("micro", None)),
        ("someone/fine-tune", Standing("local", None)),
        ("no such model", Standing("local", None)),
    ],
)
def test_a_model_stands_beside_the_papers_of_its_architecture(name: str, expected: Standing) -> None:
    assert standing(name) == expected
    claim = Claim(id="c", statement="x.y > 0", paper_values={"qwen3-8b": 0.5, "qwen3-14b": 0.25})
    own = {"qwen3-8b": 0.5, "qwen3-14b": 0.25}.get(expected.paper_model or "")
    assert claim.paper_value_of(name, expected.paper_model) == own


@pytest.mark.parametrize(
    ("declared", "match"),
    [({"reader": "reproduced"}, "'reproduced' is no outcome"), ({"same": " "}, "give the reason")],
)
def test_calibration_declares_outcomes_or_a_reason(declared: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Claim(id="c", statement="x.y > 0", calibration=declared)
