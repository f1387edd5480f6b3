"""Laws of the erratum_phrasing probe, against plain Hugging Face in float64, and of its lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rows import crossed
from worded_models import (
    TOKENIZER,
    effects_of,
    gated,
    margin_of,
    measured,
    plain_logits,
    plain_patched_logits,
    worded,
)

from kvprobe.probes.editing.erratum_phrasing.probe import LINES, METHODS, NO_LINE, ErratumPhrasing
from kvprobe.tasks.erratum_lines import PHRASINGS, phrasing_tokens
from kvprobe.tasks.extra_lines import Subjects
from kvprobe.tasks.library import skeletons
from kvprobe.tasks.wordings import TRAINED

(PAIR,) = gated()


def test_against_plain_hugging_face() -> None:
    """Each line before the task on the old prompt's cache, and on the same with one entry of the new prompt's."""
    pair, subject = PAIR, worded("qwen3")
    found = measured(ErratumPhrasing(), subject, [pair]).set_index(["method", "line"])
    attributes = pair.scenario.attributes
    said = Subjects(pair.scenario.wording, *(attributes[key] for key in ("entity", "field", "old", "new")))
    at, old, new = pair.base.spans["task"].start, pair.base.token_ids, pair.donor.token_ids
    for line in PHRASINGS:
        after = [*phrasing_tokens(line, said, TOKENIZER), *old[at:]]
        logits = {
            "erratum": plain_logits(subject.model, [*old[:at], *after]),
            "field_and_erratum": plain_patched_logits(
                subject.model, old[:at], new[:at], list(pair.field.positions), after
            ),
        }
        for method, plain in logits.items():
            assert found["margin"][method, line] == pytest.approx(margin_of(pair, plain), abs=1e-8), (method, line)
        assert found["tokens"]["erratum", line] == len(after) - 1
        assert found["tokens"]["field_and_erratum", line] == len(after) - 1 + len(pair.field)
        assert found["cost"]["erratum", line] == pytest.approx((len(after) - 1) / (at + len(after)))


def test_without_a_line_nothing_or_the_field_alone_is_run() -> None:
    rows = measured(ErratumPhrasing(), worded("mistral"), [PAIR])
    none = rows[rows["line"] == NO_LINE].set_index("method")
    assert none["tokens"].to_dict() == {"erratum": 0, "field_and_erratum": 1}
    assert none["margin"]["erratum"] == pytest.approx(none["m_base"]["erratum"], abs=1e-5)
    assert len(rows) == len(METHODS) * len(LINES)


@pytest.mark.parametrize("wording", TRAINED)
@pytest.mark.parametrize("line", PHRASINGS)
def test_lines_are_words_the_organisms_know_and_name_the_new_value_once(wording: str, line: str) -> None:
    for skeleton in skeletons("held_out"):
        said = Subjects(wording, skeleton.entity, skeleton.field, *skeleton.values[:2])
        ids = phrasing_tokens(line, said, TOKENIZER)
        assert TOKENIZER.unk_token_id not in ids
        old, new = TOKENIZER.convert_tokens_to_ids(list(skeleton.values[:2]))
        assert ids.count(new) == 1
        assert old not in ids
        assert TOKENIZER.decode(ids[-1:]) == "\n"


@given(line=st.integers(0, 10), both=st.integers(0, 10))
def test_summary_finds_what_was_put_in(line: int, both: int) -> None:
    """Rows in which the first so many pairs decide for the new value."""
    turned = {("erratum", "update"): line, ("field_and_erratum", "update"): both}
    rows = crossed(method=METHODS, line=LINES).assign(tokens=7, cost=0.1)
    correct = [row.pair < turned.get((row.method, row.line), 0) for row in rows.itertuples()]
    effects = effects_of(ErratumPhrasing(), rows.assign(correct=correct))
    assert effects["erratum.update.new_rate"].estimate == pytest.approx(line / 10)
    assert effects["in_place.update.difference"].estimate == pytest.approx((both - line) / 10)
    assert effects["erratum.update.tokens"].estimate == 7
    assert effects["erratum.override.new_rate"].estimate == 0.0
