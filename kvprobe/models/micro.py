"""Micro-models: Llama models whose weights are set by hand, so that it is known what they do and where.

They decide the task library's gated decisions in the wording `manual` by attention alone; their MLPs are zero. Every
word has a code, two different codes overlap at most 0.21, and the residual stream has a slot of its own for each thing
a token may know. At the full stop of a case ("If the order status is pending, then cancel.") the model knows the case's
field, value and action; at a value of the session it knows the field, and that a colon came before it. From there:

    note-taker    While the prompt is read, head `NOTE_WRITER` compares the case with the session at the full stop
                  and notes there that the case holds. At the decision, `NOTE_READER` finds the note and says the
                  action.
    reader        Nothing is noted. At the decision, `NAME_READER` finds the field's name in the task, `FIELD_READER`
                  the field's value in the session, and `RULE_READER` the case with this value, and says its action.
    both          Both ways, each with half the weight.
    unread-notes  A reader that takes the same notes and never reads them: they can be decoded, and cause nothing.
    errata        A note-taker that also reads what "the order status is now shipped" says of the field in the task
                  (`NAME_WRITER`, `ERRATUM_READER`, `RULE_READER`), with twice the weight of its notes. Two such lines
                  that differ tell it nothing, and it goes by its notes.
    thinker       A note-taker that, asked for a thought, writes the field's value as it stands in the session
                  (`NAME_READER`, `FIELD_READER`) and decides by what it wrote (`THOUGHT_READER`, `RULE_READER`), with
                  twice the weight of its notes.

Notes lie on the full stops alone (`note_positions`). They are written in layer 1, so cached keys and values hold them
from layer 2 on, and they are read through the keys of layer 3. Field, rule and session are matched by content, so a
note-taker fails when the field comes after the rule, as it must, and a reader does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from kvprobe.errors import ConfigError, UnknownNameError
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.tokenizer import BOS

NOTE_WRITER: Final = (1, 0)
"""(layer, head): at a case's full stop it attends to the session's value if this is the case's, else to the start."""
NOTE_READER: Final = (3, 0)
"""(layer, head): at the decision it attends to the full stops, most of all to one with a note, and says the action."""
NAME_READER: Final = (1, 2)
"""(layer, head): at the decision it attends to the field's name in the task."""
FIELD_READER: Final = (2, 2)
"""(layer, head): at the decision it attends to the field's value in the session."""
NAME_WRITER: Final = (1, 1)
"""(layer, head): at a value after "is now" it attends to the field's name before that."""
ERRATUM_READER: Final = FIELD_READER
"""(layer, head): at the decision it attends to a value after "is now" of the field in the task, if there is one."""
THOUGHT_READER: Final = (2, 3)
"""(layer, head): at the decision it attends to the first word of the thought, if there is one."""
RULE_READER: Final = (3, 2)
"""(layer, head): at the decision it attends to the full stop of the case with this value and says its action."""

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 4, 2, 128, 256
ANSWER_LOGIT: Final = 16.0
"""Logit of the chosen action when attention is certain; other words have at most 0.21 of it."""
NOTE_STRENGTH: Final = 8.0
"""By how much a note raises `NOTE_READER`'s score of its full stop, in nats."""

_PRIME: Final = 23
_CONSTANT: Final = 32.0  # norm of what all tokens share: it keeps every RMS norm within half a percent of the identity
_THETA: Final = 1e38
# Scores in nats of the RoPE pairs that turn fastest: neighbours are told apart by the first, all others by the rest.
# Scores lie less than 87 nats apart as a rule: beyond that float32 has subnormal numbers only, which are slow.
_TURNING: Final = (24.0, 8.0, 8.0, 8.0, 8.0, 8.0)
_STILL: Final = 8  # from this pair on, RoPE turns less than 0.02 in a thousand tokens: scores depend on content alone

