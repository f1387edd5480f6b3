"""Pairs of task agent_turns for the tests of agents."""

from __future__ import annotations

from functools import cache
from typing import Any

from worded_models import TOKENIZER

from kvprobe.tasks.agent_turns import AgentTurns
from kvprobe.tasks.pairs import Pair, align


@cache
def agent_pairs(size: int, **parameters: Any) -> list[Pair]:
    task = AgentTurns(size=size, notes_before=(0, 0), notes_after=(2, 2), **parameters)
    return [align(pair, TOKENIZER) for pair in task.prompt_pairs()]
