"""The unified agent beside what one would deploy otherwise (protocol 8, critique UA1, UA2, G12, MM5).

Each pair of task `agent_turns` is a conversation: a policy, a state, and turns before which the state, the rule inside
the policy, both or neither change. Every agent goes through it with its own cache and its own answers as history.

    reprefill               every turn from scratch
    prefix_caching          the longest common prefix is kept
    prefix_caching_hoist    the same, with the state stated right before the question
    cacheblend              the policy and what stands behind a change are blended
    unified_<method>        the policy is composed once, changes are edited by the method; `unified_auto`: by AUTO,
                            fitted on the first edits of other skeletons

A decision is compared with the rule, with a full prefill of the agent's own tokens (`own`: what its cache alone does),
and with a full prefill of the true state behind the agent's own history (`truth`). Costs are those of the whole turn,
edits included. Compiling the policy, which many conversations may share, is counted apart (`compile_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from kvprobe.agents.base import Agent, compiled_policy, make_agent
from kvprobe.agents.conversation import FIELD, RULE
from kvprobe.agents.unified import Unified
from kvprobe.composing.chunk import Chunk
from kvprobe.edit.auto import Auto
from kvprobe.engine.readout import read
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.agent_cases import AgentCase, agent_case, auto_cases, is_decided
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

BASELINES = ("reprefill", "prefix_caching", "prefix_caching_hoist", "cacheblend")
AUTO = "auto"


@PROBES.register("unified_agent")
class UnifiedAgent(Probe):
    """What agents decide and what they cost, turn by turn, with policies and states that really change."""

    # AUTO is fitted on some skeletons and used on others.
    needs_all_pairs: ClassVar[bool] = True

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
        fitted = self._fitted(cases) if AUTO in self.edits else {}
        majority = _majority(cases)
        rows: list[Measurement] = []
        for index, case in enumerate(cases):
            policy = compiled_policy(subject, case.conversation)
            for name, start in self._agents(case, policy, fitted.get(index)).items():
                shared = {"pair": index, **case.common, "agent": name, "baseline_majority": majority[index]}
                rows += [{**shared, **row} for row in _agent_rows(case, start())]
            progress(index + 1, len(pairs))
        return rows

    def _fitted(self, cases: Sequence[AgentCase]) -> dict[int, Auto]:
        """AUTO for each case, fitted on the edits of other skeletons."""
        learned = [auto_cases(case) for case in cases]
        skeletons = [case.pair.scenario.skeleton for case in cases]
        fitted: dict[int, Auto] = {}
        for selection, evaluation in folds(skeletons, self.folds, self.seed):
            # A model that decides nothing rightly is stopped by the gate, not here.
            chosen = [index for index in selection if is_decided(cases[index])] or list(selection)
            edits = [edit for index in chosen for edit in learned[index]]
            auto = Auto.fit(edits, error_cost=self.error_cost)
            fitted |= dict.fromkeys(evaluation, auto)
        return fitted

    def _agents(self, case: AgentCase, policy: Chunk, auto: Auto | None) -> dict[str, Callable[[], Agent]]:
        given = case.subject, case.conversation
        agents: dict[str, Callable[[], Agent]] = {name: partial(make_agent, name, *given, policy) for name in BASELINES}
        for edit in self.edits:
            if edit == AUTO:
                agents[f"unified_{AUTO}"] = partial(Unified, *given, None, policy, method=auto)
            else:
                agents[f"unified_{edit}"] = partial(make_agent, "unified", *given, policy, edit=edit)
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
