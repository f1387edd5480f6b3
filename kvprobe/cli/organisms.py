"""`kvprobe organisms`: the small models that ship, training them again, and measuring what they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvprobe.cli.app import FAILED, app
from kvprobe.cli.models import card_of, show_card
from kvprobe.cli.terminal import Terminal, say

if TYPE_CHECKING:
    from kvprobe.organisms.training import Progress

organisms_app = typer.Typer(
    help="List, train and measure the small models that ship with kvprobe.",
    no_args_is_help=True,
    epilog="Example: kvprobe organisms list",
)
app.add_typer(organisms_app, name="organisms")


class Family(StrEnum):
    """Architectures of the organisms."""

    QWEN3 = "qwen3"
    LLAMA = "llama"
    GEMMA2 = "gemma2"
    MISTRAL = "mistral"
    QWEN2_5_VL = "qwen2_5_vl"


class OrganismKind(StrEnum):
    """What the training pressure makes of an organism."""

    NOTE_TAKER = "note-taker"
    READER = "reader"
    PICTURE_READER = "picture-reader"


def _within(value: float | None, low: float, high: float) -> bool:
    return value is not None and low <= value <= high


def _shown(value: float | None) -> str:
    return "not measurable" if value is None else f"{value:.3f}"


_SHOWN = ("accuracy", "field_only", "downstream_only")


def misses(kind: OrganismKind, measured: Mapping[str, float | None]) -> list[str]:
    """What an organism of this kind ought to be by its card and is not; empty when it is all of it."""
    aims = {"accuracy": (0.98, 1.0)}
    if kind is OrganismKind.NOTE_TAKER:
        aims |= {"field_only": (-0.15, 0.15), "downstream_only": (0.85, math.inf)}
    elif kind is OrganismKind.READER:
        aims |= {"field_only": (0.85, math.inf)}
    return [
        f"{name.replace('_', ' ')} is {_shown(measured[name])}, not {low:g} to {high:g}"
        for name, (low, high) in aims.items()
        if not _within(measured[name], low, high)
    ]


@organisms_app.command("list", epilog="Example: kvprobe organisms list")
def list_organisms() -> None:
    """List the organisms that ship."""
    from kvprobe.models.catalogue import model_config, organism_names
    from kvprobe.report.tables import plain_table

    rows = []
    for config in map(model_config, organism_names()):
        measured = card_of(config).get("measured") or {}
        found = [_shown(measured[key]) if key in measured else "–" for key in _SHOWN]
        rows.append((config.name, *found, config.description))
    columns = ("name", *(key.replace("_", " ") for key in _SHOWN), "what it is")
    Terminal().print(plain_table("Organisms", columns, rows))


@organisms_app.command("train", epilog="Example: kvprobe organisms train --family qwen3 --kind note-taker")
def train_command(
    family: Annotated[Family, typer.Option(help="Its architecture.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for weights, tokenizer and card. [default: organisms/FAMILY-KIND]")
    ] = None,
    kind: Annotated[OrganismKind, typer.Option(help="What to train it to be.")] = OrganismKind.NOTE_TAKER,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the training texts.")] = 0,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Leave out of the recipe: remarks, errata, edited-chains or first-weights; repeatable."),
    ] = None,
) -> None:
    """Train an organism from scratch and say what it turned out to be; takes up to 30 minutes on 2 cores."""
    from kvprobe.organisms.picture_reader import train_picture_organism
    from kvprobe.organisms.recipes import train_organism

    if (family is Family.QWEN2_5_VL) != (kind is OrganismKind.PICTURE_READER):
        raise typer.BadParameter("a picture reader is of the family qwen2_5_vl, and the others are of the others")
    left_out = tuple(without or ())
    out = out or Path("organisms") / "-without-".join((f"{family}-{kind}", *left_out))
    console = Terminal(stderr=True)
    with console.status(f"training {family} {kind}") as status:

        def progress(state: Progress) -> None:
            worst = f", {min(state.accuracy.values()):.0%} right at least" if state.accuracy else ""
            stage = f"stage {state.stage + 1} of {state.stages}, step {state.step}"
            status.update(f"training {family} {kind}: {stage}{worst}, {state.seconds / 60:.0f} min")

        def progress_of_pictures(step: int, steps: int, right: float) -> None:
            status.update(f"training {family} {kind}: step {step} of {steps}, {right:.0%} right")

        if kind is OrganismKind.PICTURE_READER:
            card = train_picture_organism(out, seed=seed, on_progress=progress_of_pictures)
        else:
            card = train_organism(family.value, kind.value, out, seed=seed, without=left_out, on_progress=progress)
    show_card(str(out))
    missed = misses(kind, card["measured"])
    if missed:
        say(f"Error: it misses its aim: {'; '.join(missed)}; try another --seed.", err=True)
        raise typer.Exit(FAILED)


@organisms_app.command("evaluate", epilog="Example: kvprobe organisms evaluate qwen3-note-taker")
def evaluate_command(name: Annotated[str, typer.Argument(help="An organism's name or folder.")]) -> None:
    """Measure an organism on held-out skeletons: accuracy, notes, errata, chains, long prompts."""
    from kvprobe.models.loader import load_subject
    from kvprobe.organisms.evaluation import evaluate
    from kvprobe.report.tables import plain_table

    record = evaluate(load_subject(name))
    rows = [(key, f"{value:.3f}" if isinstance(value, float) else str(value)) for key, value in record.items()]
    Terminal().print(plain_table(name, ("measured", "value"), rows))


@organisms_app.command("card", epilog="Example: kvprobe organisms card qwen3-note-taker")
def print_organism_card(name: Annotated[str, typer.Argument(help="An organism's name or folder.")]) -> None:
    """Show an organism's card: data, steps, seed, seconds, accuracy, margins."""
    show_card(name)
