"""A hundred turns on one cache, with a state that keeps changing (protocol 9, critique HZ1).

Each pair of task `agent_turns` is one trajectory. Before every `period`-th turn the state changes to its other value;
in every turn the task is put to the model. The task is then dropped from the cache and only the line with the model's
own answer stays, so that a prompt grows by a few tokens a turn. Each method has its own cache and its own answers:

    field_only           the new value's entries in place; all that follows keeps what it read
    errata_kept          an erratum for every change, none removed: the paper's append-only cache
    erratum              the current erratum alone; what stood behind the earlier one is recomputed
    field_and_erratum    both
    full_downstream      everything from the field on recomputed
    periodic_reprefill   the field in place, and a full prefill every `reprefill_every` turns

The oracle of a method has the current value at the field's place and the method's own answers as history. It is read
from two caches that grow by appending, one for each value. The floor shows that appending is as good as a prefill: at
every `floor_every`-th turn `errata_kept` is compared with a full prefill of the very same tokens, as in the paper,
where by causality nothing but rounding can differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field, PositiveInt

from kvprobe.agents.conversation import FIELD, RULE
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.agent_cases import AgentCase, agent_case
from kvprobe.probes.system.long_trajectory.running import run_rows
from kvprobe.probes.system.long_trajectory.trajectories import ERRATA_KEPT, METHODS, Carried, Trajectories, layout_of
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FLOOR = "floor"


@PROBES.register("long_trajectory")
class LongTrajectory(Probe):
    """Whether decisions stay right over a hundred turns of changes, by method, against the current value in place."""

    # Trajectories of one layout are run side by side.
    needs_all_pairs: ClassVar[bool] = True

    turns: int = Field(100, ge=3, description="turns of a trajectory")
    periods: tuple[PositiveInt, ...] = Field((1, 6), min_length=1, description="turns from one change to the next")
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
            groups[layout_of(case.conversation)].append(index)
        rows: list[Measurement] = []
        done = 0
        for members in groups.values():
            for period in self.periods:
                rows += self._trajectories(subject, [cases[i] for i in members], members, period)
            done += len(members)
            progress(done, len(pairs))
        return rows

    def _trajectories(
        self, subject: Subject, cases: Sequence[AgentCase], members: Sequence[int], period: int
    ) -> Iterator[Measurement]:
        given = Trajectories([case.conversation for case in cases])
        methods = {name: Carried(subject, given, plan) for name, plan in METHODS.items()}
        value = 0
        for turn in range(self.turns):
            changed = turn > 0 and turn % period == 0
            value = 1 - value if changed else value
            right = [c.right({RULE: 0, FIELD: value}) for c in given.conversations]
            known: dict[tuple[tuple[int, ...], ...], list[float]] = {}
            for name, carried in methods.items():
                if changed:
                    carried.change(value)
                if carried.plan.periodic and turn % self.reprefill_every == 0:
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
                if name == ERRATA_KEPT and turn % self.floor_every == 0:
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
