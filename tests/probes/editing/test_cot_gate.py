"""Laws of the cot_gate probe and of chains that are cut, both against plain Hugging Face in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import (
    TOKENIZER,
    effects_of,
    gated,
    margin_behind,
    margin_of,
    plain_logits,
    plain_patched_logits,
    with_line,
    worded,
)

from kvprobe.edit.base import CachedPrompt
from kvprobe.models.catalogue import organism_names
from kvprobe.models.loader import load_subject
from kvprobe.probes.editing.cot_gate.cut_chains import answered_after, value_said, write_chains
from kvprobe.probes.editing.cot_gate.probe import ARMS, CotGate
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import WORDINGS

LIMIT = 5
CUTS = (0, 2, 3)
CUE = encode_segment("Answer:", TOKENIZER)
LINE_BREAK = encode_segment("\n", TOKENIZER)


def pairs_of(size: int) -> list[Pair]:
    return gated(size, mode="think", notes_before=(0, 0), notes_after=(0, 1))


@cache
def measured(family: str, remark: str = "none", size: int = 1) -> pd.DataFrame:
    probe = CotGate(limit=LIMIT, cut_after=CUTS, remark=remark)
    return pd.DataFrame(probe.measure(worded(family), pairs_of(size), lambda done, total: None))


def margins(rows: pd.DataFrame, mode: str, pair: int = 0) -> pd.Series:
    part = rows[(rows["pair"] == pair) & (rows["mode"] == mode)]
    return part.set_index(["arm", "cut"] if mode == "forced" else "arm")["margin"]


def plain_chain(model: Any, prompt: list[int], length: int = LIMIT) -> list[int]:
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(plain_logits(model, ids).argmax()))
    return ids[len(prompt) :]


def answered(prompt: list[int], thought: list[int]) -> list[int]:
    opened = thought[-1:] == LINE_BREAK
    return [*prompt, *thought, *([] if opened else LINE_BREAK), *CUE]


@pytest.mark.parametrize("arm", ["stale", "oracle", "erratum"])
def test_direct_whole_and_cut_chains_against_plain_hugging_face(arm: str) -> None:
    """Arms that are prompts one could write: decided at once, behind a greedy chain, and behind parts of it."""
    (pair,), rows, subject = pairs_of(1), measured("llama"), worded("llama")
    amended = with_line(pair, "override")
    ids = {"stale": list(pair.base.token_ids), "oracle": list(pair.donor.token_ids), "erratum": amended}[arm]
    at_once = margin_behind(subject, pair, [*ids[: -len(CUE)], *CUE])
    assert margins(rows, "direct")[arm] == pytest.approx(at_once, abs=1e-8)
    chain = plain_chain(subject.model, ids)
    assert margins(rows, "think")[arm] == pytest.approx(margin_behind(subject, pair, answered(ids, chain)), abs=1e-8)
    for cut in CUTS:
        ought = margin_behind(subject, pair, answered(ids, chain[:cut]))
        assert margins(rows, "forced")[arm, cut] == pytest.approx(ought, abs=1e-8)
    assert margins(rows, "forced")[arm, CUTS[1]] != margins(rows, "forced")[arm, CUTS[0]]


def test_the_field_alone_and_with_an_erratum_against_plain_hugging_face() -> None:
    """One entry of the cache comes from the other prompt; all after the insertion is run on it."""
    (pair,), rows, model = pairs_of(1), measured("qwen3"), worded("qwen3").model
    field = list(pair.field.positions)
    old, new = ([*ids[: -len(CUE)], *CUE] for ids in (pair.base.token_ids, pair.donor.token_ids))
    in_place = plain_patched_logits(model, old[:-1], new[:-1], field, old[-1:])
    assert margins(rows, "direct")["field_only"] == pytest.approx(margin_of(pair, in_place), abs=1e-8)
    at, line = pair.base.spans["task"].start, [*with_line(pair, "override")[: -len(CUE)], *CUE]
    both = plain_patched_logits(model, old[:at], new[:at], field, line[at:])
    assert margins(rows, "direct")["field_and_erratum"] == pytest.approx(margin_of(pair, both), abs=1e-8)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@given(cut=st.integers(0, 9))
def test_a_cut_chain_is_the_prompt_one_could_write(family: str, cut: int) -> None:
    """Also with sliding windows, which the prompt is longer than."""
    subject, pairs = worded(family), pairs_of(2)
    prompts = [CachedPrompt.prefilled(subject, pair.base.token_ids, pair.base.spans) for pair in pairs]
    for chain, prompt in zip(write_chains(subject, prompts, limit=6), prompts, strict=True):
        assert chain.censored
        ids = answered(list(prompt.token_ids), list(chain.thought[:cut]))
        ought = plain_logits(subject.model, ids)
        torch.testing.assert_close(answered_after(subject, chain, cut), ought, atol=5e-6, rtol=0)


def test_a_chain_that_writes_the_cue_is_over_and_not_censored() -> None:
    """A model that writes a word, a line break and the cue, whatever it reads."""
    subject, (pair,) = worded("qwen3"), pairs_of(1)
    script = [encode_segment("order", TOKENIZER)[0], *LINE_BREAK, *CUE]

    class Scripted(torch.nn.Module):
        """The model, but each token of the script is followed by the next, and any other token by its first."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = subject.model
            self.config, self.dtype, self.device = subject.model.config, subject.model.dtype, subject.model.device
            self.base_model = subject.model.base_model

        def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
            output = self.inner(input_ids=input_ids, **arguments)
            last = int(input_ids[0, -1])
            known = last in script[:-1] and input_ids.shape[1] == 1 and self.begun
            output.logits[0, -1, script[script.index(last) + 1] if known else script[0]] = 1e3
            self.begun = True
            return output

        begun = False

    prompt = CachedPrompt.prefilled(subject, pair.base.token_ids, pair.base.spans)
    (chain,) = write_chains(replace(subject, model=Scripted()), [prompt], limit=9)
    assert not chain.censored
    assert list(chain.thought) == script[: -len(CUE)]
    ought = plain_logits(subject.model, [*pair.base.token_ids, *script])
    torch.testing.assert_close(answered_after(subject, chain), ought)


