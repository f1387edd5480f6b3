"""A hundred turns on one cache, with a state that keeps changing (protocol 9, critique HZ1).

Each pair of task `agent_turns` is one trajectory. Before every `period`-th turn the state goes to its other value; in
every turn the task is put to the model. It rolls off again: only the line with the model's own answer stays, so that a
prompt grows by a few tokens a turn. Methods, each on its own cache and behind its own answers:

    field_only           the new value's entries in place; all that follows keeps what it read
    errata_kept          an erratum for every change, none taken out: the paper's append-only cache
    erratum              the current erratum alone; what stood behind the earlier one is run anew
    field_and_erratum    both
    full_downstream      everything from the field on run anew
    periodic_reprefill   the field in place, and a full prefill every `reprefill_every` turns

The oracle of a method has the current value at the field's place and the method's own answers as history. It is
computed from two caches that grow by appending, one for each value. That they are as good as prefills is what the floor
shows: at every `floor_every`-th turn the method `errata_kept` is compared with a full prefill of the very same tokens,
as in the paper, where by causality nothing but rounding can differ.

Effects, by method and period: `X.period_6.agreement` (with its oracle), `.correct_rate` (by the rule), `.margin_error`
(mean, in logits), each also for `.first_third.` and `.last_third.`; `.agreement_slope` and `.margin_error_slope`
(change over 100 turns), `.prompt_tokens` (at the end), `.token_share` (run in a turn, of the prompt);
`oracle.period_6.correct_rate`; `floor.period_6.agreement` and `.margin_error` (largest); constant baselines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from kvprobe.agents.conversation import FIELD, RULE, Conversation, Ids
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.agent_cases import AgentCase, agent_case
from kvprobe.probes.legacy import Probe
from kvprobe.probes.system.long_trajectory.trajectory_rows import Running, run_rows
from kvprobe.stats import Effect, StatisticsConfig, bootstrapped, maximum, mean, proportion
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

FLOOR = "floor"
KEPT = "errata_kept"


@dataclass(frozen=True)
class Plan:
    """What a method does when the state changes.

    Attributes:
        field: `keep`: the value in place; `rerun`: the value and all that follows; None: nothing.
        erratum: `kept`: a further erratum; `current`: one that replaces the earlier; None: none.
        periodic: whether everything is run anew from time to time.
    """

    field: str | None = None
    erratum: str | None = None
    periodic: bool = False


METHODS: Mapping[str, Plan] = {
    "full_downstream": Plan(field="rerun"),
    "field_only": Plan(field="keep"),
    KEPT: Plan(erratum="kept"),
    "erratum": Plan(erratum="current"),
    "field_and_erratum": Plan(field="keep", erratum="current"),
    "periodic_reprefill": Plan(field="keep", periodic=True),
}
THIRDS = ("first_third", "middle_third", "last_third")


@PROBES.register("long_trajectory")
class LongTrajectory(Probe):
    """Whether decisions stay right over a hundred turns of changes, by method, against the current value in place."""

    name: ClassVar[str] = "long_trajectory"
    # Trajectories of one layout are run side by side.
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        ours.format(period): PaperEntry("long_trajectory", f"toggle_every_{period}", theirs)
        for period in (1, 6)
        for ours, theirs in {
            "floor.period_{}.agreement": "mean_agree",
            "errata_kept.period_{}.first_third.correct_rate": "patched_acc_first_third",
            "errata_kept.period_{}.last_third.correct_rate": "patched_acc_last_third",
        }.items()
    }

    class Parameters(base.Parameters):
        """How long the trajectories are and how often things happen."""

        turns: int = Field(100, ge=3, description="turns of a trajectory")
        periods: tuple[int, ...] = Field((1, 6), min_length=1, description="turns from one change to the next")
        reprefill_every: int = Field(10, ge=1, description="turns between full prefills of `periodic_reprefill`")
        floor_every: int = Field(10, ge=1, description="turns between comparisons of the floor")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each period, method and turn, and for each turn of the floor.

        Raises:
            ConfigError: a pair is not one of task agent_turns.
        """
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        cases = [agent_case(subject, pair) for pair in pairs]
        for index, case in enumerate(cases):
            groups[_layout(case.conversation)].append(index)
        rows: list[Measurement] = []
        done = 0
        for members in groups.values():
            for period in self.parameters.periods:
                rows += _trajectories(subject, [cases[i] for i in members], members, period, self.parameters)
            done += len(members)
            progress(done, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Agreement, right decisions and margin errors by method and period, their slopes, the floor and baselines."""
        effects: list[Effect] = []
        for (period, method), part in rows.groupby(["period", "method"], sort=False):
            name = f"{method}.period_{period}"
            if method == FLOOR:
                effects += _floor_effects(name, part, statistics)
                continue
            effects += _method_effects(name, part, statistics)
            for number, third in enumerate(THIRDS):
                chosen = part[part["turn"] * len(THIRDS) // self.parameters.turns == number]
                effects += _rates(f"{name}.{third}", chosen, statistics)
            if method == "full_downstream":
                effects += _shared_effects(f"period_{period}", part, statistics)
        effects.append(maximum("noise.margin", rows["noise_floor"], clusters=rows[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Agreement and margin error over the turns by method; one column for each model."""
        from kvprobe.probes.system.long_trajectory.figure import draw_long_trajectory

        return draw_long_trajectory(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Agreement in the first and in the last third by method, all models."""
        from kvprobe.probes.system.long_trajectory.figure import long_trajectory_panel

        long_trajectory_panel(axes, panels)


@dataclass(eq=False)
class Trajectories:
    """Conversations of one layout as tensors `[row, token]`.

    Attributes:
        beginnings: the head under either value of the state.
        place: where the state's value begins.
        values, errata: of the state.
        question: task and cue.
        lines: the line that holds either answer.
    """

    conversations: Sequence[Conversation]
    beginnings: tuple[Tensor, Tensor] = field(init=False)
    place: int = field(init=False)
    values: tuple[Tensor, Tensor] = field(init=False)
    errata: tuple[Tensor, Tensor] = field(init=False)
    question: Tensor = field(init=False)
    lines: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        given = self.conversations
        self.beginnings = _both(lambda c, v: c.beginning({RULE: 0, FIELD: v})[0], given)
        self.place = given[0].beginning({RULE: 0, FIELD: 0})[1][FIELD].start
        self.values = _both(lambda c, v: c.variables[FIELD].values[v], given)
        self.errata = _both(lambda c, v: c.variables[FIELD].errata[v], given)
        self.question = torch.tensor([c.question for c in given])
        self.lines = _both(lambda c, v: c.answered(v), given)

    def answered(self, answers: Sequence[int]) -> Tensor:
        """The lines that hold these answers, one for each row."""
        return torch.stack([self.lines[answer][row] for row, answer in enumerate(answers)])

    def margins(self, logits: Tensor) -> list[float]:
        """How far the second answer leads the first in each row, in logits."""
        first, second = torch.tensor([c.answers for c in self.conversations]).T.to(logits.device)
        each = torch.arange(len(first), device=logits.device)
        return [float(margin) for margin in logits[each, second].double() - logits[each, first].double()]


class Carried:
    """One method on its own caches, and its oracle: one cache for either value of the state."""

    def __init__(self, subject: Subject, trajectories: Trajectories, plan: Plan) -> None:
        self.trajectories, self.plan = trajectories, plan
        self.running = Running(subject, trajectories.beginnings[0])
        self.oracles = tuple(Running(subject, ids) for ids in trajectories.beginnings)
        self.answers: list[tuple[int, ...]] = []
        self._erratum: tuple[int, int] | None = None

    def change(self, value: int) -> None:
        """The state has gone to `value`."""
        given, running, plan = self.trajectories, self.running, self.plan
        if plan.field is not None:
            running.write(given.place, given.values[value], keep_after=plan.field == "keep")
        if plan.erratum is None:
            return
        if plan.erratum == "current" and self._erratum is not None:
            running.remove(*self._erratum)
        start = running.ids.shape[1]
        running.append(given.errata[value])
        self._erratum = start, running.ids.shape[1]

    def prefill_again(self) -> None:
        """Everything is run anew with the next question."""
        self.running.forget_from(0)

    def ask(self) -> Tensor:
        """Logits `[row, vocab]` of the method itself."""
        return self.running.ask(self.trajectories.question)

    def ask_oracle(self, value: int) -> Tensor:
        """Logits with the current value in its place, behind the method's own answers."""
        return self.oracles[value].ask(self.trajectories.question)

    def remember(self, answers: Sequence[int]) -> None:
        """Put the answers into the history."""
        line = self.trajectories.answered(answers)
        for each in (self.running, *self.oracles):
            each.append(line)
        self.answers.append(tuple(answers))


def _trajectories(
    subject: Subject,
    cases: Sequence[AgentCase],
    members: Sequence[int],
    period: int,
    options: LongTrajectory.Parameters,
) -> Iterator[Measurement]:
    given = Trajectories([case.conversation for case in cases])
    methods = {name: Carried(subject, given, plan) for name, plan in METHODS.items()}
    value = 0
    for turn in range(options.turns):
        changed = turn > 0 and turn % period == 0
        value = 1 - value if changed else value
        right = [c.right({RULE: 0, FIELD: value}) for c in given.conversations]
        known: dict[tuple[tuple[int, ...], ...], list[float]] = {}
        for name, carried in methods.items():
            if changed:
                carried.change(value)
            if carried.plan.periodic and turn % options.reprefill_every == 0:
                carried.prefill_again()
            before = carried.running.tokens
            tokens = carried.running.ids.shape[1] + given.question.shape[1]
            margins = given.margins(carried.ask())
            # Methods that have always answered alike have the same oracle.
            if (history := tuple(carried.answers)) not in known:
                known[history] = given.margins(carried.ask_oracle(value))
            shared = {"period": period, "turn": turn, "prompt_tokens": tokens, "changed": changed}
            spent = (carried.running.tokens - before) / tokens
            for index, case, row in _readings(cases, members, margins, known[history], right):
                yield {"pair": index, **case.common, "method": name, **shared, "token_share": spent, **row}
            if name == KEPT and turn % options.floor_every == 0:
                same, _ = run_rows(subject, torch.cat([carried.running.ids, given.question], 1), None)
                for index, case, row in _readings(cases, members, margins, given.margins(same), right):
                    yield {"pair": index, **case.common, "method": FLOOR, **shared, "token_share": None, **row}
            carried.remember([int(margin > 0) for margin in margins])


def _readings(
    cases: Sequence[AgentCase],
    members: Sequence[int],
    margins: Sequence[float],
    oracle: Sequence[float],
    right: Sequence[int],
) -> Iterator[tuple[int, AgentCase, Measurement]]:
    for index, case, mine, theirs, ought in zip(members, cases, margins, oracle, right, strict=True):
        yield (
            index,
            case,
            {
                "margin": mine,
                "correct": int(mine > 0) == ought,
                "oracle_margin": theirs,
                "oracle_correct": int(theirs > 0) == ought,
                "agrees": (mine > 0) == (theirs > 0),
                "margin_error": abs(mine - theirs),
                "right": ought,
            },
        )


def _layout(conversation: Conversation) -> tuple[int, ...]:
    """Trajectories with the same layout can be run side by side."""
    variable = conversation.variables[FIELD]
    beginning, spans = conversation.beginning({RULE: 0, FIELD: 0})
    parts = (*variable.values, *variable.errata, conversation.question, conversation.answered(0))
    return (len(beginning), spans[FIELD].start, *(len(part) for part in parts))


def _both(part: Callable[[Conversation, int], Ids], conversations: Sequence[Conversation]) -> tuple[Tensor, Tensor]:
    first, second = (torch.tensor([part(conversation, value) for conversation in conversations]) for value in (0, 1))
    return first, second


def slope(rows: pd.DataFrame, column: str) -> float:
    """Least-squares change of a column over 100 turns, every trajectory with a level of its own."""
    turn = rows["turn"] - rows.groupby("pair")["turn"].transform("mean")
    values = rows[column].astype(float)
    return float(100 * (turn * values).sum() / (turn**2).sum())


def _rates(name: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    if rows.empty:
        return
    clusters = rows[statistics.cluster]
    for effect, column in {"agreement": "agrees", "correct_rate": "correct"}.items():
        share = rows[column].astype(float)
        yield proportion(f"{name}.{effect}", share, clusters=clusters, statistics=statistics)
    error = rows["margin_error"]
    yield mean(f"{name}.margin_error", error, clusters=clusters, statistics=statistics, unit="logits")


def _method_effects(name: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    yield from _rates(name, rows, statistics)
    clusters = rows[statistics.cluster]
    for effect, (column, unit) in {
        "agreement_slope": ("agrees", "fraction per 100 turns"),
        "margin_error_slope": ("margin_error", "logits per 100 turns"),
    }.items():
        yield bootstrapped(
            f"{name}.{effect}",
            rows,
            lambda table, column=column: slope(table, column),  # type: ignore[misc]
            clusters=clusters,
            statistics=statistics,
            unit=unit,
        )
    last = rows[rows["turn"] == rows["turn"].max()]
    ends = last[statistics.cluster]
    yield mean(f"{name}.prompt_tokens", last["prompt_tokens"], clusters=ends, statistics=statistics, unit="tokens")
    yield mean(f"{name}.token_share", rows["token_share"], clusters=clusters, statistics=statistics)


def _floor_effects(name: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    clusters = rows[statistics.cluster]
    yield proportion(f"{name}.agreement", rows["agrees"].astype(float), clusters=clusters, statistics=statistics)
    yield maximum(f"{name}.margin_error", rows["margin_error"], clusters=clusters, statistics=statistics)


def _shared_effects(period: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """The oracle by the rule, and what one would score by saying one thing, or the last turn's right answer, always."""
    clusters = rows[statistics.cluster]
    right = rows["oracle_correct"].astype(float)
    yield proportion(f"oracle.{period}.correct_rate", right, clusters=clusters, statistics=statistics)
    share = rows.groupby("pair")["right"].transform("mean")
    majority = np.maximum(share, 1 - share)
    yield mean(f"baseline.majority.{period}.correct_rate", majority, clusters=clusters, statistics=statistics)
    later = rows[rows["turn"] > 0]
    repeated = 1 - later["changed"].astype(float)
    labels = later[statistics.cluster]
    yield mean(f"baseline.same.{period}.correct_rate", repeated, clusters=labels, statistics=statistics)
