"""The caches on which `knockout` hides positions: stale, field-only, new, and stale under the opposite rule."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import prefill
from kvprobe.engine.operations import overwrite
from kvprobe.probes.kit.prefilled_pair import PrefilledPair
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


def four_caches(subject: Subject, pair: Pair, prefilled: PrefilledPair) -> dict[str, tuple[TokenizedContext, KVCache]]:
    """Prompt and cache of each condition by name; `swapped` is left out where the prompt has no rule to swap."""
    field_only, _ = overwrite(prefilled.stale, pair.field, prefilled.oracle)
    caches = {
        "stale": (pair.base, prefilled.stale),
        "field_only": (pair.base, field_only),
        "new": (pair.donor, prefilled.oracle),
    }
    swapped = with_actions_exchanged(pair)
    if swapped is not None:
        caches["swapped"] = (swapped, prefill(subject, swapped.token_ids).cache)
    return caches


def with_actions_exchanged(pair: Pair) -> TokenizedContext | None:
    """The base prompt's tokens with the two actions exchanged in its rule, segment `policy`.

    None where the prompt has no such segment or it does not name both actions by their answer tokens.
    """
    policy = pair.base.spans.get("policy")
    exchange = {pair.base_answer_id: pair.donor_answer_id, pair.donor_answer_id: pair.base_answer_id}
    ids = list(pair.base.token_ids)
    if policy is None or not set(exchange) <= set(ids[policy.start : policy.end]):
        return None
    for position in policy.positions:
        ids[position] = exchange.get(ids[position], ids[position])
    return replace(pair.base, token_ids=tuple(ids))
