"""The facts probe and its task: lists hold what is asked, and readings are those of the prompts that are named."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from composing_rows import decided
from hypothesis import given
from hypothesis import strategies as st
from worded_models import aligned, effects_of, measured, plain_logits, worded

from kvprobe.composing.prompts import compile_segment, composition_of
from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import read
from kvprobe.probes.composing.facts.probe import FactsProbe
from kvprobe.probes.kit.fidelity import REMOVED
from kvprobe.tasks.facts import FACTS, Facts
from kvprobe.tasks.pairs import Pair

PROBE = FactsProbe(seam=3)


def pairs_of(size: int) -> list[Pair]:
    return aligned(Facts(size=size))


@given(seed=st.integers(0, 999), entries=st.integers(2, 12))
def test_lists_hold_both_values_with_what_goes_with_them(seed: int, entries: int) -> None:
    early, late = Facts(size=2, seed=seed, entries=entries).prompt_pairs()
    for pair in (early, late):
        about = pair.scenario.attributes
        (facts,) = (segment.text for segment in pair.base.segments if segment.name == FACTS)
        lines = [line for line in facts.split("\n") if " " in line]
        assert len(lines) == entries
        asked = zip((about["old"], about["new"]), (pair.base_answer, pair.donor_answer), strict=True)
        for value, action in asked:
            spoken = [set(line.replace(".", " ").replace(",", " ").split()) for line in lines]
            assert sum({value, action} <= words for words in spoken) == 1
            assert sum(bool({value, action} & words) for words in spoken) == 1
    names = [[segment.name for segment in pair.base.segments] for pair in (early, late)]
    assert names[0].index(FACTS) == 1
    assert names[1].index(FACTS) == names[1].index("session") - 1
    # The two prompts say the same, in another order.
    assert sorted(early.base.text.split("\n")) == sorted(late.base.text.split("\n"))


def test_prompts_do_not_depend_on_how_many_are_asked_for() -> None:
    assert list(Facts(size=3).prompt_pairs()) == list(Facts(size=9).prompt_pairs())[:3]


def test_rows_against_plain_runs() -> None:
    subject, pairs = worded("qwen3"), pairs_of(2)
    rows = measured(PROBE, subject, pairs)
    assert len(rows) == 2 * 2 * len(PROBE.arms())
    for index, pair in enumerate(pairs):
        here = rows[(rows["pair"] == index) & (rows["arm"] == REMOVED)].set_index("prompt")
        for prompt, context, right in (
            ("base", pair.base, pair.base_answer_id),
            ("donor", pair.donor, pair.donor_answer_id),
        ):
            span = context.spans[FACTS]
            # Without its list the prompt is the same tokens but those.
            bare = (*context.token_ids[: span.start], *context.token_ids[span.end :])
            for column, ids in (("reference_", context.token_ids), ("", bare)):
                logits = plain_logits(subject.model, ids)
                over = read(logits, pair.base_answer_id, pair.donor_answer_id).margin
                expected = over if prompt == "donor" else -over
                assert here.loc[prompt, f"{column}margin"] == pytest.approx(expected, abs=1e-6)
                assert here.loc[prompt, f"{column}exact"] == (int(logits.argmax()) == right)


def test_exact_matches_are_counted_over_the_prompts() -> None:
    rows = []
    for number in range(8):
        for place in ("early", "late"):
            for arm in PROBE.arms():
                exact = arm.name != REMOVED and (place == "late" or number < 2)
                where = {"pair": number, "scenario": str(number), "skeleton": number, "insertion": place}
                answers = {"arm": arm.name, "exact": exact, "reference_exact": True}
                rows.append({**where, **answers, **decided(("base", "donor")[number % 2])})
    effects = effects_of(PROBE, pd.DataFrame(rows))
    assert effects["early.splice_none.exact_match"].estimate == 0.25
    assert effects["late.splice_none.exact_match"].estimate == 1
    assert effects["early.full_prefill.exact_match"].estimate == 1
    assert effects["late_less_early.splice_none.exact_match"].estimate == 0.75
    assert effects["late_less_early.removed.exact_match"].estimate == 0
    assert effects["early.seam_gain.exact_match"].estimate == 0
    assert effects["early.seam_3.exact_match"].condition == "{insertion}.seam_{seam}"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_list_compiled_in_its_place_is_the_prefill(family: str) -> None:
    subject = worded(family)
    for pair in pairs_of(2):
        chunk = compile_segment(subject, pair.donor, FACTS, "real")
        scheme, composition = PROBE.arms()[0].scheme, composition_of(pair.base, {FACTS: chunk})
        found = scheme.compose(subject, composition).decide(subject).logits
        torch.testing.assert_close(found, prefill(subject, pair.base.token_ids).logits, atol=5e-6, rtol=0)
