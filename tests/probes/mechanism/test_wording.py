"""Laws of the wording probe and of chains of thought, and both against plain Hugging Face in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import (
    TOKENIZER,
    effects_of,
    gated,
    margin_behind,
    margin_of,
    measured,
    plain_logits,
    plain_patched_logits,
    with_line,
    worded,
)

from kvprobe.engine.forward import prefill
from kvprobe.models.catalogue import organism_names
from kvprobe.models.loader import load_subject
from kvprobe.probes.kit.chains import finish_chains
from kvprobe.probes.mechanism.wording.probe import CONTEXTS, WordingProbe
from kvprobe.probes.mechanism.wording.reading import CONTRASTS
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.extra_lines import NAMES


def margins(rows: pd.DataFrame, pair: int = 0) -> pd.Series:
    return rows[rows["pair"] == pair].set_index(["context", "line"])["margin"]


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2"])
def test_without_a_line_the_contexts_are_the_two_prompts(family: str) -> None:
    subject, pairs = worded(family), gated(2)
    rows = measured(WordingProbe(), subject, pairs)
    for index, pair in enumerate(pairs):
        for context, prompt in (("stale", pair.base), ("recomputed", pair.donor)):
            logits = prefill(subject, prompt.token_ids).logits
            assert margins(rows, index)[context, "none"] == pytest.approx(margin_of(pair, logits), abs=1e-5)
    none = rows[rows["line"] == "none"].set_index(["pair", "context"])
    assert (none["m_base"] == none["margin"])[:, "stale"].all()
    assert (none["m_donor"] == none["margin"])[:, "recomputed"].all()
    assert rows["noise_floor"].max() < 1e-5
    assert len(rows) == 2 * len(CONTEXTS) * len(NAMES)


@pytest.mark.parametrize("line", ["override", "voids_conclusions", "neutral"])
def test_against_plain_hugging_face(line: str) -> None:
    """Stale and recomputed contexts are prompts with the line; in place, one entry comes from the other prompt."""
    subject, (pair,) = worded("qwen3"), gated(1)
    found = margins(measured(WordingProbe(), subject, [pair]))
    old, new = with_line(pair, line), with_line(pair, line, donor=True)
    assert found["stale", line] == pytest.approx(margin_behind(subject, pair, old), abs=1e-9)
    assert found["recomputed", line] == pytest.approx(margin_behind(subject, pair, new), abs=1e-9)
    at = pair.base.spans["task"].start
    edited = plain_patched_logits(subject.model, old[:at], new[:at], list(pair.field.positions), old[at:])
    assert found["in_place", line] == pytest.approx(margin_of(pair, edited), abs=1e-9)
    assert found["in_place", line] != found["stale", line]


@pytest.mark.parametrize("limit", [1, 7])
def test_chains_against_plain_hugging_face(limit: int) -> None:
    """Greedy tokens without a cache, then the cue that a random model does not write itself."""
    subject, pairs = worded("llama"), gated(3, mode="think")
    prompts = [(pair.base.token_ids, prefill(subject, pair.base.token_ids).cache) for pair in pairs]
    for chain, (prompt, _) in zip(finish_chains(subject, prompts, limit=limit, batch_size=2), prompts, strict=True):
        ids = list(prompt)
        for _ in range(limit):
            ids.append(int(plain_logits(subject.model, ids).argmax()))
            if ids[-1] == TOKENIZER.eos_token_id:
                ids.pop()
                break
        cue = encode_segment("\nAnswer:", TOKENIZER)
        assert not chain.finished
        torch.testing.assert_close(chain.logits, plain_logits(subject.model, [*ids, *cue]))


def test_a_chain_ends_where_the_model_writes_the_cue() -> None:
    """A model whose unembedding makes it write the cue at once."""
    subject, (pair,) = worded("qwen3"), gated(1, mode="think")
    answer, colon = encode_segment("Answer:", TOKENIZER)

    class Scripted(torch.nn.Module):
        """The model, but after any token but "Answer" it says "Answer", and then a colon."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = subject.model
            self.config, self.dtype, self.device = subject.model.config, subject.model.dtype, subject.model.device
            self.base_model = subject.model.base_model

        def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
            output = self.inner(input_ids=input_ids, **arguments)
            said = torch.where(input_ids[:, -1] == answer, colon, answer)
            output.logits[torch.arange(len(input_ids)), -1, said] = 1e3
            return output

    scripted = replace(subject, model=Scripted())
    prompts = [(pair.base.token_ids, prefill(scripted, pair.base.token_ids).cache)]
    (chain,) = finish_chains(scripted, prompts, limit=9, batch_size=1)
    assert chain.finished
    assert chain.length == 2
    expected = plain_logits(subject.model, [*pair.base.token_ids, answer, colon])
    expected[answer] = 1e3
    torch.testing.assert_close(chain.logits, expected)


