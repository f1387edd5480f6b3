"""Components agree with plain forward passes, leave the subject alone and keep rows apart."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, WINDOW, build, tiny, tokens

from kvprobe.engine import components as module
from kvprobe.engine.cache import KVCache
from kvprobe.engine.components import ActivationEdit, Components, add, components, set_to
from kvprobe.engine.forward import prefill
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.sweep import run_patches
from kvprobe.errors import NoEffectError, NumericsError, UnsupportedError
from kvprobe.models.loader import load_subject

LENGTHS = (WINDOW - 2, WINDOW, WINDOW + 1, 2 * WINDOW)
CORE = ("qwen3", "llama", "mistral", "gemma2")
VISUAL = ("qwen2_5_vl", "qwen3_vl")


def close(mine: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(mine.float(), other.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="with torchvision they are bridged")
@pytest.mark.parametrize("family", VISUAL)
def test_a_bridge_that_lacks_a_library_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedError, match="torchvision"):
        components(tiny(family))


BRIDGED = [name for name in FAMILIES if name not in VISUAL and not tiny(name).architecture.latent_cache]


@pytest.mark.parametrize("family", BRIDGED)
@pytest.mark.parametrize("length", LENGTHS)
def test_plain_run_equals_plain_forward_below_at_and_above_the_window(family: str, length: int) -> None:
    subject, ids = tiny(family), tokens(length)
    plain = prefill(subject, ids)
    close(components(subject).run(ids, [()])[0], plain.logits)
    cached = plain.cache.take(slice(0, length - 1))
    close(components(subject).run(ids[-1:], [()], cache=cached)[0], plain.logits)


@pytest.mark.parametrize("name", ["qwen3-note-taker", "mistral-note-taker"])
def test_organism_agrees(name: str) -> None:
    subject = load_subject(name)
    ids = list(range(5, 95))
    plain = prefill(subject, ids)
    made = components(subject)
    close(made.capture(ids, []).logits, plain.logits, 1e-3)
    close(made.run(ids[60:], [()], cache=plain.cache.take(slice(0, 60)))[0], plain.logits, 1e-3)


@pytest.mark.parametrize("family", CORE)
def test_subject_is_left_as_it_is_and_shares_its_weights(family: str) -> None:
    from tiny_models import CONFIGS

    subject = build(CONFIGS[family], family)
    ids = tokens(9)
    tree = [(name, type(part), id(part)) for name, part in subject.model.named_modules()]
    before, settings = prefill(subject, ids).logits, subject.config.to_dict()
    made = Components(subject)
    made.gradients(ids, ["blocks.0.hook_resid_pre"], lambda logits: logits[3])
    assert [(name, type(part), id(part)) for name, part in subject.model.named_modules()] == tree
    assert subject.config.to_dict() == settings
    assert torch.equal(prefill(subject, ids).logits, before)
    own = {parameter.data_ptr() for parameter in subject.model.parameters()}
    bridged = {parameter.data_ptr(): parameter for parameter in made._subject.model.parameters()}
    assert set(bridged) >= own
    # The bridge gives the unembedding a bias that the model does not have.
    assert all(not bridged[added].any() for added in set(bridged) - own)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in subject.model.parameters())


def test_components_are_made_once() -> None:
    assert components(tiny("llama")) is components(tiny("llama"))
    assert components(tiny("llama")) is not components(tiny("mistral"))


@pytest.mark.parametrize("family", CORE)
def test_rows_are_independent_of_one_another_and_of_the_batch(family: str) -> None:
    subject, ids = tiny(family), tokens(10)
    made, hidden = components(subject), subject.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    rows: list[list[ActivationEdit]] = [[]]
    for layer, position in ((0, 3), (1, 9), (1, 4)):
        vector = torch.randn(hidden, generator=generator)
        rows.append([ActivationEdit(f"blocks.{layer}.hook_resid_post", add(vector), (position,))])
    rows.append([*rows[1], *rows[2]])
    together = made.run(ids, rows)
    for row, logits in zip(rows, together, strict=True):
        close(made.run(ids, [row])[0], logits)
    close(made.run(ids, rows, batch_size=2), together)
    assert all(not torch.allclose(logits, together[0], atol=1e-3) for logits in together[1:])
    assert torch.equal(made.run(ids, [()])[0], made.run(ids, [()])[0])


@pytest.mark.parametrize("family", CORE)
def test_edits_with_their_own_activation_change_nothing_and_with_all_the_donors_give_the_donor(family: str) -> None:
    subject, ids, others = tiny(family), tokens(9), tokens(9, seed=1)
    made = components(subject)
    names = ("blocks.1.hook_resid_pre", "blocks.1.attn.hook_z", "blocks.1.attn.hook_pattern", "blocks.2.hook_mlp_out")
    own = made.capture(ids, names)
    rows = [[ActivationEdit(name, set_to(value), no_op=True)] for name, value in own.activations.items()]
    close(made.run(ids, rows), own.logits.expand(len(rows), -1))
    for (declared,) in rows:
        # Rows are run as one, as they were read: to the bit what stands there.
        with pytest.raises(NoEffectError, match=rf"{declared.hook} changes nothing"):
            made.run(ids, [[replace(declared, no_op=False)]], reference=True)
    donor = made.capture(others, ["blocks.1.hook_resid_post"])
    edit = ActivationEdit("blocks.1.hook_resid_post", set_to(donor.activations["blocks.1.hook_resid_post"]))
    close(made.run(ids, [[edit]])[0], donor.logits)


@pytest.mark.parametrize("family", CORE)
def test_residual_stream_adds_up(family: str) -> None:
    made = components(tiny(family))
    names = [f"blocks.1.hook_{part}" for part in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")]
    before, attention, middle, mlp, after = made.capture(tokens(9), names).activations.values()
    close(before + attention, middle)
    close(middle + mlp, after)


def test_positions_are_absolute_and_a_head_can_be_set_alone() -> None:
    subject, ids = tiny("qwen3"), tokens(10)
    made, cache = components(subject), prefill(subject, ids[:6]).cache
    edit = ActivationEdit("blocks.1.attn.hook_z", set_to(torch.zeros(8), head=2), (7,))
    close(made.run(ids[6:], [[edit]], cache=cache), made.run(ids, [[edit]]))
    seen: list[torch.Tensor] = []

    def watch(activation: torch.Tensor) -> torch.Tensor:
        seen.append(activation)
        return activation

    made.run(ids, [[edit, ActivationEdit("blocks.1.attn.hook_z", watch, no_op=True)]])
    assert not seen[0][7, 2].any()
    assert seen[0][7, 1].any()
    assert seen[0][6, 2].any()


@pytest.mark.parametrize("family", BRIDGED)
def test_edits_at_the_models_own_modules_equal_those_through_the_bridge(family: str) -> None:
    subject, ids, others = tiny(family, torch.float64), tokens(12), tokens(12, seed=1)
    made, hidden = components(subject), subject.config.hidden_size
    donor = prefill(subject, others).cache
    cache = prefill(subject, ids).cache.take(slice(0, 9))
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(hidden, generator=generator, dtype=torch.float64)
    head = torch.randn(8 if family != "wide_heads" else 1, generator=generator, dtype=torch.float64)
    rows: list[list[ActivationEdit]] = [
        [],
        [ActivationEdit("blocks.0.hook_resid_pre", set_to(vector), (10,))],
        [ActivationEdit("blocks.1.attn.hook_z", set_to(head, head=2))],
        [
            ActivationEdit("blocks.2.attn.hook_z", lambda z: 2 * z, (11,)),
            ActivationEdit("blocks.0.hook_resid_post", add(vector)),
        ],
    ]
    patches = [[], [KVPatch((2, 5), donor)], [], [KVPatch((8,), donor, (1,))]]
    for entries, tail in ((None, ids), (cache, ids[9:])):
        with_patches = {} if entries is None else {"patches": patches}
        mine = made.run(tail, rows, cache=entries, **with_patches)
        close(mine, made.run(tail, rows, cache=entries, reference=True, **with_patches))
        close(made.run(tail, rows, cache=entries, batch_size=3, **with_patches), mine, 1e-9)
        assert float((mine[1:] - mine[0]).abs().amax(-1).min()) > 1e-3


@pytest.mark.parametrize("family", CORE)
def test_patched_rows_agree_with_a_sweep(family: str) -> None:
    subject, ids, others = tiny(family), tokens(9), tokens(9, seed=1)
    base, donor = prefill(subject, ids).cache, prefill(subject, others).cache
    patches = [[], [KVPatch((3,), donor)], [KVPatch((1, 7), donor, (1,))]]
    mine = components(subject).run(ids[-1:], [()] * 3, cache=base.take(slice(0, 8)), patches=patches)
    close(mine, run_patches(subject, ids, base, patches))


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[4] - 2 * logits[7]


@pytest.mark.parametrize("family", CORE)
def test_gradients_agree_with_finite_differences_alone_and_together(family: str) -> None:
    subject, ids = tiny(family, torch.float64), tokens(9)
    made = components(subject)
    names = [name for name in made.hooks if name.startswith("blocks.1.") and not name.endswith("mid")]
    names += ["blocks.0.attn.hook_z", "blocks.2.hook_resid_pre"]
    together = made.gradients(ids, names, metric)
    assert set(together) == set(names)
    generator = torch.Generator().manual_seed(0)
    for name in names:
        ((activation, gradient),) = made.gradients(ids, [name], metric).values()
        close(together[name][0], activation)
        close(together[name][1], gradient)
        direction = torch.randn(activation.shape, generator=generator, dtype=torch.float64)
        direction = gradient / gradient.norm() + direction / direction.norm()
        # Softmax and norms compute in float32 in every model, so a smaller step would measure their rounding.
        rows = [[ActivationEdit(name, add(step * direction))] for step in (3e-3, -3e-3)]
        up, down = (metric(logits) for logits in made.run(ids, rows))
        assert float((up - down) / 6e-3) == pytest.approx(float((gradient * direction).sum()), rel=5e-3), name


def test_gradients_on_a_cache_are_those_of_the_full_run() -> None:
    subject, ids = tiny("gemma2"), tokens(12)
    made, cache = components(subject), prefill(subject, ids[:11]).cache
    name = "blocks.2.attn.hook_z"
    full = made.gradients(ids, [name], lambda logits: logits[5])[name]
    alone = made.gradients(ids[11:], [name], lambda logits: logits[5], cache=cache)[name]
    close(alone[0], full[0][-1:])
    close(alone[1], full[1][-1:])


def test_hooks_are_gone_after_an_exception() -> None:
    subject, ids = tiny("llama"), tokens(6)
    made = components(subject)
    before = made.run(ids, [()])

    def fail(activation: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made.run(ids, [[ActivationEdit("blocks.0.hook_mlp_out", fail)]])
    assert torch.equal(made.run(ids, [()]), before)


def test_what_cannot_be_done_is_refused_in_a_sentence() -> None:
    subject, ids = tiny("qwen3"), tokens(5)
    made, cache = components(subject), prefill(subject, ids[:3]).cache
    with pytest.raises(UnsupportedError, match=r"did you mean 'blocks\.1\.attn\.hook_z'"):
        made.capture(ids, ["blocks.1.attn.hook_zz"])
    with pytest.raises(UnsupportedError, match=r"a change of blocks\.0\.hook_attn_out"):
        made.run(ids, [[ActivationEdit("blocks.0.hook_resid_mid", add(torch.ones(32)))]])
    with pytest.raises(UnsupportedError, match="can only be read"):
        made.gradients(ids, ["blocks.0.hook_resid_mid"], metric)
    with pytest.raises(UnsupportedError, match="position 2; this pass runs 3 to 4"):
        made.run(ids[3:], [[ActivationEdit("blocks.0.hook_resid_pre", add(torch.ones(32)), (2,))]], cache=cache)
    with pytest.raises(UnsupportedError, match=r"\[5, 32\] into \[32\]"):
        made.run(ids, [[ActivationEdit("blocks.0.hook_resid_pre", lambda activation: activation[0])]])
    with pytest.raises(UnsupportedError, match="need the cache"):
        made.run(ids, [()], patches=[()])
    with pytest.raises(UnsupportedError, match="no token"):
        made.run([], [()], cache=cache)
    double = KVCache.computed([(k.keys.repeat(2, 1, 1, 1),) * 2 for k in cache.layers], cache.positions)
    with pytest.raises(UnsupportedError, match="one row"):
        made.capture(ids[3:], [], cache=double)


def test_a_bridge_that_drops_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge

    monkeypatch.setattr(AttentionBridge, "_update_kv_cache", lambda self, keys, values, **_: (keys, values))
    with pytest.raises(UnsupportedError, match="leaves 0 in its KV cache"):
        Components(tiny("llama"))


def test_a_bridge_that_disagrees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(logits=torch.ones(61))
    monkeypatch.setattr(module, "prefill", lambda *_: wrong)
    with pytest.raises(NumericsError, match="differs from the model by"):
        Components(tiny("llama"))


@given(st.integers(-9, 9), st.integers(1, 4))
def test_a_head_that_is_not_there_is_refused(head: int, heads: int) -> None:
    change, before = set_to(torch.zeros(2), head=head), torch.ones(3, heads, 2)
    if 0 <= head < heads:
        assert (change(before) == 0).any(dim=(0, 2)).nonzero().flatten().tolist() == [head]
    else:
        with pytest.raises(UnsupportedError, match=rf"no head {head}; the heads here are 0 to {heads - 1}"):
            change(before)
