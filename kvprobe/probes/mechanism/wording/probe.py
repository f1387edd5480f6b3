"""Wording of an erratum on a stale context (protocol 1.6, critique ED9): which part of the line turns the decision?

One line is inserted before the task block, and the task is run after it. Every wording of the line is combined with
every state of the context before it:

    stale        the old value and the notes that follow from it: the cache is reused up to the line
    in_place     the new value at the field itself, the notes stale: an in-place edit
    recomputed   the new value throughout: a second prefill (the only context in the paper's ablation)

    none                nothing
    restatement         the new value, stated plainly
    update              the same with a tag: "Update: ... is now ..."
    override            the same with a clause that it replaces the earlier value
    voids_conclusions   earlier answers are not to be used; the new value is not mentioned
    neutral             as many tokens as `override`, about nothing
    old_value           `override` with the old value

In think mode a chain is generated greedily from each of these caches up to the answer cue, and the decision is read
after it. A chain that does not reach the cue in time has it appended and is counted (`chains_finished`).

Effects: `direct.stale.override.new_rate` (share of decisions for the new value) and `.recovery`; contrasts between two
cells within pairs, such as `direct.tag.difference`, in shares of decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import overwrite
from kvprobe.engine.readout import read
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.chains import Chain, finish_chains
from kvprobe.probes.kit.pair_lines import subjects_of
from kvprobe.probes.kit.rule_positions import segment
from kvprobe.tasks.extra_lines import NAMES, line_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

CONTEXTS = ("stale", "in_place", "recomputed")


@dataclass(frozen=True, eq=False)
class _Run:
    """One cell of one pair: the cache of the whole prompt with its line, and the logits `[vocab]` at its end."""

    pair: int
    context: str
    line: str
    line_length: int
    token_ids: tuple[int, ...]
    cache: KVCache
    logits: Tensor


@PROBES.register("wording")
class WordingProbe(Probe):
    """Which part of a line before the task turns a stale context: every wording on every state of the context."""

    chain_limit: int = Field(default=40, ge=1, description="most tokens of a chain of thought")
    batch_size: int = Field(default=32, ge=1, description="chains of thought generated together")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """One row per pair, line and context.

        Raises:
            ConfigError: a pair does not state its entity, field and values.
            UnsupportedError: a prompt has no task block.
        """
        rows: list[Measurement] = []
        thinking: list[_Run] = []
        floors = []
        for index, pair in enumerate(pairs):
            runs, floor = _run_pair(subject, index, pair)
            floors.append(floor)
            if _mode(pair) == "think":
                thinking += runs
            else:
                rows += [_row(run, pair, None) for run in runs]
            progress(index + 1, len(pairs))
        prompts = [(run.token_ids, run.cache) for run in thinking]
        chains = finish_chains(subject, prompts, limit=self.chain_limit, batch_size=self.batch_size)
        rows += [_row(run, pairs[run.pair], chain) for run, chain in zip(thinking, chains, strict=True)]
        return _with_gate_columns(rows, floors)


def _run_pair(subject: Subject, index: int, pair: Pair) -> tuple[list[_Run], float]:
    """All cells of a pair, and how far two ways of computing the same margin lie apart, in logits."""
    said, insertion = subjects_of(pair), segment(pair, "task").start
    tokens = {name: line_tokens(name, said, subject.tokenizer, start=index) for name in NAMES}
    old, new = (prefill(subject, prompt.token_ids) for prompt in (pair.base, pair.donor))
    edited, _ = overwrite(old.cache, pair.field, new.cache)
    before = {
        context: cache.take(slice(0, insertion))
        for context, cache in zip(CONTEXTS, (old.cache, edited, new.cache), strict=True)
    }
    runs = []
    for line, ids in tokens.items():
        after = (*ids, *pair.base.token_ids[insertion:])
        for context, cache in before.items():
            prompt = pair.donor if context == "recomputed" else pair.base
            result = forward(subject, after, cache)
            whole = (*prompt.token_ids[:insertion], *after)
            runs.append(_Run(index, context, line, len(ids), whole, result.cache, result.logits))
    whole_pass = {"stale": old.logits, "recomputed": new.logits}
    floor = max(
        abs(_margin(run.logits, pair) - _margin(whole_pass[run.context], pair))
        for run in runs
        if run.line == "none" and run.context in whole_pass
    )
    return runs, floor


def _mode(pair: Pair) -> str:
    return pair.scenario.attributes.get("mode", "direct")


def _margin(logits: Tensor, pair: Pair) -> float:
    return read(logits, pair.base_answer_id, pair.donor_answer_id).margin


def _row(run: _Run, pair: Pair, chain: Chain | None) -> Measurement:
    logits = run.logits if chain is None else chain.logits
    reading = read(logits, pair.base_answer_id, pair.donor_answer_id)
    return {
        "pair": run.pair,
        "mode": _mode(pair),
        "context": run.context,
        "line": run.line,
        "line_tokens": run.line_length,
        "margin": reading.margin,
        "probability_base": reading.probability_base,
        "probability_donor": reading.probability_donor,
        "mass": reading.mass,
        "new": reading.margin > 0,
        "chain_tokens": None if chain is None else chain.length,
        "chain_finished": None if chain is None else chain.finished,
    }


def _with_gate_columns(rows: Sequence[Measurement], floors: Sequence[float]) -> list[Measurement]:
    """The rows with the columns of the inclusion gate: decisions without a line, under the old and the new value."""
    unedited = {(row["pair"], row["context"]): row for row in rows if row["line"] == "none"}

    def common(pair: int) -> dict[str, float]:
        stale, new = unedited[pair, "stale"], unedited[pair, "recomputed"]
        return {
            "m_base": stale["margin"],
            "m_donor": new["margin"],
            "mass_base": stale["mass"],
            "mass_donor": new["mass"],
            "noise_floor": floors[pair],
        }

    return [{**row, **common(row["pair"])} for row in rows]
