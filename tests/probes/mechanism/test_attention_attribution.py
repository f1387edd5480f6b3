"""Laws of the attention attribution probe, and plain Hugging Face attention in float64."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from worded_models import aligned, effects_of, measured, plain_margin, worded

from kvprobe.engine.decision_attention import decision_attention
from kvprobe.engine.forward import prefill
from kvprobe.probes.mechanism.attention_attribution.probe import SINK, AttentionAttribution, regions
from kvprobe.probes.mechanism.attention_attribution.reading import of_pair
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair

PROBE = AttentionAttribution()


def pairs_of(size: int) -> list[Pair]:
    return aligned(GatedDecision(size=size, notes_before=(0, 0), notes_after=(0, 1)))


@cache
def rows_of(family: str) -> pd.DataFrame:
    return measured(PROBE, worded(family), pairs_of(2))


def masses(rows: pd.DataFrame, cache_name: str) -> pd.DataFrame:
    part = rows[(rows["measurement"] == "mass") & (rows["cache"] == cache_name)]
    return part.pivot_table(index=["pair", "layer"], columns="region", values="mass").fillna(0.0)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2"])
def test_all_attention_is_somewhere_and_none_is_counted_twice(family: str) -> None:
    rows = rows_of(family)
    for name in ("field_only", "stale", "new"):
        assert masses(rows, name).sum(axis=1).to_numpy() == pytest.approx(1.0, abs=1e-5)
    for pair in pairs_of(2):
        held = [position for positions in regions(pair).values() for position in positions]
        assert sorted(held) == list(range(len(pair.base.token_ids)))
        assert regions(pair)["sink"] == list(range(SINK))


def test_a_window_hides_what_lies_outside_it() -> None:
    rows = rows_of("mistral")
    assert (masses(rows, "stale")[["sink", "field"]].to_numpy() == 0).all()
    assert (masses(rows, "stale")["self"].to_numpy() > 0).all()


def test_caches_agree_before_the_first_layer_that_can_differ() -> None:
    rows = rows_of("qwen3")
    field_only, stale, new = (masses(rows, name).xs(0, level="layer") for name in ("field_only", "stale", "new"))
    # In the first layer a key knows its own token alone, so only the field's own key differs.
    torch.testing.assert_close(torch.tensor(field_only.to_numpy()), torch.tensor(new.to_numpy()))
    assert (field_only["field"] - stale["field"]).abs().max() > 1e-6


def test_against_plain_hugging_face() -> None:
    subject, pair = worded("llama"), pairs_of(2)[0]
    eager = AutoModelForCausalLM.from_config(deepcopy(subject.config), attn_implementation="eager").double().eval()
    eager.load_state_dict(subject.model.state_dict())
    ids, last = list(pair.base.token_ids), pair.decision_position
    caches: dict[str, Any] = {}
    with torch.no_grad():
        for name, context in (("stale", pair.base), ("new", pair.donor)):
            caches[name] = DynamicCache()
            eager(torch.tensor([context.token_ids[:-1]]), past_key_values=caches[name])
        for ours, theirs in zip(caches["stale"].layers, caches["new"].layers, strict=True):
            ours.keys[:, :, pair.field.start] = theirs.keys[:, :, pair.field.start]
            ours.values[:, :, pair.field.start] = theirs.values[:, :, pair.field.start]
        weights = eager(torch.tensor([ids[-1:]]), past_key_values=caches["stale"], output_attentions=True).attentions
    policy = list(pair.base.spans["policy"].positions)
    found = masses(rows_of("llama"), "field_only")
    for layer, weight in enumerate(weights):
        by_head = weight[0, :, 0]
        assert by_head.shape[-1] == last + 1
        assert found["policy"][0, layer] == pytest.approx(float(by_head[:, policy].sum(-1).mean()), abs=1e-6)
        assert found["field"][0, layer] == pytest.approx(float(by_head[:, pair.field.start].mean()), abs=1e-6)
    position = policy[3]
    row = rows_of("llama").query("pair == 0 and position == @position")
    assert row["margin_transplanted"].item() == pytest.approx(plain_margin(subject, pair, [position]), abs=1e-9)


def test_attention_of_a_full_pass_is_that_of_the_step_on_its_cache() -> None:
    subject, ids = worded("qwen3"), pairs_of(1)[0].base.token_ids
    whole = prefill(subject, ids)
    with_entry, without = whole.cache, whole.cache.take(slice(0, len(ids) - 1))
    torch.testing.assert_close(decision_attention(subject, ids, with_entry), decision_attention(subject, ids, without))


def test_correlation_and_share_find_what_was_put_in() -> None:
    rows = pd.DataFrame({"attention": [0.1, 0.2, 0.3, 0.4], "effect": [0.0, 0.1, 0.3, 0.6]})
    assert of_pair(rows, 1) == pytest.approx((1.0, 0.6, 0.25))
    assert of_pair(rows.assign(effect=-rows["effect"]), 1)[0] != of_pair(rows, 1)[0]
    assert of_pair(rows.assign(attention=rows["attention"][::-1].to_numpy()), 1) == pytest.approx((-1.0, 0.0, 0.25))


def test_summary_is_the_mean_over_layers_of_the_paper() -> None:
    rows = rows_of("qwen3")
    effects = effects_of(PROBE, rows)
    assert effects["mass.policy"].estimate == pytest.approx(float(masses(rows, "field_only")["policy"].mean()))
    parts = [name for name in effects if name.startswith("mass.") and name not in ("mass.downstream", "mass.error")]
    assert sum(effects[name].estimate for name in parts) == pytest.approx(1.0, abs=1e-5)
    outside = sum(effects[f"mass.{name}"].estimate for name in ("sink", "before", "field", "self"))
    assert effects["mass.downstream"].estimate == pytest.approx(1 - outside, abs=1e-5)
    assert {"transplanted.correlation", "hidden.correlation", "transplanted.top_8_over_chance"} <= set(effects)
    assert effects["mass.error"].high < 1e-5
