"""Code blocks of markdown pages, made to run.

Python blocks share their names within a page. All blocks of a page run in one folder of their own. A block whose first
line is `# file: NAME` is written there too. `kvprobe` commands run in this process; other shell blocks run in bash.
A block behind `<!-- skip: next "why" -->` does not run; what its commands call must exist all the same. A block of
language `text` is only shown.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import SkipTest

import typer
import yaml
from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"#\s*(?:file:\s*)?(?P<name>[\w./-]+\.(?:py|yaml|toml))\s*\n")
SHELL = re.compile(r"[|&;<>$`]")
LANGUAGES = ("python", "sh", "yaml", "toml")


def blocks(page: Path) -> Document:
    """The page with its blocks found."""
    evaluators = {"python": run_python, "sh": run_shell, "yaml": check_yaml, "toml": check_toml}
    parsers = [SkipParser(), *(CodeBlockParser(language, evaluators[language]) for language in LANGUAGES)]
    return Sybil(parsers=parsers).parse(page)


def run(page: Path, *, commands: bool = True) -> None:
    """Run all blocks of a page in the working directory; without `commands`, those of the shell need only exist."""
    for example in blocks(page):
        try:
            if not commands and example.region.evaluator is run_shell:
                raise SkipTest
            example.evaluate()
        except SkipTest:
            check_skipped(str(example.parsed))
        except Exception as error:
            error.add_note(f"in the block that begins on line {example.line} of {page.relative_to(ROOT)}")
            raise


def written(text: str) -> Path | None:
    """The file that a block says it is, written."""
    named = FILE.match(text)
    if named is None:
        return None
    file = Path(named["name"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def run_python(example: Example) -> None:
    """Run a block, with line numbers of the page in tracebacks."""
    written(example.parsed)
    start = example.line + example.parsed.line_offset
    source = "\n" * start + example.parsed
    # Names and classes of a page belong to a module, as those of a script do.
    example.namespace.setdefault("__name__", "__main__")
    exec(compile(source, example.path, "exec", dont_inherit=True), example.namespace)


def run_shell(example: Example) -> None:
    """Run the commands of a block in the folder of the page."""
    commands = list(commands_of(example.parsed))
    if all(command.startswith("kvprobe ") and not SHELL.search(command) for command in commands):
        for command in commands:
            result = CliRunner().invoke(app(), shlex.split(command)[1:], catch_exceptions=False)
            assert result.exit_code == 0, f"{command}\n{result.output}"
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.parsed], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{example.parsed}\n{done.stdout}{done.stderr}"


def check_yaml(example: Example) -> None:
    """Write and validate a file; a block that names none is a part of one and must be YAML."""
    from kvprobe.models.config import read_model_config
    from kvprobe.runs import load_config
    from kvprobe.runs.preparation import make_plan
    from kvprobe.tasks.own_prompt import PromptFile

    content = yaml.safe_load(example.parsed)
    assert isinstance(content, dict)
    file = written(example.parsed)
    if file is None:
        return
    if "probe" in content:
        for profile in (None, *content.get("profiles", {})):
            make_plan(load_config(file, profile=profile))
    elif {"prompt", "answers"} <= set(content):
        PromptFile.model_validate(content)
    elif "source" in content:
        read_model_config(file)


def check_toml(example: Example) -> None:
    """Write a file of project metadata; the plugins it names must be modules of the page, in a group that exists."""
    content = tomllib.loads(example.parsed)
    written(example.parsed)
    for group, plugins in content.get("project", {}).get("entry-points", {}).items():
        assert group in entry_point_groups()
        for module in plugins.values():
            assert Path(f"{module}.py").is_file(), f"{module}.py is not a file of this page"


def check_skipped(text: str) -> None:
    """What a block that does not run calls must exist: make targets, commands and options of kvprobe, extras."""
    for command in commands_of(text):
        words = [word for word in shlex.split(command, comments=True) if "=" not in word or word.startswith("--")]
        if words[:1] == ["make"]:
            missing = [word for word in words[1:] if word not in make_targets()]
            assert not missing, f"the Makefile has no target {missing}"
        if words[:1] == ["kvprobe"]:
            check_command(words[1:])
        if words[:2] == ["pip", "install"]:
            extras = {name for found in re.findall(r"\[([\w,-]+)\]", command) for name in found.split(",")}
            assert extras <= all_extras(), f"pyproject.toml has no extra {extras - all_extras()}"


def check_command(words: list[str]) -> None:
    """The subcommand and all options exist."""
    command: Any = typer.main.get_command(app())
    rest = list(words)
    while rest and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"kvprobe has no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    unknown = [word for word in rest if word.startswith("--") and word.split("=")[0] not in options]
    assert not unknown, f"kvprobe {' '.join(words)}: there is no option {unknown}"


def commands_of(text: str) -> Iterator[str]:
    """The commands of a shell block, continued lines joined, comments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        command = line.split(" #")[0].strip()
        if command and not command.startswith("#"):
            yield command


@cache
def app() -> typer.Typer:
    """The command line with all its commands."""
    from kvprobe.cli.app import app as application

    generator().command_line()
    return application


@cache
def generator() -> Any:
    """The module that makes pages from the code."""
    found = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@cache
def make_targets() -> set[str]:
    """The targets that `make help` lists."""
    return set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@cache
def all_extras() -> set[str]:
    """The extras of the package."""
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@cache
def entry_point_groups() -> set[str]:
    """The groups third parties register through."""
    return set(re.findall(r"Entry point group `([\w.]+)`", generator().names_page()))
