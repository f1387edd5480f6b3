"""What a model source does: say whether a model is here, fetch it, load it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvprobe.errors import KvprobeError, ModelSourceError, OutOfMemoryError
from kvprobe.models.config import ModelConfig
from kvprobe.models.files import Progress
from kvprobe.registry import KINDS, Registry

if TYPE_CHECKING:
    import torch


_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class LoadSettings:
    """How weights are laid into memory."""

    dtype: torch.dtype
    device: torch.device
    attention: str


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model whose files are on this machine and verified, and whose weights are not read yet.

    Attributes:
        location: the folder or file, and what `identity.source` says.
        weights_sha256: of the weight files.
        config: its Hugging Face configuration.
        copies: how often the weights lie in memory while they are read.
    """

    location: str
    weights_sha256: str
    config: Any
    copies: float = 1.0


@dataclass(frozen=True)
class Pins:
    """The sha256 of weights and of settings, see `kvprobe.models.files`, that a model must have; None: any."""

    weights: str | None
    settings: str | None


class ModelSource(ABC):
    """Base of all sources."""

    downloads: ClassVar[bool] = False
    """Whether `pull` fetches anything."""

    @abstractmethod
    def is_here(self, config: ModelConfig) -> bool:
        """Whether the model can be loaded without the network."""

    @abstractmethod
    def pull(self, config: ModelConfig, progress: Progress) -> Path:
        """Fetch what is missing and return where it lies.

        Raises:
            ModelSourceError: it is not to be had, or is damaged.
        """

    @abstractmethod
    def open(self, config: ModelConfig, path: Path) -> Checkpoint:
        """Verify the files and read the configuration.

        Raises:
            ModelSourceError: a file is missing, cut short, or not the pinned one.
            UnsupportedError: the architecture is unknown.
        """

    @abstractmethod
    def load(self, config: ModelConfig, path: Path, settings: LoadSettings) -> tuple[Any, Any]:
        """The model and its tokenizer.

        Raises:
            ModelSourceError: weights are missing or have the wrong shape.
        """


MODEL_SOURCES: Registry[type[ModelSource]] = Registry(KINDS["MODEL_SOURCES"])


def require_all_weights(info: dict[str, Any], where: str) -> None:
    """Refuse a model some of whose weights the library had to invent.

    Raises:
        ModelSourceError: names the first such weight.
    """
    invented = sorted(info["missing_keys"])
    misshapen = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    for names, what in ((invented, "holds no weights for"), (misshapen, "holds weights of another shape for")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelSourceError(
                f"{where} {what} {names[0]}{more}, and the model library would fill in random numbers; use a complete "
                "causal language model."
            )


def refuse_adapters(folder: Path) -> None:
    """Refuse a folder with an adapter, which the model library would load on top of the weights.

    Raises:
        ModelSourceError: names the adapter's file.
    """
    adapter = next((name for name in _ADAPTER if (folder / name).exists()), None)
    if adapter is not None:
        raise ModelSourceError(
            f"{folder} holds the adapter {adapter}, which would be loaded on top of the weights; merge it into them "
            "with peft's merge_and_unload and save_pretrained, or move it elsewhere."
        )


def loading_error(error: BaseException, where: str) -> KvprobeError:
    """What to raise when the model library fails to load `where`."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return OutOfMemoryError(
            f"{where} does not fit in memory; choose a smaller model, a smaller dtype or another device."
        )
    return ModelSourceError(f"{where} cannot be loaded: {first_line(error)}.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without its full stop."""
    return (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".")


@contextmanager
def quiet_library() -> Iterator[None]:
    """Without the model library's progress bars and advice: library code of kvprobe does not print."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
