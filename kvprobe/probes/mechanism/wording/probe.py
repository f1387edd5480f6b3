"""Wording of an erratum on a stale context (protocol 1.6 as critique ED9 asks): what in the line does the work?

One line is put before the task block, and the task is run after it. Its wording is crossed with what the context
before it holds:

    stale        the old value and the notes made of it: the cache is reused up to the line
    in_place     the new value at the field itself, stale notes: an in-place edit
    recomputed   the new value throughout: another prefill (the paper's ablation has this context alone)

    none                nothing
    restatement         the new value, plainly said
    update              the same with a tag: "Update: ... is now ..."
    override            and with the clause that it replaces the earlier one
    voids_conclusions   earlier answers are not to be used; the new value is not said
    neutral             as many tokens as `override`, about nothing
    old_value           `override` with the old value

In think mode a chain is generated greedily from each of these caches up to the answer cue, and the decision is read
behind it; a chain that does not get there in time is given the cue and counted (`chains_finished`).

Effects: `direct.stale.override.new_rate` (share of decisions for the new value) and `.recovery`; contrasts between two
cells within pairs, `direct.tag.difference`, in shares of decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
from pydantic import Field
from torch import Tensor

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.operations import overwrite
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.chains import Chain, finish_chains
from kvprobe.probes.kit.measures import pair_noise
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, mean, proportion, ratio_of_sums
from kvprobe.tasks.extra_lines import NAMES, Subjects, line_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

CONTEXTS = ("stale", "in_place", "recomputed")
_Cell = tuple[str, str]
CONTRASTS: Mapping[str, tuple[_Cell, _Cell]] = {
    "value": (("stale", "restatement"), ("stale", "none")),
    "tag": (("stale", "update"), ("stale", "restatement")),
    "override_clause": (("stale", "override"), ("stale", "update")),
    "any_line": (("stale", "neutral"), ("stale", "none")),
    "value_against_form": (("stale", "override"), ("stale", "old_value")),
    "field_alone": (("in_place", "none"), ("stale", "none")),
    "field_under_void": (("in_place", "voids_conclusions"), ("stale", "voids_conclusions")),
    "field_under_override": (("in_place", "override"), ("stale", "override")),
    "void_on_new": (("recomputed", "voids_conclusions"), ("recomputed", "none")),
}
"""The first cell less the second."""
_PAPER_LINES = {
    "none": "none",
    "restatement": "value_only",
    "update": "update_tag",
    "override": "override_full",
    "voids_conclusions": "conclusion",
}


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
    """What one line before the task must say to turn a stale context: wording x what the context holds."""

    name: ClassVar[str] = "wording"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        **{
            f"think.recomputed.{ours}.new_rate": PaperEntry("wording_ablation", theirs, "P_safe")
            for ours, theirs in _PAPER_LINES.items()
        },
        "direct.stale.override.new_rate": PaperEntry("erratum_phrasing", "override_full", "P_correct"),
        "direct.stale.restatement.new_rate": PaperEntry("erratum_phrasing", "bare_value", "P_correct"),
        "direct.stale.old_value.new_rate": PaperEntry("erratum_content_control", "err_wrong", "P_correct"),
        "direct.stale.none.new_rate": PaperEntry("erratum_content_control", "stale", "P_correct"),
        "think.stale.override.new_rate": PaperEntry("cot_gate_diverse", "cot/erratum", "P_correct"),
    }

    class Parameters(base.Parameters):
        """Only chains of thought have any."""

        chain_limit: int = Field(default=40, ge=1, description="most tokens of a chain of thought")
        batch_size: int = Field(default=32, ge=1, description="chains of thought generated together")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each line on each context.

        Raises:
            ConfigError: a pair does not say its entity, field, values and mode, or has no task block.
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
        chains = finish_chains(
            subject,
            [(run.token_ids, run.cache) for run in thinking],
            limit=self.parameters.chain_limit,
            batch_size=self.parameters.batch_size,
        )
        rows += [_row(run, pairs[run.pair], chain) for run, chain in zip(thinking, chains, strict=True)]
        return _with_unedited(rows, floors)

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Share of decisions for the new value and recovery in every cell, contrasts, chains, noise."""
        effects: list[Effect] = []
        for mode, part in rows.groupby("mode", sort=False):
            effects += _mode_effects(str(mode), part, statistics)
        effects.append(pair_noise(rows, statistics))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Share of decisions for the new value by line and context; one column for each model."""
        from kvprobe.probes.mechanism.wording.figure import draw_wording

        return draw_wording(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """The same on the stale context, all models."""
        from kvprobe.probes.mechanism.wording.figure import wording_panel

        wording_panel(axes, panels)


def _run_pair(subject: Subject, index: int, pair: Pair) -> tuple[list[_Run], float]:
    """All cells of a pair, and how far two ways of computing the same margin lie apart, in logits."""
    tokens, insertion = _line_ids(subject, index, pair), pair.base.spans["task"].start
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


def _line_ids(subject: Subject, index: int, pair: Pair) -> dict[str, list[int]]:
    attributes = pair.scenario.attributes
    missing = [key for key in ("entity", "field", "old", "new", "mode") if key not in attributes]
    if missing or "task" not in pair.base.spans:
        lacking = missing[0] if missing else "task"
        raise ConfigError(f"The probe wording needs pairs that say their {lacking}: use task gated_decision.")
    said = Subjects(pair.scenario.wording, *(attributes[key] for key in ("entity", "field", "old", "new")))
    return {name: line_tokens(name, said, subject.tokenizer, start=index) for name in NAMES}


def _mode(pair: Pair) -> str:
    return pair.scenario.attributes["mode"]


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


def _with_unedited(rows: Sequence[Measurement], floors: Sequence[float]) -> list[Measurement]:
    """The rows with what the inclusion gate reads: decisions without a line, under the old and the new value."""
    unedited = {(row["pair"], row["context"]): row for row in rows if row["line"] == "none"}

    def common(pair: int) -> Measurement:
        stale, new = unedited[pair, "stale"], unedited[pair, "recomputed"]
        return {
            "m_base": stale["margin"],
            "m_donor": new["margin"],
            "mass_base": stale["mass"],
            "mass_donor": new["mass"],
            "noise_floor": floors[pair],
        }

    return [{**row, **common(row["pair"])} for row in rows]


def _mode_effects(mode: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    floor = float(rows["noise_floor"].max())
    for (context, line), part in rows.groupby(["context", "line"], sort=False):
        name, clusters = f"{mode}.{context}.{line}", part[statistics.cluster]
        yield proportion(f"{name}.new_rate", part["new"].astype(float), clusters=clusters, statistics=statistics)
        yield ratio_of_sums(
            f"{name}.recovery",
            part["margin"] - part["m_base"],
            part["m_donor"] - part["m_base"],
            clusters=clusters,
            statistics=statistics,
            noise_floor=floor,
        )
    decided = rows.assign(new=rows["new"].astype(float)).pivot(index="pair", columns=["context", "line"], values="new")
    clusters = rows.groupby("pair")[statistics.cluster].first().loc[decided.index]
    for name, (first, second) in CONTRASTS.items():
        difference = decided[first] - decided[second]
        yield mean(f"{mode}.{name}.difference", difference, clusters=clusters, statistics=statistics)
    if mode == "think":
        finished, clusters = rows["chain_finished"].astype(float), rows[statistics.cluster]
        yield proportion(f"{mode}.chains_finished", finished, clusters=clusters, statistics=statistics)