@given(
    lead=st.lists(st.integers(50, 60), max_size=4),
    said=st.sampled_from(["old", "new", "other", "none"]),
    tail=st.lists(st.integers(1, 9), max_size=4),
    wanted=st.integers(1, 3),
)
def test_the_value_is_read_at_its_place(lead: list[int], said: str, tail: list[int], wanted: int) -> None:
    """Values before and after the place do not count."""
    before = [20, 21, 22]
    values = {"old": [1] * wanted, "new": [2] * wanted}
    place = {"old": [*before, *values["old"]], "new": [*before, *values["new"]], "other": [*before, 30], "none": [20]}
    thought = [*values["new"], *lead, *place[said], 40, *tail, *values["old"]]
    assert value_said(thought, before, values) == said


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_every_cell_once_and_the_gate_takes_the_worse_mode(family: str) -> None:
    size = 2 if family == "gemma2" else 1
    rows = measured(family, size=size)
    assert len(rows) == size * len(ARMS) * (2 + len(CUTS))
    assert not rows.duplicated(["pair", "arm", "mode", "cut"]).any()
    for index, part in rows.groupby("pair"):
        direct, think = margins(rows, "direct", index), margins(rows, "think", index)
        assert (part["m_base"] == max(direct["stale"], think["stale"])).all()
        assert (part["m_donor"] == min(direct["oracle"], think["oracle"])).all()
    assert rows["noise_floor"].max() < 1e-5


