"""Forward passes with explicit positions, masks and caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.engine.cache import KVCache, LayerKV, joined_places
from kvprobe.engine.interventions import AttentionKnockout
from kvprobe.engine.masks import MaskPlan, applied, plan_masks
from kvprobe.engine.prefills import kept_prefills
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import NumericsError, UnsupportedError
from kvprobe.models.caching import empty_cache
from kvprobe.models.images import ImageFeatures
from kvprobe.models.subject import Subject
from kvprobe.viewing import Viewable


@dataclass(frozen=True, eq=False)
class Forward(Viewable):
    """What one forward pass gives.

    Attributes:
        cache: entries of the cache it ran on, then those of its own tokens.
        logits: `[vocab]` at its last token, float32 (float64 for a float64 model).
        receipt: its cost, from what was really run.
        attention: weights per layer `[head, query, key]` when asked for.
    """

    cache: KVCache
    logits: Tensor
    receipt: Receipt
    attention: tuple[Tensor, ...] | None = None

    def __repr__(self) -> str:
        return f"Forward({self.cache}; logits [{len(self.logits)}]; {self.receipt})"


def prefill(subject: Subject, token_ids: Sequence[int], *, offset: int = 0, attention: bool = False) -> Forward:
    """One causal pass over `token_ids` at positions `offset`, `offset + 1`, ...; see also `share_prefixes`.

    Raises:
        NumericsError: the logits are not finite.
    """
    if (kept := kept_prefills(subject)) is not None and not offset and not attention:
        shared = kept.prefill(token_ids, lambda ids, cache: forward(subject, ids, cache))
        if shared is not None:
            return shared
    return forward(subject, token_ids, positions=range(offset, offset + len(token_ids)), attention=attention)


def forward(
    subject: Subject,
    token_ids: Sequence[int],
    cache: KVCache | None = None,
    *,
    positions: Sequence[int] | None = None,
    axes: Tensor | None = None,
    images: Sequence[ImageFeatures] = (),
    knockouts: Sequence[AttentionKnockout] = (),
    attention: bool = False,
) -> Forward:
    """Run `token_ids` after everything in `cache`.

    Args:
        subject: the model.
        token_ids: at least one token.
        cache: entries of one row that come before the tokens; it is left as it is.
        positions: one per token; by default they go on from the largest cached position.
        axes: under M-RoPE, the temporal, height and width position of each token, `[3, token]`; by default those of
            text after the cache.
        images: what stands for the image tokens among the tokens, in their order.
        knockouts: attention knockouts of this pass.
        attention: also return attention weights, which needs eager attention.

    Raises:
        NumericsError: the logits are not finite.
        UnsupportedError: no token, positions or images that do not fit, several rows, or weights from a fused
            kernel, or a position that the model does not have.
    """
    if positions is None:
        start = int(cache.positions.max()) + 1 if cache is not None and len(cache) else 0
        positions = range(start, start + len(token_ids))
    past = 0 if cache is None else len(cache)
    causal = torch.ones(len(token_ids), past + len(token_ids), dtype=torch.bool).tril(past)
    return run_tokens(
        subject, token_ids, positions, cache, causal, axes=axes, images=images, knockouts=knockouts, attention=attention
    )


def run_tokens(
    subject: Subject,
    token_ids: Sequence[int],
    positions: Sequence[int],
    cache: KVCache | None,
    causal: Tensor,
    *,
    axes: Tensor | None = None,
    images: Sequence[ImageFeatures] = (),
    knockouts: Sequence[AttentionKnockout] = (),
    attention: bool = False,
) -> Forward:
    """As `forward`, with the order of tokens given by `causal` bool `[token, cached entry and then token]`."""
    if not len(token_ids) or len(token_ids) != len(positions):
        raise UnsupportedError(
            f"A forward pass needs at least one token and one position per token, not {len(token_ids)} tokens and "
            f"{len(positions)} positions."
        )
    if cache is not None and (cache.batch != 1 or len(cache.layers) != subject.layers):
        raise UnsupportedError("A forward pass runs on one row of a cache of the same model; take one row first.")
    places = torch.as_tensor(positions, dtype=torch.long)
    past = cache if cache is not None and len(cache) else None
    keys = places if past is None else torch.cat([past.positions, places])
    if axes is None and past is not None:
        axes = past.text_axes(places)
    plan = plan_masks(subject, places, keys, causal, [knockouts] if knockouts else ())
    started = clock(subject)
    hugging_face = empty_cache() if past is None else past.to_hugging_face()
    ids = torch.as_tensor(token_ids, dtype=torch.long)[None]
    output = call_model(subject, ids, places, hugging_face, plan, axes=axes, images=images, attention=attention)
    seconds = clock(subject) - started
    filled = _collect(hugging_face, past, places, axes, subject)
    receipt = Receipt(
        tokens_reused=0 if past is None else len(past),
        tokens_appended=len(filled) - (0 if past is None else len(past)),
        flops=flops(subject, len(token_ids), plan.attended, len(keys)),
        seconds=seconds,
    )
    weights = tuple(layer[0] for layer in output.attentions) if attention else None
    return Forward(filled, logits_of(output, subject)[0], receipt, weights)


def call_model(
    subject: Subject,
    ids: Tensor,
    positions: Tensor,
    past: Any,
    plan: MaskPlan,
    *,
    axes: Tensor | None = None,
    images: Sequence[ImageFeatures] = (),
    attention: bool = False,
    gradients: bool = False,
) -> Any:
    """Call the Hugging Face model, without gradients unless asked.

    `ids` `[row, token]`, `positions` `[token]`; `axes` `[3, token]` take their place where they are given.
    """
    if attention and subject.config._attn_implementation != "eager":
        raise UnsupportedError(
            f"Attention weights need eager attention and {subject.name} runs {subject.config._attn_implementation!r}; "
            "load it with attention='eager'."
        )
    places = (positions if axes is None else axes[:, None]).to(subject.device)
    further = subject.architecture.image_inputs(subject.model, ids, images)
    subject.check_reach(positions if axes is None else axes)
    subject.architecture.check_positions(subject.model, positions)
    with torch.set_grad_enabled(gradients), applied(subject, plan) as mask:
        return subject.model(
            input_ids=ids.to(subject.device),
            attention_mask=mask,
            position_ids=places.expand(*places.shape[:-2], len(ids), -1),
            past_key_values=subject.architecture.model_cache(past),
            use_cache=True,
            logits_to_keep=1,
            output_attentions=attention,
            **further,
        )


def logits_of(output: Any, subject: Subject) -> Tensor:
    """Logits `[row, vocab]` at the last token, at least float32.

    Raises:
        NumericsError: a logit is NaN or infinite.
    """
    logits: Tensor = output.logits[:, -1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # One pass over them: a single NaN or infinity makes the sum one too.
    if not bool(torch.isfinite(logits.sum())):
        raise NumericsError(
            f"{subject.name} gives NaN or infinite logits in {subject.identity.dtype} on {subject.identity.device}; "
            "load it in float32 or bfloat16, or check its weights."
        )
    return logits


def flops(subject: Subject, tokens: int, attended: int, keys: int) -> int:
    """FLOPs of running `tokens` tokens over `keys` keys, `attended` of them seen in all, with logits at one token."""
    adapter, config = subject.architecture, subject.config
    return (
        tokens * adapter.flops_per_token(config)
        + keys * subject.layers * adapter.flops_per_key(config)
        + attended * adapter.flops_per_attended_key(config)
        + adapter.flops_per_logits(config)
    )


def clock(subject: Subject) -> float:
    """Seconds, after the device has finished what it was given."""
    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)
    return time.perf_counter()


def _collect(
    hugging_face: Any, past: KVCache | None, positions: Tensor, axes: Tensor | None, subject: Subject
) -> KVCache:
    """The filled cache, checked for length; original keys of moved entries are kept."""
    layers = [(layer.keys, layer.values) for layer in hugging_face.layers]
    start = 0 if past is None else len(past)
    held = [0 if keys is None else keys.shape[2] for keys, _ in layers]
    if len(held) != subject.layers or set(held) != {start + len(positions)}:
        raise UnsupportedError(
            f"{subject.name} left {min(held, default=0)} of {start + len(positions)} entries in its KV cache; install "
            "a transformers version below 5.24, which fills it."
        )
    if past is None:
        return KVCache.computed(layers, positions, axes)
    new = KVCache.computed([(keys[:, :, start:], values[:, :, start:]) for keys, values in layers], positions, axes)
    # Keys and values are joined already; only the originals of moved keys are not.
    moved = any(layer.source_keys is not layer.keys for layer in past.layers)
    grown = tuple(
        LayerKV(keys, values, torch.cat([layer.source_keys, keys[:, :, start:]], dim=2) if moved else keys)
        for layer, (keys, values) in zip(past.layers, layers, strict=True)
    )
    return KVCache(grown, *joined_places([past, new]))
