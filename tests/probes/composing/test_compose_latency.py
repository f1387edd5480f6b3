"""The compose latency probe: every arm does the work it is timed for, and exponents are those of the costs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worded_models import TOKENIZER, effects_of, gated, measured, plain_logits, worded

from kvprobe.composing.base import make_scheme
from kvprobe.composing.chunk import precompile
from kvprobe.composing.library import SkillLibrary
from kvprobe.engine.forward import prefill
from kvprobe.engine.operations import reposition
from kvprobe.errors import ConfigError
from kvprobe.probes.composing.compose_latency.probe import ComposeLatency
from kvprobe.probes.composing.compose_latency.requests import SKILL, Prepared, Request, repeated, request_of
from kvprobe.stats import StatisticsConfig
from kvprobe.stats.growth import growth_exponent
from kvprobe.tasks.context import Span, TokenizedContext

ARMS = ("full_prefill", "splice", "splice_from_disk", "splice_seam_8", "cacheblend_15", "without_chunk", "two_pieces")
PROBE = ComposeLatency(
    lengths=(32, 64, 128), repeated_lengths=(200, 300), text_length=48, repeats=1, long_from=128, asymptote_from=128
)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_arms_give_the_logits_that_they_are_timed_for(family: str, tmp_path: object) -> None:
    subject, request = worded(family), request_of(gated(1)[0].base)
    ids = PROBE.chunk_ids(subject, "random", 40)
    # Compiled behind the very opening line, so that splicing is exact, and then moved away, so that it must be rotated.
    chunk = precompile(subject, ids, "real", before=request.opening)
    library = SkillLibrary(str(tmp_path))
    library.save(subject, SKILL, chunk)
    prepared = Prepared(chunk, library, compiling=1.0, saving=1.0, nbytes=1)
    whole = (*request.opening, *ids, *request.task)
    expected = prefill(subject, whole)
    if family == "qwen3":
        torch.testing.assert_close(expected.logits.double(), plain_logits(subject.model, whole), atol=1e-9, rtol=0)
    for name, run in PROBE.arms(subject, request, prepared).items():
        logits, flops = run()
        if name in ("without_chunk", "two_pieces"):
            expected_here = prefill(subject, (*request.opening, *request.task)).logits
        else:
            expected_here = expected.logits
            assert name == "full_prefill" or 0 < flops < expected.receipt.flops
        torch.testing.assert_close(logits, expected_here, atol=5e-6, rtol=0, msg=name)


def test_a_request_is_the_prompt_around_the_chunk() -> None:
    prompt = gated(1)[0].base
    request = request_of(prompt)
    assert request.opening == prompt.token_ids[: prompt.spans["system"].end]
    assert prompt.token_ids[-len(request.task) :] == request.task
    with pytest.raises(ConfigError, match="'task'"):
        request_of(TokenizedContext((1, 2), {"system": Span(0, 2)}, ""))


def test_chunks_have_their_length_and_no_special_token() -> None:
    subject = worded("llama")
    random, text = (PROBE.chunk_ids(subject, kind, 700) for kind in ("random", "text"))
    assert len(random) == len(text) == 700
    assert not set(random) & set(TOKENIZER.all_special_ids)
    assert random == PROBE.chunk_ids(subject, "random", 700)
    assert len(set(random)) > 200
    assert TOKENIZER.decode(text[:30]).startswith("-")


def test_a_repeated_chunk_is_moved_like_the_one_it_repeats() -> None:
    subject = worded("llama")
    chunk = precompile(subject, PROBE.chunk_ids(subject, "random", 10), "none")
    long = repeated(chunk, 25)
    assert len(long) == 25
    moved, _ = reposition(subject, long.cache, 40)
    there, _ = reposition(subject, chunk.cache, 40)
    assert moved.positions.tolist() == [*range(40, 65)]
    for ours, theirs in zip(moved.layers, there.layers, strict=True):
        assert torch.equal(ours.values[:, :, 20:], theirs.values[:, :, :5])
        assert torch.equal(ours.keys[:, :, 10:20], theirs.keys)


def test_rows_and_effects() -> None:
    subject, pairs = worded("llama"), gated(2)
    rows = measured(PROBE, subject, pairs)
    assert len(rows) == 4 * (1 + 2 * len(ARMS)) + 2 * 2 * 2
    timed = rows[(rows["arm"] != "compile") & (rows["text"] != "repeated")]
    assert set(timed["arm"]) == set(ARMS)
    assert (rows["seconds"] > 0).all()
    request = request_of(pairs[0].base)
    whole = (*request.opening, *PROBE.chunk_ids(subject, "random", 64), *request.task)
    one = timed[(timed["pair"] == 0) & (timed["length"] == 64)].set_index("arm")
    assert one.loc["full_prefill", "flops"] == prefill(subject, whole).receipt.flops
    effects = effects_of(PROBE, rows)
    shares = [effects[f"splice_{length}.flop_share"].estimate for length in (32, 64, 128)]
    assert 1 > shares[0] > shares[1] > shares[2] > 0
    assert effects["splice_seam_8_64.flop_share"].estimate > shares[1]
    assert 0.9 < effects["splice.flop_exponent"].estimate < 1.1
    assert effects["full_prefill.flop_exponent"].estimate > effects["splice.flop_exponent"].high
    long = effects["splice.exponent_long"]
    assert long.n + long.excluded == 6
    assert effects["splice_repeated_300.seconds"].estimate > 0
    assert "splice_repeated_300.speedup" not in effects
    assert effects["cacheblend_15_64.speedup"].condition == "cacheblend_{percent}_{length}"


def test_eager_models_leave_out_what_would_not_fit() -> None:
    heads = worded("gemma2").config.num_attention_heads
    few = {"lengths": (32, 64), "repeated_lengths": (), "text_length": 32, "repeats": 1}
    probe = ComposeLatency(**few, score_bytes=8 * heads * 40**2)
    rows = probe.measure(worded("gemma2"), gated(1), lambda done, total: None)
    assert {row["length"] for row in rows} == {32}
    assert all(probe.fits(worded("llama"), length) for length in (64, 10**6))


def made_rows(splice: float, full: float, alone: float = 0.01) -> pd.DataFrame:
    """Rows of two pairs with seconds `alone + 1e-6 * length ** power`; in two passes three times `alone`."""
    rows = []
    for length in (512, 1024, 2048, 4096):
        common = {"length": length, "text": "random", "flops": 1, "noise_floor": 0.0, "runs": 1}
        rows.append({**common, "pair": 0, "arm": "compile", "seconds": 6.0, "save_seconds": 2.0, "bytes": 10 * length})
        for pair in range(2):
            powers = {"full_prefill": full, "splice": splice, "splice_from_disk": splice}
            for arm, power in {**powers, "without_chunk": None, "two_pieces": None}.items():
                passes = 1 if arm in ("full_prefill", "without_chunk") else 3
                seconds = passes * alone + (0 if power is None else 1e-6 * length**power * (1 + 0.01 * pair))
                rows.append({**common, "pair": pair, "arm": arm, "seconds": seconds})
    return pd.DataFrame(rows).assign(skeleton=lambda table: table["pair"])


def test_exponents_are_those_of_what_the_chunk_adds() -> None:
    rows = made_rows(1.0, 1.7)
    probe = ComposeLatency(asymptote_from=2048)
    effects = effects_of(probe, rows)
    assert effects["splice.exponent"].estimate == pytest.approx(1.0)
    assert effects["full_prefill.exponent"].estimate == pytest.approx(1.7)
    assert effects["full_over_splice.exponent"].estimate == pytest.approx(0.7)
    assert effects["splice.exponent_raw"].estimate < 0.3
    assert (effects["splice.exponent_long"].n, effects["splice.exponent"].n) == (4, 8)
    assert effects["splice.exponent_long"].estimate == pytest.approx(1.0)
    full, stored = (
        rows[(rows["arm"] == arm) & (rows["length"] == 512)]["seconds"].mean() for arm in ("full_prefill", "splice")
    )
    assert effects["splice_512.speedup"].estimate == pytest.approx(full / stored, rel=1e-3)
    assert effects["pays_off_512.uses"].estimate == pytest.approx(8 / (full - stored), rel=1e-3)
    assert effects["storage_512.bytes"].estimate == 5120
    never = set(effects_of(probe, made_rows(1.7, 1.7)))
    assert "splice.exponent" in never
    assert not any(name.startswith("pays_off") for name in never)
    assert "splice.exponent" not in effects_of(probe, made_rows(1, 2, alone=1e20))


@given(power=st.floats(0.2, 3), noise=st.floats(0, 0.3), seed=st.integers(0, 999))
def test_growth_against_numpy(power: float, noise: float, seed: int) -> None:
    sizes = np.array([1.0, 2, 4, 8, 16, 32])
    costs = 3 * sizes**power * np.exp(noise * np.random.Generator(np.random.PCG64(seed)).normal(size=6))
    effect = growth_exponent("x.exponent", sizes, costs, statistics=StatisticsConfig())
    (slope, _), covariance = np.polyfit(np.log(sizes), np.log(costs), 1, cov=True)
    assert effect.estimate == pytest.approx(slope)
    # numpy's covariance and Student's 97.5% point of 4 degrees of freedom.
    assert effect.high - effect.low == pytest.approx(2 * 2.776445 * np.sqrt(covariance[0, 0]), abs=1e-6)


def test_growth_covers() -> None:
    generator, hits = np.random.Generator(np.random.PCG64(0)), 0
    sizes = np.repeat([1.0, 2, 4, 8, 16], 3)
    for _ in range(400):
        costs = sizes**1.1 * np.exp(0.2 * generator.normal(size=15))
        effect = growth_exponent("x.exponent", sizes, costs, statistics=StatisticsConfig())
        hits += effect.low <= 1.1 <= effect.high
    assert 0.92 < hits / 400 < 0.98
    with pytest.raises(ValueError, match="two sizes"):
        growth_exponent("x.exponent", [1, 1, 1], [1, 2, 3], statistics=StatisticsConfig())


def test_the_seam_arm_runs_its_seam() -> None:
    subject = worded("qwen3")
    request, ids = Request((5, 6, 7), (8, 9)), PROBE.chunk_ids(subject, "random", 30)
    chunk = precompile(subject, ids, "neutral")
    before = prefill(subject, request.opening).cache
    placed = make_scheme("splice", seam=8).place(subject, before, chunk)
    assert placed.computed == tuple(range(3, 11))
