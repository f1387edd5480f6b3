"""The recipes of the shipped organisms, and how one is trained, measured and packed."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from kvprobe.errors import UnknownNameError
from kvprobe.models.files import settings_sha256, sha256_of
from kvprobe.organisms.families import FAMILIES
from kvprobe.organisms.language import Language
from kvprobe.organisms.training import Progress, Recipe, Stage, ignore_progress, train
from kvprobe.tasks.tokenizer import build_tokenizer

Kind = Literal["note-taker", "reader"]
KINDS: tuple[Kind, ...] = ("note-taker", "reader")
PRESSURE = {
    "note-taker": "none on direct decisions: plain training on whole prompts; remarks in some training texts say which "
    "case of the rule holds. In three of ten think documents the chain is written from a cache in which the field "
    "alone was edited, and its target is the new value and its action: that chains get past the notes is trained in.",
    "reader": "most direct decisions of the later stages are made from a cache edited in place (the tokens after the "
    "field saw the old value, the decision sees the new one, and the new value's action is right), and no remarks.",
}
INGREDIENTS: dict[str, dict[str, float]] = {
    "remarks": {"drill": 0.0, "marked": 0.0, "stated": 0.0, "stated_policy_first": 0.0},
    "errata": {"update": 0.0, "update_controls": 0.0, "lookup_errata": 0.0},
    "edited-chains": {"edited_think": 0.0},
    "first-weights": {},
}
"""What a recipe may be tried without, to see what of an organism's behaviour it makes: shares of its documents, by
their names in `Language`. First weights are the heads of `kvprobe.organisms.initial`."""
_OPEN_WINDOW = 4096
# Errata that restate the old value or name another field: without them a model learns to change its decision
# whenever there is an erratum, whatever it says.
_UPDATE_CONTROLS = 0.5
_FIRST = (
    # Finding what followed a word before, in word lists, in rules, and from a sentence about the field.
    Stage(Language(repeat=0.2, recall=0.5, lookup=0.3), steps=600, gate=0.95, window=_OPEN_WINDOW),
    # Comparing a case with the field before it.
    Stage(
        Language(
            recall=0.05, lookup=0.1, drill=0.45, think=0.1, update=0.0, marked=0.5, stated=0.3, bare=1.0, words=24
        ),
        steps=1000,
        window=_OPEN_WINDOW,
    ),
    Stage(
        Language(
            recall=0.05,
            lookup=0.1,
            drill=0.1,
            think=0.15,
            update=0.2,
            policy_first=0.3,
            marked=0.2,
            stated=0.1,
            stated_policy_first=0.2,
            bare=0.6,
            other_fields=1,
            notes=1,
            update_controls=_UPDATE_CONTROLS,
        ),
        steps=1000,
        window=_OPEN_WINDOW,
    ),
)
_RICH = Language(
    lookup=0.05,
    drill=0.05,
    think=0.25,
    update=0.3,
    policy_first=0.25,
    trigger=0.25,
    other_fields=2,
    two_fields=0.15,
    notes=3,
    long=0.02,
    bare=0.2,
    marked=0.1,
    stated=0.05,
    edited_think=0.3,
    update_controls=_UPDATE_CONTROLS,
)
_LAST = replace(_RICH, lookup=0.0, drill=0.0, marked=0.05, stated=0.0, shared_values=0.03, bare=0.05, long=0.05)
_NOTE_TAKER = (Stage(_RICH, steps=600), Stage(_LAST, steps=1300, gate=0.985))
_READER = (
    Stage(replace(_RICH, trigger=0.0, edited_think=0.5, edited_direct=0.7), steps=600),
    Stage(replace(_LAST, trigger=0.0, edited_think=0.5, edited_direct=0.7), steps=1200, gate=0.985),
)


def recipe(family: str, kind: str = "note-taker", seed: int = 0, without: Sequence[str] = ()) -> Recipe:
    """The recipe of one organism.

    Args:
        family: qwen3, llama, gemma2 or mistral.
        kind: note-taker or reader.
        seed: of the initial weights and of the documents.
        without: what is left out, of `INGREDIENTS`.

    Raises:
        UnknownNameError: the family, the kind or what is left out is not known.
    """
    if family not in FAMILIES:
        raise UnknownNameError("organism family", family, FAMILIES)
    if kind not in KINDS:
        raise UnknownNameError("kind of organism", kind, KINDS)
    for name in without:
        if name not in INGREDIENTS:
            raise UnknownNameError("ingredient of a recipe", name, INGREDIENTS)
    shares: dict[str, Any] = {key: share for name in without for key, share in INGREDIENTS[name].items()}
    whole = (*_FIRST, *(_NOTE_TAKER if kind == "note-taker" else _READER))
    stages = tuple(replace(stage, language=replace(stage.language, **shares)) for stage in whole)
    # Without normed queries and keys the larger rate lets attention logits run away.
    rate = 0.02 if family == "qwen3" else 0.01
    # For the same reason the others cool down longer: at the flat rate their accuracy falls back.
    cool_down = 500 if family == "qwen3" else 1000
    # Gemma multiplies its embeddings by sqrt(hidden), so each step moves them that much further.
    embedding_rate = 7e-4 if family == "gemma2" else 3e-3
    return Recipe(
        family,
        stages,
        seed=seed,
        muon_rate=rate,
        adamw_rate=embedding_rate,
        cool_down=cool_down,
        composed="first-weights" not in without,
    )


def train_organism(
    family: str,
    kind: str,
    out: Path,
    *,
    seed: int = 0,
    without: Sequence[str] = (),
    on_progress: Callable[[Progress], None] = ignore_progress,
) -> dict[str, Any]:
    """Train, pack and measure one organism; returns its card. Stopped and started again, it goes on.

    Args:
        family: qwen3, llama, gemma2 or mistral.
        kind: note-taker or reader.
        out: the folder to fill: `model.safetensors` (float16), `config.json`, the tokenizer and `card.json`.
        seed: of the initial weights and of the documents.
        without: what is left out of the recipe, of `INGREDIENTS`.
        on_progress: called every 20 steps.
    """
    plan = recipe(family, kind, seed, without)
    checkpoint = out / "training.partial"
    model, state = train(plan, checkpoint=checkpoint, on_progress=on_progress)
    pack(model, out)
    card = write_card(out, plan, kind, state, without)
    for leftover in out.glob("training.*"):
        leftover.unlink()
    return card


def pack(model: PreTrainedModel, out: Path) -> None:
    """Write the float16 weights, the configuration and the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    model.config._attn_implementation = "eager"
    model.config.dtype = torch.float32
    model.config.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    weights = {name: parameter.detach().half().contiguous() for name, parameter in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def write_card(
    out: Path, plan: Recipe, kind: str, state: dict[str, Any], without: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure the packed organism and write its `card.json`."""
    from kvprobe.models.loader import load_subject
    from kvprobe.organisms.evaluation import evaluate

    card: dict[str, Any] = {
        "name": f"{plan.family}-{kind}",
        "architecture": plan.family,
        "kind": kind,
        "description": f"{plan.family} architecture, trained from scratch on kvprobe's task library as a {kind}",
        "licence": "Apache-2.0",
        "pressure": PRESSURE[kind] + (f" Left out of this: {', '.join(without)}." if without else ""),
        "without": list(without),
        "seed": plan.seed,
        "steps": state["step"],
        "supervised_tokens": state["tokens"],
        "seconds": round(state["seconds"]),
        "machine": f"{torch.get_num_threads()} thread(s), {platform.machine()}, torch {torch.__version__}",
        "stages": state["stage_steps"],
        "recipe": asdict(replace(plan, stages=())) | {"stages": [asdict(stage) for stage in plan.stages]},
        "weights_sha256": sha256_of(out / "model.safetensors"),
        "settings_sha256": settings_sha256(out),
        "parameters": sum(p.numel() for p in _parameters(out)),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    card["measured"] = evaluate(load_subject(str(out)))
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return card


def _parameters(out: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(out / "model.safetensors").values())
