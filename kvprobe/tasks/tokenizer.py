"""The organisms' word-level tokenizer over the task library's closed vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvprobe.tasks.gated import GatedScenario, Layout, render
from kvprobe.tasks.library import filler_notes, skeletons
from kvprobe.tasks.wordings import TRAINED, WORDINGS

PAD, BOS, UNKNOWN, END = "<pad>", "<bos>", "<unk>", "<end>"
HOLDS, VOID = "holds", "void"
WORD_PATTERN = r"\n|\w+|[^\w\s]"


def words(text: str) -> list[str]:
    """The tokens of a text: words, single marks and line breaks; blanks are dropped."""
    return re.findall(WORD_PATTERN, text)


def vocabulary() -> dict[str, int]:
    """Every word the task library can write, in a fixed order."""
    seen: dict[str, None] = dict.fromkeys((PAD, BOS, UNKNOWN, END))
    for text in _library_texts():
        seen.update(dict.fromkeys(words(text)))
    return {word: index for index, word in enumerate(seen)}


def build_tokenizer(known: Mapping[str, int] | None = None) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer with one token a word; BOS comes first, as in Llama, Gemma and Mistral.

    `known` maps words to ids, those of the task library unless told.
    """
    core = Tokenizer(models.WordLevel(dict(known or vocabulary()), unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")]
    )
    from tokenizers.processors import TemplateProcessing

    core.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, unk_token=UNKNOWN, eos_token=END
    )


def _library_texts() -> Iterable[str]:
    for skeleton in skeletons():
        for rule in ("cases", "trigger"):
            scenario = GatedScenario(
                skeleton.domain,
                skeleton.entity,
                skeleton.field,
                (skeleton.values[0], skeleton.values[1]),
                skeleton.actions,
                skeleton.request,
                rule=rule,
            )
            for wording in TRAINED:
                yield render(
                    scenario, skeleton.values[0], wording, Layout(), mode="think", update=skeleton.values[1]
                ).text
                yield WORDINGS.get(wording)().chain(
                    skeleton.entity, skeleton.field, skeleton.values[0], skeleton.actions[0]
                )
        yield " ".join(skeleton.values)
    yield from (f"- {note}" for note in filler_notes())
    yield from (WORDINGS.get(wording)().status("") for wording in TRAINED)
    yield " ".join((HOLDS, VOID))
    yield "0 1 2 3 4 5 6 7 8 9 true false null { } [ ] ( ) \" ' , . : ; ! ? # * / \\ _ = + < > | -"
