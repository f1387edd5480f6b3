"""`kvprobe models`: what can be studied, fetching it, and what is known of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kvprobe.cli.app import app
from kvprobe.cli.terminal import Terminal, progress_bar, say

if TYPE_CHECKING:
    from kvprobe.models.config import ModelConfig

PEAK_TFLOPS, SHARE = 989.0, 0.1
"""Of one H100 SXM in bfloat16 without sparsity, and what passes over a few hundred tokens reach of it: assumed."""
models_app = typer.Typer(
    help="List, fetch and describe models.", no_args_is_help=True, epilog="Example: kvprobe models list"
)
app.add_typer(models_app, name="models")


@models_app.command("list", epilog="Example: kvprobe models list")
def print_models() -> None:
    """List all models by tier: organisms ship with kvprobe, pocket models run on a CPU, paper models want a GPU."""
    from kvprobe.models.cards import list_models
    from kvprobe.report.tables import plain_table

    rows = []
    for model in list_models():
        here = "yes" if model.available else "no"
        memory = f"{round(model.memory_gb, 1 if model.memory_gb < 10 else 0):g} GB" if model.memory_gb else "–"
        rows.append((model.name, model.tier, model.architecture, here, memory, model.description))
    columns = ("name", "tier", "architecture", "here", "memory", "what it is")
    console = Terminal()
    # In a narrow terminal the last column would be a letter or two wide.
    shown = len(columns) if console.width >= 110 else len(columns) - 1
    console.print(plain_table("Models", columns[:shown], [row[:shown] for row in rows]))


@models_app.command(epilog="Example: kvprobe models support")
def support() -> None:
    """Show what can be done with each architecture, as the tests have found it, and why not the rest."""
    from kvprobe.models.support import MEANING, OPERATIONS, support_matrix
    from kvprobe.report.tables import plain_table

    matrix = support_matrix()
    console = Terminal()
    rows = [(row.architecture, *row.cells) for row in matrix]
    console.print(plain_table("Architectures", ("architecture", *OPERATIONS), rows))
    for status, meaning in MEANING.items():
        console.print(f"{status}: {meaning}", style="dim")
    reasons: dict[str, list[str]] = {}
    for row in matrix:
        reasons.setdefault(row.reason, []).append(row.architecture)
    console.print()
    for reason, names in reasons.items():
        console.print(Text.assemble((", ".join(names), "bold"), f": {reason}"))


@models_app.command(epilog="Example: kvprobe models cost 3 4 --models paper")
def cost(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="Names, sections (3), YAML files or folders of them. [default: all]")
    ] = None,
    models: Annotated[str, typer.Option(help="Names with commas, or a group of the files.")] = "paper",
    *,
    peak: Annotated[float, typer.Option(min=1.0, help="TFLOPS of one GPU in bfloat16.")] = PEAK_TFLOPS,
    share: Annotated[float, typer.Option(min=0.001, max=1.0, help="Share of the peak that is reached.")] = SHARE,
) -> None:
    """Predict GPU memory and hours of experiments on models that need not be here."""
    from kvprobe.report.tables import plain_table
    from kvprobe.runs import load_config
    from kvprobe.runs.costs import TOKENS, paper_tier_costs
    from kvprobe.runs.experiments import experiment_files, known_experiments

    files = experiment_files(experiments) if experiments else known_experiments().values()
    found, unknown = paper_tier_costs([load_config(file, models=models) for file in files], peak * 1e12, share)
    rows = [
        (
            one.model,
            str(one.experiments),
            f"{one.weights / 1e9:.1f}",
            f"{one.cache_per_token / 2**10:.0f}",
            f"{one.memory / 1e9:.0f}",
            f"{one.flops / 1e15:.1f}",
            f"{one.hours:.2f}",
        )
        for one in found
    ]
    columns = ("model", "experiments", "weights GB", "cache KiB/token", "GPU memory GB", "PFLOP", "GPU hours")
    console = Terminal()
    console.print(plain_table("Predicted cost", columns, rows))
    told = f"GPU memory: weights and a sweep over {TOKENS} tokens; hours: at {share:g} of {peak:g} TFLOPS."
    console.print(told, style="dim", soft_wrap=True)
    if left := max((one.uncounted for one in found), default=0):
        console.print(f"Experiments left out because their work was not counted: {left}.", style="yellow")
    if unknown:
        console.print(f"Not predicted, since their YAML gives no shape: {', '.join(unknown)}.", style="yellow")


@models_app.command(epilog="Example: kvprobe models pull smollm2-135m")
def pull(names: Annotated[list[str], typer.Argument(help="Names of `kvprobe models list`, or hub ids.")]) -> None:
    """Fetch models and verify their files."""
    for name in names:
        say(f"{name}: {_pull(name)}")


@models_app.command("card", epilog="Example: kvprobe models card qwen3-note-taker")
def print_card(
    name: Annotated[str, typer.Argument(help="A name of `kvprobe models list`, a folder or a file.")],
) -> None:
    """Show what is known of a model: its card if it has one, else what its YAML file says."""
    show_card(name)


def show_card(name: str) -> None:
    """Print a model's card."""
    from kvprobe.models.catalogue import model_config
    from kvprobe.report.tables import plain_table

    content = card_of(model_config(name))
    rows = [(key, _text(value)) for key, value in content.items() if value not in (None, "", {}, [])]
    Terminal().print(plain_table(name, ("key", "value"), rows))


def _pull(name: str) -> str:
    from kvprobe.models.cards import pull_model

    with progress_bar() as bar:
        task = bar.add_task(name, total=1.0)

        def progress(stage: str, fraction: float) -> None:
            bar.update(task, description=stage, completed=fraction)

        return str(pull_model(name, progress))


def card_of(config: ModelConfig) -> dict[str, Any]:
    """What is known of a model: its card if it has one, else what its YAML file says."""
    from kvprobe.models.catalogue import CARD, read_card

    file = config.path / CARD if config.path else None
    if file is None or not file.is_file():
        return dict(config.model_dump(mode="json"))
    return read_card(file)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
