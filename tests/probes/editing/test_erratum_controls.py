"""Laws of the erratum_controls probe, against plain Hugging Face in float64, and of its lines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import TOKENIZER, effects_of, gated, margin_behind, measured, worded

from kvprobe.errors import ConfigError
from kvprobe.probes.editing.erratum_controls.probe import EARLY, EXPECTED, ErratumControls, arms_of
from kvprobe.probes.kit.edit_cases import edit_case
from kvprobe.stats import Effect
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.erratum_lines import about_irrelevant_field, about_unmentioned_value, random_line_tokens
from kvprobe.tasks.extra_lines import Subjects, line_tokens
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import TRAINED, WORDINGS

(PAIR,) = gated()


def update(pair: Pair, value: str) -> list[int]:
    """The erratum with any value, written down without the probe."""
    attributes, style = pair.scenario.attributes, WORDINGS.get(pair.scenario.wording)()
    return encode_segment(style.update(attributes["entity"], attributes["field"], value), TOKENIZER)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_arms_that_are_prompts_one_could_write_against_plain_hugging_face(family: str) -> None:
    pair, subject = PAIR, worded(family)
    found = measured(ErratumControls(), subject, [pair]).set_index("arm")
    assert sorted(found.index) == sorted(EXPECTED)
    assert list(found.index[found["as_expected"].isna()]) == ["unmentioned_value"]
    old, new = (update(pair, pair.scenario.attributes[name]) for name in ("old", "new"))
    lines = {"stale": [], "new_value": new, "old_value": old, "old_then_new": old + new, "new_then_old": new + old}
    for arm in [*lines, "early_recomputed"]:
        at = pair.base.spans["session_rest"].end if arm in EARLY else pair.base.spans["task"].start
        ids = [*pair.base.token_ids[:at], *lines.get(arm, new), *pair.base.token_ids[at:]]
        assert found["margin"][arm] == pytest.approx(margin_behind(subject, pair, ids), abs=1e-5), arm


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_an_early_line_whose_rest_is_reused_leaves_every_stale_note_as_it_was(family: str) -> None:
    subject, pair = worded(family), PAIR
    case = edit_case(subject, pair)
    edited = dict(arms_of(subject, case, 0))["early_reused"].prompt
    line, end = update(pair, pair.scenario.attributes["new"]), pair.base.spans["session_rest"].end
    assert list(edited.token_ids) == [*pair.base.token_ids[:end], *line, *pair.base.token_ids[end:]]
    for mine, stale in zip(edited.cache.layers, case.stale.cache.layers, strict=True):
        assert torch.equal(mine.values[:, :, end + len(line) :], stale.values[:, :, end:])
        assert torch.equal(mine.source_keys[:, :, end + len(line) :], stale.keys[:, :, end:])
        assert not torch.equal(mine.keys[:, :, end + len(line) :], stale.keys[:, :, end:])
    # What stood behind the field in its line is run anew with the line, on what it saw before.
    fresh, held = edited.cache.layers[-1].values[:, :, :end], case.stale.cache.layers[-1].values[:, :, :end]
    torch.testing.assert_close(fresh, held, atol=5e-6, rtol=0)


@pytest.mark.parametrize("wording", TRAINED)
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
    rows = crossed(arm=EXPECTED)
    ought = {arm: 10 * bool(expected) for arm, expected in EXPECTED.items()} | turned
    correct, expected = rows["pair"] < rows["arm"].map(ought), rows["arm"].map(EXPECTED)
    as_expected = correct.eq(expected).where(expected.notna(), None)
    return effects_of(
        ErratumControls(), rows.assign(correct=correct, as_expected=as_expected, margin=4.0 * correct - 2)
    )


@given(new=st.integers(0, 10), neutral=st.integers(0, 10))
def test_summary_finds_what_was_put_in(new: int, neutral: int) -> None:
    effects = made_effects({"new_value": new, "neutral": neutral, "unmentioned_value": 5})
    assert effects["neutral.new_rate"].estimate == pytest.approx(neutral / 10)
    assert effects["neutral.margin_shift"].estimate == pytest.approx(0.4 * neutral)
    assert effects["value.against_neutral.difference"].estimate == pytest.approx((new - neutral) / 10)
    judged = 10 * (len(EXPECTED) - 1)
    assert effects["as_expected"].estimate == pytest.approx((judged - neutral - (10 - new)) / judged)
