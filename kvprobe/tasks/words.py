"""Words and filler of the tasks that are not gated decisions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import yaml

from kvprobe.tasks.gated import pick_notes
from kvprobe.tasks.library import filler_notes


@dataclass(frozen=True)
class Words:
    """Things and people, names of rooms and desks, and who may own a room."""

    items: tuple[str, ...]
    places: tuple[str, ...]
    owners: tuple[str, ...]


@lru_cache
def off_template_words() -> Words:
    """The words of the off-template tasks."""
    rows = yaml.safe_load((files("kvprobe.tasks") / "data/off_template.yaml").read_text())
    return Words(**{kind: tuple(words) for kind, words in rows.items()})


def neutral_lines(rng: random.Random, fewest: int, most: int) -> str:
    """Between `fewest` and `most` neutral notes, a line each."""
    notes = filler_notes()
    return "".join(f"- {note}\n" for note in pick_notes(notes, rng.randint(fewest, most), rng.randrange(len(notes))))
