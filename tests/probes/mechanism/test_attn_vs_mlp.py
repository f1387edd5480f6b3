"""The residual stream's change comes apart exactly, and one share agrees with plain Hugging Face in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from worded_models import effects_of, gated, measured, worded

from kvprobe.engine.components import components
from kvprobe.engine.forward import prefill
from kvprobe.errors import NumericsError
from kvprobe.models.subject import Subject
from kvprobe.probes.mechanism.attn_vs_mlp.probe import AttnVsMlp, source_groups
from kvprobe.probes.mechanism.attn_vs_mlp.reading import middle_layer
from kvprobe.probes.mechanism.attn_vs_mlp.residual_parts import Change, Parts, change_of, read_parts
from kvprobe.tasks.pairs import Pair

# Gemma norms what attention and MLP add; Mistral's and Gemma's windows are far shorter than the prompts.
FAMILIES = ("qwen3", "llama", "mistral", "gemma2", "gemma3")


@cache
def pairs(size: int = 6) -> list[Pair]:
    return gated(size, wordings=("manual",), notes_before=(0, 0), notes_after=(0, 0))


def parts_of(subject: Subject, pair: Pair, position: int) -> tuple[Parts, Parts]:
    made = components(subject)
    base, donor = (
        read_parts(made, subject.layers, prompt.token_ids, prefill(subject, prompt.token_ids).cache, position)
        for prompt in (pair.base, pair.donor)
    )
    return base, donor


def change_at(subject: Subject, pair: Pair, position: int) -> Change:
    last = subject.layers - 1
    return change_of(components(subject), *parts_of(subject, pair, position), last, subject.dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_are_the_whole(family: str) -> None:
    subject, pair = worded(family, torch.float32), pairs()[0]
    for position in (pair.field.end - 1, pair.field.end + 2, pair.decision_position):
        change = change_at(subject, pair, position)
        assert change.error < 1e-5
        token_change = change.stream[0] - change.attention[0] - change.mlp[0]
        summed = token_change + change.attention.sum(0) + change.mlp.sum(0)
        torch.testing.assert_close(change.stream[-1], summed, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(change.sources.sum(-1), change.written[:, 0], rtol=1e-3, atol=1e-4)
        # At the field the tokens differ; after it they are the same and all change comes through the layers.
        assert bool(token_change.abs().max() > 1e-3) == (position in pair.field.positions)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_before_the_field_or_between_equal_prompts(family: str) -> None:
    subject, pair = worded(family, torch.float32), pairs()[0]
    for one, position in ((pair, pair.field.start - 1), (replace(pair, donor=pair.base), pair.decision_position)):
        change = change_at(subject, one, position)
        assert float(change.stream.abs().max()) == 0.0
        assert float(change.sources.abs().max()) == 0.0


def test_a_sum_that_misses_the_whole_is_refused() -> None:
    subject, pair = worded("gemma2", torch.float32), pairs()[0]
    base, donor = parts_of(subject, pair, pair.decision_position)
    wrong = replace(donor, mlp=donor.mlp + 0.01)
    with pytest.raises(NumericsError, match="neither attention nor MLP"):
        change_of(components(subject), base, wrong, subject.layers - 1, subject.dtype)
    unscaled = replace(donor, attention=donor.before_norm, stream=donor.stream)
    with pytest.raises(NumericsError, match="miss the whole"):
        change_of(components(subject), base, unscaled, subject.layers - 1, subject.dtype)


@pytest.mark.parametrize(
    ("family", "writers"),
    [("llama", ("self_attn", "mlp")), ("gemma2", ("post_attention_layernorm", "post_feedforward_layernorm"))],
)
def test_a_share_agrees_with_plain_hugging_face_in_float64(family: str, writers: tuple[str, str]) -> None:
    subject, pair = worded(family), pairs()[1]
    added: dict[tuple[int, str, int], torch.Tensor] = {}
    final: list[torch.Tensor] = []
    for number, prompt in enumerate((pair.base, pair.donor)):
        handles = []
        for layer, block in enumerate(subject.model.model.layers):
            for writer in writers:

                def keep(
                    module: Any, args: Any, output: Any, at: tuple[int, str, int] = (number, writer, layer)
                ) -> None:
                    added[at] = (output[0] if isinstance(output, tuple) else output)[0, -1]

                handles.append(getattr(block, writer).register_forward_hook(keep))
        handles.append(
            subject.model.model.norm.register_forward_pre_hook(lambda module, args: final.append(args[0][0, -1]))
        )
        with torch.no_grad():
            subject.model(torch.tensor([prompt.token_ids]))
        for handle in handles:
            handle.remove()
    whole = final[1] - final[0]
    attention, mlp = (
        sum(added[1, writer, layer] - added[0, writer, layer] for layer in range(subject.layers)) for writer in writers
    )
    torch.testing.assert_close(attention + mlp, whole, rtol=1e-6, atol=1e-8)
    expected = float(attention @ whole / (whole @ whole))  # type: ignore[operator]
    change = change_at(subject, pair, pair.decision_position)
    assert float(change.written[:, 0].sum() / change.stream[-1].norm()) == pytest.approx(expected, abs=1e-5)


def test_source_groups_cover_every_position() -> None:
    pair = pairs()[0]
    groups = source_groups(pair, pair.decision_position)
    assert len(groups) == len(pair.base.token_ids)
    assert groups[-1] == "self"
    assert [groups[place] for place in pair.field.positions] == ["field"] * len(pair.field)
    assert set(groups[: pair.field.start]) == {"before"}
    assert {"policy", "task", "conversation"} <= set(groups)
    assert [middle_layer(layers) for layers in (6, 32, 36, 42)] == [2, 12, 14, 16]


def test_shares_add_up() -> None:
    probe = AttnVsMlp(folds=3)
    effects = effects_of(probe, measured(probe, worded("gemma2", torch.float32), pairs()))
    found = {name: effect.estimate for name, effect in effects.items()}
    for place, last in (("note", 2), ("decision", 3)):
        attention, mlp = (
            sum(found[f"{place}.{kind}_of_layer_{layer}"] for layer in range(last + 1)) for kind in ("attention", "mlp")
        )
        assert attention + mlp == pytest.approx(1.0, abs=1e-4)
        assert f"{place}.attention_of_layer_{last + 1}" not in found
        assert found[f"{place}.attention_share_{last}"] == pytest.approx(attention, abs=1e-5)
        brought = sum(found[f"{place}.from_{source}"] for source in ("before", "field", "after_field", "self"))
        assert brought == pytest.approx(attention, abs=1e-4)
    assert found["note.attention_share_middle"] == found["note.attention_share_1"]
    assert found["decision.attention_share_final"] == found["decision.attention_share_3"]
    assert found["identity.error"] < 1e-5
