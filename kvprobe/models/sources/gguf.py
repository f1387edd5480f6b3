"""A GGUF file: weights in blocks of few bits, unpacked on loading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from kvprobe.errors import ModelSourceError, UnsupportedError
from kvprobe.models.config import ModelConfig
from kvprobe.models.files import Progress, sha256_of, verify_sha256
from kvprobe.models.sources.base import (
    MODEL_SOURCES,
    Checkpoint,
    LoadSettings,
    ModelSource,
    first_line,
    loading_error,
    quiet_library,
    refuse_adapters,
    require_all_weights,
)

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
"""Architectures by their GGUF name whose numbers the model library restores, with their `model_type`."""

_OTHER_QUERY_SCALE = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of the 27B models: their query scale is not in the file and not the default."""

_GPT2 = frozenset({"default", "gpt-2", "phi-2", "olmo", "mpt"})
"""Pre-tokenizers that cut as GPT-2's does, which the model library takes for all that it does not know."""
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact"})
"""Pre-tokenizers that cut off every digit before they cut as GPT-2's does."""
_COPIES = 2.0
"""The library holds all unpacked weights once beside the model."""


@MODEL_SOURCES.register("gguf")
class GGUFSource(ModelSource):
    """A local GGUF file, read by the model library and unpacked to plain weights."""

    mend = "fetch or copy the file again"

    @override
    def is_here(self, config: ModelConfig) -> bool:
        return config.path is not None and config.path.is_file()

    @override
    def pull(self, config: ModelConfig, progress: Progress) -> Path:
        assert config.path is not None
        if not config.path.is_file():
            raise ModelSourceError(f"There is no file {config.path}; correct the path of model {config.name!r}.")
        return config.path

    @override
    def open(self, config: ModelConfig, path: Path) -> Checkpoint:
        import transformers

        refuse_adapters(path.parent)
        digest = sha256_of(path)
        verify_sha256(digest, config.sha256, path, self.mend)
        fields, tensors = read_header(path)
        check_restorable(path, fields, tensors)
        with _without_bar():
            model_config = transformers.AutoConfig.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
        return Checkpoint(str(path), digest, model_config, _COPIES)

    @override
    def load(self, config: ModelConfig, path: Path, settings: LoadSettings) -> tuple[Any, Any]:
        import transformers

        where = {"gguf_file": path.name, "local_files_only": True}
        with _without_bar():
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
                model, info = transformers.AutoModelForCausalLM.from_pretrained(
                    path.parent,
                    **where,
                    # Packed weights would be computed by other kernels, whose numbers differ.
                    quantization_config=transformers.GgufConfig(dequantize=True),
                    dtype=settings.dtype,
                    attn_implementation=settings.attention,
                    output_loading_info=True,
                )
            except (OSError, ValueError, RuntimeError, MemoryError, KeyError, TypeError) as error:
                raise loading_error(error, str(path)) from error
        require_all_weights(info, str(path))
        _forget_packing(model)
        cut_as_named(tokenizer, read_header(path)[0], path)
        return model.to(settings.device), tokenizer


def cut_as_named(tokenizer: Any, fields: dict[str, Any], path: Path) -> None:
    """Let a byte-level tokenizer cut text before its merges as the file's pre-tokenizer does.

    The model library cuts as GPT-2 does where it does not know the name.

    Raises:
        UnsupportedError: kvprobe does not know it either.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = str(fields.get("tokenizer.ggml.pre", "default"))
    if fields.get("tokenizer.ggml.model") != "gpt2" or name in _GPT2 or name in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if name not in _SINGLE_DIGITS:
        raise UnsupportedError(
            f"{path} names the pre-tokenizer {name!r}, which transformers would replace by GPT-2's, and some texts "
            "would be cut into other tokens; use the model's safetensors folder or hub id."
        )
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def read_header(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Scalar metadata and tensor names of a GGUF file.

    Raises:
        ModelSourceError: the file is cut short or is no GGUF file.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {
            key: field.contents() for key, field in reader.fields.items() if field.types[0] != gguf.GGUFValueType.ARRAY
        }
        return fields, {tensor.name for tensor in reader.tensors}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelSourceError(
            f"{path} is cut short or is no GGUF file ({first_line(error)}); fetch or copy it again."
        ) from error


def check_restorable(path: Path, fields: dict[str, Any], tensors: set[str]) -> None:
    """Refuse a file whose model the library would rebuild with other numbers.

    transformers 5.23 drops RoPE scaling that a GGUF file states for these architectures, the per-frequency factors
    of Llama-3.1 included, and it takes head_dim and the query scale of some from defaults.

    Raises:
        UnsupportedError: names the architecture or what would be dropped.
    """
    from kvprobe.models.architectures.base import architecture_of

    architecture = str(fields.get("general.architecture"))
    model_type = MODEL_TYPES.get(architecture)
    if model_type is None:
        raise UnsupportedError(
            f"{path} holds a model of GGUF architecture {architecture!r}, which kvprobe does not load from GGUF "
            f"(known: {', '.join(MODEL_TYPES)}); use its safetensors folder or hub id."
        )
    architecture_of(SimpleNamespace(model_type=model_type))
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(name.startswith("rope_f") for name in tensors):
        raise UnsupportedError(
            f"{path} scales its RoPE ({'llama3 factors' if scaling == 'none' else scaling}), which transformers drops "
            "when it reads GGUF; use the model's safetensors folder or hub id."
        )
    if (architecture, fields.get(f"{architecture}.block_count")) in _OTHER_QUERY_SCALE:
        raise UnsupportedError(
            f"{path} holds a 27B model whose query scale GGUF does not state and transformers would take from another "
            "size; use the model's safetensors folder or hub id."
        )


def _forget_packing(model: Any) -> None:
    # The weights are plain now; left in place the mark would forbid save_pretrained.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name, value in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        if hasattr(model, name):
            setattr(model, name, value)


@contextmanager
def _without_bar() -> Iterator[None]:
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    # The bar of the GGUF reader obeys none of the library's switches.
    original = gguf_reader.tqdm
    gguf_reader.tqdm = lambda items, **_: items
    try:
        with quiet_library():
            yield
    finally:
        gguf_reader.tqdm = original
