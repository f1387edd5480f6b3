"""Architectures that kvprobe knows and refuses, each with the reason."""

from __future__ import annotations

_RECURRENT = (
    "it keeps one recurrent state per layer and no entry per token, so there is nothing to edit in place, to move or "
    "to splice; only a new prefill is exact"
)
_HYBRID = (
    "it mixes attention with recurrent layers, whose state depends on every token before: after an edit, a move or a "
    "splice each layer would have to be run again over the tokens that follow, so that all a moved cache of keys "
    "and values could save is their projection"
)
_PARTIAL = f"{_HYBRID}; kvprobe.composing.hybrid saves just that, and nothing else can be done"

_INDEXED = (
    "it chooses by an index of its own which keys each token reads, so what an edited or moved entry does is decided "
    "outside its attention mask; a new prefill is exact, and so is an erratum behind the cached prompt"
)
_SINKS = (
    "its heads weigh keys against sinks of their own inside the softmax, which sweeps over a shared cache would leave "
    "out; a new prefill is exact, and so is an erratum behind the cached prompt"
)
_CHUNKS = (
    "it attends in chunks of fixed places, so that an entry that is moved over the end of a chunk is read by other "
    "tokens; a new prefill is exact, and so is an erratum behind the cached prompt"
)
_SHARED = (
    "it shares the cache of some layers with others, so that an entry of one layer cannot be edited alone; a new "
    "prefill is exact, and so is an erratum behind the cached prompt"
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "granitemoehybrid",
            "jamba",
            "minimax",
            "nemotron_h",
            "recurrent_gemma",
            "zamba",
            "zamba2",
        ),
        _HYBRID,
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), _HYBRID),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4"), _INDEXED),
    "gpt_oss": _SINKS,
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKS),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), _SHARED),
    "qwen3_next": _PARTIAL,
}
"""Why, by `model_type`; the reason goes on from the name."""
