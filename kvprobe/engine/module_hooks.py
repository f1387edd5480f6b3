"""Edits of activations at the model's own modules, where a TransformerLens name has its place there.

A sweep that changes one vector in each row needs no bridge: all rows share everything else, the cache included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvprobe.models.subject import Subject

Editor = Callable[[Tensor], Tensor]
"""From an activation `[row, position, ...]` to what replaces it."""

_PLACES = ("hook_resid_pre", "hook_resid_post", "attn.hook_z")


def has_place(hook: str) -> bool:
    """Whether the activation of this name is the input or the output of one module of every model."""
    return hook.startswith("blocks.") and hook.split(".", 2)[2] in _PLACES


@contextmanager
def edited(subject: Subject, editors: Mapping[str, Editor]) -> Iterator[None]:
    """Inside the block, activations are what the editors make of them.

    Args:
        subject: the model.
        editors: by TransformerLens name; `hook_z` is given as `[row, position, head, head_dim]`.
    """
    layers = subject.architecture.decoder_layers(subject.model)
    handles: list[Any] = []
    try:
        for hook, editor in editors.items():
            _, number, place = hook.split(".", 2)
            layer = layers[int(number)]
            if place == "hook_resid_pre":
                handles.append(layer.register_forward_pre_hook(_Input(editor)))
            elif place == "hook_resid_post":
                handles.append(layer.register_forward_hook(_Output(editor)))
            else:
                projection = subject.architecture.output_projection(layer)
                handles.append(projection.register_forward_pre_hook(_Heads(editor, subject)))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Input:
    def __init__(self, editor: Editor) -> None:
        self.editor = editor

    def __call__(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        return (self.editor(args[0]), *args[1:])


class _Output:
    def __init__(self, editor: Editor) -> None:
        self.editor = editor

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ARG002
        return (self.editor(output[0]), *output[1:]) if isinstance(output, tuple) else self.editor(output)


class _Heads:
    def __init__(self, editor: Editor, subject: Subject) -> None:
        self.editor = editor
        self.heads = int(subject.config.num_attention_heads)

    def __call__(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        return (self.editor(args[0].unflatten(-1, (self.heads, -1))).flatten(-2), *args[1:])