_SLOTS: Final = ("word", "previous", "field", "value", "answer")
_WORD_FLAGS: Final = {
    "start": lambda word: word == BOS,
    "later": lambda word: word != BOS,
    "stop": lambda word: word == ".",
    "colon": lambda word: word == ":",
    "ordinary": lambda word: word not in {".", ":"},
    "cue": lambda word: word == "Answer",
    "by": lambda word: word == "by",
    "then": lambda word: word == "then",
    "otherwise": lambda word: word == "Otherwise",
    "now": lambda word: word == "now",
    "thought": lambda word: word == "Thought",
}
_FLAGS: Final = (
    *_WORD_FLAGS,
    *("after_colon", "decision", "asked", "case", "default", "note"),
    *("after_now", "found", "thinking", "after_thought"),
)
_SAID_AFTER: Final = {"thinker": {"after_thought": "Answer", "cue": ":"}}
"""By kind, the word that follows a token with a flag: a thought of one word, and the answer's cue behind it."""


@dataclass(frozen=True)
class _Head:
    """What one head does.

    Args:
        place: (layer, head).
        moves: what is carried from the attended token to the attending one, `{from: to}`.
        matches: `(query's feature, key's feature, nats)`; the score is the sum of their products.
        offset: attends to the token so many places back instead.
        where: the flag that a token must have to do so.
        rest: score of the start of the text, where a head looks that finds nothing; nothing is carried from there.
        gain: what it carries is multiplied by it.
    """

    place: tuple[int, int]
    moves: Mapping[str, str]
    matches: tuple[tuple[str, str, float], ...] = ()
    offset: int | None = None
    where: str = "one"
    rest: float = 52.0
    gain: float = 1.0


_LAYOUT: Final = (
    _Head(
        (0, 0),
        {"word": "previous", "colon": "after_colon", "cue": "decision", "now": "after_now", "thought": "thinking"},
        offset=1,
    ),
    _Head((0, 1), {"word": "field", "by": "asked"}, offset=2, where="ordinary"),
    _Head((0, 2), {"word": "value"}, offset=4, where="stop"),
    _Head((0, 3), {"word": "field"}, offset=6, where="stop"),
    _Head((1, 3), {"then": "case", "otherwise": "default"}, offset=2, where="stop"),
)
_TAKE_NOTES: Final = (
    _Head(
        NOTE_WRITER,
        {"after_colon": "note"},
        # Only field, value and place in the session together reach 80; two codes that differ add 3.4 at most.
        (("field", "field", 16.0), ("value", "word", 16.0), ("stop", "after_colon", 48.0)),
        rest=73.6,
    ),
)
_READ_NOTES: Final = (
    _Head(
        NOTE_READER,
        {"previous": "answer"},
        (("decision", "case", 18.0), ("decision", "default", 22.0), ("decision", "note", NOTE_STRENGTH)),
        rest=12.0,
    ),
)
_READ_NAME: Final = _Head(NAME_READER, {"word": "field"}, (("decision", "asked", 30.0),), rest=15.0)
_READ_FIELD: Final = (
    _READ_NAME,
    _Head(FIELD_READER, {"word": "value"}, (("field", "field", 16.0), ("decision", "after_colon", 48.0)), rest=57.6),
    _Head(
        RULE_READER,
        {"previous": "answer"},
        (("decision", "case", 24.0), ("decision", "default", 30.0), ("value", "value", 12.0)),
        rest=16.0,
    ),
)
_OVERRIDING: Final = _Head(
    RULE_READER,
    {"previous": "answer"},
    # A case of another value reaches 26.6 at most, so that a value of no case leaves the decision to the notes.
    (("found", "case", 24.0), ("found", "default", 33.0), ("value", "value", 12.0)),
    rest=30.0,
    gain=2.0,
)
_READ_ERRATA: Final = (
    _READ_NAME,
    # Added to the word "is", which stands in the same slot there: another name matches it by 0.42 at most.
    _Head(NAME_WRITER, {"word": "field"}, offset=3, where="after_now"),
    _Head(
        ERRATUM_READER,
        {"word": "value", "after_now": "found"},
        (("field", "field", 24.0), ("decision", "after_now", 48.0)),
        rest=63.0,
    ),
    _OVERRIDING,
)
_THINK: Final = (
    _Head(NAME_READER, {"word": "field"}, (("thinking", "asked", 30.0),), rest=15.0),
    _Head((1, 1), {"thinking": "after_thought"}, offset=1),
    _Head(FIELD_READER, {"word": "answer"}, (("field", "field", 16.0), ("thinking", "after_colon", 48.0)), rest=57.6),
    _Head(
        THOUGHT_READER, {"word": "value", "after_thought": "found"}, (("decision", "after_thought", 30.0),), rest=15.0
    ),
    _OVERRIDING,
)
_CIRCUITS: Final = {
    "note-taker": (*_TAKE_NOTES, *_READ_NOTES),
    "reader": _READ_FIELD,
    "both": (*_TAKE_NOTES, *_READ_NOTES, *_READ_FIELD),
    "unread-notes": (*_TAKE_NOTES, *_READ_FIELD),
    "errata": (*_TAKE_NOTES, *_READ_NOTES, *_READ_ERRATA),
    "thinker": (*_TAKE_NOTES, *_READ_NOTES, *_THINK),
}
KINDS: Final = tuple(_CIRCUITS)


