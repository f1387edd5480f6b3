"""`kvprobe audit`: a prompt of one's own, from file to verdict."""

from __future__ import annotations

from importlib.resources import files as package_files
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from kvprobe.cli.app import FAILED, INTERRUPTED, app
from kvprobe.cli.terminal import Terminal, progress_bar, say
from kvprobe.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from kvprobe.auditing import AuditResult

DEFAULT_MODEL = "qwen3-note-taker"


@app.command(
    "audit", epilog="Example: kvprobe audit --example > prompt.yaml; kvprobe audit prompt.yaml --page audit.html"
)
def audit_command(
    prompt: Annotated[Path | None, typer.Argument(help="A prompt file; --example prints one to start from.")] = None,
    model: Annotated[
        str, typer.Option(help="A name of `kvprobe models list`, a folder, a .gguf file or a hub id.")
    ] = DEFAULT_MODEL,
    field: Annotated[
        list[str] | None, typer.Option(help="Audit this field only; may be given several times. [default: all]")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="Write an HTML page to this file.")] = None,
    *,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:0. [default: cuda where there is one]")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights. [default: what the model's YAML says]")] = None,
    answer_mass: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Probability the answers need together, unless one is likeliest. [default: 0.5]"
        ),
    ] = None,
    chat: Annotated[bool, typer.Option(help="Use the tokenizer's chat template, where it has one.")] = True,
    example: Annotated[bool, typer.Option("--example", help="Print a prompt file to start from, and stop.")] = False,
) -> None:
    """Audit a prompt: does a field matter, where are its notes, which edit of it is safe, and the cheapest of these."""
    if example:
        # By the package above: to name its own one would load torch for a few lines of text.
        say((package_files("kvprobe") / "auditing/example.yaml").read_text(encoding="utf-8"), nl=False)
        return
    if prompt is None:
        raise ConfigError("Name a prompt file; `kvprobe audit --example > prompt.yaml` writes one to start from.")
    _check_outputs(prompt, json, page)
    try:
        result = _audited(prompt, model, field, chat=chat, device=device, dtype=dtype, answer_mass=answer_mass)
    except KeyboardInterrupt:
        say("Interrupted; nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    from kvprobe.auditing import Dependence, summary

    Terminal().print(summary(result))
    _write(result, json, page)
    if not any(each.judged or each.dependence is Dependence.NOT_ASKED for each in result.fields):
        raise typer.Exit(FAILED)


def _check_outputs(prompt: Path, *outputs: Path | None) -> None:
    """What cannot be written is better known before the measurement than after it."""
    taken = {prompt.resolve(): "the prompt"}
    for file in filter(None, outputs):
        folder = file.absolute().parent
        if not folder.is_dir():
            raise StoreError(f"There is no folder {file.parent} to write {file.name} to; create it.")
        # Writing puts a new file in the place of the old one, and that must not be done to a pipe or a terminal.
        if folder.is_relative_to("/dev") or (file.exists() and not file.is_file()):
            kind = "a folder" if file.is_dir() else "no ordinary file"
            raise StoreError(f"{file} is {kind}; name a file to write.")
        if file.resolve() in taken:
            raise StoreError(f"{file} is {taken[file.resolve()]}; name another file to write.")
        taken[file.resolve()] = "the other output"
        try:
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise StoreError(f"Nothing can be written to the folder {folder} ({error.strerror}).") from error


def _audited(
    prompt: Path,
    model: str,
    fields: list[str] | None,
    *,
    chat: bool,
    device: str | None,
    dtype: str | None,
    answer_mass: float | None,
) -> AuditResult:
    from kvprobe.auditing import audit
    from kvprobe.models.loader import load_subject
    from kvprobe.tasks.own_prompt import read_prompt_file

    # A mistake in the file is better known before a model is loaded than after.
    read_prompt_file(prompt).fields(str(prompt))
    with progress_bar() as bar:
        task = bar.add_task(f"loading {model}", total=1.0)

        def progress(stage: str, fraction: float) -> None:
            bar.update(task, description=stage, completed=fraction)

        subject = load_subject(model, device=device, dtype=dtype, progress=progress)
        return audit(subject, prompt, fields=fields, chat=chat, answer_mass=answer_mass, progress=progress)


def _write(result: AuditResult, json: Path | None, page: Path | None) -> None:
    from kvprobe.html import audit_page
    from kvprobe.runs.store import write_atomically

    made = {json: lambda: result.model_dump_json(indent=1) + "\n", page: lambda: audit_page(result)}
    for file, text in made.items():
        if file is None:
            continue
        try:
            write_atomically(file, text().encode())
        except OSError as error:
            raise StoreError(f"The file {file} cannot be written ({error.strerror}); choose another.") from error
        Terminal().print(f"Written: {file}", soft_wrap=True)
