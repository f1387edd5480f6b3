"""The AUTO probe: all policies judge the same edits, and what they cost and err adds up."""

from __future__ import annotations

import pytest
from worded_models import aligned, effects_of, measured, worded

from kvprobe.probes.editing.auto.probe import AutoProbe, auto_name
from kvprobe.tasks.two_fields import TwoFields


def test_policies_are_compared_on_the_same_edits() -> None:
    pairs, probe = aligned(TwoFields(size=9, joint=("own", "and", "none"))), AutoProbe(folds=3, error_costs=(10.0, 0.1))
    rows = measured(probe, worded("qwen3"), pairs)
    policies = rows.groupby("policy").size()
    assert set(policies) == {18}
    assert {auto_name(10.0), auto_name(0.1), "cheapest_right", "always_erratum"} <= set(policies.index)
    for _, edit in rows.groupby(["pair", "edit"]):
        by_policy = edit.set_index("policy")
        right = by_policy[by_policy.index.str.startswith("always_") & ~by_policy["error"]]
        if len(right):
            assert not by_policy.loc["cheapest_right", "error"]
            assert by_policy.loc["cheapest_right", "token_share"] == right["token_share"].min()
        assert by_policy.loc[auto_name(10.0), "token_share"] <= by_policy.loc["always_erratum", "token_share"]
    effects = effects_of(probe, rows)
    assert effects["auto_less_erratum.most_tokens"].estimate <= 0
    assert effects["auto.loss"].estimate == pytest.approx(
        10 * effects["auto.error_rate"].estimate + effects["auto.token_share"].estimate
    )
    assert effects["cheapest_right.error_rate"].estimate <= effects["always_erratum.error_rate"].estimate
    assert effects["auto_0.1.error_rate"].parameters == {"error_cost": 0.1}
