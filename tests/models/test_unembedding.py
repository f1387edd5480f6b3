"""The unembedding sees a last token as one block in memory, whatever it was cut out of."""

import torch
from tiny_models import tiny


def test_the_last_hidden_state_has_plain_strides() -> None:
    subject = tiny("qwen3")
    seen: list[tuple[int, ...]] = []
    head = subject.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, arguments, __: seen.append(arguments[0].stride()))
    try:
        subject.model(torch.arange(1, 9)[None], logits_to_keep=1)
    finally:
        handle.remove()
    width = head.weight.shape[1]
    assert seen == [(width, width, 1)]
