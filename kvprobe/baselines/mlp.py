"""The MLP's down-projection inside a subject: read, shifted at one position, and logits of many prompts at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprobe.errors import UnsupportedError

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

# Of all rows of one batch without gradients.
_TOKENS_AT_ONCE = 2048


def down_projection(subject: Subject, layer: int) -> torch.nn.Linear:
    """The linear map from the MLP's hidden units to the residual stream; its weight is `[hidden, units]`.

    Raises:
        UnsupportedError: there is no such layer, or its MLP has no linear down-projection.
    """
    if not 0 <= layer < subject.layers:
        raise UnsupportedError(f"{subject.name} has layers 0 to {subject.layers - 1}, no layer {layer}.")
    found = getattr(getattr(decoder_layer(subject, layer), "mlp", None), "down_proj", None)
    if not isinstance(found, torch.nn.Linear):
        raise UnsupportedError(
            f"Layer {layer} of {subject.name} has no linear mlp.down_proj (it is {type(found).__name__}); ROME and "
            "MEMIT edit dense MLPs only."
        )
    return found


def decoder_layer(subject: Subject, layer: int) -> Any:
    """The Hugging Face module of one layer."""
    return subject.architecture.decoder_layers(subject.model)[layer]


def after_norm(subject: Subject, layer: int) -> Any:
    """The norm that the down-projection's output passes before it joins the residual stream (Gemma), or None."""
    return getattr(decoder_layer(subject, layer), "post_feedforward_layernorm", None)


def layer_at(subject: Subject, depth: float) -> int:
    """The layer at a share of the model's depth, 0 the first and 1 the last."""
    return round(depth * (subject.layers - 1))


def logits_at(
    subject: Subject, prompts: Sequence[Sequence[int]], reads: Sequence[tuple[int, int]], *, gradients: bool = False
) -> Tensor:
    """Logits `[read, vocab]`, at least float32, at `(row, position)` of prompts run in one batch.

    Prompts are padded behind their ends, where a causal model cannot see.
    """
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=subject.device)
    kept = sorted({position for _, position in reads})
    subject.check_prompt(longest)
    with torch.set_grad_enabled(gradients):
        output = subject.model(
            input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(kept, device=subject.device)
        ).logits
    rows = torch.tensor([row for row, _ in reads], device=output.device)
    places = torch.tensor([kept.index(position) for _, position in reads], device=output.device)
    chosen: Tensor = output[rows, places]
    return chosen.to(torch.promote_types(chosen.dtype, torch.float32))


def decisions(subject: Subject, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Logits `[prompt, vocab]` behind each prompt, without gradients, in batches that memory allows."""
    return torch.cat(
        [
            logits_at(subject, batch, [(row, len(prompt) - 1) for row, prompt in enumerate(batch)])
            for batch in batches(prompts)
        ]
    )


def batches(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """The prompts in order, as many at once as make a good batch."""
    batch: list[Sequence[int]] = []
    for prompt in prompts:
        longest = max(len(prompt), *(len(other) for other in batch), 0)
        if batch and longest * (len(batch) + 1) > _TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


@contextmanager
def shifted(module: torch.nn.Module, position: int, change: Tensor) -> Iterator[None]:
    """A block in which `change` `[channel]` is added to what `module` gives at one position of every row."""

    def shift(_: Any, __: Any, output: Tensor) -> Tensor:
        where = torch.zeros(output.shape[1], 1, dtype=output.dtype, device=output.device)
        where[position] = 1.0
        return output + where * change.to(output)

    handle = module.register_forward_hook(shift)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def recorded(modules: Sequence[torch.nn.Module]) -> Iterator[list[dict[str, Tensor]]]:
    """A block that records for each module the `input` and the `output` `[row, position, channel]` of its last call."""
    records: list[dict[str, Tensor]] = [{} for _ in modules]
    with ExitStack() as stack:
        for module, record in zip(modules, records, strict=True):

            def keep(_: Any, inputs: Any, output: Any, record: dict[str, Tensor] = record) -> None:
                record["input"] = inputs[0].detach()
                record["output"] = (output[0] if isinstance(output, tuple) else output).detach()

            stack.callback(module.register_forward_hook(keep).remove)
        yield records
