"""Logits finer than a model's weights: the output embedding alone in a wider dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WideOutput(torch.nn.Linear):
    """An output embedding that computes in its own dtype, whatever its inputs have."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Logits `[..., vocab]` in the dtype of the weights."""
        return super().forward(input.to(self.weight.dtype))


def widen_output(model: Any, dtype: torch.dtype) -> None:
    """Have a Hugging Face model compute its logits in `dtype` where its weights are narrower.

    A logit of 20 is rounded to 1/8 in bfloat16, more than many edits move it. The input embedding stays as it is, and
    the model's configuration, and so its identity, says so.
    """
    narrow = model.get_output_embeddings()
    if torch.promote_types(narrow.weight.dtype, dtype) == narrow.weight.dtype:
        return
    with torch.device("meta"):
        wide = WideOutput(narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
    wide.weight = torch.nn.Parameter(narrow.weight.detach().to(dtype), requires_grad=False)
    if narrow.bias is not None:
        wide.bias = torch.nn.Parameter(narrow.bias.detach().to(dtype), requires_grad=False)
    model.set_output_embeddings(wide)
    model.config.output_embedding_dtype = str(dtype).removeprefix("torch.")
