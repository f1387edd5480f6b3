"""Tiny tokenizers of every kind, trained in the test on a few lines: their tokens reach over line ends and blanks."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvprobe.tasks.tokenizer import build_tokenizer

LINES = [
    "Record\n\nloan status: low\n\nparcel origin: foreign.\nPolicy:\n\n1. If the loan is high, then inspect.\n",
    "You work at the customs desk.\nloan status: high or low\n\n\nparcel origin: domestic or foreign\n\nAnswer: inspect",
    "Update: the loan is low.\nUpdate: origin domestic.\nTask: decide by the origin.\nAnswer: release 赤 青 答え：赤",
]
CONTROL = ("<|start|>", "<|end|>")
THOUGHT = ("<think>", "</think>")
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SIZE = 420


def _words(prepend: str) -> pre_tokenizers.PreTokenizer:
    """Blanks begin words; line breaks are tokens of their own, as sentencepiece models have them."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n+"), "isolated"), pre_tokenizers.Metaspace(prepend_scheme=prepend)]
    )


def _core(kind: str) -> tuple[Tokenizer, trainers.Trainer]:
    bytes_known = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<unk>", "<s>", "</s>", *CONTROL]
    if kind.startswith("byte-level"):
        core = Tokenizer(models.BPE())
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "byte-level GPT-2")]
        if kind != "byte-level GPT-2":
            steps.insert(0, pre_tokenizers.Split(Regex(_SPLIT), "isolated"))
            core.normalizer = normalizers.NFC()
        core.pre_tokenizer, core.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
        core.post_processor = processors.ByteLevel(trim_offsets=True)
        return core, trainers.BpeTrainer(
            vocab_size=SIZE, special_tokens=specials[1:], initial_alphabet=bytes_known, show_progress=False
        )
    if kind == "unigram":
        core = Tokenizer(models.Unigram())
        core.normalizer = normalizers.NFKC()
        core.pre_tokenizer, core.decoder = _words("always"), decoders.Metaspace()
        return core, trainers.UnigramTrainer(
            vocab_size=200, special_tokens=specials, unk_token="<unk>", show_progress=False
        )
    if kind == "word piece":
        core = Tokenizer(models.WordPiece(unk_token="<unk>"))
        core.normalizer, core.pre_tokenizer = (
            normalizers.BertNormalizer(lowercase=True),
            pre_tokenizers.BertPreTokenizer(),
        )
        core.decoder = decoders.WordPiece()
        return core, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = _words("first"), decoders.Metaspace()
    return core, trainers.BpeTrainer(vocab_size=300, special_tokens=specials, show_progress=False)


KINDS = ("byte-level", "byte-level GPT-2", "unigram", "metaspace", "whole text", "word piece", "words")
"""The last reads words as the organisms do."""


@cache
def tiny_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a kind; all but byte-level ones put `<s>` before a text."""
    if kind == "words":
        return build_tokenizer()
    core, trainer = _core(kind)
    core.train_from_iterator(LINES * 3, trainer)
    if kind == "whole text":
        # As in converted sentencepiece models: the whole text is one word.
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        core.pre_tokenizer = None
    if not kind.startswith("byte-level"):
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    told = {} if kind.startswith("byte-level") else {"unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", additional_special_tokens=list(CONTROL), **told
    )
    tokenizer.add_tokens(list(THOUGHT))
    return tokenizer
