"""A fake model and a fake probe, fast and exact, for the tests of the experiment runner.

As a script, `python runs_fakes.py RESULTS SECONDS`, it runs the fake experiment, SECONDS for each cell, and prints a
line for each finished cell; the tests kill it.
"""

from __future__ import annotations

import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from kvprobe.errors import ModelSourceError, UnknownNameError
from kvprobe.figures.spec import FigureSpec
from kvprobe.probes.base import Reading
from kvprobe.runs import events, preparation, provenance
from kvprobe.runs.config import ExperimentConfig
from kvprobe.stats import Effect, Sample

CONFIG: dict[str, Any] = {
    "name": "fake",
    "question": "Does the fake recover?",
    "probe": "fake",
    "models": ["red", "blue"],
    "task": {"name": "gated_decision", "size": 20, "split": "all"},
    "block_size": 4,
    "claims": [
        {"id": "local", "kind": "paper", "statement": "field_only.recovery < 0.15", "paper_value": 0.02},
        {"id": "rest", "kind": "critique", "statement": "downstream.recovery < 0.5", "headline": True},
    ],
}


# The tree under test may be edited while the tests run, and loading torch takes seconds.
PROVENANCE = {"source_hash": "source", "code_version": {"version": "0", "commit": "c", "dirty": False}, "threads": 1}


class WordTokenizer:
    """Words and marks with the blank before them are tokens; there is no BOS and no chat template."""

    bos_token_id = None
    bos_token = None
    chat_template = None
    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
    backend_tokenizer = SimpleNamespace(post_processor=None)

    def __init__(self) -> None:
        self.words: dict[int, str] = {}

    def __len__(self) -> int:
        return 1

    def __call__(self, text: str, **_: Any) -> dict[str, list[Any]]:
        found = list(re.finditer(r" ?\w+| ?[^\w\s]|\s", text))
        ids = [zlib.crc32(match[0].encode()) for match in found]
        self.words |= dict(zip(ids, (match[0] for match in found), strict=True))
        return {"input_ids": ids, "offset_mapping": [match.span() for match in found]}

    def encode(self, text: str, **_: Any) -> list[int]:
        return self(text)["input_ids"]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self.words[token] for token in ids)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.words[token] for token in ids]


@dataclass(frozen=True)
class Identity:
    """The fields of a model's identity that the runner looks at."""

    name: str
    source: str
    weights_sha256: str
    tokenizer_sha256: str = "t" * 64
    dtype: str = "float32"
    attention: str = "eager"
    device: str = "cpu"
    parameters: int = 10


def load_subject(name: str) -> Any:
    """The fake model `red` or `blue`; `broken` cannot be loaded, others do not exist."""
    if name == "broken":
        raise ModelSourceError("The weights of broken are truncated; pull them again.")
    if name not in {"red", "blue", "hub/model"}:
        raise UnknownNameError("model", name, ["red", "blue"])
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    return SimpleNamespace(name=name, tokenizer=WordTokenizer(), identity=identity(name), **where)


def identity(name: str) -> Identity:
    return Identity(name, f"/here/{name}", f"{name}-weights")


class FakeProbe:
    """Measures hashes: recovery 0.05 of the field alone, 0.95 of all after it."""

    needs_all_pairs = False

    def __init__(self, field_only: float = 0.05) -> None:
        self.field_only = field_only
        self.measured: list[str] = []
        self.before: Callable[[Any, Sequence[Any]], None] = lambda subject, pairs: None
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: row
        self.unable: str | None = None
        self.foreseen: Callable[[Any], Mapping[str, float] | None] = lambda pair: None

    def refusal(self, subject: Any, pair: Any) -> str | None:
        return self.unable

    def preview(self, subject: Any, pair: Any) -> Mapping[str, float] | None:
        return self.foreseen(pair)

    def measure(self, subject: Any, pairs: Sequence[Any], progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
        self.measured.append(subject.name)
        self.before(subject, pairs)
        rows = []
        for index, pair in enumerate(pairs):
            noise = int(pair.base.token_hash[:4], 16) / 65536 - 0.5
            base, donor = -5.0 - noise, 5.0 + noise
            for condition, recovery in (("field_only", self.field_only), ("downstream", 0.95)):
                margin = base + (recovery + 0.1 * noise) * (donor - base)
                row = {"pair": index, "condition": condition, "m_base": base, "m_donor": donor, "margin": margin}
                rows.append(self.change(row))
            progress(index + 1, len(pairs))
        return rows

    def model_dump(self, mode: str = "python") -> dict[str, Any]:
        return {"field_only": self.field_only}

    def read_by(self) -> Reading:
        return FAKE_READING


def fake_effects(sample: Sample, _: Any) -> Iterator[Effect]:
    for condition, part in sample.by("condition"):
        yield part.recovery(f"{condition}.recovery")


FAKE_READING = Reading(fake_effects, FigureSpec("What the fakes recover", ()))


def config(**changes: Any) -> ExperimentConfig:
    """The fake experiment."""
    return ExperimentConfig(**{**CONFIG, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the log, which alone may differ."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "log.jsonl")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def main() -> None:
    from kvprobe.runs import runner

    results, seconds = sys.argv[1], float(sys.argv[2])
    probe = FakeProbe()
    probe.before = lambda subject, pairs: time.sleep(seconds)
    preparation.make_probe = lambda config: probe  # type: ignore[assignment]
    for name, value in PROVENANCE.items():
        setattr(provenance, name, lambda value=value: value)
    assert preparation.provenance is provenance

    def say(event: events.Event) -> None:
        if isinstance(event, events.CellFinished):
            print(event.key, flush=True)

    runner.run_experiment(config(), results_dir=results, load_subject=load_subject, on_event=say)


if __name__ == "__main__":
    main()
