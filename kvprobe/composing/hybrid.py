"""Reuse in hybrids of attention and recurrence: attention keys and values moved, everything else run again.

A recurrent layer keeps one state that every token before has shaped, so a chunk compiled elsewhere has no state that
would be right here: its tokens are run through all layers again. What a compiled chunk is good for is that attention
layers take its keys and values, rotated to where it stands, and leave out the two projections that would make them.
Queries, the recurrence, all MLPs and every attention score are computed as in a prefill. This saves `largest_saving` of
the adapter at most, below a hundredth for Qwen3-Next: it shows what is lost by moving, and is no way to save time.

A chunk compiled behind the very text it is put behind gives the decision of a full prefill. Compiled behind another or
none, its keys and values know nothing of what stands before, and through the attention layers neither do the inputs of
the recurrent layers that follow; the states are those of a scan over the chunk's tokens all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprobe.engine.cache import LayerKV
from kvprobe.engine.forward import clock, logits_of
from kvprobe.errors import ConfigError, UnsupportedError
from kvprobe.models.architectures.hybrid import Qwen3NextHybrid, hybrid_of
from kvprobe.models.identity import identify
from kvprobe.models.subject import Subject

_PROJECTIONS = ("k_proj", "v_proj")


@dataclass(frozen=True, eq=False)
class HybridChunk:
    """A piece of text with its keys and values in the attention layers, and nothing of the recurrent ones.

    Attributes:
        token_ids: of the chunk alone, at least one.
        layers: by number of the attention layer, `[1, kv_head, position, head_dim]`, keys post-RoPE.
        start: the position of its first token when it was compiled.
        flops: what compiling it cost.
    """

    token_ids: tuple[int, ...]
    layers: Mapping[int, LayerKV]
    start: int
    flops: int

    def __len__(self) -> int:
        return len(self.token_ids)

    def moved_to(self, subject: Subject, position: int) -> dict[int, LayerKV]:
        """The entries of each attention layer with keys rotated so that the first stands at `position`.

        Raises:
            UnsupportedError: the RoPE scaling does not allow it.
        """
        if position == self.start:
            return dict(self.layers)
        table = _adapter(subject).attention_table(subject.model)
        turn = torch.full((len(self),), position - self.start)
        return {
            number: LayerKV(table.rotate(layer.source_keys, turn), layer.values, layer.source_keys)
            for number, layer in self.layers.items()
        }


@dataclass(frozen=True)
class HybridReceipt:
    """What composing a prompt ran and what it left out.

    Attributes:
        tokens_run: tokens run through every layer: all of them.
        tokens_moved: of these, tokens whose keys and values in the attention layers came from a chunk.
        attention_layers: layers that took them.
        recurrent_layers: layers whose state was scanned anew over every token.
        projection_flops: of the key and value projections that were left out.
        flops: of all that was run, rotating keys included.
        full_prefill_flops: of a prefill of the same tokens.
        seconds: wall time.
    """

    tokens_run: int
    tokens_moved: int
    attention_layers: int
    recurrent_layers: int
    projection_flops: int
    flops: int
    full_prefill_flops: int
    seconds: float

    @property
    def flops_saved(self) -> int:
        """Projections left out less the cost of rotating keys."""
        return self.full_prefill_flops - self.flops

    @property
    def share_saved(self) -> float:
        """`flops_saved` as a share of a full prefill's FLOPs."""
        return self.flops_saved / self.full_prefill_flops

    def __str__(self) -> str:
        return (
            f"{self.tokens_run} tokens run through all layers, {self.recurrent_layers} recurrent ones scanned anew; "
            f"keys and values of {self.tokens_moved} tokens moved in {self.attention_layers} attention layers, which "
            f"left out {self.share_saved:.2%} of a full prefill's FLOPs"
        )


@dataclass(frozen=True, eq=False)
class HybridComposed:
    """A composed prompt and its decision.

    Attributes:
        token_ids: of the whole prompt.
        logits: `[vocab]` at its last token, at least float32.
        past: the model library's own cache of all tokens, recurrent states included, to go on from.
        receipt: what it cost.
    """

    token_ids: tuple[int, ...]
    logits: Tensor
    past: Any
    receipt: HybridReceipt


