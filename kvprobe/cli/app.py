"""The application all commands hang on: quiet libraries, errors as one sentence, exit codes.

Commands import torch, pandas and matplotlib inside their functions, so that `kvprobe --help` is instant.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvprobe import __version__
from kvprobe.cli.terminal import say
from kvprobe.errors import KvprobeError

FAILED, INTERRUPTED = 1, 130
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class _Group(TyperGroup):
    """Tells what kvprobe raises on purpose in one sentence; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        with _interrupts() as seen:
            try:
                with _quiet_libraries():
                    return super().invoke(ctx)
            except KvprobeError as error:
                say(f"Error: {error}", err=True)
                raise typer.Exit(FAILED) from None
            except typer.Exit:
                raise
            except OSError as error:
                if seen or error.filename is None:
                    raise
                say(f"Error: {error.filename}: {error.strerror}.", err=True)
                raise typer.Exit(FAILED) from None
            except (KeyboardInterrupt, Exception) as error:
                if not seen and not isinstance(error, KeyboardInterrupt):
                    raise
                say("Interrupted; the same command can be given again.", err=True)
                raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="kvprobe",
    cls=_Group,
    help="Probe, edit and compose what a language model wrote into its KV cache.",
    epilog="Example: kvprobe run locality",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of `kvprobe` itself."""


def quieten() -> None:
    """Let libraries say errors only, in this process."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for library in ("transformers", "transformer_lens", "sae_lens", "huggingface_hub", "matplotlib"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The interrupts that came; a library that is stopped while it loads may lose one and fail in another way."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    with warnings.catch_warnings():
        quieten()
        yield
