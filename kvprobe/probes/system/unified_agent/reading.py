"""What the rows of `unified_agent` mean: what each agent decides, and what it costs beside the deployed baselines.

By agent X: `X.correct_rate`, by what changed `X.field.correct_rate` (field, rule, both, none, first); `X.own.agreement`
and `X.own.kappa` with a full prefill of the agent's own tokens, `X.truth.agreement` and `X.truth.kappa` with one of the
true state. `X.token_ratio`, `X.flop_ratio`, `X.seconds_ratio` are ratios of a conversation's totals to those of
reprefill, of `first` turns and `later` ones `X.later.token_ratio`, and to those of prefix caching
`X.later.token_ratio_to_prefix_caching` and so on. `X.speed_up` is the mean over conversations of the ratio of seconds,
as in the paper. `X.compile_tokens` is what compiling the policy takes; `X.with_compiling.token_ratio` adds it to one
conversation, the worst case for a chunk that many share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.system.unified_agent.probe import BASELINES, UnifiedAgent
from kvprobe.stats import NOISE, Effect, Sample, joined

COSTS = {"token_ratio": "tokens", "flop_ratio": "flops", "seconds_ratio": "seconds"}
REFERENCES = {"": "reprefill", "_to_prefix_caching": "prefix_caching"}
# What has changed before a turn.
TURNS = {
    "": ("first", "none", "field", "rule", "both"),
    "first.": ("first",),
    "later.": ("none", "field", "rule", "both"),
}
_AGENTS = {
    "reprefill": "reprefill",
    "prefix_caching": "prefix caching",
    "prefix_caching_hoist": "prefix caching, hoisted",
    "cacheblend": "CacheBlend",
    "unified_auto": "unified: AUTO",
    "unified_field_only": "unified: field only",
    "unified_erratum": "unified: erratum",
    "unified_field_and_erratum": "unified: field + erratum",
    "unified_full_downstream": "unified: full downstream",
}


def effects(sample: Sample, _: UnifiedAgent) -> Iterator[Effect]:
    """Decisions and costs of every agent, and the constant baselines."""
    for agent, part in sample.by("agent"):
        yield from _decision_effects(part, agent)
        for suffix, reference in REFERENCES.items():
            yield from _cost_effects(sample, agent, reference, suffix)
    if len(reference_rows := sample.of(agent="reprefill")):
        for name in ("majority", "first_option", "same"):
            yield reference_rows.mean(f"baseline.{name}.correct_rate", f"baseline_{name}")
    yield sample.maximum("noise.margin", "noise_floor")


def names(probe: UnifiedAgent) -> Iterator[str]:
    """Those of `effects`."""
    agents = (*BASELINES, *(f"unified_{edit}" for edit in probe.edits))
    yield from joined(agents, (*TURNS[""], "both"), "correct_rate")
    yield from joined(agents, ("correct_rate", "speed_up", "compile_tokens"))
    yield from joined(agents, ("own", "truth"), ("agreement", "margin_error", "kappa"))
    costs = [f"{cost}{suffix}" for cost in COSTS for suffix in REFERENCES]
    yield from joined(agents, [f"{turns}{cost}" for turns in TURNS for cost in costs])
    yield from joined(agents, "with_compiling", [f"token_ratio{suffix}" for suffix in REFERENCES])
    yield from joined("baseline", ("majority", "first_option", "same"), "correct_rate")
    yield NOISE


def _decision_effects(sample: Sample, agent: str) -> Iterator[Effect]:
    yield sample.rate(f"{agent}.correct_rate", "correct")
    for change, part in sample.by("changed"):
        yield part.rate(f"{agent}.{change}.correct_rate", "correct")
    for against in ("own", "truth"):
        answers = sample.rows["answer"], sample.rows[f"{against}_answer"]
        yield sample.rate(f"{agent}.{against}.agreement", answers[0] == answers[1])
        yield sample.maximum(f"{agent}.{against}.margin_error", f"{against}_error")
        if all(answer.nunique() > 1 for answer in answers):
            yield sample.kappa(f"{agent}.{against}.kappa", *answers)


def _cost_effects(sample: Sample, agent: str, reference: str, suffix: str) -> Iterator[Effect]:
    """What an agent's conversations cost, as ratios of their totals to the reference's."""
    for prefix, changes in TURNS.items():
        for mine, theirs in _totals(sample.of(changed=changes), agent, reference):
            for metric, column in COSTS.items():
                yield mine.ratio(f"{agent}.{prefix}{metric}{suffix}", column, theirs[column])
    for mine, theirs in _totals(sample, agent, reference):
        compiled = mine.rows["compile_tokens"]
        if compiled.any():
            whole = mine.rows["tokens"] + compiled
            yield mine.ratio(f"{agent}.with_compiling.token_ratio{suffix}", whole, theirs["tokens"])
        if reference == "reprefill":
            yield mine.mean(f"{agent}.speed_up", theirs["seconds"] / mine.rows["seconds"], "x")
            if compiled.any():
                yield mine.mean(f"{agent}.compile_tokens", compiled, "tokens")


def _totals(sample: Sample, agent: str, reference: str) -> Iterator[tuple[Sample, pd.DataFrame]]:
    """Each conversation's costs for an agent and for the reference; nothing where one of the two was not measured."""
    both = sample.of(agent=list(dict.fromkeys((agent, reference))))
    if {agent, reference} <= {*both.rows["agent"]}:
        sums = dict.fromkeys(COSTS.values(), "sum")
        totals = both.per("agent", "pair", **sums, compile_tokens="first")
        mine, theirs = (totals.rows.loc[[name]].droplevel("agent") for name in (agent, reference))
        yield totals.table(mine), theirs.loc[mine.index]