def test_in_think_mode_the_decision_is_read_behind_the_chain() -> None:
    subject, pairs = worded("qwen3"), gated(1, mode="think")
    rows = measured(WordingProbe(chain_limit=3), subject, pairs)
    ids = with_line(pairs[0], "update")
    prompt = [(ids, prefill(subject, ids).cache)]
    (chain,) = finish_chains(subject, prompt, limit=3, batch_size=1)
    assert margins(rows)["stale", "update"] == pytest.approx(margin_of(pairs[0], chain.logits), abs=1e-9)
    assert not rows["chain_finished"].any()
    assert (rows["chain_tokens"] >= 3).all()


@given(seed=st.integers(0, 99), size=st.integers(1, 30))
def test_batches_do_not_change_chains(seed: int, size: int) -> None:
    subject, pairs = worded("mistral"), gated(4, seed=seed, mode="think")
    prompts = [(pair.base.token_ids, prefill(subject, pair.base.token_ids).cache) for pair in pairs] * 2
    one, other = (finish_chains(subject, prompts, limit=4, batch_size=n) for n in (1, size))
    for alone, together in zip(one, other, strict=True):
        torch.testing.assert_close(alone.logits, together.logits)


def made_rows(shares: dict[tuple[str, str], int], pairs: int = 10, mode: str = "direct") -> pd.DataFrame:
    """Rows in which the first so many pairs decide for the new value."""
    rows = crossed(pairs, context=CONTEXTS, line=NAMES)
    rows["new"] = [row.pair < shares.get((row.context, row.line), 0) for row in rows.itertuples()]
    finished = None if mode == "direct" else rows["pair"] < 9
    return rows.assign(mode=mode, margin=4.0 * rows["new"] - 2.0, chain_finished=finished)


@given(tagged=st.integers(0, 10), plain=st.integers(0, 10), mode=st.sampled_from(["direct", "think"]))
def test_summary_finds_what_was_put_in(tagged: int, plain: int, mode: str) -> None:
    effects = effects_of(
        WordingProbe(), made_rows({("stale", "update"): tagged, ("stale", "restatement"): plain}, mode=mode)
    )
    assert effects[f"{mode}.stale.update.new_rate"].estimate == pytest.approx(tagged / 10)
    assert effects[f"{mode}.stale.update.recovery"].estimate == pytest.approx(tagged / 10)
    assert effects[f"{mode}.stale.none.new_rate"].estimate == 0.0
    assert effects[f"{mode}.tag.difference"].estimate == pytest.approx((tagged - plain) / 10)
    assert {f"{mode}.{name}.difference" for name in CONTRASTS} <= set(effects)
    assert (f"{mode}.chains_finished" in effects) == (mode == "think")
    assert effects["noise.margin"].estimate == 1e-6


@pytest.mark.skipif("qwen3-note-taker" not in organism_names(), reason="the organism does not ship with this checkout")
def test_an_erratum_turns_an_organism_that_was_trained_on_errata_and_its_length_does_not() -> None:
    rows = measured(WordingProbe(), load_subject("qwen3-note-taker"), gated(8))
    shares = rows.groupby(["context", "line"])["new"].mean()
    assert shares["stale", "override"] >= 0.75
    assert shares["stale", "neutral"] <= 0.25
    assert shares["recomputed", "none"] >= 0.75
