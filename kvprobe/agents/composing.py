"""The first turn of agents that reuse a policy compiled beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvprobe.agents.conversation import CHUNK
from kvprobe.composing.base import Composition, Part, make_scheme
from kvprobe.engine.cache import KVCache
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import UnsupportedError

if TYPE_CHECKING:
    from kvprobe.agents.base import Agent


@dataclass(frozen=True, eq=False)
class Started:
    """A cache of the first prompt but for its last token, and what composing it cost; compiling is not in it."""

    cache: KVCache
    receipt: Receipt


def compose_first(agent: Agent, scheme: str, **parameters: Any) -> Started:
    """The prompt of this turn with the compiled policy in its place, by a reuse scheme.

    A policy that is no longer as it was compiled is run.

    Raises:
        UnsupportedError: the scheme leaves gaps between positions, which no edit can follow.
    """
    conversation, policy = agent.conversation, agent.policy
    ids, (beginning, spans) = conversation.prompt(agent.state, agent.answers), conversation.beginning(agent.state)
    parts = []
    for in_chunk, names in groupby(spans, lambda name: name in CHUNK):
        named = list(names)
        piece = beginning[spans[named[0]].start : spans[named[-1]].end]
        as_compiled = in_chunk and policy is not None and policy.token_ids == piece
        parts.append(Part(named[0], piece, policy if as_compiled else None))
    parts.append(Part("asked", ids[len(beginning) :]))
    composed = make_scheme(scheme, **parameters).compose(agent.subject, Composition(tuple(parts)))
    if not composed.is_contiguous:
        raise UnsupportedError(f"The scheme {scheme!r} leaves gaps between positions; an agent needs one without.")
    return Started(composed.cache, composed.receipt)
