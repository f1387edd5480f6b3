"""The first turn of agents that reuse a policy compiled beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvprobe.agents.conversation import CHUNK
from kvprobe.compose.base import Composition, Part, make_scheme
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
    """The first prompt with the compiled policy in its place, by a reuse scheme.

    Raises:
        UnsupportedError: the scheme leaves gaps between positions, which no edit can follow.
    """
    conversation, policy = agent.conversation, agent.policy
    parts = []
    for in_chunk, pieces in groupby(conversation.head, lambda piece: piece[0] in CHUNK):
        named = list(pieces)
        ids = tuple(token for _, tokens in named for token in tokens)
        parts.append(Part(named[0][0], ids, policy if in_chunk else None))
    parts.append(Part("asked", (*conversation.request, *conversation.question)))
    composed = make_scheme(scheme, **parameters).compose(agent.subject, Composition(tuple(parts)))
    if not composed.is_contiguous:
        raise UnsupportedError(f"The scheme {scheme!r} leaves gaps between positions; an agent needs one without.")
    return Started(composed.cache, composed.receipt)
