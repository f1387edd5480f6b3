"""Chat templates: put a context into the user turn without tokenising anything twice."""

from __future__ import annotations

from typing import Any

from kvprobe.errors import AlignmentError
from kvprobe.tasks.context import Context, Segment

_PLACEHOLDER = "\u2063kvprobe\u2063"


def chat_wrapped(context: Context, tokenizer: Any, **template_arguments: Any) -> Context:
    """The context inside the tokenizer's chat template, as one user turn and an open assistant turn.

    The segment `cue` goes into the assistant's turn, so that the next token is the decision; the template's
    own text becomes the segments `chat_prefix`, `chat_middle`. A tokenizer without a template returns the
    context as it is. Templates with a thinking switch need `enable_thinking=False` for direct answers,
    else the next token opens a think block (protocol section 0.3).

    Raises:
        AlignmentError: the template changes the text that it is given.
    """
    if not getattr(tokenizer, "chat_template", None):
        return context
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACEHOLDER}],
        tokenize=False,
        add_generation_prompt=True,
        **template_arguments,
    )
    prefix, found, middle = text.partition(_PLACEHOLDER)
    if not found:
        raise AlignmentError("The tokenizer's chat template alters the user's text; use chat: false for this model.")
    body = [segment for segment in context.segments if segment.name != "cue"]
    cue = [segment for segment in context.segments if segment.name == "cue"]
    return Context((Segment("chat_prefix", prefix), *body, Segment("chat_middle", middle), *cue))
