"""What was claimed when the first cell was measured, and what was changed since: read from the logs of a run.

Each log says when an experiment's claims were other than before. All hashes of an experiment share their cells, so
their logs are read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprobe.errors import StoreError
from kvprobe.runs.claims import Claim, ClaimKind
from kvprobe.runs.store import LOG, Store, read_json

CLAIMS = "claims"
"""The event with which a log tells what is claimed from then on."""
_KEYS = {"id", "kind", "statement", "models", "headline"}


@dataclass(frozen=True)
class Registration:
    """The claims of an experiment as they were when its first cell was measured.

    Args:
        claims: by id; empty where no log says them, so that nothing can be told of changes.
        since: by id and statement, when a later claim was made first, as `2026-12-01 09:30`.
        gone: by id, when one was first left out.
    """

    claims: Mapping[str, Claim] = field(default_factory=dict)
    since: Mapping[tuple[str, str], str] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)

    def changed(self, claim: Claim) -> bool:
        """Whether the claim is not what it was, or was not made then."""
        first = self.claims.get(claim.id)
        return bool(self.claims) and (first is None or _told(first) != _told(claim))

    def when(self, claim: Claim) -> str:
        """When it was made, where it was changed."""
        return self.since.get((claim.id, claim.statement), "later")

    def when_withdrawn(self, claim: Claim) -> str:
        """When it was not claimed any more."""
        return self.gone.get(claim.id, "later")

    def withdrawn(self, claims: Sequence[Claim]) -> list[Claim]:
        """What was claimed then and is not any more."""
        kept = {claim.id for claim in claims}
        return [claim for name, claim in self.claims.items() if name not in kept]


def told_to_the_log(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """What a log keeps of claims: all that a verdict depends on."""
    return [claim.model_dump(mode="json", include=_KEYS) for claim in claims]


def registration(folder: Path) -> Registration:
    """What was claimed before anything in `folder`, or in another hash of the experiment, was measured.

    Raises:
        StoreError: a log cannot be read.
    """
    events = sorted(_events(folder.parent), key=lambda event: str(event["time"]))
    measured = next((place for place, event in enumerate(events) if event["event"] == "cell"), len(events))
    made = [place for place, event in enumerate(events) if event["event"] == CLAIMS]
    if not made:
        return Registration()
    first = max((place for place in made if place < measured), default=made[0])
    claims = {claim["id"]: _read(claim) for claim in events[first]["claims"]}
    since: dict[tuple[str, str], str] = {}
    gone: dict[str, str] = {}
    for place in made:
        if place > first:
            when, told = events[place]["time"][:16].replace("T", " "), events[place]["claims"]
            for claim in told:
                since.setdefault((claim["id"], claim["statement"]), when)
            for name in claims.keys() - {claim["id"] for claim in told}:
                gone.setdefault(name, when)
    return Registration(claims, since, gone)


def is_news(claims: Sequence[Claim], entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the log of one folder, entry by entry, has not told these claims last."""
    told = [entry["claims"] for entry in entries if entry["event"] == CLAIMS]
    return not told or told[-1] != told_to_the_log(claims)


def register(store: Store, claims: Sequence[Claim]) -> None:
    """Have the log of a run tell its claims, where they are others than it told last.

    Raises:
        StoreError: the log cannot be read or written.
    """
    if is_news(claims, log_entries(store.folder / LOG)):
        store.log(CLAIMS, claims=told_to_the_log(claims))


def _read(told: Mapping[str, Any]) -> Claim:
    # Nothing that was once told is refused: an earlier version may have had other rules.
    kind = told.get("kind")
    return Claim.model_construct(**{**told, "kind": ClaimKind(kind) if kind else None})


def _told(claim: Claim) -> tuple[Any, ...]:
    return claim.statement, sorted(claim.models), claim.headline


def log_entries(log: Path) -> list[dict[str, Any]]:
    """What the log of a run says, line by line; nothing where it is not there.

    Raises:
        StoreError: it cannot be read.
    """
    if not log.is_file():
        return []
    try:
        entries = [read_json(line.encode()) for line in log.read_text(encoding="utf-8").splitlines()]
        for entry in entries:
            if entry["event"] == CLAIMS:
                # A claim that no version could have told is found here, and not by whoever judges it.
                for claim in map(_read, entry["claims"]):
                    _ = _told(claim), claim.parsed, entry["time"][:16]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{log} is damaged ({error}); restore it, or delete it and run again.") from error
    return entries


def _events(experiment: Path) -> Iterator[dict[str, Any]]:
    for log in experiment.glob(f"*/{LOG}"):
        yield from (entry for entry in log_entries(log) if entry["event"] in (CLAIMS, "cell"))
