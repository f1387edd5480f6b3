"""A folder in the Hugging Face layout: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from typing_extensions import override

from kvprobe.errors import ModelSourceError
from kvprobe.models.config import ModelConfig
from kvprobe.models.files import Progress, check_safetensors, settings_sha256, sha256_of_all, verify_sha256
from kvprobe.models.sources.base import (
    MODEL_SOURCES,
    Checkpoint,
    LoadSettings,
    ModelSource,
    Pins,
    first_line,
    loading_error,
    quiet_library,
    refuse_adapters,
    require_all_weights,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DISTRIBUTED = ".metadata"
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


@MODEL_SOURCES.register("directory")
class DirectorySource(ModelSource):
    """A local folder, read in place; code in it is never run."""

    mend = "fetch or copy the folder again"

    @override
    def is_here(self, config: ModelConfig) -> bool:
        return config.path is not None and (config.path / "config.json").is_file()

    @override
    def pull(self, config: ModelConfig, progress: Progress) -> Path:
        assert config.path is not None
        if not config.path.is_dir():
            raise ModelSourceError(f"There is no folder {config.path}; correct the path of model {config.name!r}.")
        return config.path

    @override
    def open(self, config: ModelConfig, path: Path) -> Checkpoint:
        from kvprobe.models.architectures.base import architecture_of

        model_type = str(read_json(path / "config.json").get("model_type"))
        architecture_of(SimpleNamespace(model_type=model_type))
        refuse_redirects(path)
        files = weight_files(path)
        check_safetensors(files)
        digest = sha256_of_all(files)
        pins = self.pins(config)
        verify_sha256(digest, pins.weights, files[0] if len(files) == 1 else path, self.mend)
        if pins.settings is not None:
            what = f"The whole of the configuration and tokenizer files of {path}"
            verify_sha256(settings_sha256(path), pins.settings, what, self.mend)
        return Checkpoint(str(path), digest, read_config(path))

    @override
    def load(self, config: ModelConfig, path: Path, settings: LoadSettings) -> tuple[Any, Any]:
        import transformers

        from kvprobe.models.architectures.base import architecture_of

        tokenizer = read_tokenizer(path)
        with quiet_library():
            try:
                auto_class = getattr(transformers, architecture_of(read_config(path)).auto_class)
                model, info = auto_class.from_pretrained(
                    path,
                    dtype=settings.dtype,
                    attn_implementation=settings.attention,
                    device_map={"": settings.device} if settings.device.type != "cpu" else None,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                raise loading_error(error, str(path)) from error
        require_all_weights(info, str(path))
        return model, tokenizer

    def pins(self, config: ModelConfig) -> Pins:
        """The sha256 that the files must have."""
        return Pins(config.sha256, config.settings_sha256)


def read_config(path: Path) -> Any:
    """The Hugging Face configuration of a folder.

    Raises:
        ModelSourceError: it is damaged, or names weights other than those that are hashed.
    """
    import transformers

    file = path / "config.json"
    with quiet_library():
        try:
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            # The library computes with what it reads: any error of Python's, and its own checks, tell of wrong values.
            raise ModelSourceError(f"{file} is not a usable configuration: {_reason(error)}.") from error
    if getattr(config, "transformers_weights", None) is not None:
        raise ModelSourceError(
            f"{file} sends the loader to other weights by its key 'transformers_weights'; name that file {SINGLE} and "
            "remove the key."
        )
    return config


def _reason(error: Exception) -> str:
    """What an error says; a check of the library names itself first and its reason last."""
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()]
    return lines[-1].rstrip(".") if isinstance(error, StrictDataclassError) and lines else first_line(error)


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder, of the class its tokenizer_config.json names.

    The library replaces a generic tokenizer by the architecture's own for some architectures (Qwen2), which turns
    every text into no tokens at all; so a generic one is loaded as what it is.

    Raises:
        ModelSourceError: it is damaged, or needs code of its own.
    """
    import transformers

    file = path / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    named = settings.get("tokenizer_class")
    if "auto_map" in settings and named and not hasattr(transformers, str(named)):
        raise ModelSourceError(
            f"{file} names the tokenizer {named!r}, which is code of the model's own, and kvprobe runs none; use "
            "a model whose tokenizer the library transformers knows."
        )
    kind = transformers.PreTrainedTokenizerFast if named in _GENERIC else transformers.AutoTokenizer
    with quiet_library():
        try:
            return kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            # The tokenizers library raises bare Exception on damaged files.
            raise ModelSourceError(
                f"{path} holds no usable tokenizer ({first_line(error)}); add its tokenizer.json and "
                "tokenizer_config.json."
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelSourceError: the file is absent or damaged.
    """
    if not path.is_file():
        raise ModelSourceError(f"{path.parent} holds no {path.name}; name a model folder in the Hugging Face layout.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelSourceError(
            f"{path} is cut short or is no JSON ({first_line(error)}); fetch or copy it again."
        ) from error
    if not isinstance(content, dict):
        raise ModelSourceError(f"{path} must hold a JSON object.")
    return content


def refuse_redirects(path: Path) -> None:
    """Refuse a folder in which the model library would open other weights than those that are hashed.

    Raises:
        ModelSourceError: it holds an adapter, a distributed checkpoint, or two sets of weights.
    """
    refuse_adapters(path)
    if (path / _DISTRIBUTED).exists():
        raise ModelSourceError(
            f"{path} holds a distributed checkpoint ({_DISTRIBUTED}), which is read as a pickle; save the model with "
            "save_pretrained."
        )
    if (path / INDEX).is_file() and (path / SINGLE).is_file():
        raise ModelSourceError(
            f"{path} holds both {SINGLE} and {INDEX}, so it is not clear which weights are meant; remove one of them."
        )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder that the model library opens, shards included.

    Raises:
        ModelSourceError: there are none, the index is damaged, or a shard that it names is missing.
    """
    if (path / INDEX).is_file():
        return [path / shard for shard in _shards(path)]
    if not (path / SINGLE).is_file():
        raise ModelSourceError(
            f"{path} holds no {SINGLE}; kvprobe reads weights from safetensors only, so convert other formats with "
            "save_pretrained."
        )
    return [path / SINGLE]


def _shards(path: Path) -> list[str]:
    index, there = read_json(path / INDEX), {file.name for file in path.iterdir() if file.is_file()}
    parts = index.get("weight_map"), index.get("metadata")
    shards = list(parts[0].values()) if isinstance(parts[0], dict) else []
    if not all(isinstance(part, dict) for part in parts) or not all(isinstance(shard, str) for shard in shards):
        raise ModelSourceError(
            f"{path / INDEX} is damaged, for its 'weight_map' must give each weight its file, and its 'metadata' be "
            "keys with values; fetch or copy it again."
        )
    missing = sorted({shard for shard in shards if shard not in there})
    if missing or not shards:
        lost = f"the shard {missing[0]!r}, which {INDEX} names" if missing else f"any shard that {INDEX} could name"
        raise ModelSourceError(f"{path} lacks {lost}; fetch or copy it again.")
    return sorted(set(shards))