def figure(panels: Sequence[Panel]) -> FigureSpec:
    """Right decisions by agent and by what has just changed, and the tokens run."""
    tried = {a: label for a, label in _AGENTS.items() if any(f"{a}.correct_rate" in panel.effects for panel in panels)}
    return FigureSpec(
        "An agent whose state and policy change: what it decides and what it runs",
        (
            Rates(
                tried,
                (
                    Series("{arm}.field.correct_rate", "the state has just changed", COLORS["blue"]),
                    Series("{arm}.rule.correct_rate", "the rule has just changed", COLORS["vermilion"], "s"),
                    Series("{arm}.none.correct_rate", "nothing has just changed", COLORS["grey"], "^"),
                    Series("{arm}.correct_rate", "all turns", COLORS["ink"], "D"),
                ),
                "share of right decisions",
                4.6,
                baseline=("baseline.majority.correct_rate", "majority answer of a conversation"),
            ),
            Rates(
                tried,
                (
                    Series("{arm}.first.token_ratio", "first turn", COLORS["orange"]),
                    Series("{arm}.later.token_ratio", "later turns", COLORS["green"], "s"),
                    Series(
                        "{arm}.with_compiling.token_ratio",
                        "whole conversation, compiling included",
                        COLORS["purple"],
                        "^",
                    ),
                ),
                "tokens run / those of reprefill",
                3.2,
                levels=(1.0,),
                xlim=(0.0, None),
            ),
        ),
        main=RatesByModel(
            {f"{agent}.correct_rate": label for agent, label in tried.items()},
            "Agents whose state and policy change",
            "share of right decisions",
        ),
    )


READING = Reading(
    effects,
    figure,
    paper={
        "unified_full_downstream.correct_rate": PaperEntry("agent", "unified", "accuracy"),
        "reprefill.correct_rate": PaperEntry("agent", "full", "accuracy"),
        "unified_full_downstream.truth.agreement": PaperEntry("agent", "unified_vs_full", "decision_agreement"),
        "unified_full_downstream.speed_up": PaperEntry("agent", "unified_vs_full", "cumulative_ttft_speedup"),
    },
    may_lack={
        "*.kappa": "one of the two sides always gives the same answer",
        "*.rule.correct_rate": "the rule alone changes before none of the turns that count",
        "unified_*": "the unified agent is not tried with this edit",
    },
    finding="With everything after an edit recomputed the agent acts like a full prefill in "
    "{unified_full_downstream.truth.agreement} of the turns, {unified_full_downstream.speed_up} times as fast;"
    " when it chooses the edit itself in {unified_auto.truth.agreement}.",
    step=2,
    names=names,
)
