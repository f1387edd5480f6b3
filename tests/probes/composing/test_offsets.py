"""Laws of the offsets probe: moved chunks against plain Hugging Face at every offset, and its rows' summary."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from composed_plainly import plain_composed, plain_entries
from composing_rows import decided
from hypothesis import given
from hypothesis import strategies as st
from worded_models import TOKENIZER, aligned, effects_of, measured, plain_logits, worded

from kvprobe.composing.chunk import header_ids
from kvprobe.probes.composing.offsets.probe import ARMS, Offsets, filler_ids
from kvprobe.probes.kit.fidelity import REMOVED
from kvprobe.tasks.field_position import FieldPosition
from kvprobe.tasks.pairs import Pair

PROBE = Offsets(offsets=(0, 1000), fillers=(30,))
# Hugging Face turns keys in float32 whatever the model's precision is.
NOISE = 2e-4


def pairs_of(size: int) -> list[Pair]:
    return aligned(FieldPosition(size=size, field_slots=("after_policy",), notes=(1,), mentions=(0,)))


def test_margins_against_plain_hugging_face() -> None:
    subject, (pair,) = worded("qwen3"), pairs_of(1)
    model, rows = subject.model, measured(PROBE, subject, [pair])
    span, ids = pair.base.spans["policy"], list(pair.base.token_ids)
    chunk, rest, neutral = ids[span.start : span.end], ids[span.end :], header_ids(subject, "neutral")
    for kind, size in (("offset", 0), ("offset", 1000), ("filler", 30)):
        found = rows[(rows["measurement"] == kind) & (rows["size"] == size) & (rows["prompt"] == "base")]
        margins = found.set_index("arm")["margin"].astype(float)
        at = size if kind == "offset" else 0
        before = [*ids[: span.start], *(filler_ids(size, TOKENIZER) if kind == "filler" else ())]
        start = at + len(before)
        entries = {
            "rotated": plain_entries(model, chunk, start, neutral),
            "no_rotation": plain_entries(model, chunk, len(neutral), neutral),
        }
        if kind == "offset":
            entries["no_rotation_in_context"] = plain_entries(model, chunk, span.start, ids[: span.start])
        places: dict[str, int] = {"rest_at": start + len(chunk), "before_at": at}
        ought = {arm: plain_composed(model, before, made, rest, **places) for arm, made in entries.items()}
        ought[REMOVED] = plain_logits(model, [*before, *rest])
        whole = plain_logits(model, [*before, *chunk, *rest])
        for arm, logits in ought.items():
            expected = float(logits[pair.base_answer_id] - logits[pair.donor_answer_id])
            assert margins[arm] == pytest.approx(expected, abs=NOISE), (kind, size, arm)
        # RoPE knows differences only: the reference far away is the prefill at 0.
        expected = float(whole[pair.base_answer_id] - whole[pair.donor_answer_id])
        assert found["reference_margin"].astype(float).to_numpy() == pytest.approx(expected, abs=NOISE)
    moved = rows[(rows["measurement"] == "offset") & (rows["size"] == 1000)].set_index("arm")["margin_error"]
    assert moved["rotated_in_context"].max() < NOISE < 10 * NOISE < moved["no_rotation_in_context"].max()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "gemma3", "mistral"])
def test_moved_keys_are_native_keys_within_the_models_own_rounding(family: str) -> None:
    subject = worded(family, torch.float32)
    probe = Offsets(offsets=(0, 777, 32768), fillers=())
    rows = measured(probe, subject, pairs_of(1))
    keys = rows[rows["measurement"] == "keys"]
    ids = pairs_of(1)[0].base
    span = ids.spans["policy"]
    chunk = list(ids.token_ids[span.start : span.end])
    for size, part in keys.groupby("size"):
        native = plain_entries(subject.model, chunk, int(size))
        here = plain_entries(subject.model, chunk)
        layers = subject.architecture.layer_types(subject.config)
        for _, row in part.iterrows():
            kind = f"{row['kind']}_attention"
            errors = [
                ((ours[0] - theirs[0]).norm(dim=-1) / theirs[0].norm(dim=-1)).max()
                for ours, theirs, other in zip(here, native, layers, strict=True)
                if other == kind
            ]
            assert row["unrotated_error"] == pytest.approx(float(max(errors)), rel=1e-2, abs=1e-4)
        assert part["rounding_units"].max() < 8
        assert size == 0 or part["unrotated_error"].min() > 0.05
    chained = rows[rows["measurement"] == "chained"].iloc[0]
    assert chained["excess"] == 0.0 < chained["rotated_error"]


def made_rows(errors: dict[tuple[str, int, str], float], pairs: int = 12) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for pair in range(pairs):
        common = {"pair": pair, "skeleton": f"s{pair}", "noise_floor": 1e-9}
        for size in (0, 1000):
            measured_keys = {"rotated_error": size * 1e-7, "unrotated_error": size / 1000, "rounding_units": 1.5}
            rows.append({**common, "measurement": "keys", "size": size, "kind": "full", **measured_keys})
        rows.append({**common, "measurement": "chained", "size": 1000, "rotated_error": 1e-4, "excess": 0.0})
        for kind, size, arm in [(k, s, a) for k, s in (("offset", 0), ("offset", 1000), ("filler", 30)) for a in ARMS]:
            for side in ("base", "donor"):
                error = errors.get((kind, size, arm), 0.0) * (1 + pair / pairs)
                what = {"measurement": kind, "size": size, "arm": arm}
                rows.append({**decided(side, error, agrees=error < 5), **common, **what})
    return pd.DataFrame(rows)


@given(error=st.floats(0.1, 2.0))
def test_summary_finds_what_was_put_in(error: float) -> None:
    effects = effects_of(PROBE, made_rows({("offset", 1000, "rotated"): error, ("filler", 30, "no_rotation"): 6.0}))
    scale = sum(1 + pair / 12 for pair in range(12)) / 12
    assert effects["offset_1000.rotated.margin_error"].estimate == pytest.approx(error * scale)
    assert effects["offset_0.rotated.margin_error"].estimate == 0.0
    assert effects["filler_30.no_rotation.kappa"].estimate == -1.0
    assert effects["offset_1000.reference.accuracy"].estimate == 1.0
    assert effects["offset_1000.keys.unrotated_error"].estimate == 1.0
    assert effects["offset_1000.keys.full.rotated_error"].estimate == pytest.approx(1e-4)
    assert effects["chained.excess"].estimate == 0.0
