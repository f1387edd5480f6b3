"""Requests that are served beside an edited one: the same field and policy, their own value still the old one.

They are the edited prompt with other segments, so that they carry its chat template, and those that share its beginning
share it token by token, as requests on one cached prefix do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.errors import ConfigError
from kvprobe.tasks.context import TokenizedContext, encode_segment
from kvprobe.tasks.gated import pick_notes
from kvprobe.tasks.library import Skeleton, filler_notes, skeletons
from kvprobe.tasks.wordings import TRAINED, WORDINGS, Wording

if TYPE_CHECKING:
    from kvprobe.tasks.pairs import Pair

SHARED_PREFIX, OWN_PREFIX, OTHER_WORDING = "shared_prefix", "own_prefix", "other_wording"
# Notes that a prompt lacks stand in front of these.
_NOTES_BEFORE = {"filler_before": "policy", "filler": "conversation"}
_MOST_NOTES = 3
_MOST_FIELDS = 2


@dataclass(frozen=True)
class ConcurrentRequest:
    """A prompt that holds the old value.

    Attributes:
        kind: `shared_prefix` (the edited prompt up to its policy), `own_prefix` (other notes and further session lines
            too, in the same words), `other_wording` (all in other words).
        token_ids: of the whole prompt.
        shared: tokens at its beginning that it has in common with the edited prompt.
    """

    kind: str
    token_ids: tuple[int, ...]
    shared: int


def concurrent_requests(pair: Pair, tokenizer: Any, *, each: int, first: int = 0) -> list[ConcurrentRequest]:
    """`each` requests on the shared prefix, as many with their own, and one for each other wording.

    Args:
        pair: the edited request, of task `gated_decision`.
        tokenizer: a Hugging Face tokenizer.
        each: how many.
        first: number of the first draw; other draws give other requests.

    Raises:
        ConfigError: the pair does not say its entity, field, value and rule, or its prompt lacks a segment.
    """
    scenario = _Scenario.of(pair, tokenizer)
    requests = []
    for kind in (SHARED_PREFIX, OWN_PREFIX):
        for number in range(first, first + each):
            rng = random.Random(f"{kind} {number} {pair.base.token_hash}")
            requests.append(_request(kind, pair, scenario.redrawn(rng, whole=kind == OWN_PREFIX), tokenizer))
    if pair.scenario.attributes["rule"] == "cases":
        for wording in (name for name in TRAINED if name != pair.scenario.wording):
            rng = random.Random(f"{wording} {first} {pair.base.token_hash}")
            requests.append(_request(OTHER_WORDING, pair, scenario.reworded(rng, wording), tokenizer))
    return requests


@dataclass(frozen=True)
class _Scenario:
    skeleton: Skeleton
    wording: Wording
    old: str
    new: str
    actions: tuple[str, str]

    @classmethod
    def of(cls, pair: Pair, tokenizer: Any) -> _Scenario:
        attributes, spans = pair.scenario.attributes, pair.base.spans
        missing = [key for key in ("entity", "field", "old", "new", "rule") if key not in attributes]
        missing += [name for name in ("session", "session_rest", "policy", "conversation", "task") if name not in spans]
        known = {skeleton.name: skeleton for skeleton in skeletons("all")}
        if missing or pair.scenario.skeleton not in known:
            lacking = missing[0] if missing else "skeleton"
            raise ConfigError(f"Concurrent requests need pairs that say their {lacking}: use task gated_decision.")
        skeleton = known[pair.scenario.skeleton]
        first, second = skeleton.actions
        if encode_segment(f" {first}", tokenizer) != [pair.base_answer_id]:
            first, second = second, first
        wording = WORDINGS.get(pair.scenario.wording)()
        return cls(skeleton, wording, attributes["old"], attributes["new"], (first, second))

    def redrawn(self, rng: random.Random, *, whole: bool) -> dict[str, str]:
        """Other notes and another order of the options; with `whole` also what stands before the policy."""
        notes = {"filler": self.wording.filler(_notes(rng)), "task": self._task(rng, self.wording)}
        if not whole:
            return notes
        others = [other for other in skeletons("all") if other.field != self.skeleton.field]
        lines = [
            self.wording.line(self.skeleton.entity, other.field, rng.choice(other.values))
            for other in rng.sample(others, rng.randint(0, _MOST_FIELDS))
        ]
        return {
            "filler_before": self.wording.filler(_notes(rng)),
            **self._session(self.wording, "".join(lines)),
            **notes,
        }

    def reworded(self, rng: random.Random, wording: str) -> dict[str, str]:
        """All but the cue in other words."""
        style, skeleton = WORDINGS.get(wording)(), self.skeleton
        cases: list[tuple[str | None, str]] = list(zip((self.old, self.new), self.actions, strict=True))
        rng.shuffle(cases)
        return {
            "system": style.system(skeleton.domain),
            **self._session(style, ""),
            "filler_before": style.filler(_notes(rng)),
            "policy": style.policy(skeleton.entity, skeleton.field, cases),
            "filler": style.filler(_notes(rng)),
            "conversation": style.conversation(skeleton.request, skeleton.field),
            "task": self._task(rng, style),
        }

    def _session(self, style: Wording, lines: str) -> dict[str, str]:
        before, after = style.record(self.skeleton.entity, self.skeleton.field)
        return {"session": style.session_header + before, "session_rest": after + lines}

    def _task(self, rng: random.Random, style: Wording) -> str:
        return style.task(self.skeleton.field, rng.sample(self.actions, 2))


def _notes(rng: random.Random) -> tuple[str, ...]:
    notes = filler_notes()
    return pick_notes(notes, rng.randint(1, _MOST_NOTES), rng.randrange(len(notes)))


def _request(kind: str, pair: Pair, texts: Mapping[str, str], tokenizer: Any) -> ConcurrentRequest:
    ids = with_segments(pair.base, {name: encode_segment(text, tokenizer) for name, text in texts.items()})
    old = pair.base.token_ids
    differing = (place for place, (ours, theirs) in enumerate(zip(old, ids, strict=False)) if ours != theirs)
    # The last token is run anew for every decision, so it is never shared.
    return ConcurrentRequest(kind, ids, min(next(differing, len(ids)), len(ids) - 1, len(old) - 1))


def with_segments(context: TokenizedContext, pieces: Mapping[str, list[int]]) -> tuple[int, ...]:
    """Token ids of a prompt with other tokens in some segments; notes that it lacks are put in their place."""
    absent = {before: name for name, before in _NOTES_BEFORE.items() if name not in context.spans}
    ids = list(context.token_ids[: min(span.start for span in context.spans.values())])
    for name, span in context.spans.items():
        ids += pieces.get(absent.get(name, ""), [])
        ids += pieces.get(name, list(context.token_ids[span.start : span.end]))
    return tuple(ids)
