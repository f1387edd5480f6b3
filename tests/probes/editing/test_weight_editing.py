"""Laws of the weight-editing probe: what is decided beside an edit, and that zeros are measured and not written."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import TOKENIZER, effects_of, gated, margin_behind, worded
from worded_models import measured as measured_by

from kvprobe.baselines.base import Background
from kvprobe.edit.base import CachedPrompt, Edited, EditMethod, FieldEdit
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError, SampleError
from kvprobe.figures.panel import Panel
from kvprobe.models.catalogue import organism_names
from kvprobe.models.loader import load_subject
from kvprobe.models.subject import Subject
from kvprobe.probes.editing.weight_editing.arms import cache_rows
from kvprobe.probes.editing.weight_editing.concurrent_requests import (
    OTHER_WORDING,
    OWN_PREFIX,
    SHARED_PREFIX,
    concurrent_requests,
    with_segments,
)
from kvprobe.probes.editing.weight_editing.probe import WeightEditing
from kvprobe.probes.editing.weight_editing.reading import READING
from kvprobe.tasks.pairs import Pair

SMALL: dict[str, Any] = {
    "weight_edits": {
        "rome": ({"search": {"steps": 2}},),
        "memit": ({"search": {"steps": 2}},),
        "lora": ({"steps": 2},),
    },
    "training_pairs": 20,
    "validation_edits": 1,
    "validation_least": 0.0,
    "concurrent": 1,
    "collateral": 2,
    "together": 2,
    "repeats": 1,
    "retain": 2,
}
ARMS = {
    *("field_only", "erratum", "full_downstream"),
    *("rome", "memit", "memit_together", "lora", "lora_per_request"),
}


def measured(subject: Subject, pairs: list[Pair], **parameters: Any) -> pd.DataFrame:
    return measured_by(WeightEditing(**{**SMALL, **parameters}), subject, pairs)


@cache
def of_random_model() -> tuple[Subject, list[Pair], pd.DataFrame]:
    subject, pairs = worded("gemma2"), gated(3)
    # Neighbours of a random model's edit may all flip, so nothing depends on the validation here.
    return subject, pairs, measured(subject, pairs)


@given(seed=st.integers(0, 99))
def test_concurrent_requests_share_what_they_say_they_share(seed: int) -> None:
    (pair,) = gated(1, seed=seed)
    requests = concurrent_requests(pair, TOKENIZER, each=3)
    assert [each.kind for each in requests] == [SHARED_PREFIX] * 3 + [OWN_PREFIX] * 3 + [OTHER_WORDING] * 2
    new = TOKENIZER.convert_tokens_to_ids(pair.scenario.attributes["new"])
    stated_new = pair.donor.token_ids.count(new) - pair.base.token_ids.count(new)
    for request in requests:
        ids, shared = request.token_ids, request.shared
        assert ids[:shared] == pair.base.token_ids[:shared]
        assert ids != pair.base.token_ids
        assert shared < len(ids)
        if request.kind == SHARED_PREFIX:
            assert shared >= pair.base.spans["policy"].end
        if request.kind != OTHER_WORDING:
            assert ids.count(new) == pair.base.token_ids.count(new) < pair.base.token_ids.count(new) + stated_new
        assert TOKENIZER.unk_token_id not in ids
    assert concurrent_requests(pair, TOKENIZER, each=3) == requests
    later = {each.token_ids for each in concurrent_requests(pair, TOKENIZER, each=3, first=3)}
    assert len({each.token_ids for each in requests} & later) < len(later)


def test_a_prompt_with_no_other_segments_is_itself() -> None:
    for pair in gated(4):
        assert with_segments(pair.base, {}) == pair.base.token_ids
        field = {"field": list(pair.donor.token_ids[pair.field.start : pair.field.end])}
        assert with_segments(pair.base, field) == pair.donor.token_ids


def test_every_arm_decides_every_prompt() -> None:
    _, pairs, rows = of_random_model()
    assert set(rows["arm"]) == ARMS
    counts = rows.groupby(["arm", "pair", "prompt"]).size().unstack()
    for arm in ARMS:
        for index in range(len(pairs)):
            found = counts.loc[arm, index]
            assert found["target"] == 1
            assert found[SHARED_PREFIX] == found[OWN_PREFIX] == 1
            assert found[OTHER_WORDING] == 2
            assert (found["edited_prefix"] == 1) == (arm in {"field_only", "erratum", "full_downstream"})
    assert rows[rows["prompt"] == "target"]["seconds"].gt(0).all()
    assert rows[rows["arm"].isin({"rome", "memit", "memit_together", "lora"})]["weights_equal"].eq(True).all()


def test_margins_against_plain_hugging_face() -> None:
    subject, pairs, rows = of_random_model()
    for index, pair in enumerate(pairs):
        mine = rows[rows["pair"] == index].set_index(["arm", "prompt"])
        base, donor = (margin_behind(subject, pair, prompt.token_ids) for prompt in (pair.base, pair.donor))
        assert mine.loc[("full_downstream", "target"), "margin"].item() == pytest.approx(donor, abs=2e-5)
        for arm in ARMS:
            assert mine.loc[(arm, "target"), "margin_before"].item() == pytest.approx(base, abs=2e-5)
        requests = concurrent_requests(pair, TOKENIZER, each=1)
        for arm in ("erratum", "lora_per_request"):
            for request in requests[:2]:
                ought = margin_behind(subject, pair, request.token_ids)
                found = mine.loc[(arm, request.kind)]
                assert found["margin_before"].item() == pytest.approx(ought, abs=2e-5)
                assert found["margin"].item() == pytest.approx(ought, abs=2e-5)
        # On the edited entries of full downstream a request is one with the new value.
        ids = list(requests[0].token_ids)
        ids[pair.field.start : pair.field.end] = pair.donor.token_ids[pair.field.start : pair.field.end]
        on_edited = mine.loc[("full_downstream", "edited_prefix"), "margin"].item()
        assert on_edited == pytest.approx(margin_behind(subject, pair, ids), abs=2e-5)
        assert mine.loc[("lora", SHARED_PREFIX), "margin"].item() != pytest.approx(base, abs=1e-3)


class _InPlace(EditMethod):
    """Writes into the cache it was given, as no edit may."""

    name = "in_place"

    def apply(self, subject: Subject, stale: CachedPrompt, edit: FieldEdit) -> Edited:
        for layer in stale.cache.layers:
            layer.values[:, :, stale.span(edit.field).start] += 5.0
        return Edited(stale, Receipt())

    def tokens(self, stale: CachedPrompt, edit: FieldEdit) -> float:
        return 0


def test_an_edit_that_writes_into_shared_entries_is_seen_to_change_concurrent_requests() -> None:
    subject, pairs = worded("llama"), gated(2)
    probe = WeightEditing(**SMALL)
    background = Background((pairs[1].base.token_ids,))
    served = probe._served(subject, 0, pairs, background)
    rows = pd.DataFrame(cache_rows(subject, _InPlace(), served, 1)).set_index("prompt")
    changes = (rows["margin"] - rows["margin_before"]).abs()
    assert changes[SHARED_PREFIX] > 1e-3
    assert changes[OWN_PREFIX] < 2e-5


def test_a_method_that_fails_its_validation_is_not_used() -> None:
    subject, pairs = worded("qwen3"), gated(2)
    none = {"rome": ({"search": {"steps": 1, "learning_rate": 1e-9}},)}
    rows = measured(subject, pairs, weight_edits=none, validation_least=1.0, cache_edits=("field_only",))
    rome = rows[rows["arm"] == "rome"]
    assert len(rome) == len(pairs)
    assert rome["margin"].isna().all()
    effects = effects_of(WeightEditing(), rows)
    assert effects["rome.usable"].estimate == 0.0
    assert effects["rome.validation.switched"].estimate == 0.0
    assert effects["rome.validation.kept"].n >= 2
    assert "rome.efficacy" not in effects
    assert "weights.bit_equal" not in effects


def made_rows(flipped: int, changed: int, wrong_before: int, pairs: int = 10) -> pd.DataFrame:
    """One arm in which the first so many concurrent requests flip and bystanders change."""
    rows = crossed(pairs, arm=["rome"], prompt=["target", "own_prefix", "collateral"])
    pair, target, beside = rows["pair"], rows["prompt"] == "target", rows["prompt"] == "own_prefix"
    validation = {"switched": 0.75, "kept": 1.0, "edits": 4, "neighbours": 8}
    return rows.assign(
        new=target | (beside & (pair < flipped)),
        new_before=beside & (pair >= pairs - wrong_before),
        changed=target | (beside & (pair < flipped)) | (rows["prompt"].eq("collateral") & (pair < changed)),
        seconds=target.map({True: 2.0}),
        weights_equal=pair > 0,
        usable=True,
        margin=1.0,
        reprefill_seconds=0.5,
        **{f"validation_{name}": value for name, value in validation.items()},
    )


@given(flipped=st.integers(0, 5), changed=st.integers(0, 10), wrong_before=st.integers(0, 4))
def test_summary_finds_what_was_put_in(flipped: int, changed: int, wrong_before: int) -> None:
    effects = effects_of(WeightEditing(), made_rows(flipped, changed, wrong_before))
    assert effects["rome.efficacy"].estimate == 1.0
    assert effects["rome.contamination"].estimate == pytest.approx(flipped / (10 - wrong_before))
    assert effects["rome.contamination"].excluded == wrong_before
    assert effects["rome.collateral"].estimate == pytest.approx(changed / 10)
    assert effects["rome.latency"].estimate == 4.0
    assert (effects["rome.validation.switched"].estimate, effects["rome.validation.switched"].n) == (0.75, 4)
    assert effects["weights.bit_equal"].estimate == pytest.approx(0.9)
    assert effects["baseline.refuse.correct_rate"].estimate == 0.0


def test_the_figure_says_which_arms_are_not_usable() -> None:
    usable = effects_of(WeightEditing(), made_rows(3, 2, 0))
    unusable = {name: effect for name, effect in usable.items() if ".validation." in name or name == "rome.usable"}
    figure = READING.draw([Panel("one", usable), Panel("two", unusable)])
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert sum("not usable: 75% of 4" in text for text in texts) == 1


def test_what_cannot_be_measured_is_refused() -> None:
    (pair,) = gated(1)
    unsaid = replace(pair, scenario=replace(pair.scenario, attributes={"entity": "order", "field": "status"}))
    with pytest.raises(ConfigError, match="say their old: use task gated_decision"):
        concurrent_requests(unsaid, TOKENIZER, each=1)
    with pytest.raises(SampleError, match="share the skeleton"):
        measured(worded("llama"), gated(10, split="all", seed=3))


@pytest.mark.skipif("qwen3-note-taker" not in organism_names(), reason="the organism does not ship with this checkout")
def test_an_adapter_switches_an_organism_and_flips_concurrent_requests_too() -> None:
    torch.manual_seed(0)
    rows = measured(
        load_subject("qwen3-note-taker"),
        gated(2),
        weight_edits={"lora": ({},)},
        cache_edits=("full_downstream",),
        validation_least=0.5,
    )
    shares = rows.astype({"new": float}).groupby(["arm", "prompt"])["new"].mean()
    assert shares["lora", "target"] == shares["full_downstream", "target"] == 1.0
    assert shares["lora", SHARED_PREFIX] >= 0.5
    assert shares["lora_per_request", SHARED_PREFIX] == shares["full_downstream", SHARED_PREFIX] == 0.0
