"""Micro-models: their weights are set by hand while they are loaded."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvprobe.models.config import ModelConfig
from kvprobe.models.files import Progress
from kvprobe.models.sources.base import MODEL_SOURCES, Checkpoint, LoadSettings, ModelSource

if TYPE_CHECKING:
    from torch import Tensor


@MODEL_SOURCES.register("micro")
class MicroSource(ModelSource):
    """A circuit of `kvprobe.models.micro`, whose kind is the name after `micro-`."""

    @override
    def is_here(self, config: ModelConfig) -> bool:
        return True

    @override
    def pull(self, config: ModelConfig, progress: Progress) -> Path:
        return Path()

    @override
    def open(self, config: ModelConfig, path: Path) -> Checkpoint:
        from kvprobe.models.micro import micro_config, weights_sha256
        from kvprobe.tasks.tokenizer import build_tokenizer

        return Checkpoint("weights set by hand", weights_sha256(_weights(config.name)), micro_config(build_tokenizer()))

    @override
    def load(self, config: ModelConfig, path: Path, settings: LoadSettings) -> tuple[Any, Any]:
        from transformers import LlamaForCausalLM

        from kvprobe.models.micro import micro_config
        from kvprobe.tasks.tokenizer import build_tokenizer

        tokenizer = build_tokenizer()
        configuration = micro_config(tokenizer)
        configuration._attn_implementation = settings.attention
        model = LlamaForCausalLM(configuration).to(settings.dtype)
        weights = _weights(config.name)
        model.load_state_dict({name: weights[name].to(value.dtype) for name, value in model.state_dict().items()})
        return model.to(settings.device), tokenizer


# One model is opened and then loaded.
@lru_cache(maxsize=1)
def _weights(name: str) -> dict[str, Tensor]:
    from kvprobe.models.micro import micro_weights
    from kvprobe.tasks.tokenizer import build_tokenizer

    return micro_weights(name.removeprefix("micro-"), build_tokenizer().get_vocab())
