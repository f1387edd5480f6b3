"""The organisms' language, masks and training loop."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvprobe.errors import UnknownNameError
from kvprobe.models.catalogue import organism_names
from kvprobe.models.loader import load_subject
from kvprobe.organisms.batches import attention_masks, collate
from kvprobe.organisms.documents import encode
from kvprobe.organisms.families import FAMILIES, organism_config
from kvprobe.organisms.initial import initialize
from kvprobe.organisms.language import Language
from kvprobe.organisms.pool import draw_scenario
from kvprobe.organisms.recipes import INGREDIENTS, KINDS, recipe
from kvprobe.organisms.sampler import Sampler
from kvprobe.organisms.training import Recipe, Stage, train
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.tokenizer import HOLDS, VOID, build_tokenizer, vocabulary

WORDS = {index: word for word, index in vocabulary().items()}
RICH = Language(
    think=0.4,
    update=0.4,
    trigger=0.4,
    policy_first=0.4,
    other_fields=2,
    notes=2,
    marked=0.4,
    stated=0.3,
    stated_policy_first=0.3,
    edited_think=0.5,
    edited_direct=0.5,
)


def documents(language: Language, count: int = 400, seed: int = 0):  # type: ignore[no-untyped-def]
    sampler = Sampler(language, seed)
    return [sampler.document() for _ in range(count)]


def test_the_fast_encoder_agrees_with_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    for document in documents(RICH, 50):
        text = " ".join(WORDS[token] for token in document.ids[1:-1])
        assert tokenizer.encode(text, add_special_tokens=False) == encode(text)


@pytest.mark.parametrize("name", [name for name in organism_names() if "picture" not in name])
def test_words_keep_the_numbers_that_organisms_know_them_by(name: str) -> None:
    """A word, a wording or a skeleton more must not number the others anew."""
    assert load_subject(name).tokenizer.get_vocab() == vocabulary()


def test_held_out_combinations_never_occur() -> None:
    """No training rule sends a held-out skeleton's value to one of its actions, nor shows it as its field's value."""
    held_out = {(value, action) for s in skeletons("held_out") for value in s.values for action in s.actions}
    fields = {(s.field, value) for s in skeletons("held_out") for value in s.values}
    rng = random.Random(1)
    for _ in range(3000):
        scenario = draw_scenario(rng, RICH)
        assert not {(value, action) for value in scenario.values for action in scenario.actions} & held_out
        assert not {(scenario.field, value) for value in scenario.values} & fields


def test_answers_are_balanced_in_place_and_in_word() -> None:
    for two_fields in (0.0, 1.0):
        offered_first = stated_first = 0
        drawn = documents(Language(think=0.0, update=0.0, two_fields=two_fields), 1000)
        for document in drawn:
            text = [WORDS[token] for token in document.ids]
            answer, rival = WORDS[document.answer], WORDS[document.rival]
            task = len(text) - text[::-1].index("Task")
            offered_first += text[text.index("with", task) + 1] == answer
            stated_first += text.index(answer) < text.index(rival)
        assert 430 < offered_first < 570
        assert 430 < stated_first < 570


def test_an_edited_document_hides_each_value_from_the_right_tokens() -> None:
    document = next(d for d in documents(RICH) if d.new >= 0)
    batch = collate([document])
    mask = attention_masks(batch, organism_config("qwen3", len(vocabulary())))
    assert isinstance(mask, torch.Tensor)
    seen = mask[0, 0] == 0
    early = list(range(document.new + 1, document.decision))
    late = list(range(document.decision, len(document.ids)))
    assert seen[early, document.old].all()
    assert not seen[early, document.new].any()
    assert seen[late, document.new].all()
    assert not seen[late, document.old].any()
    assert batch.positions[0, document.old] == batch.positions[0, document.new]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edited_document_is_the_cache_after_an_in_place_edit(family: str) -> None:
    """The training forward equals a plain Hugging Face decision on a cache whose field was overwritten."""
    document = next(d for d in documents(replace(RICH, edited_direct=1.0, think=0.0)) if d.new >= 0)
    torch.manual_seed(0)
    config = organism_config(family, len(vocabulary()))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    batch = collate([document])
    with torch.no_grad():
        trained = model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=attention_masks(batch, config),
            use_cache=False,
        ).logits[0, document.decision]
        prompt = list(document.ids[: document.decision + 1])
        old = [token for index, token in enumerate(prompt) if index != document.new]
        new = [token for index, token in enumerate(prompt) if index != document.old]
        # Given explicitly: a cache made by the model would keep only window - 1 tokens on sliding layers.
        cache, donor = DynamicCache(), DynamicCache()
        model(torch.tensor([old[:-1]]), past_key_values=cache, use_cache=True)
        model(torch.tensor([new[:-1]]), past_key_values=donor, use_cache=True)
        for layer, other in zip(cache.layers, donor.layers, strict=True):
            layer.keys[:, :, document.old] = other.keys[:, :, document.old]
            layer.values[:, :, document.old] = other.values[:, :, document.old]
        edited = model(torch.tensor([old[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1]
    torch.testing.assert_close(trained, edited, rtol=1e-4, atol=1e-5)


def test_an_exercise_can_be_solved_from_what_stands_before_it() -> None:
    """Each asked token followed the same word before: at once in lists, by a case of the rule in the others."""
    for kind in ("repeat", "recall", "lookup"):
        for document in documents(Language(**{kind: 1.0}), 60):
            assert document.kind == kind
            asked = [i for i, weight in enumerate(document.weights) if weight == 1.0]
            assert document.ids[asked[-1]] == document.answer != document.rival
            for place in asked:
                assert document.ids[place] in document.ids[:place]
                if kind == "repeat":
                    pairs = list(zip(document.ids[: place - 1], document.ids[1:place], strict=True))
                    assert (document.ids[place - 1], document.ids[place]) in pairs


@pytest.mark.parametrize("family", FAMILIES)
def test_first_weights_find_what_followed_a_word_before(family: str) -> None:
    """Induction: a repeated word attends to where it stood two and three tokens back (the look-back of layer 0)."""
    torch.manual_seed(0)
    config = organism_config(family, len(vocabulary()))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    initialize(model)
    order = torch.randperm(400)[:24] + 100
    with torch.no_grad():
        attention = model(torch.cat([order, order])[None], output_attentions=True).attentions[1][0, 0]
    found = [float(attention[24 + place, [place + 2, place + 3]].sum()) for place in range(20)]
    # Two of 44 keys at the middle place have 0.05 by chance.
    assert sum(found) / len(found) > 0.15


def test_the_decision_of_a_chain_is_its_action() -> None:
    for document in documents(Language(think=1.0)):
        assert document.ids[document.answer_index] == document.answer == document.ids[-2]
        assert document.answer_index < len(document.ids) - 2
        assert document.weights[document.answer_index] == 1.0


def test_errata_differ_in_what_they_mean() -> None:
    """The presence of an erratum alone must not tell the answer."""
    said = {"new": 0, "other": 0}
    for document in documents(Language(think=0.0, update=1.0, update_controls=0.6), 600):
        text = [WORDS[token] for token in document.ids]
        value = text[text.index("now") + 1]
        policy = text[: text.index("Update")]
        said["new" if value in policy and policy.count(value) == 1 else "other"] += 1
    assert min(said.values()) > 150


def test_every_family_and_kind_has_a_recipe_and_unknown_ones_are_refused() -> None:
    for family in FAMILIES:
        for kind in KINDS:
            assert recipe(family, kind).family == family
    with pytest.raises(UnknownNameError, match="gemma2"):
        recipe("gemma")
    with pytest.raises(UnknownNameError, match="reader"):
        recipe("qwen3", "raeder")


def test_what_is_left_out_of_a_recipe_occurs_in_none_of_its_documents() -> None:
    def seen(without: tuple[str, ...]) -> dict[str, bool]:
        drawn = [d for stage in recipe("qwen3", without=without).stages for d in documents(stage.language, 200)]
        words = {WORDS[token] for document in drawn for token in document.ids}
        remarks = {HOLDS, VOID} & words
        return {
            "remarks": bool(remarks) or any(d.kind.endswith("_annotated") for d in drawn),
            "errata": "Update" in words,
            "edited-chains": any(d.new >= 0 for d in drawn),
            "first-weights": recipe("qwen3", without=without).composed,
        }

    assert all(seen(()).values())
    for name in INGREDIENTS:
        assert [ingredient for ingredient, there in seen((name,)).items() if not there] == [name]
    with pytest.raises(UnknownNameError, match="remarks"):
        recipe("qwen3", without=("remark",))


def test_training_goes_on_from_its_checkpoint_to_the_same_weights(tmp_path: Path) -> None:
    stages = tuple(Stage(Language(drill=1.0, words=8), steps=200, minimum_steps=1000) for _ in range(2))
    plan = Recipe("qwen3", (replace(stages[0], steps=3), replace(stages[1], steps=4)), tokens_per_step=200, cool_down=2)
    whole, record = train(plan)
    checkpoint = tmp_path / "training.partial"
    train(replace(plan, stages=plan.stages[:1], cool_down=0), checkpoint=checkpoint)
    resumed, again = train(plan, checkpoint=checkpoint)
    assert record["step"] == again["step"] == 7
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(value, resumed.state_dict()[name], rtol=0, atol=0, msg=name)
