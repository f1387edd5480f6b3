"""Verdicts follow from intervals alone."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvprobe.errors import ConfigError
from kvprobe.models.catalogue import Standing, standing
from kvprobe.runs.claims import Claim, Outcome, adjust, judge, not_applicable, parse_statement
from kvprobe.stats import (
    Effect,
    Label,
    StatisticsConfig,
    bootstrapped,
    maximum,
    mean,
    median,
    proportion,
    ratio_of_sums,
)
from kvprobe.stats.kappa import cohen_kappa

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
        ("x.y < 0.15", -0.1, 0.1, Outcome.HOLDS),
        ("x.y < 0.15", 0.1, 0.15, Outcome.OPEN),
        ("x.y <= 0.15", 0.1, 0.15, Outcome.HOLDS),
        ("x.y < 0.15", 0.15, 0.3, Outcome.FAILS),
        ("x.y <= 0.15", 0.15, 0.3, Outcome.OPEN),
        ("x.y >= 0.85", 0.9, 1.1, Outcome.HOLDS),
        ("x.y >= 0.85", 0.1, 0.8, Outcome.FAILS),
        ("x.y == 0", 0.0, 0.0, Outcome.HOLDS),
        ("x.y == 0", 0.1, 0.1, Outcome.FAILS),
        ("x.y == 0", -0.1, 0.1, Outcome.OPEN),
        ("abs(x.y) < 0.1", -0.05, 0.02, Outcome.HOLDS),
        ("abs(x.y) < 0.1", -0.5, -0.2, Outcome.FAILS),
        ("abs( x.y ) < 0.1", -0.5, 0.02, Outcome.OPEN),
        ("0.85 <= x.y <= 1.15", 0.9, 1.1, Outcome.HOLDS),
        ("0.85 <= x.y <= 1.15", 1.2, 1.3, Outcome.FAILS),
        ("-1e-3 < x.y < .5", 0.0, 0.6, Outcome.OPEN),
        ("x.y < 0.15", -math.inf, math.inf, Outcome.OPEN),
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
    opposite = {Outcome.HOLDS: Outcome.FAILS, Outcome.FAILS: Outcome.HOLDS}
    assert negation is opposite.get(claim, Outcome.OPEN)


@given(numbers, numbers, numbers, st.floats(0, 1))
def test_a_narrower_interval_never_reverses_a_verdict(bound: float, a: float, b: float, inner: float) -> None:
    low, high = min(a, b), max(a, b)
    wide = outcome(f"x.y < {bound!r}", effect(low, high, estimate=low))
    middle = min(max(low + inner * (high - low), low), high)
    narrow = outcome(f"x.y < {bound!r}", effect(middle, high, estimate=high))
    assume(wide is not Outcome.OPEN)
    assert narrow is wide


@pytest.mark.parametrize(("clusters", "expected"), [(1, "needs more pairs"), (5, "needs more pairs"), (6, "holds")])
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


@pytest.mark.parametrize(("p", "outcome"), [(0.01, Outcome.HOLDS), (0.6, Outcome.OPEN)])
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
        ("no such model", Standing()),
    ],
)
def test_a_model_stands_beside_the_papers_of_its_architecture(name: str, expected: Standing) -> None:
    assert standing(name) == expected
    claim = Claim(id="c", statement="x.y > 0", paper_values={"qwen3-8b": 0.5, "qwen3-14b": 0.25})
    own = {"qwen3-8b": 0.5, "qwen3-14b": 0.25}.get(expected.paper_model or "")
    assert claim.paper_value_of(name, expected.paper_model) == (own, own is not None)


@pytest.mark.parametrize(
    ("declared", "match"),
    [({"reader": "reproduced"}, "'reproduced' is no outcome"), ({"same": " "}, "give the reason")],
)
def test_calibration_declares_outcomes_or_a_reason(declared: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Claim(id="c", statement="x.y > 0", calibration=declared)


def share(successes: int, rows: int, clusters: int | None = None) -> Effect:
    labels = None if clusters is None else [row % clusters for row in range(rows)]
    return proportion("x.y", [row < successes for row in range(rows)], clusters=labels)


@pytest.mark.parametrize(
    ("statement", "measured", "needed"),
    [
        ("x.y > 0.85", share(8, 8), 19),
        ("x.y > 0.85", share(7, 8), 19),
        ("x.y < 0.15", share(0, 60, 10), 19),
        ("0.3 < x.y < 0.7", share(4, 8), 22),
        ("x.y > 0.85", share(19, 19), None),
        ("x.y > 0.85", share(1, 8), None),
        ("x.y < 0.15", mean("x.y", [0.1, 0.2, 0.0, 0.3]), None),
    ],
)
def test_what_no_sample_of_this_size_could_settle_says_how_many_could(
    statement: str, measured: Effect, needed: int | None
) -> None:
    verdict = judge(Claim(id="c", statement=statement), "m", [measured])
    assert (verdict.outcome is Outcome.UNDERPOWERED) == (needed is not None)
    assert ("needs n >=" in verdict.reason) == (needed is not None)
    if needed:
        assert verdict.reason.endswith(f"needs n >= {needed}.")
        outcomes = {outcome(statement, share(k, needed)) for k in range(needed + 1)}
        assert Outcome.HOLDS in outcomes
        assert Outcome.HOLDS not in {outcome(statement, share(k, needed - 1)) for k in range(needed)}


@given(st.integers(1, 60), st.data(), st.floats(0.02, 0.98), st.sampled_from("<>"))
def test_p_and_interval_of_a_share_decide_alike(rows: int, data: st.DataObject, bound: float, sign: str) -> None:
    clusters = data.draw(st.integers(max(1, rows // 4), rows))
    measured = share(data.draw(st.integers(0, rows)), rows, clusters)
    verdict = judge(Claim(id="c", statement=f"x.y {sign} {bound!r}"), "m", [measured])
    assert verdict.p_value is not None
    assume(abs(verdict.p_value - 0.05) > 1e-9)
    assert verdict.outcome.decided == (verdict.p_value < 0.05)


def test_an_identity_is_a_check_of_its_rows() -> None:
    for kind, expected in (("identity", Outcome.HOLDS), ("critique", Outcome.OPEN)):
        verdict = judge(Claim(id="c", kind=kind, statement="x.y == 1"), "m", [share(60, 60)])  # type: ignore[arg-type]
        assert verdict.outcome is expected
        assert verdict.p_value is None
    missed = judge(Claim(id="c", kind="identity", statement="x.y == 1"), "m", [share(59, 60)])  # type: ignore[arg-type]
    assert (missed.outcome, missed.reason, missed.p_reason) == (Outcome.FAILS, "59 of 60 rows.", "an identity")
    with pytest.raises(ValueError, match="is no headline"):
        Claim(id="c", kind="identity", statement="x.y == 1", headline=True)  # type: ignore[arg-type]


def test_every_verdict_has_a_p_value_or_says_why_not() -> None:
    rows = pd.DataFrame({"v": [0.1, 0.3, 0.2, 0.5, 0.4] * 5})
    measured = [
        share(7, 10),
        share(10, 10),
        mean("x.y", [0.1, 0.2, 0.4]),
        mean("x.y", [0.5] * 3, noise_floor=0.1),
        mean("x.y", [0.1, 0.2], clusters=[0, 0]),
        median("x.y", list(range(9))),
        maximum("x.y", [0.0, 0.0]),
        ratio_of_sums("x.y", [1.0, -1.0, 2.0, 0.5, 1.0], [5.0, -4.0, 1.0, -3.0, 2.0]),
        cohen_kappa("x.y", list("aabbabab"), list("aabbabbb")),
        bootstrapped("x.y", rows[:8], lambda r: float(r["v"].mean())),
        bootstrapped("x.y", rows, lambda r: float(r["v"].mean()), statistics=StatisticsConfig(resamples=999)),
        Effect(Label.of("x.y"), 0.2, 0.2, 0.2, n=3, clusters=3, unit="p", method="exact"),
    ]
    verdicts = [judge(Claim(id="c", statement="x.y < 0.5"), "m", [effect]) for effect in measured]
    verdicts += [not_applicable(Claim(id="c", statement="x.y < 0.5"), "m", "gate")]
    assert [(v.p_value is None) == bool(v.p_reason) for v in verdicts] == [True] * len(verdicts)
    assert sum(v.p_value is not None for v in verdicts) == 5


@pytest.mark.parametrize(
    ("kind", "tier", "held", "failed"),
    [
        ("paper", "paper", "reproduced", "contradicted"),
        ("paper", "pocket", "reproduced on small", "contradicted on small"),
        ("paper", "local", "reproduced on small", "contradicted on small"),
        ("paper", "organism", "holds", "fails"),
        ("paper", "micro", "holds", "fails"),
        ("paper", None, "holds", "fails"),
        ("critique", "paper", "holds", "fails"),
        ("cost", "pocket", "holds", "fails"),
        ("identity", "paper", "passes", "fails"),
        (None, "paper", "holds", "fails"),
    ],
)
def test_only_pretrained_models_reproduce_or_contradict(
    kind: str | None, tier: str | None, held: str, failed: str
) -> None:
    claim = Claim(id="c", kind=kind, statement="x.y > 0.5", paper_value=1.0)  # type: ignore[arg-type]
    beside = Standing(tier)  # type: ignore[arg-type]
    words = [judge(claim, "folder/small", [effect(low, low + 0.1)], beside=beside).word for low in (0.6, 0.1)]
    assert words == [held, failed]
    assert judge(claim, "small", [effect(0.1, 0.9)], beside=beside).word == "open"
    assert not_applicable(claim, "small", "gate", beside).word == "not applicable"


def test_words_of_earlier_versions_are_read() -> None:
    former = ["reproduced", "contradicted", "inconclusive", "not applicable"]
    assert [str(Outcome(word)) for word in former] == ["holds", "fails", "open", "not applicable"]
    with pytest.raises(ValueError, match="proven"):
        Outcome("proven")
