"""Weight edits: they bring the answer about inside their block, and every weight has its bits again afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, VOCABULARY, build, tiny, tokens

from kvprobe.baselines.base import (
    WEIGHT_EDITS,
    Background,
    WeightChange,
    WeightEdit,
    WeightRequest,
)
from kvprobe.baselines.memit import before_norm
from kvprobe.baselines.mlp import after_norm, decisions, decoder_layer, down_projection, recorded, shifted
from kvprobe.baselines.second_moment import second_moments
from kvprobe.baselines.validation import ValidationEdit, validate
from kvprobe.baselines.values import ValueSearch, find_value
from kvprobe.errors import SampleError, UnsupportedError
from kvprobe.models.identity import state_sha256
from kvprobe.models.subject import Subject

FAMILIES = ("qwen3", "llama", "gemma2", "mistral")
BACKGROUND = Background(tuple(tuple(tokens(n, seed=n)) for n in (9, 14, 11, 17, 12, 15)), (tuple(tokens(8, seed=90)),))
REQUESTS = [WeightRequest(tuple(tokens(12, seed=50)), 9, (7,)), WeightRequest(tuple(tokens(10, seed=51)), 7, (9,))]
QUICK: dict[str, dict[str, Any]] = {
    "rome": {"search": {"steps": 8}},
    "memit": {"search": {"steps": 8}, "last_depth": 0.5, "weight": 1e-3},
    "lora": {"steps": 5},
}


def method(name: str, **more: Any) -> WeightEdit:
    kind = WEIGHT_EDITS.get(name)
    return kind(kind.Parameters.model_validate({**QUICK[name], **more}))


def plain_logits(subject: Subject, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return subject.model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()


def chance(logits: torch.Tensor, token: int) -> float:
    return float(logits.softmax(-1)[token])


def test_every_method_is_tested_here() -> None:
    assert set(WEIGHT_EDITS.names()) == set(QUICK)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_comes_about_and_the_weights_come_back(family: str, name: str) -> None:
    subject, request = tiny(family), REQUESTS[0]
    before, modules = state_sha256(subject.model), dict(subject.model.named_modules())
    attributes, random_state = dict(vars(subject.model)), torch.get_rng_state()
    old = plain_logits(subject, request.token_ids)
    with method(name).applied(subject, [request], BACKGROUND) as change:
        new = plain_logits(subject, request.token_ids)
        assert state_sha256(subject.model) != before
    if name != "memit":  # whose spread over a tiny random model changes what all other tokens say too
        assert chance(new, 7) > 1.3 * chance(old, 7)
    assert change.probability > 1.1 * chance(old, 7)
    assert state_sha256(subject.model) == before
    assert dict(subject.model.named_modules()) == modules
    assert vars(subject.model) == attributes
    assert not subject.model.training
    assert not any(weight.requires_grad for weight in subject.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(plain_logits(subject, request.token_ids), old)


@pytest.mark.parametrize("name", QUICK)
def test_an_exception_leaves_the_weights_as_they_were(name: str) -> None:
    subject = tiny("qwen3")
    before, modules = state_sha256(subject.model), dict(subject.model.named_modules())
    with pytest.raises(RuntimeError, match="inside"), method(name).applied(subject, REQUESTS[:1], BACKGROUND):
        raise RuntimeError("inside")
    broken = WeightRequest((*REQUESTS[0].token_ids[:-1], VOCABULARY + 5), 9, (7,))
    with pytest.raises(IndexError), method(name).applied(subject, [broken], BACKGROUND):
        pass
    assert state_sha256(subject.model) == before
    assert dict(subject.model.named_modules()) == modules


@pytest.mark.parametrize("name", QUICK)
def test_the_same_edit_twice_is_the_same(name: str) -> None:
    subject = tiny("llama")
    both = []
    for _ in range(2):
        with method(name).applied(subject, REQUESTS[:1], BACKGROUND):
            both.append(plain_logits(subject, tokens(9, seed=3)))
    assert torch.equal(*both)


@pytest.mark.parametrize("family", FAMILIES)
def test_rome_gives_the_subject_token_the_value_that_was_found(family: str) -> None:
    subject, request, layer = tiny(family, torch.float64), REQUESTS[0], 1
    edit = method("rome", depth=layer / (subject.layers - 1), ridge=1e-6)
    found = find_value(subject, request, layer, edit.parameters.search)
    module = down_projection(subject, layer)

    def value() -> torch.Tensor:
        with recorded([module]) as (record,):
            plain_logits(subject, request.token_ids)
        return record["output"][0, request.position]

    old = value()
    with edit.applied(subject, [request], BACKGROUND):
        torch.testing.assert_close(value(), old + found.change, atol=1e-6, rtol=0)
    with shifted(module, request.position, found.change):
        assert chance(plain_logits(subject, request.token_ids), 7) == pytest.approx(found.probability, abs=1e-5)


@pytest.mark.parametrize("layers", [(1,), (0, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_memit_gives_several_requests_at_once_the_stream_they_want(family: str, layers: tuple[int, ...]) -> None:
    """Without weight on the text the last layer leaves nothing over but what a norm's length does not allow (Gemma)."""
    subject, last = tiny(family, torch.float64), layers[-1]
    first_depth, last_depth = (layer / (subject.layers - 1) for layer in (layers[0], last))
    search = {"steps": 8, "largest": 0.5}
    edit = method("memit", first_depth=first_depth, last_depth=last_depth, weight=1e-9, search=search)
    old = [down_projection(subject, layer).weight.clone() for layer in range(subject.layers)]

    def stream(request: WeightRequest) -> torch.Tensor:
        with recorded([decoder_layer(subject, last)]) as (record,):
            plain_logits(subject, request.token_ids)
        return record["output"][0, request.position]

    wanted, before = [], [stream(request) for request in REQUESTS]
    for request in REQUESTS:
        change = find_value(subject, request, last, edit.parameters.search).change
        with shifted(down_projection(subject, last), request.position, change):
            wanted.append(stream(request))
    with edit.applied(subject, REQUESTS, BACKGROUND):
        for request, ought, was in zip(REQUESTS, wanted, before, strict=True):
            assert (stream(request) - ought).norm() < (0.2 if family == "gemma2" else 0.01) * (was - ought).norm()
        changed = {n for n in range(subject.layers) if not torch.equal(down_projection(subject, n).weight, old[n])}
    assert changed == set(layers)