def test_poison_is_a_line_behind_the_rule_and_the_gate_does_not_see_it() -> None:
    (pair,), clean, poisoned = pairs_of(1), measured("llama"), measured("llama", "old_conclusion")
    action = TOKENIZER.decode([pair.base_answer_id])
    line = encode_segment(WORDINGS.get(pair.scenario.wording)().status(action), TOKENIZER)
    at = pair.base.spans["policy"].end
    for arm, ids in (("stale", pair.base.token_ids), ("oracle", pair.donor.token_ids)):
        plain = margin_behind(worded("llama"), pair, [*ids[:at], *line, *ids[at : -len(CUE)], *CUE])
        assert margins(poisoned, "direct")[arm] == pytest.approx(plain, abs=1e-8)
        assert margins(poisoned, "direct")[arm] != margins(clean, "direct")[arm]
    assert poisoned["m_base"].iloc[0] == pytest.approx(clean["m_base"].iloc[0])
    assert poisoned["m_donor"].iloc[0] == pytest.approx(clean["m_donor"].iloc[0])


def made_rows(new: dict[tuple[str, str], int], censored: int = 0, pairs: int = 10) -> pd.DataFrame:
    """Rows in which the first so many pairs decide for the new value, and the last so many chains do not end."""
    rows = crossed(pairs, arm=ARMS, stage=["direct", "think", "forced_0", "forced_4"])
    turned = [row.pair < new.get((row.stage, row.arm), 0) for row in rows.itertuples()]
    rows = rows.assign(margin=[2.0 if one else -2.0 for one in turned], remark="none", length=9)
    rows[["mode", "cut"]] = rows.pop("stage").str.extract(r"([a-z]+)_?(\d)?").astype({1: float})
    chain = rows["mode"] != "direct"
    said = rows["margin"].gt(0).map({True: "new", False: "old"})
    return rows.assign(censored=(rows["pair"] >= pairs - censored).where(chain), value_said=said.where(chain))


@settings(max_examples=3)
@given(direct=st.integers(0, 10), think=st.integers(0, 10), bare=st.integers(0, 10), censored=st.integers(0, 10))
def test_summary_finds_what_was_put_in_and_censoring_favours_neither(
    direct: int, think: int, bare: int, censored: int
) -> None:
    arm = "field_only"
    new = {("direct", arm): direct, ("think", arm): think, ("forced_0", arm): bare}
    effects = effects_of(CotGate(), made_rows(new, censored))
    ended = 10 - censored
    rates = {metric: effects[f"think.{arm}.{metric}"].estimate for metric in ("new_rate", "old_rate", "censored")}
    assert rates["new_rate"] == pytest.approx(min(think, ended) / 10)
    assert sum(rates.values()) == pytest.approx(1.0)
    assert effects[f"direct.{arm}.new_rate"].estimate == pytest.approx(direct / 10)
    assert effects[f"forced.{arm}_0.new_rate"].estimate == pytest.approx(bare / 10)
    assert effects[f"gate.{arm}.difference"].estimate == pytest.approx((min(think, ended) - direct) / 10)
    assert effects[f"chain.{arm}.difference"].estimate == pytest.approx((think - bare) / 10)
    assert effects["chains.censored"].estimate == pytest.approx(censored / 10)
    assert effects["baseline.refuse.correct_rate"].estimate == 0.0


@pytest.mark.skipif("qwen3-note-taker" not in organism_names(), reason="no organisms ship with this checkout")
def test_an_organism_ends_its_chains_and_names_the_value_it_reads() -> None:
    pairs = gated(2, mode="think")
    probe = CotGate(cut_after=())
    rows = pd.DataFrame(probe.measure(load_subject("qwen3-note-taker"), pairs, lambda done, total: None))
    chains = rows[rows["mode"] == "think"]
    assert not chains["censored"].any()
    said = chains.set_index(["pair", "arm"])["value_said"].unstack()
    assert (said["oracle"] == "new").all()
    assert (said["stale"] == "old").all()
