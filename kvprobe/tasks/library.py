"""The scenario library: skeletons (what a decision is about) and neutral filler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Literal

import yaml

Split = Literal["train", "held_out", "all"]


@dataclass(frozen=True)
class Skeleton:
    """An independent situation: a field of an entity decides between two actions."""

    name: str
    domain: str
    entity: str
    field: str
    values: tuple[str, ...]
    actions: tuple[str, str]
    request: str
    held_out: bool = False


@lru_cache
def skeletons(split: Split = "all") -> tuple[Skeleton, ...]:
    """All skeletons of a split; `held_out` ones were never shown to the organisms."""
    rows = yaml.safe_load((files("kvprobe.tasks") / "data/skeletons.yaml").read_text())["skeletons"]
    every = tuple(Skeleton(**{**row, "values": tuple(row["values"]), "actions": tuple(row["actions"])}) for row in rows)
    if split == "all":
        return every
    return tuple(skeleton for skeleton in every if skeleton.held_out == (split == "held_out"))


@lru_cache
def filler_notes() -> tuple[str, ...]:
    """Neutral sentences that mention no field, value or action."""
    return tuple(yaml.safe_load((files("kvprobe.tasks") / "data/fillers.yaml").read_text())["notes"])
