"""Laws of the seam-repair probe: cells against plain Hugging Face, and its contrasts on rows made by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from composed_plainly import plain_composed, plain_entries
from composing_rows import decided
from hypothesis import given
from hypothesis import strategies as st
from worded_models import aligned, effects_of, measured, plain_logits, worded

from kvprobe.composing.chunk import Header, header_ids
from kvprobe.probes.composing.seam_repair.probe import HEADERS, REPAIRED, SINK, SeamRepair
from kvprobe.probes.kit.fidelity import FULL_PREFILL
from kvprobe.tasks.field_position import FieldPosition
from kvprobe.tasks.pairs import Pair

PROBE = SeamRepair(seams=(0, 1, 4), chunk=("policy", "filler"))
# Hugging Face turns keys in float32 whatever the model's precision is.
NOISE = 3e-5


def pairs_of(size: int) -> list[Pair]:
    task = FieldPosition(size=size, field_slots=("after_filler",), notes=(1,), mentions=(0,))
    return aligned(task)


def test_every_cell_against_plain_hugging_face() -> None:
    subject, (pair,) = worded("qwen3"), pairs_of(1)
    model, rows = subject.model, measured(PROBE, subject, [pair])
    cells = rows[rows["measurement"] == "cell"].set_index(["header", "seam"])["margin"]
    ids, start, end = list(pair.base.token_ids), pair.base.spans["policy"].start, pair.base.spans["filler"].end
    heads: dict[Header, tuple[int, ...]] = {name: header_ids(subject, name) for name in ("none", "bos", "neutral")}
    for header, size in cells.index:
        seam = int(size)
        head = heads.get(header, tuple(ids[:start]))
        # Compiled whole; what the seam runs anew is dropped.
        entries = [(k[:, :, seam:], v[:, :, seam:]) for k, v in plain_entries(model, ids[start:end], start, head)]
        logits = plain_composed(model, ids[: start + seam], entries, ids[end:], rest_at=end)
        ought = float(logits[pair.base_answer_id] - logits[pair.donor_answer_id])
        assert cells[header, seam] == pytest.approx(ought, abs=NOISE), (header, seam)
    whole = plain_logits(model, ids)
    exact = float(whole[pair.base_answer_id] - whole[pair.donor_answer_id])
    assert cells["real", 0] == pytest.approx(exact, abs=NOISE)
    assert abs(cells["none", 0] - exact) > 10 * NOISE
    assert len(cells) == len(HEADERS) * 3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sinks_are_read_in_every_cache_and_seams_cost_their_tokens(family: str) -> None:
    subject, pairs = worded(family, torch.float32), pairs_of(2)
    rows = measured(PROBE, subject, pairs)
    sinks = rows[rows["measurement"] == "sink"]
    assert set(sinks["cache"]) == {*HEADERS, REPAIRED, FULL_PREFILL}
    assert set(sinks["layer"]) == set(range(subject.layers))
    values = sinks.set_index(["pair", "layer", "cache"])["attention"].astype(float).unstack()
    assert (values["real"] - values[FULL_PREFILL]).abs().max() < 1e-5
    assert (values["none"] - values[FULL_PREFILL]).abs().max() > 1e-4
    # The first layer's keys depend on the token alone, but for their turn, which keeps norms.
    norms = sinks[sinks["layer"] == 0].set_index(["pair", "cache"])["key_norm"].astype(float).unstack()
    assert (norms["none"] - norms[FULL_PREFILL]).abs().max() < 1e-4
    cells = rows[rows["measurement"] == "cell"]
    tokens = cells.pivot_table(index=["pair", "header"], columns="seam", values="tokens")
    assert (tokens[4] - tokens[0] == 4).all()
    assert set(cells[cells["pair"] == 0]["prompt"]) == {"base"}
    assert set(cells[cells["pair"] == 1]["prompt"]) == {"donor"}


def made_rows(errors: dict[tuple[str, int], float], sink: float = 0.1, pairs: int = 12) -> pd.DataFrame:
    """Rows in which every cell has an error, all else being right."""
    rows: list[dict[str, Any]] = []
    for pair in range(pairs):
        scale = 1 + pair / pairs
        side = ("base", "donor")[pair % 2]
        common = {"pair": pair, "skeleton": f"s{pair}", "noise_floor": 1e-9, "prompt": side}
        for header in HEADERS:
            for seam in (0, 1, 4):
                error = errors.get((header, seam), 0.0) * scale
                what = {"measurement": "cell", "header": header, "seam": seam, "tokens": 20.0 + seam}
                rows.append({**decided(side, error), **common, **what, "full_tokens": 100.0, "kl": 2 * error})
        for cache in (*HEADERS, REPAIRED, FULL_PREFILL):
            value = 0.02 + (sink if cache == "none" else 0.0)
            rows += [
                {**common, "measurement": "sink", "cache": cache, "layer": layer}
                | dict.fromkeys(SINK, value * (1 + layer) / 1.5)
                for layer in range(2)
            ]
    return pd.DataFrame(rows)


@given(mended=st.floats(0, 1), sink=st.floats(0.01, 0.5))
def test_summary_finds_what_was_put_in(mended: float, sink: float) -> None:
    errors = {("none", 0): 1.0, ("none", 1): 1 - mended, ("neutral", 0): 0.25, ("neutral", 1): 0.25}
    effects = effects_of(PROBE, made_rows(errors, sink))
    mean_scale = sum(1 + pair / 12 for pair in range(12)) / 12
    assert effects["none.seam_0.kl"].estimate == pytest.approx(2 * mean_scale)
    assert effects["none.seam_1.token_share"].estimate == pytest.approx(0.21)
    for name in ("kl_removed", "error_removed"):
        assert effects[f"none.repair_1.{name}"].estimate == pytest.approx(mended)
        assert effects[f"neutral.repair_1.{name}"].estimate == pytest.approx(0)
    assert "bos.repair_1.kl_removed" not in effects
    assert effects["header.neutral_over_none.margin_error"].estimate == pytest.approx(0.75 * mean_scale)
    assert effects["interaction.neutral.margin_error"].estimate == pytest.approx(mended * mean_scale)
    assert effects["interaction.neutral.kl"].estimate == pytest.approx(2 * mended * mean_scale)
    assert effects["sink.none_over_full.attention"].estimate == pytest.approx(sink)
    assert effects["sink.neutral_over_full.attention"].estimate == pytest.approx(0)
    assert effects[f"sink.{FULL_PREFILL}.attention_on_start"].estimate == pytest.approx(0.02)