def hybrid_subject(model: Any, tokenizer: Any = None, name: str | None = None) -> Subject:
    """A loaded Hugging Face hybrid, frozen and in eval mode, for the functions of this module and no others.

    `load_subject` refuses hybrids, as all operations of the engine do with what this returns.

    Raises:
        UnsupportedError: the model is no hybrid that kvprobe composes.
    """
    adapter = hybrid_of(model.config)
    model.requires_grad_(False).eval()
    adapter.settle(model)
    name = name or model.config.name_or_path or model.config.model_type
    return Subject(name, model, tokenizer, adapter, identify(model, tokenizer, name, "handed over"))


def compile_chunk(
    subject: Subject, token_ids: Sequence[int], *, before: Sequence[int] = (), offset: int = 0
) -> HybridChunk:
    """Compute a chunk's keys and values in the attention layers once.

    Args:
        subject: a hybrid.
        token_ids: at least one.
        before: what to compile it behind; the entries of these tokens are not kept.
        offset: the position of the first token that is run.

    Raises:
        ConfigError: the chunk is empty.
        UnsupportedError: not such a hybrid, or one without attention layers.
    """
    adapter = _adapter(subject)
    if not len(token_ids):
        raise ConfigError("There is nothing to compile: the chunk is empty; give at least one token.")
    past, skip, ids = _empty_cache(subject), len(before), (*before, *token_ids)
    _run(subject, ids, offset, past)
    layers = {
        number: LayerKV.computed(past.layers[number].keys[:, :, skip:], past.layers[number].values[:, :, skip:])
        for number in adapter.attention_layers(subject.config)
    }
    flops = adapter.prefill_flops(subject.config, len(ids)) - adapter.flops_per_logits(subject.config)
    return HybridChunk(tuple(token_ids), layers, offset + skip, flops)


def compose(subject: Subject, parts: Sequence[Sequence[int] | HybridChunk]) -> HybridComposed:
    """A prompt of token ids and chunks, in order; the last token decides.

    Args:
        subject: the hybrid that the chunks were compiled with.
        parts: at least one, none empty, the last one of token ids.

    Raises:
        ConfigError: an empty part, or a chunk at the end.
        NumericsError: the logits are not finite.
        UnsupportedError: not such a hybrid, a chunk of another model, or a RoPE scaling that does not allow moving.
    """
    if not parts or isinstance(parts[-1], HybridChunk) or not all(len(part) for part in parts):
        raise ConfigError("A prompt needs parts of at least one token each, the last one of token ids to be run.")
    chunks = list(_placed(parts))
    for chunk, _ in chunks:
        _check_fits(subject, chunk)
    past = _empty_cache(subject)
    started = clock(subject)
    ids: tuple[int, ...] = ()
    for part in parts[:-1]:
        if isinstance(part, HybridChunk):
            with taken_from(subject, past, part.moved_to(subject, len(ids))):
                _run(subject, part.token_ids, len(ids), past)
        else:
            _run(subject, part, len(ids), past)
        ids = (*ids, *(part.token_ids if isinstance(part, HybridChunk) else part))
    output = _run(subject, parts[-1], len(ids), past, decide=True)
    seconds = clock(subject) - started
    ids = (*ids, *parts[-1])
    return HybridComposed(ids, logits_of(output, subject)[0], past, _receipt(subject, len(ids), chunks, seconds))


@contextmanager
def taken_from(subject: Subject, past: Any, entries: Mapping[int, LayerKV]) -> Iterator[None]:
    """Inside, attention layers take `entries` for the tokens that are run, and their two projections are not run.

    `past` is the cache that the pass is given; on leaving, also by an exception, the model and the methods of the cache
    are what they were.
    """
    layers = _adapter(subject).decoder_layers(subject.model)
    own = {(number, name): getattr(layers[number].self_attn, name) for number in entries for name in _PROJECTIONS}
    try:
        for (number, name), projection in own.items():
            setattr(layers[number].self_attn, name, _LeftOut(projection.out_features))
        for number, moved in entries.items():
            past.layers[number].update = partial(_put_instead, past.layers[number], moved)
        yield
    finally:
        for (number, name), projection in own.items():
            setattr(layers[number].self_attn, name, projection)
        for number in entries:
            vars(past.layers[number]).pop("update", None)


