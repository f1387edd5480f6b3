"""Generation equals Hugging Face's own, its rows are independent, and its knockouts act at every step."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny, tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.generation import _choose, _Stops, generate
from kvprobe.engine.interventions import AttentionKnockout, KVPatch
from kvprobe.engine.operations import overwrite
from kvprobe.errors import NoEffectError, UnsupportedError

LENGTH = 12
LAST = LENGTH - 1


def donor_ids(ids: list[int]) -> list[int]:
    return [*ids[:3], 3 + (ids[3] + 5) % 50, *ids[4:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_hugging_face(family: str) -> None:
    subject, ids = tiny(family, torch.float64), tokens(LENGTH)
    (ours,) = generate(subject, ids, prefill(subject, ids).cache, [()], limit=8, ends=())
    theirs = list(ids)
    with torch.no_grad():
        for _ in range(8):
            theirs.append(int(subject.model(torch.tensor([theirs])).logits[0, -1].argmax()))
    assert list(ours.token_ids) == theirs[LENGTH:]
    assert ours.censored


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_cache_is_that_of_a_prefill_of_prompt_and_text(family: str) -> None:
    subject, ids = tiny(family, torch.float64), tokens(LENGTH)
    (ours,) = generate(subject, ids, prefill(subject, ids).cache, [()], limit=5, ends=())
    whole = prefill(subject, [*ids, *ours.token_ids[:-1]]).cache
    assert ours.cache.positions.tolist() == whole.positions.tolist()
    for mine, other in zip(ours.cache.layers, whole.layers, strict=True):
        # Eager attention takes its softmax in float32 whatever the model's own precision is.
        torch.testing.assert_close(mine.keys, other.keys, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(mine.values, other.values, atol=1e-5, rtol=1e-3)


@given(limit=st.integers(1, 9), seed=st.integers(0, 50))
def test_rows_run_together_as_they_run_alone(limit: int, seed: int) -> None:
    subject, ids = tiny("qwen3", torch.float64), tokens(LENGTH, seed)
    base, donor = (prefill(subject, prompt).cache for prompt in (ids, donor_ids(ids)))
    before = base.fingerprint(), donor.fingerprint()
    queries = tuple(range(LAST, LAST + limit))
    rows = [(), KVPatch((3, 5), donor), (KVPatch((3,), donor), AttentionKnockout(queries, (1, 2), (0, 2)))]
    together = generate(subject, ids, base, rows, limit=limit, ends=())
    alone = [generate(subject, ids, base, [row], limit=limit, ends=())[0] for row in rows]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    edited, _ = overwrite(base, (3, 5), donor)
    (from_edited,) = generate(subject, ids, edited, [()], limit=limit, ends=())
    assert from_edited.token_ids == together[1].token_ids
    assert (base.fingerprint(), donor.fingerprint()) == before


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_knockout_acts_at_every_step_it_names(family: str) -> None:
    subject, ids = tiny(family, torch.float64), tokens(LENGTH)
    queries = (LAST, LAST + 1, LAST + 3)
    knockout = AttentionKnockout(queries, (LAST - 1, LAST - 2), no_op=True)
    (ours,) = generate(subject, ids, prefill(subject, ids).cache, [knockout], limit=5, ends=())
    for step in range(5):
        text = [*ids, *ours.token_ids[:step]]
        # All at once, without a cache: the prompt before its last token is not hidden anything.
        again = forward(subject, text, knockouts=[knockout])
        assert int(again.logits.argmax()) == ours.token_ids[step]


def test_what_a_knockout_does_is_seen_in_the_cache() -> None:
    subject, ids = tiny("qwen3", torch.float64), tokens(LENGTH)
    cache = prefill(subject, ids).cache
    hidden = AttentionKnockout((LAST,), (2, 3))
    plain, masked = generate(subject, ids, cache, [(), hidden], limit=2, ends=())
    assert torch.equal(plain.cache.layers[1].keys[:, :, :LAST], masked.cache.layers[1].keys[:, :, :LAST])
    assert not torch.allclose(plain.cache.layers[1].keys[:, :, LAST], masked.cache.layers[1].keys[:, :, LAST])


@given(seed=st.integers(0, 30), ends=st.lists(st.integers(0, 60), max_size=40))
def test_it_ends_at_any_of_the_end_tokens_as_hugging_face_does(seed: int, ends: list[int]) -> None:
    subject, ids = tiny("qwen3", torch.float64), tokens(LENGTH, seed)
    model, settings = subject.model, deepcopy(subject.model.generation_config)
    try:
        model.generation_config.eos_token_id = ends or None
        (ours,) = generate(subject, ids, prefill(subject, ids).cache, [()], limit=9)
        given = torch.tensor([ids])
        theirs = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=9, do_sample=False)
    finally:
        model.generation_config = settings
    assert ours.token_ids == tuple(theirs[0, LENGTH:].tolist())
    assert ours.censored == (ours.token_ids[-1] not in ends)
    assert len(ours.cache) == LENGTH + len(ours.token_ids) - 1


def byte_level() -> PreTrainedTokenizerFast:
    """Bytes, and tokens of two line breaks, of a full stop with them, and of a word with its blank."""
    merges = [("Ċ", "Ċ"), (".", "ĊĊ"), ("Ġ", "a")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@given(text=st.text("\n. aé日", min_size=1, max_size=20), stop=st.text("\n. aé日", min_size=1, max_size=3))
def test_a_stop_text_ends_where_the_text_first_holds_it(text: str, stop: str) -> None:
    """However it is cut into tokens."""
    tokenizer = byte_level()
    stops, ids = _Stops(tokenizer, [stop], tokenizer.encode("a")[0]), tokenizer.encode(text)
    holding = [count for count in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:count])]
    lengths = [stops.length(ids[:count]) for count in range(1, len(ids) + 1)]
    first = next((count for count, length in enumerate(lengths, 1) if length), None)
    assert first == (holding[0] if holding else None)
    if first:
        length = lengths[first - 1]
        assert stop in tokenizer.decode(ids[first - length : first])
        assert stop not in tokenizer.decode(ids[first - length + 1 : first])


def test_the_same_seed_draws_the_same_text_and_rows_share_their_draws() -> None:
    subject, ids = tiny("llama", torch.float64), tokens(LENGTH)
    cache = prefill(subject, ids).cache

    def drawn(seed: int) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(seed)
        made = generate(subject, ids, cache, [(), ()], limit=12, ends=(), temperature=2.0, generator=generator)
        return [one.token_ids for one in made]

    first = drawn(1)
    assert first[0] == first[1]
    assert drawn(1) == first
    assert drawn(2) != first


def test_draws_follow_the_softmax() -> None:
    from scipy import stats

    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draws = torch.tensor([int(_choose(logits, 0.7, generator)) for _ in range(4000)])
    expected = 4000 * torch.softmax(logits[0].double() / 0.7, 0)
    assert stats.chisquare(draws.bincount(minlength=4).numpy(), expected.numpy()).pvalue > 0.001


def test_what_cannot_act_is_refused() -> None:
    subject, ids = tiny("qwen3"), tokens(LENGTH)
    cache = prefill(subject, ids).cache
    with pytest.raises(NoEffectError, match="hid nothing"):
        generate(subject, ids, cache, [AttentionKnockout((LAST + 30,), (1,))], limit=3, ends=())
    with pytest.raises(NoEffectError, match="changes nothing"):
        generate(subject, ids, cache, [KVPatch((1,), cache)], limit=3, ends=())
    with pytest.raises(UnsupportedError, match="generator"):
        generate(subject, ids, cache, [()], limit=3, ends=(), temperature=1.0)
    with pytest.raises(UnsupportedError, match="at least one"):
        generate(subject, ids, cache, [], limit=3, ends=())
