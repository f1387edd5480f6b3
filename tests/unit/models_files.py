"""Small model files made in a test: folders, cards, GGUF files, wheels."""

from __future__ import annotations

import json
import zipfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from tiny_models import CONFIGS, VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from kvprobe.models.architectures.base import architecture_of
from kvprobe.models.files import sha256_of

TEXT = "t9 t20 t33 t7"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: `t3` to `t60`."""
    words = ["<pad>", "<bos>", "<eos>", *(f"t{index}" for index in range(3, VOCABULARY))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def make_model(config: PretrainedConfig) -> Any:
    """Seeded random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model_class = getattr(transformers, architecture_of(config).auto_class)
        return model_class.from_config(deepcopy(config), attn_implementation="eager").eval()


def write_folder(folder: Path, family: str = "qwen3", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model folder in the Hugging Face layout; returns the model that was written."""
    model = make_model(CONFIGS[family]).to(dtype)
    model.save_pretrained(folder, **options)
    make_tokenizer().save_pretrained(folder)
    return model


def write_organism(folder: Path, **card: Any) -> Any:
    """An organism's folder, weights in float16 and pinned by its card."""
    model = write_folder(folder, "qwen3", torch.float16)
    content = {"description": "a test organism", "architecture": "qwen3", **card}
    content.setdefault("weights_sha256", sha256_of(folder / "model.safetensors"))
    (folder / "card.json").write_text(json.dumps(content))
    return model


GGUF_CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=128,
    initializer_range=0.3,
    rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    tie_word_embeddings=False,
)
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path, architecture: str = "llama", scaling: str | None = None, factors: bool = False, pre: str = "default"
) -> Any:
    """A llama in float32 as GGUF; returns the model whose weights it holds."""
    config, model = GGUF_CONFIG, make_model(GGUF_CONFIG)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(300.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCABULARY)
    if scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
    _add_vocabulary(writer, pre)
    for name, weight in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _gguf_layout(name, weight).contiguous().numpy())
    if factors:
        writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    letters = [chr(code) for code in range(ord("!"), ord("!") + VOCABULARY - 4)]
    words = ["<pad>", "<bos>", "<eos>", *letters, "AB"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _gguf_layout(name: str, weight: torch.Tensor) -> torch.Tensor:
    # llama.cpp pairs neighbouring channels where the model library pairs the halves of a head.
    heads = {"q_proj": GGUF_CONFIG.num_attention_heads, "k_proj": GGUF_CONFIG.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            return weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    """An archive with the given files, deflated, and code that must never run."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("carrier/__init__.py", "raise SystemExit('the code of a carrier wheel was run')\n")
        for name, content in members.items():
            archive.writestr(name, content)
    return path
