"""`kvprobe explore`: a local page to try things on one prompt."""

from __future__ import annotations

import webbrowser
from importlib.resources import files as package_files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvprobe.cli.app import app
from kvprobe.cli.audit import DEFAULT_MODEL
from kvprobe.cli.terminal import progress_bar, say
from kvprobe.errors import ConfigError, StoreError


@app.command("explore", epilog="Example: kvprobe explore prompt.yaml --model qwen3-note-taker")
def explore_command(
    prompt: Annotated[
        Path | None, typer.Argument(help="A prompt file, or a state saved on the page. [default: an example]")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A name of `kvprobe models list`, a folder, a .gguf file or a hub id.")
    ] = DEFAULT_MODEL,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page. [default: a free one]")] = 0,
    *,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:0. [default: cuda where there is one]")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights. [default: what the model's YAML says]")] = None,
    chat: Annotated[bool, typer.Option(help="Use the tokenizer's chat template, where it has one.")] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Open a local page: change a field, transplant cache entries, try an edit, and see the decision at once."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError("The page needs starlette and uvicorn: pip install 'kvprobe[explore]'.")
    if prompt is None:
        text, where = (package_files("kvprobe") / "auditing/example.yaml").read_text(encoding="utf-8"), "The example"
    else:
        from kvprobe.yaml_files import read_text

        text, where = read_text(prompt), str(prompt)
    from kvprobe.explore.state import read_state

    # A mistake in the file is better known before a model is loaded than after.
    first = read_state(text, where)
    first.prompt.fields(where)
    from kvprobe.explore.server import Server
    from kvprobe.explore.session import Session
    from kvprobe.models.loader import load_subject

    with progress_bar() as bar:
        task = bar.add_task(f"loading {model}", total=1.0)
        subject = load_subject(
            model,
            device=device,
            dtype=dtype,
            progress=lambda stage, done: bar.update(task, description=stage, completed=done),
        )
    try:
        server = Server(Session(subject, chat=chat), first, port)
    except OSError as error:
        raise StoreError(f"Port {port} cannot be used ({error.strerror}); name another, or none.") from error
    say(f"{subject.name} is at {server.url}\nThe address is a key to it: keep it to yourself. Ctrl-C ends it.")
    if open_page:
        webbrowser.open(server.url)
    try:
        server.run()
    except KeyboardInterrupt:
        say("Ended.", err=True)