class _LeftOut(torch.nn.Module):
    """Stands for a projection whose result nothing reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, hidden: Tensor) -> Tensor:
        """Zeros `[..., width]`, without a product."""
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], self.width)


def _put_instead(layer: Any, moved: LayerKV, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """What `layer.update` does, with `moved` in the place of what the model made of zeros."""
    if keys.shape != moved.keys.shape or values.shape != moved.values.shape:
        raise UnsupportedError(
            f"A pass over keys {list(keys.shape)} cannot take the keys {list(moved.keys.shape)} of a chunk."
        )
    return type(layer).update(layer, moved.keys.to(keys), moved.values.to(values))


def _run(subject: Subject, ids: Sequence[int], start: int, past: Any, *, decide: bool = False) -> Any:
    """Run `ids` from position `start` on after `past`, which grows; with logits at the last one if they `decide`."""
    tokens = torch.as_tensor(ids, dtype=torch.long, device=subject.device)[None]
    places = torch.arange(start, start + len(ids))
    subject.check_reach(places)
    _adapter(subject).check_positions(subject.model, places)
    model = subject.model if decide else _adapter(subject).decoder(subject.model)
    wanted: dict[str, Any] = {"logits_to_keep": 1} if decide else {}
    with torch.no_grad():
        return model(
            input_ids=tokens,
            position_ids=places[None].to(subject.device),
            past_key_values=past,
            use_cache=True,
            **wanted,
        )


def _receipt(subject: Subject, tokens: int, chunks: Sequence[tuple[HybridChunk, int]], seconds: float) -> HybridReceipt:
    adapter, config = _adapter(subject), subject.config
    attending, full = len(adapter.attention_layers(config)), adapter.prefill_flops(config, tokens)
    moved = sum(len(chunk) for chunk, _ in chunks)
    projections = moved * adapter.projection_flops_per_token(config)
    rotated, turning = sum(len(chunk) for chunk, place in chunks if place != chunk.start), 0
    if rotated:
        channels = config.num_key_value_heads * adapter.attention_table(subject.model).rotary_dim
        turning = 3 * rotated * channels * attending
    return HybridReceipt(
        tokens_run=tokens,
        tokens_moved=moved,
        attention_layers=attending,
        recurrent_layers=config.num_hidden_layers - attending,
        projection_flops=projections,
        flops=full - projections + turning,
        full_prefill_flops=full,
        seconds=seconds,
    )


def _placed(parts: Sequence[Sequence[int] | HybridChunk]) -> Iterator[tuple[HybridChunk, int]]:
    """Each chunk with the position it is put at."""
    start = 0
    for part in parts:
        if isinstance(part, HybridChunk):
            yield part, start
        start += len(part)


def _adapter(subject: Subject) -> Qwen3NextHybrid:
    if isinstance(subject.architecture, Qwen3NextHybrid):
        return subject.architecture
    return hybrid_of(subject.config)


def _check_fits(subject: Subject, chunk: HybridChunk) -> None:
    adapter, config = _adapter(subject), subject.config
    shape = (1, config.num_key_value_heads, len(chunk), adapter.head_dim(config))
    if tuple(chunk.layers) != adapter.attention_layers(config) or any(
        layer.keys.shape != shape for layer in chunk.layers.values()
    ):
        raise UnsupportedError(f"The chunk was not compiled with {subject.name}: its layers or heads are others.")


def _empty_cache(subject: Subject) -> Any:
    """The model library's cache, which has a layer of its own kind for attention and for recurrence.

    Raises:
        UnsupportedError: no layer attends, so that there is nothing to reuse.
    """
    from transformers.cache_utils import DynamicCache

    if not _adapter(subject).attention_layers(subject.config):
        raise UnsupportedError(f"No layer of {subject.name} attends, so there are no keys and values to reuse.")
    return DynamicCache(config=subject.config)
