"""A model under study, with everything that determines its answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvprobe.errors import UnsupportedError
from kvprobe.models.architectures.base import ArchitectureAdapter
from kvprobe.models.identity import ModelIdentity


@dataclass(frozen=True, eq=False)
class Subject:
    """A causal language model in eval mode with its tokenizer and architecture adapter.

    `model` is a Hugging Face `PreTrainedModel`; its gradients are off and nothing in kvprobe changes it.

    Attributes:
        extrapolates: whether tokens may stand at positions that the model does not have; refused by default.
        kept: what the engine keeps between passes, by name; nothing in it changes a result beyond the noise floor.
    """

    name: str
    model: Any
    tokenizer: Any
    architecture: ArchitectureAdapter
    identity: ModelIdentity
    extrapolates: bool = False
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def extrapolating(self) -> Subject:
        """The same model, allowed to run tokens at positions beyond those it has."""
        return replace(self, extrapolates=True)

    def check_reach(self, positions: torch.Tensor) -> None:
        """Refuse positions that the model does not have: what it computes there is not what it was trained for.

        Args:
            positions: of any shape.

        Raises:
            UnsupportedError: one of them lies beyond its positions, and the subject does not extrapolate.
        """
        reach = reach_of(self.config)
        if self.extrapolates or reach is None or not positions.numel() or int(positions.max()) < reach:
            return
        raise UnsupportedError(
            f"{self.name} has {reach} positions and a token would stand at position {int(positions.max())}; shorten "
            "the text, or insist with load_subject(..., extrapolate=True) or `extrapolate: true` in the model's YAML."
        )

    def check_prompt(self, length: int) -> None:
        """Refuse a prompt of `length` tokens that does not fit the model, before it is called outside the engine.

        Raises:
            UnsupportedError: as `check_reach`, or the frequencies of a dynamic RoPE would change.
        """
        places = torch.arange(length)
        self.check_reach(places)
        self.architecture.check_positions(self.model, places)

    @property
    def config(self) -> Any:
        """The Hugging Face configuration of the language model; a vision-language model's has one of its own inside."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the token embeddings live, so where token ids must go."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of cached keys and values."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: those that the generation configuration names, else the tokenizer's one."""
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if named is None:
            named = getattr(self.tokenizer, "eos_token_id", None)
        return () if named is None else tuple(named) if isinstance(named, list | tuple) else (named,)

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return int(self.config.num_hidden_layers)


def reach_of(config: Any) -> int | None:
    """How many positions a model has: `max_position_embeddings`, or what YaRN stretches the original ones to.

    Published YaRN configurations (Qwen2.5's) state the original number alone. `None` where none is stated.
    """
    stated: int | None = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or {}
    if stated is None or scaling.get("rope_type") != "yarn":
        return stated
    original = scaling.get("original_max_position_embeddings") or stated
    return max(stated, int(original * scaling.get("factor", 1.0)))
