"""Laws of the transplant probe: composed decisions against plain Hugging Face, floors, ceiling, and known mechanisms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from composed_plainly import plain_composed, plain_entries
from composing_rows import decided
from hypothesis import given
from hypothesis import strategies as st
from worded_models import TOKENIZER, aligned, effects_of, margin_of, measured, plain_logits, worded

from kvprobe.composing.base import REUSE_SCHEMES, make_scheme
from kvprobe.composing.chunk import header_ids, precompile
from kvprobe.composing.prompts import composition_of
from kvprobe.engine.forward import prefill
from kvprobe.models.loader import load_subject
from kvprobe.probes.composing.transplant.probe import CONDITIONS, Transplant, condition_of
from kvprobe.probes.kit.fidelity import FULL_PREFILL, decide_behind
from kvprobe.tasks.field_position import FieldPosition
from kvprobe.tasks.pairs import Pair, align

PROBE = Transplant(seam=3, share=0.2)
# Hugging Face turns keys in float32 whatever the model's precision is.
NOISE = 3e-5


def pairs_of(size: int, slots: tuple[str, ...] = ("after_policy", "start"), **parameters: Any) -> list[Pair]:
    task = FieldPosition(size=size, field_slots=slots, notes=(2,), mentions=(0,), **parameters)
    return aligned(task)


def margin(logits: torch.Tensor, pair: Pair, *, donor: bool) -> float:
    return margin_of(pair, logits) * (1 if donor else -1)


@pytest.mark.parametrize("slot", ["after_policy", "start"])
def test_margins_against_plain_hugging_face(slot: str) -> None:
    subject, pairs = worded("qwen3"), pairs_of(2, (slot,))
    model, pair, rows = subject.model, pairs[1], measured(PROBE, subject, pairs)
    span = pair.base.spans["policy"]
    assert condition_of(pair) == ("self_contained" if slot == "after_policy" else "coupled")
    for donor, prompt in ((False, pair.base), (True, pair.donor)):
        ids, side = list(prompt.token_ids), "donor" if donor else "base"
        found = rows[(rows["pair"] == 1) & (rows["prompt"] == side)].set_index("arm")["margin"]
        before, chunk, rest = ids[: span.start], ids[span.start : span.end], ids[span.end :]
        neutral = header_ids(subject, "neutral")
        entries = {
            "splice_none": plain_entries(model, chunk, span.start),
            "splice_neutral": plain_entries(model, chunk, span.start, neutral),
            "no_rotation": plain_entries(model, chunk),
        }
        ought = {arm: plain_composed(model, before, made, rest, rest_at=span.end) for arm, made in entries.items()}
        gap = -(-span.start // 32) * 32
        reserved = plain_entries(model, chunk, gap)
        ought["prompt_cache"] = plain_composed(model, before, reserved, rest, rest_at=gap + len(chunk))
        whole = plain_logits(model, ids)
        ought |= {"splice_real": whole, FULL_PREFILL: whole, "removed": plain_logits(model, [*before, *rest])}
        for arm, logits in ought.items():
            assert found[arm] == pytest.approx(margin(logits, pair, donor=donor), abs=NOISE), arm
        assert abs(found["splice_none"] - found[FULL_PREFILL]) > 10 * NOISE
        assert abs(found["no_rotation"] - found["splice_none"]) > 10 * NOISE


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_deciding_behind_a_shared_beginning_is_composing(family: str) -> None:
    subject, (pair,) = worded(family), pairs_of(1, ("start",))
    ids, at = pair.base.token_ids, pair.base.spans["policy"]
    before, chunk = prefill(subject, ids[: at.start]).cache, precompile(subject, ids[at.start : at.end], "bos")
    composition = composition_of(pair.base, {"policy": chunk})
    for name in REUSE_SCHEMES.names():
        composed = make_scheme(name).compose(subject, composition)
        logits, run = decide_behind(subject, before, make_scheme(name), chunk, ids[at.end :])
        assert torch.allclose(logits, composed.decide(subject).logits, atol=1e-6, rtol=0), name
        assert at.start + run == composed.receipt.tokens_appended + composed.receipt.tokens_recomputed, name


def test_the_other_beginning_and_the_wrong_rule_are_other_prompts() -> None:
    subject, pairs = worded("qwen3"), pairs_of(4)
    rows = measured(PROBE, subject, pairs)
    model, pair = subject.model, pairs[0]
    span, ids = pair.base.spans["policy"], list(pair.base.token_ids)
    other = next(o for o in pairs[2::2] if o.base.spans["policy"].start != span.start)
    elsewhere = other.base.token_ids[: other.base.spans["policy"].start]
    chunk = plain_entries(model, ids[span.start : span.end], span.start, elsewhere)
    slid = plain_composed(model, ids[: span.start], chunk, ids[span.end :], rest_at=span.end)
    wrong = pairs[2].base.token_ids[pairs[2].base.spans["policy"].start : pairs[2].base.spans["policy"].end]
    entries = plain_entries(model, wrong, span.start, header_ids(subject, "neutral"))
    logits = plain_composed(model, ids[: span.start], entries, ids[span.end :], rest_at=span.start + len(wrong))
    found = rows[(rows["pair"] == 0) & (rows["prompt"] == "base")].set_index("arm")["margin"]
    assert found["wrong_chunk"] == pytest.approx(margin(logits, pair, donor=False), abs=NOISE)
    assert found["relative"] == pytest.approx(margin(slid, pair, donor=False), abs=NOISE)
    assert abs(found["relative"] - found["splice_none"]) > 10 * NOISE


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_in_its_own_place_a_chunk_is_the_prefill_in_every_family(family: str) -> None:
    pairs = pairs_of(2, ("after_policy",))
    rows = measured(PROBE, worded(family, torch.float32), pairs)
    exact = rows[rows["arm"].isin([FULL_PREFILL, "splice_real"])]
    assert exact["margin_error"].max() < 1e-4 > exact["kl"].max()
    assert rows["noise_floor"].max() < 1e-4
    assert set(rows["arm"]) == {arm.name for arm in PROBE.arms()}
    assert (exact[exact["arm"] == FULL_PREFILL]["tokens"] == exact[exact["arm"] == FULL_PREFILL]["full_tokens"]).all()
    saved = exact[exact["arm"] == "splice_real"]
    assert (
        saved["tokens"] + [len(pair.base.spans["policy"]) for pair in pairs for _ in "12"] == saved["full_tokens"]
    ).all()


def test_models_whose_mechanism_is_known_are_told_apart() -> None:
    """Notes are lost with a rule compiled without them; a model that reads the field itself loses nothing."""
    agreement = {}
    for kind in ("note-taker", "reader"):
        subject = load_subject(f"micro-{kind}")
        task = FieldPosition(size=2, field_slots=("start",), notes=(2,), mentions=(0,), wordings=("manual",))
        pairs = [align(pair, subject.tokenizer) for pair in task.prompt_pairs()]
        rows = measured(PROBE, subject, pairs)
        agreement[kind] = rows.groupby("arm")["agrees"].mean()
        assert agreement[kind]["splice_real"] == 1.0
        assert (rows.groupby("pair")[["m_base", "m_donor"]].first() * [-1, 1] > 0).all(axis=None)
    assert agreement["note-taker"]["splice_none"] == 0.5
    assert agreement["reader"]["splice_none"] == 1.0


def test_without_a_token_for_the_beginning_of_a_text_that_header_is_left_out() -> None:
    class Headless:
        bos_token_id = None

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def __len__(self) -> int:
            return len(TOKENIZER)

        def __call__(self, *arguments: Any, **settings: Any) -> Any:
            return TOKENIZER(*arguments, **settings)

    subject = replace(worded("qwen3", torch.float32), tokenizer=Headless())
    names = set(effects_of(PROBE, measured(PROBE, subject, pairs_of(2))))
    assert not any("splice_bos" in name for name in names)
    assert any("splice_neutral" in name for name in names)


def made_rows(shares: dict[str, float], pairs: int = 20) -> pd.DataFrame:
    """Rows in which the first so many scenarios agree, both prompts of each; where they do not, both say the same."""
    rows = []
    for pair in range(2 * pairs):
        for side in ("base", "donor"):
            for arm in PROBE.arms():
                agrees = pair // 2 < shares.get(arm.name, 1.0) * pairs or side == "donor"
                rows.append(
                    decided(side, 0.0 if agrees else 8.0, margin=4.0, agrees=agrees)
                    | {"pair": pair, "skeleton": f"s{pair // 2}", "scenario": str(pair // 2), "arm": arm.name}
                    | {"condition": CONDITIONS[pair % 2], "tokens": 10.0, "full_tokens": 40.0}
                    | {"kl": 0.0 if agrees else 2.0, "cosine": 0.75 if arm.name == "wrong_chunk" else 0.95}
                )
    return pd.DataFrame(rows)


@given(epic=st.integers(0, 10))
def test_summary_finds_what_was_put_in(epic: int) -> None:
    effects = effects_of(PROBE, made_rows({"epic": epic / 10}))
    share = (1 + epic / 10) / 2
    for condition in CONDITIONS:
        name = f"{condition}.epic"
        assert effects[f"{name}.agreement"].estimate == pytest.approx(share)
        assert effects[f"{name}.kappa"].estimate == pytest.approx(2 * share - 1)
        assert effects[f"{name}.kl"].estimate == pytest.approx(2 * (1 - share))
        assert effects[f"{name}.margin_retained"].estimate == pytest.approx(2 * share - 1)
        assert effects[f"{name}.cosine_above_wrong_chunk"].estimate == pytest.approx(0.2)
        assert effects[f"{name}.token_share"].estimate == pytest.approx(0.25)
    p_value = effects["coupled.epic.margin_retained"].extra["equivalence_p_value"]
    assert p_value == 0.0 if epic == 10 else p_value > 0.05
    assert "coupled.wrong_chunk.cosine_above_wrong_chunk" not in effects
    assert effects["coupling.agreement_loss"].estimate == 0.0


def test_coupling_and_rotation_are_differences_within_scenarios() -> None:
    rows = made_rows({})
    lost = (rows["condition"] == "coupled") & (rows["arm"] == "splice_neutral") & (rows["prompt"] == "base")
    unturned = (rows["arm"] == "no_rotation") & (rows["pair"] < 10)
    effects = effects_of(PROBE, rows.assign(agrees=rows["agrees"] & ~lost & ~unturned))
    assert effects["coupling.agreement_loss"].estimate == pytest.approx(0.5)
    assert effects["self_contained.rotation.agreement_gain"].estimate == pytest.approx(0.25)
    assert effects["self_contained.rotation.kl_gain"].estimate == 0.0


def test_kappa_is_left_out_where_the_reference_says_one_thing_only() -> None:
    rows = made_rows({}).assign(reference_answers_donor=True)
    effects = effects_of(PROBE, rows)
    assert "coupled.epic.agreement" in effects
    assert "coupled.epic.kappa" not in effects
