"""Laws of the chain knockout probe, its summary on made rows, and plain Hugging Face in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from made_rows import crossed
from worded_models import TOKENIZER, effects_of, gated, margin_of, measured, worded

from kvprobe.engine.forward import prefill
from kvprobe.engine.generation import generate
from kvprobe.models.catalogue import organism_names
from kvprobe.models.loader import load_subject
from kvprobe.probes.mechanism.chain_knockout.chains import Cell, finished
from kvprobe.probes.mechanism.chain_knockout.probe import CACHES, ChainKnockout
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.pairs import Pair

LIMIT = 4
CUE = encode_segment("Answer:", TOKENIZER)
MASKS = ("mask_field", "mask_downstream", "mask_chain", "mask_both", "mask_random")
BLOCKS = ("block_field", "block_rule")


def pairs_of(size: int) -> list[Pair]:
    return gated(size, mode="think", notes_before=(0, 0), notes_after=(0, 1))


@cache
def rows_of(family: str, **parameters: Any) -> pd.DataFrame:
    return measured(ChainKnockout(limit=LIMIT, **parameters), worded(family), pairs_of(2))


def margins(rows: pd.DataFrame, pair: int = 0) -> pd.Series:
    part = rows[(rows["pair"] == pair) & (rows["arm"] != "same_value")]
    return part.set_index(["cache", "arm"])["margin"]


def masked_logits(model: Any, ids: list[int], hidden: dict[int, list[int]]) -> torch.Tensor:
    """Logits behind `ids` in one pass, with the keys in `hidden` taken from each query, by Hugging Face alone."""
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for query, keys in hidden.items():
        seen[query, keys] = False
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0, -1]


def plain_chain(model: Any, prompt: list[int], hidden: list[int]) -> list[int]:
    """A greedy chain whose tokens, from the prompt's last one on, cannot see `hidden`."""
    ids = list(prompt)
    for _ in range(LIMIT):
        blind = dict.fromkeys(range(len(prompt) - 1, len(ids)), hidden)
        ids.append(int(masked_logits(model, ids, blind).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["stale", "new"])
def test_against_plain_hugging_face(name: str) -> None:
    """Free and blocked chains, and a decision that cannot see the chain or the prompt after the field."""
    pair, rows, model = pairs_of(2)[0], rows_of("llama"), worded("llama").model
    prompt = list((pair.base if name == "stale" else pair.donor).token_ids)
    found = margins(rows)[name]
    chain = plain_chain(model, prompt, [])
    ids = [*prompt, *chain, *CUE]
    last, field, rest = len(ids) - 1, list(pair.field.positions), list(pair.downstream.positions)
    written = list(range(len(prompt), last))
    hidden = {"free": [], "mask_field": field, "mask_downstream": rest, "mask_chain": written}
    for arm, keys in {**hidden, "mask_both": rest + written}.items():
        assert found[arm] == pytest.approx(margin_of(pair, masked_logits(model, ids, {last: keys})), abs=1e-8)
    blocked = plain_chain(model, prompt, field)
    ids = [*prompt, *blocked, *CUE]
    everywhere = dict.fromkeys(range(len(prompt) - 1, len(ids)), field)
    assert found["block_field"] == pytest.approx(margin_of(pair, masked_logits(model, ids, everywhere)), abs=1e-8)
    told = rows[(rows["pair"] == 0) & (rows["cache"] == name)].set_index("arm")["chain"]
    assert told["free"] == " ".join(map(str, chain))
    assert told["block_field"] == " ".join(map(str, blocked))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_every_arm_on_every_cache_and_the_floors(family: str) -> None:
    rows = rows_of(family)
    for index in range(2):
        assert set(margins(rows, index).index) == {(c, a) for c in CACHES for a in ("free", *BLOCKS, *MASKS)}
    same = rows[rows["arm"] == "same_value"]
    assert same["same_chain"].all()
    assert rows["noise_floor"].max() < 1e-5
    free = rows[rows["arm"] == "free"].set_index(["pair", "cache"])["margin"]
    gate = rows.groupby("pair").first()
    assert free.xs("stale", level="cache").to_numpy() == pytest.approx(gate["m_base"].to_numpy())
    assert free.xs("new", level="cache").to_numpy() == pytest.approx(gate["m_donor"].to_numpy())
    assert (rows["chain_tokens"] <= LIMIT).all()
    # Masks of the decision token come after the chain and so leave it as it was.
    assert rows[rows["arm"].isin(MASKS)]["same_chain"].all()


def test_sampled_chains_repeat_with_their_seed() -> None:
    first, pairs = rows_of("qwen3", temperature=3.0), pairs_of(2)
    again, other = (
        measured(ChainKnockout(limit=LIMIT, temperature=3.0, seed=seed), worded("qwen3"), pairs) for seed in (0, 1)
    )
    assert again["chain"].tolist() == first["chain"].tolist()
    assert other["chain"].tolist() != first["chain"].tolist()
    assert rows_of("qwen3")["chain"].tolist() != first["chain"].tolist()


def test_a_chain_that_ends_without_the_cue_gets_it() -> None:
    """Cut off, or ended by another token, which does not stay before the cue."""
    subject, pair = worded("qwen3"), pairs_of(1)[0]
    prompt, base = pair.base.token_ids, prefill(subject, pair.base.token_ids).cache
    (cut,) = generate(subject, prompt, base, [()], limit=3, ends=())
    (ended,) = generate(subject, prompt, base, [()], limit=3, ends=cut.token_ids[1:2])
    for generation, kept in ((cut, cut.token_ids), (ended, cut.token_ids[:1])):
        chain = finished(subject, pair, Cell("stale", "free", ()), generation, CUE)
        assert chain.ids == (*prompt, *kept, *CUE)
        assert chain.censored
        whole = prefill(subject, chain.ids[:-1]).cache
        for mine, other in zip(chain.cache.layers, whole.layers, strict=True):
            torch.testing.assert_close(mine.keys, other.keys)


@pytest.mark.skipif("qwen3-note-taker" not in organism_names(), reason="no organisms ship with this checkout")
def test_an_organism_writes_its_cue_itself_and_reads_the_field_again() -> None:
    rows = measured(ChainKnockout(), load_subject("qwen3-note-taker"), gated(6, mode="think"))
    free = rows[rows["arm"] == "free"]
    assert not free["censored"].any()
    named = rows[rows["cache"] == "field_only"].groupby("arm")["names_new_value"].mean()
    assert named["free"] > named["block_field"]


def made_rows(follows: dict[tuple[str, str], bool]) -> pd.DataFrame:
    follows = {**follows, ("same_value", "stale"): False}
    rows = crossed(case=follows)
    new, free = rows["case"].map(follows), rows["case"].map(lambda case: follows["free", case[1]])
    told = {"censored": False, "chain_tokens": 9, "same_chain": True, "names_new_value": new}
    rows[["arm", "cache"]] = rows.pop("case").to_list()
    return rows.assign(margin=8.0 * new - 4.0, free_margin=8.0 * free - 4.0, **told)


def test_a_drop_on_the_field_only_cache_is_told_from_one_on_every_cache() -> None:
    free = {("free", "stale"): False, ("free", "field_only"): True, ("free", "new"): True}
    reading = {("block_field", "stale"): False, ("block_field", "field_only"): False, ("block_field", "new"): True}
    breaking = {("mask_both", "stale"): False, ("mask_both", "field_only"): False, ("mask_both", "new"): False}
    effects = effects_of(ChainKnockout(), made_rows({**free, **reading, **breaking}))
    assert effects["block_field.drop"].estimate == effects["mask_both.drop"].estimate == 1.0
    assert effects["block_field.drop_over_new"].estimate == 1.0
    assert effects["mask_both.drop_over_new"].estimate == 0.0
    assert effects["block_field.field_only.follows_new"].estimate == 0.0
    assert effects["block_field.field_difference"].estimate == pytest.approx(-8.0)
    # Ten pairs that all agree do not make a difference exact.
    assert effects["block_field.drop"].low == pytest.approx(0.9)