def test_a_change_of_the_stream_goes_back_through_a_norm_as_far_as_its_length_allows() -> None:
    subject = tiny("gemma2", torch.float64)
    norm = after_norm(subject, 0)
    generator = torch.Generator().manual_seed(0)
    output, other = torch.randn(2, 32, generator=generator, dtype=torch.float64)
    reachable = norm(output + 0.4 * other) - norm(output)
    found = before_norm(norm, output, reachable)
    torch.testing.assert_close(norm(output + found) - norm(output), reachable, atol=1e-5, rtol=0)
    assert before_norm(after_norm(tiny("llama"), 0), output, other) is other


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_padded_behind_give_each_prompt_its_own_logits(family: str) -> None:
    subject = tiny(family, torch.float64)
    prompts = [tokens(n, seed=n) for n in (3, 21, 9)]
    ought = torch.stack([plain_logits(subject, prompt) for prompt in prompts])
    torch.testing.assert_close(decisions(subject, prompts), ought, atol=5e-6, rtol=0)


def test_second_moments_are_those_of_all_text_tokens_and_are_measured_once() -> None:
    subject, layer = build(CONFIGS["mistral"], "mistral", torch.float64), 2
    keys: list[torch.Tensor] = []
    handle = down_projection(subject, layer).register_forward_pre_hook(lambda _, inputs: keys.append(inputs[0][0]))
    for text in BACKGROUND.texts:
        plain_logits(subject, text)
    handle.remove()
    every = torch.cat(keys)
    found = second_moments(subject, [0, layer], BACKGROUND)
    torch.testing.assert_close(found[layer], every.T @ every / len(every))
    assert second_moments(subject, [layer], BACKGROUND)[layer] is found[layer]
    assert second_moments(subject, [layer], Background(BACKGROUND.texts[:2]))[layer] is not found[layer]