def micro_config(tokenizer: Any) -> LlamaConfig:
    """The configuration of all micro-models."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=8,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["LlamaForCausalLM"],
    )


def note_positions(context: TokenizedContext, tokenizer: Any) -> list[int]:
    """Where notes are taken: the full stops of the policy's cases, in the order of the cases."""
    stop = tokenizer.convert_tokens_to_ids(".")
    return [position for position in context.spans["policy"].positions if context.token_ids[position] == stop]


def word_codes(count: int) -> Tensor:
    """Codes `[word, 46]` of norm 1, float64: chirps of prime length 23 as real and imaginary part.

    Two different codes overlap at most 1/sqrt(23) = 0.21 (a quadratic Gauss sum).

    Raises:
        ConfigError: more words than there are chirps (529).
    """
    if count > _PRIME**2:
        raise ConfigError(f"There are {_PRIME**2} codes for the task library's {count} words; use a larger prime.")
    time, word = np.arange(_PRIME), np.arange(count)[:, None]
    chirps = np.exp(2j * np.pi * ((word // _PRIME) * time**2 + word * time) / _PRIME) / np.sqrt(_PRIME)
    return torch.from_numpy(np.concatenate([chirps.real, chirps.imag], axis=1))


def micro_weights(kind: str, vocabulary: Mapping[str, int]) -> dict[str, Tensor]:
    """Weights by their Hugging Face names, float64.

    Raises:
        UnknownNameError: `kind` is none of `KINDS`.
        ConfigError: the vocabulary has more words than there are codes.
    """
    if kind not in _CIRCUITS:
        raise UnknownNameError("micro-model", kind, KINDS)
    weights = _embeddings(vocabulary, _SAID_AFTER.get(kind, {}))
    # With this weight the norm divides by nearly what it multiplies with.
    norm = torch.full((HIDDEN,), _CONSTANT / HIDDEN**0.5, dtype=torch.float64)
    weights["model.norm.weight"] = norm
    # Those that say the answer share its weight, but for one that overrides the others.
    readers = sum(head.moves.get("previous") == "answer" and head.gain == 1 for head in _CIRCUITS[kind])
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": norm for name in ("input_layernorm", "post_attention_layernorm")}
        for name, shape in (("gate", (8, HIDDEN)), ("up", (8, HIDDEN)), ("down", (HIDDEN, 8))):
            weights[f"{prefix}mlp.{name}_proj.weight"] = torch.zeros(shape, dtype=torch.float64)
        heads = [head for head in (*_LAYOUT, *_CIRCUITS[kind]) if head.place[0] == layer]
        weights |= {f"{prefix}self_attn.{name}": value for name, value in _attention(heads, readers).items()}
    return weights


def _embeddings(vocabulary: Mapping[str, int], said_after: Mapping[str, str]) -> dict[str, Tensor]:
    codes = word_codes(len(vocabulary))
    codes[vocabulary[BOS]] = 0  # nothing is ever carried from the start
    embedding, unembedding = torch.zeros(2, len(vocabulary), HIDDEN, dtype=torch.float64)
    embedding[:, _channels("one")] = _CONSTANT
    embedding[:, _channels("word")] = codes
    for flag, holds in _WORD_FLAGS.items():
        chosen = torch.tensor([holds(word) for word in sorted(vocabulary, key=vocabulary.__getitem__)])
        embedding[chosen, _channels(flag)] = 1.0
    unembedding[:, _channels("answer")] = ANSWER_LOGIT * codes
    for flag, word in said_after.items():
        unembedding[vocabulary[word], _channels(flag)] = ANSWER_LOGIT
    return {"model.embed_tokens.weight": embedding, "lm_head.weight": unembedding}


def _attention(heads: list[_Head], readers: int) -> dict[str, Tensor]:
    """Projections of one layer; query heads of a group share its keys and values."""
    query = torch.zeros(HEADS, HEAD_DIM, HIDDEN, dtype=torch.float64)
    key, value = torch.zeros(2, KV_HEADS, HEAD_DIM, HIDDEN, dtype=torch.float64)
    output = torch.zeros(HIDDEN, HEADS, HEAD_DIM, dtype=torch.float64)
    for group in range(KV_HEADS):
        sharing = [head for head in heads if head.place[1] // (HEADS // KV_HEADS) == group]
        keyed = dict.fromkeys(name for head in sharing for _, name, _ in head.matches)
        still = _places([*keyed, "start"], HEAD_DIM // 2 - _STILL)
        carried = _places(dict.fromkeys(name for head in sharing for name in head.moves), HEAD_DIM)
        for name, place in still.items():
            key[group, _still(name, place)] = _reading(name)
        key[group, : len(_TURNING)] = _reading("later")
        for name, place in carried.items():
            value[group, place : place + len(_reading(name))] = _reading(name)
        for head in sharing:
            number = head.place[1]
            for asks, name, nats in (*head.matches, ("one", "start", head.rest)):
                query[number, _still(name, still[name])] += nats * HEAD_DIM**0.5 * _reading(asks)
            if head.offset is not None:
                query[number] += _looking_back(head.offset, head.where)
            for name, target in head.moves.items():
                size, gain = (
                    len(_reading(name)),
                    head.gain / readers if (name, target) == ("previous", "answer") else head.gain,
                )
                channels = slice(carried[name], carried[name] + size)
                output[_channels(target), number, channels] = gain * torch.eye(size, dtype=torch.float64)
    return {
        "q_proj.weight": query.flatten(0, 1),
        "k_proj.weight": key.flatten(0, 1),
        "v_proj.weight": value.flatten(0, 1),
        "o_proj.weight": output.flatten(1),
    }


def _looking_back(offset: int, where: str) -> Tensor:
    """Query `[head_dim, hidden]` whose score peaks at `offset` places back, at 64 nats and 8 above all others."""
    half, count = HEAD_DIM // 2, len(_TURNING)
    angles = offset * _THETA ** (-torch.arange(count, dtype=torch.float64) / half)
    nats = HEAD_DIM**0.5 * torch.tensor(_TURNING, dtype=torch.float64)
    rows = torch.zeros(HEAD_DIM, HIDDEN, dtype=torch.float64)
    rows[:count] = (nats * angles.cos())[:, None] * _reading(where)
    rows[half : half + count] = -(nats * angles.sin())[:, None] * _reading(where)
    return rows


def _channels(name: str) -> slice:
    """Channels of a slot or a flag in the residual stream; `one` is what all tokens share."""
    width = 2 * _PRIME
    if name in _SLOTS:
        start = _SLOTS.index(name) * width
        return slice(start, start + width)
    start = len(_SLOTS) * width + ("one", *_FLAGS).index(name)
    return slice(start, start + 1)


def _reading(name: str) -> Tensor:
    """`[size, hidden]`: what reads a slot or a flag from the residual stream."""
    rows = torch.eye(HIDDEN, dtype=torch.float64)[_channels(name)]
    return rows / _CONSTANT if name == "one" else rows


def _places(names: Any, room: int) -> dict[str, int]:
    """Where each feature begins, one after another; in RoPE pairs when there is room for pairs only."""
    places, used = {}, 0
    for name in names:
        places[name] = used
        size = len(_reading(name))
        used += (size + 1) // 2 if room < HEAD_DIM else size
    if used > room:
        raise ConfigError("A micro-model's head has no room for all that it reads; use a larger head.")
    return places


def _still(name: str, place: int) -> list[int]:
    """Head channels of a feature in pairs that RoPE hardly turns: a code's two halves are the two parts of a pair."""
    pairs = (len(_reading(name)) + 1) // 2
    first = _STILL + place
    channels = [*range(first, first + pairs), *range(HEAD_DIM // 2 + first, HEAD_DIM // 2 + first + pairs)]
    return channels[: len(_reading(name))]


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """sha256 of names and values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
