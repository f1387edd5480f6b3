"""Counting what a model really runs, apart from what receipts say (critique ED4)."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from kvprobe.models.subject import Subject


class Meter:
    """Counts, inside a `with` block, the tokens that pass through the model's decoder layers.

    Attributes:
        calls: forward passes begun.
        layer_tokens: tokens that passed through a layer, summed over layers.
    """

    def __init__(self, subject: Subject) -> None:
        self.calls = 0
        self.layer_tokens = 0
        self._layers = list(subject.architecture.decoder_layers(subject.model))
        self._handles: list[Any] = []

    @property
    def tokens(self) -> float:
        """Tokens run, those of partial passes by the share of layers they went through."""
        return self.layer_tokens / len(self._layers)

    def __enter__(self) -> Meter:
        for number, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._count_first if number == 0 else self._count))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _count_first(self, module: Any, args: Any, output: Any) -> None:
        self.calls += 1
        self._count(module, args, output)

    def _count(self, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.layer_tokens += hidden.shape[0] * hidden.shape[1]
