"""The unified agent beside what one would deploy otherwise (protocol 8, critique UA1, UA2, G12, MM5).

Each pair of task `agent_turns` is a conversation: a policy, a state, and turns before which the state, the rule inside
the policy, both or nothing change. Every agent goes through it with its own cache and its own answers as history.

    reprefill               every turn from scratch
    prefix_caching          the longest common prefix is kept
    prefix_caching_hoist    the same, with the state stated right before the question
    cacheblend              the policy and what stands behind a change are blended
    unified_<method>        the policy is composed once, changes are edited by the method; `unified_auto`: by AUTO,
                            fitted on the first edits of other skeletons

A decision is compared with the rule, with a full prefill of the agent's own tokens (`own`: what its cache alone does),
and with a full prefill of the true state behind the agent's own history (`truth`). Costs are those of the whole turn,
edits included, as ratios of the totals of a conversation to those of reprefill and of prefix caching; the first turn
and later ones apart. Compiling the policy is not in them: `X.compile_tokens` says what it takes,
`X.with_compiling.token_ratio` adds it to one conversation, the worst case for a chunk that many share.

Effects, by agent: `X.correct_rate`, by what changed `X.field.correct_rate` (field, rule, both, none, first),
`X.own.agreement`, `X.own.kappa`, `X.truth.agreement`, `X.truth.kappa`; `X.token_ratio`, `X.flop_ratio`,
`X.seconds_ratio`, of `first` turns and `later` ones `X.later.token_ratio`, against prefix caching
`X.later.token_ratio_to_prefix_caching` and so on; `X.speed_up` (the mean over conversations of the ratio of seconds, as
in the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from kvprobe.agents.base import Agent, compiled_policy, make_agent
from kvprobe.agents.conversation import FIELD, RULE
from kvprobe.agents.unified import Unified
from kvprobe.composing.chunk import Chunk
from kvprobe.edit.auto import Auto
from kvprobe.engine.readout import read
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.agent_cases import AgentCase, agent_case, auto_cases, is_decided
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.probes.legacy import Probe
from kvprobe.stats import (
    Effect,
    StatisticsConfig,
    maximum,
    mean,
    mean_of_ratios,
    proportion,
    ratio_of_sums,
)
from kvprobe.stats.kappa import cohen_kappa
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

BASELINES = ("reprefill", "prefix_caching", "prefix_caching_hoist", "cacheblend")
AUTO = "auto"
COSTS = {"token_ratio": "tokens", "flop_ratio": "flops", "seconds_ratio": "seconds"}
REFERENCES = {"": "reprefill", "_to_prefix_caching": "prefix_caching"}


@PROBES.register("unified_agent")
class UnifiedAgent(Probe):
    """What agents decide and what they cost, turn by turn, with policies and states that really change."""

    name: ClassVar[str] = "unified_agent"
    # AUTO is fitted on some skeletons and used on others.
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        "unified_full_downstream.correct_rate": PaperEntry("agent", "unified", "accuracy"),
        "reprefill.correct_rate": PaperEntry("agent", "full", "accuracy"),
        "unified_full_downstream.truth.agreement": PaperEntry("agent", "unified_vs_full", "decision_agreement"),
        "unified_full_downstream.speed_up": PaperEntry("agent", "unified_vs_full", "cumulative_ttft_speedup"),
    }
    may_lack: ClassVar[Mapping[str, str]] = {
        "*.kappa": "one of the two sides always says the same",
        "*.rule.correct_rate": "before no turn that counts the rule alone changes",
        "unified_*": "the unified agent is not tried with this edit",
    }

    class Parameters(base.Parameters):
        """Which edits the unified agent is tried with."""

        edits: tuple[str, ...] = Field(
            (AUTO, "field_only", "erratum", "field_and_erratum", "full_downstream"),
            min_length=1,
            description="edit methods of the unified agent",
        )
        error_cost: float = Field(10.0, gt=0, description="what AUTO takes an error to cost, in full prefills")
        folds: int = Field(3, ge=2, description="of the cross-fitting over skeletons")
        seed: int = Field(0, ge=0, description="of the folds")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each agent and turn.

        Raises:
            ConfigError: a pair is not one of task agent_turns.
            SampleError: there are too few skeletons to fit AUTO on others.
        """
        cases = [agent_case(subject, pair) for pair in pairs]
        fitted = self._fitted(cases) if AUTO in self.parameters.edits else {}
        majority = _majority(cases)
        rows: list[Measurement] = []
        for index, case in enumerate(cases):
            policy = compiled_policy(subject, case.conversation)
            for name, start in self._agents(case, policy, fitted.get(index)).items():
                shared = {"pair": index, **case.common, "agent": name, "baseline_majority": majority[index]}
                rows += [{**shared, **row} for row in _agent_rows(case, start())]
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Decisions and costs of every agent, and the constant baselines."""
        effects: list[Effect] = []
        for agent, part in rows.groupby("agent", sort=False):
            effects += _decision_effects(str(agent), part, statistics)
            effects += _cost_effects(str(agent), rows, statistics)
        reference = rows[rows["agent"] == "reprefill"]
        for name in ("majority", "first_option", "same"):
            right, clusters = reference[f"baseline_{name}"], reference[statistics.cluster]
            effects.append(mean(f"baseline.{name}.correct_rate", right, clusters=clusters, statistics=statistics))
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Right decisions and tokens by agent; one column for each model."""
        from kvprobe.probes.system.unified_agent.figure import draw_unified_agent

        return draw_unified_agent(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Right decisions by agent, all models."""
        from kvprobe.probes.system.unified_agent.figure import unified_agent_panel

        unified_agent_panel(axes, panels)

    def _fitted(self, cases: Sequence[AgentCase]) -> dict[int, Auto]:
        """AUTO for each case, fitted on the edits of other skeletons."""
        learned = [auto_cases(case) for case in cases]
        skeletons = [case.pair.scenario.skeleton for case in cases]
        fitted: dict[int, Auto] = {}
        for selection, evaluation in folds(skeletons, self.parameters.folds, self.parameters.seed):
            # A model that decides nothing rightly is stopped by the gate, not here.
            chosen = [index for index in selection if is_decided(cases[index])] or list(selection)
            edits = [edit for index in chosen for edit in learned[index]]
            auto = Auto.fit(edits, error_cost=self.parameters.error_cost)
            fitted |= dict.fromkeys(evaluation, auto)
        return fitted

    def _agents(self, case: AgentCase, policy: Chunk, auto: Auto | None) -> dict[str, Callable[[], Agent]]:
        subject, conversation = case.subject, case.conversation
        agents: dict[str, Callable[[], Agent]] = {
            name: lambda name=name: make_agent(name, subject, conversation, policy)  # type: ignore[misc]
            for name in BASELINES
        }
        for edit in self.parameters.edits:
            if edit == AUTO:
                agents[f"unified_{AUTO}"] = lambda: Unified(subject, conversation, None, policy, method=auto)
            else:
                agents[f"unified_{edit}"] = lambda edit=edit: make_agent(  # type: ignore[misc]
                    "unified", subject, conversation, policy, edit=edit
                )
        return agents


def _agent_rows(case: AgentCase, agent: Agent) -> Iterator[Measurement]:
    conversation, pair = case.conversation, case.pair
    asked = pair.base.token_ids[pair.base.spans["task"].start :]
    first_option = int(asked.index(conversation.answers[1]) < asked.index(conversation.answers[0]))
    before = 0
    for number, changes in enumerate(conversation.changes):
        reply = agent.take_turn(changes)
        right = conversation.right(agent.state)
        truth = case.prefilled(conversation.prompt(agent.state, agent.answers[:-1]))
        own = case.prefilled(reply.token_ids)
        margin = read(reply.logits, *conversation.answers).margin
        yield {
            "turn": number,
            "changed": _label(number, changes),
            "method": "+".join(agent.chosen) if isinstance(agent, Unified) else "",
            "margin": margin,
            "answer": reply.answer,
            "correct": reply.answer == right,
            "own_answer": int(own.margin > 0),
            "own_error": abs(own.margin - margin),
            "truth_answer": int(truth.margin > 0),
            "truth_error": abs(truth.margin - margin),
            "truth_correct": int(truth.margin > 0) == right,
            "prompt_tokens": len(reply.token_ids),
            "tokens": reply.tokens,
            "flops": reply.receipt.flops,
            "seconds": reply.seconds,
            "compile_tokens": agent.compiling.tokens_appended if agent.uses_chunk else 0,
            "compile_seconds": agent.compiling.seconds if agent.uses_chunk else 0.0,
            "baseline_first_option": float(first_option == right),
            "baseline_same": float(before == right),
        }
        before = right


def _label(number: int, changes: Sequence[str]) -> str:
    if not number:
        return "first"
    return {0: "none", 2: "both"}.get(len(changes), changes[0] if changes else "none")


def _majority(cases: Sequence[AgentCase]) -> list[float]:
    """For each conversation how often its more frequent right answer is right."""
    shares = []
    for case in cases:
        state, right = {RULE: 0, FIELD: 0}, []
        for changes in case.conversation.changes:
            for name in changes:
                state[name] = 1 - state[name]
            right.append(case.conversation.right(state))
        shares.append(max(np.mean(right), 1 - np.mean(right)))
    return [float(share) for share in shares]


def _decision_effects(agent: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    clusters = rows[statistics.cluster]
    right = rows["correct"].astype(float)
    yield proportion(f"{agent}.correct_rate", right, clusters=clusters, statistics=statistics)
    for label, part in rows.groupby("changed", sort=False):
        some, of = part["correct"].astype(float), part[statistics.cluster]
        yield proportion(f"{agent}.{label}.correct_rate", some, clusters=of, statistics=statistics)
    for against in ("own", "truth"):
        agrees = (rows["answer"] == rows[f"{against}_answer"]).astype(float)
        yield proportion(f"{agent}.{against}.agreement", agrees, clusters=clusters, statistics=statistics)
        yield maximum(f"{agent}.{against}.margin_error", rows[f"{against}_error"], clusters=clusters)
        if len({*rows["answer"]}) > 1 and len({*rows[f"{against}_answer"]}) > 1:
            theirs = rows[f"{against}_answer"]
            yield cohen_kappa(
                f"{agent}.{against}.kappa", rows["answer"], theirs, clusters=clusters, statistics=statistics
            )


def _cost_effects(agent: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    first = rows["turn"] == 0
    for suffix, reference in REFERENCES.items():
        for prefix, chosen in (("", first | ~first), ("first.", first), ("later.", ~first)):
            totals = _totals(rows[chosen], statistics)
            if not len(totals):
                continue
            mine, theirs = totals.loc[agent], totals.loc[reference]
            for metric, column in COSTS.items():
                name = f"{agent}.{prefix}{metric}{suffix}"
                labels = mine[statistics.cluster]
                yield ratio_of_sums(name, mine[column], theirs[column], clusters=labels, statistics=statistics)
    totals = _totals(rows, statistics)
    mine, theirs = totals.loc[agent], totals.loc["reprefill"]
    labels = mine[statistics.cluster]
    yield mean_of_ratios(
        f"{agent}.speed_up", theirs["seconds"], mine["seconds"], clusters=labels, statistics=statistics, unit="x"
    )
    if mine["compile_tokens"].any():
        compiled = mine["compile_tokens"]
        yield mean(f"{agent}.compile_tokens", compiled, clusters=labels, statistics=statistics, unit="tokens")
        for suffix, reference in REFERENCES.items():
            name, whole = f"{agent}.with_compiling.token_ratio{suffix}", totals.loc[reference]["tokens"]
            yield ratio_of_sums(name, mine["tokens"] + compiled, whole, clusters=labels, statistics=statistics)


def _totals(rows: pd.DataFrame, statistics: StatisticsConfig) -> pd.DataFrame:
    """Costs of each agent and conversation, by agent and then pair."""
    sums = {column: (column, "sum") for column in COSTS.values()}
    once = {column: (column, "first") for column in ("compile_tokens", statistics.cluster)}
    return rows.groupby(["agent", "pair"]).agg(**sums, **once)
