"""Chain-of-thought gate (protocol 5.3, critique ED6): does a field-only edit suffice once the model thinks?

The same scenarios and values are decided by the same model directly and after a chain of thought, from caches that are
edited by

    oracle              full reprefill
    stale               nothing
    field_only          the field in place
    erratum             a line before the task
    field_and_erratum   both

Each chain is also cut after k of its tokens and answered there (`forced`), which varies the length of the chain without
changing the prompt, which asks for one: k = 0 has that prompt and no chain. Chains are greedy. One that does not end by
itself within the limit is censored. Which value a chain names is read from its tokens after the session line's own
words.

With `remark: old_conclusion` the context is poisoned: a line after the rule already states the action that is right
under the old value (protocol 0.8 J). The gate then reads the prompts without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvprobe.edit.base import EDIT_METHODS, CachedPrompt, Edited, FieldEdit
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.editing.cot_gate.cut_chains import WrittenChain, answered_after, value_said, write_chains
from kvprobe.probes.kit.edit_cases import baseline_columns, edit_case, reading_row
from kvprobe.probes.kit.pair_lines import piece_of, subjects_of, with_pieces
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.wordings import WORDINGS, Wording

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

ARMS: Mapping[str, str] = {
    "oracle": "full_reprefill",
    "stale": "stale",
    "field_only": "field_only",
    "erratum": "erratum",
    "field_and_erratum": "field_and_erratum",
}
"""Edit method of each arm."""


@PROBES.register("cot_gate")
class CotGate(Probe):
    """Whether an in-place edit is followed directly, after a chain of thought, and after k tokens of one."""

    limit: int = Field(40, ge=1, description="most tokens of a chain; a longer one is censored")
    cut_after: tuple[int, ...] = Field((0, 2, 4, 8, 12, 16), description="chain tokens before a forced answer")
    remark: Literal["none", "old_conclusion"] = Field(
        "none", description="a line after the rule that states the old conclusion poisons the context"
    )

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair and arm one direct row, one after a whole chain, and one for each forced answer.

        Raises:
            ConfigError: a pair does not ask for a chain of thought, or does not say its entity, field and values.
        """
        rows: list[Measurement] = []
        baselines = baseline_columns(pairs, subject.tokenizer)
        for index, pair in enumerate(pairs):
            poisoned = self.remark == "old_conclusion"
            found = self._decide(subject, _poisoned(subject, pair) if poisoned else pair, tuple(ARMS))
            clean = self._decide(subject, pair, ("oracle", "stale")) if poisoned else found
            common = {"pair": index, "remark": self.remark, **_gate_columns(clean), **baselines[index]}
            rows += [{**row, **common} for row in found]
            progress(index + 1, len(pairs))
        return rows

    def _decide(self, subject: Subject, pair: Pair, arms: Sequence[str]) -> list[Measurement]:
        """Rows of one pair: every arm decided directly, after its chain, and after parts of it."""
        answers = pair.base_answer_id, pair.donor_answer_id
        rows: list[Measurement] = []
        case = edit_case(subject, _asked_directly(subject, pair))
        for arm, edited in _edited(subject, case.stale, case.edit, arms).items():
            reading = case.read(subject, edited)
            floor = {"noise_floor": case.noise_floor}
            rows.append({"arm": arm, "mode": "direct", "cut": None, **floor, **reading_row(reading)})
        stale = CachedPrompt.prefilled(subject, pair.base.token_ids, pair.base.spans)
        thinking = _edited(subject, stale, case.edit, arms)
        chains = write_chains(subject, [edited.prompt for edited in thinking.values()], limit=self.limit)
        for arm, chain in zip(thinking, chains, strict=True):
            said = _chain_columns(subject, pair, chain)
            reading = read(answered_after(subject, chain), *answers)
            rows.append({"arm": arm, "mode": "think", "cut": None, **said, **reading_row(reading)})
            for tokens in self.cut_after:
                # A chain that is over before the cut is answered where it ended, by the answer it already has.
                early = tokens >= len(chain.thought)
                here = reading if early else read(answered_after(subject, chain, tokens), *answers)
                rows.append({"arm": arm, "mode": "forced", "cut": tokens, **said, **reading_row(here)})
        return rows


def _asked_directly(subject: Subject, pair: Pair) -> Pair:
    """The same pair with the answer cue in place of the one that asks for a chain."""
    if pair.scenario.attributes.get("mode") != "think" or "cue" not in pair.base.spans:
        raise ConfigError("The probe cot_gate needs prompts that ask for a chain of thought: set mode: think.")
    cue = encode_segment(Wording.answer_cue, subject.tokenizer)
    return with_pieces(pair, "cue", [("cue", cue)], subject.tokenizer)


def _poisoned(subject: Subject, pair: Pair) -> Pair:
    """The pair with a line behind the rule that states the action which is right under the old value."""
    action = subject.tokenizer.decode([pair.base_answer_id]).strip()
    line = encode_segment(WORDINGS.get(pair.scenario.wording)().status(action), subject.tokenizer)
    return with_pieces(pair, "policy", [piece_of(pair, "policy"), ("remark", line)], subject.tokenizer)


def _edited(subject: Subject, stale: CachedPrompt, edit: FieldEdit, arms: Sequence[str]) -> dict[str, Edited]:
    return {arm: EDIT_METHODS.get(ARMS[arm])().apply(subject, stale, edit) for arm in arms}


def _chain_columns(subject: Subject, pair: Pair, chain: WrittenChain) -> Measurement:
    said = subjects_of(pair)
    before, _ = WORDINGS.get(said.wording)().record(said.entity, said.field)
    span = pair.field
    values = {
        "old": pair.base.token_ids[span.start : span.end],
        "new": pair.donor.token_ids[span.start : span.end],
    }
    return {
        "censored": chain.censored,
        "length": len(chain.thought),
        "value_said": value_said(chain.thought, encode_segment(f" {before}", subject.tokenizer), values),
    }


def _gate_columns(rows: Sequence[Measurement]) -> Measurement:
    """A pair counts when it is decided rightly in both modes, so the worse of the two margins is the pair's."""
    whole = [row for row in rows if row["mode"] in ("direct", "think")]
    stale, new = ([row for row in whole if row["arm"] == arm] for arm in ("stale", "oracle"))
    return {
        "m_base": max(row["margin"] for row in stale),
        "m_donor": min(row["margin"] for row in new),
        "mass_base": min(row["mass"] for row in stale),
        "mass_donor": min(row["mass"] for row in new),
        "noise_floor": max(row.get("noise_floor", 0.0) for row in rows),
    }