def test_an_adapter_can_be_suspended_and_its_retain_set_holds_others() -> None:
    subject = tiny("qwen3")
    retained, request = BACKGROUND.retain[0], REQUESTS[0]
    old = plain_logits(subject, retained).log_softmax(-1)
    drift = {}
    for weight in (0.0, 10.0):
        with method("lora", retain=weight, steps=8, enough=1.0).applied(subject, [request], BACKGROUND) as change:
            now = plain_logits(subject, retained).log_softmax(-1)
            drift[weight] = float(torch.nn.functional.kl_div(now, old, reduction="sum", log_target=True))
            assert change.suspended is not None
            with change.suspended():
                assert torch.equal(plain_logits(subject, retained).log_softmax(-1), old)
            assert torch.equal(plain_logits(subject, retained).log_softmax(-1), now)
    assert drift[10.0] < 0.5 * drift[0.0]


def test_answers_of_several_tokens() -> None:
    subject = tiny("llama")
    request = WeightRequest(REQUESTS[0].token_ids, 9, (7, 11))
    found = find_value(subject, request, 1, ValueSearch(steps=5))
    with shifted(down_projection(subject, 1), request.position, found.change):
        first = chance(plain_logits(subject, request.token_ids), 7)
        second = chance(plain_logits(subject, [*request.token_ids, 7]), 11)
    assert found.probability == pytest.approx(first * second, rel=1e-3)


class _Answering(WeightEdit):
    """Makes every prompt get one answer, or changes nothing."""

    name = "answering"

    def __init__(self, token: int | None) -> None:
        super().__init__()
        self.token = token

    @contextmanager
    def applied(self, subject: Any, requests: Any, background: Any) -> Iterator[WeightChange]:
        def answer(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            if self.token is not None:
                output[..., self.token] = 1e3
            return output

        handle = subject.model.lm_head.register_forward_hook(answer)
        yield WeightChange(1.0, 0)
        handle.remove()


@pytest.mark.parametrize(("token", "switched", "kept"), [(None, 0.0, 1.0), (7, 1.0, 0.5)])
def test_validation_counts_switches_and_neighbours(token: int | None, switched: float, kept: float) -> None:
    subject, request = tiny("llama"), REQUESTS[0]
    before = int(plain_logits(subject, request.token_ids).argmax())
    neighbours = []
    for seed, other in ((60, 7), (61, 8)):
        prompt = tuple(tokens(9, seed=seed))
        neighbours.append((prompt, int(plain_logits(subject, prompt).argmax()), other))
    edit = ValidationEdit(request, before, tuple(neighbours))
    found = validate(subject, _Answering(token), [edit], BACKGROUND, least=0.75)
    assert (found.switched, found.kept, found.usable) == (switched, kept, False)
    assert validate(subject, _Answering(7), [edit], BACKGROUND, least=0.5).usable
    with pytest.raises(SampleError, match="one neighbour"):
        validate(subject, _Answering(7), [ValidationEdit(request, before, ())], BACKGROUND, least=0.5)


def test_edits_that_cannot_be_made_are_refused() -> None:
    subject = tiny("llama")
    for name in QUICK:
        with pytest.raises(UnsupportedError, match="not 0"), method(name).applied(subject, [], BACKGROUND):
            pass
    with pytest.raises(UnsupportedError, match="not 2"), method("rome").applied(subject, REQUESTS, BACKGROUND):
        pass
    with (
        pytest.raises(UnsupportedError, match="give background"),
        method("rome").applied(subject, REQUESTS[:1], Background()),
    ):
        pass
    with pytest.raises(UnsupportedError, match="layers 0 to 2"):
        down_projection(subject, 3)
    with pytest.raises(UnsupportedError, match="cannot stand at 4"):
        WeightRequest((1, 2), 4, (3,))
    with pytest.raises(UnsupportedError, match="at least one token"):
        WeightRequest((1, 2), 1, ())
