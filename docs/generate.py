"""Hook of mkdocs: pages that are made from the code, so that they stay right when the code changes.

The reference of each package comes from its modules, the lists of names from the registries, the command line from its
own help, the changelog from the root of the repository, and the notebooks from their files.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
ORDER = (
    "engine",
    "models",
    "tasks",
    "probes",
    "edit",
    "composing",
    "agents",
    "baselines",
    "organisms",
    "stats",
    "runs",
)
"""Packages in the order in which they build on each other; others follow by name."""
REGISTRIES = {
    "Probes": ("kvprobe.probes.base", "PROBES"),
    "Tasks": ("kvprobe.tasks.base", "TASKS"),
    "Wordings": ("kvprobe.tasks.wordings", "WORDINGS"),
    "Edit methods": ("kvprobe.edit.base", "EDIT_METHODS"),
    "Selection criteria": ("kvprobe.edit.selection", "SELECTIONS"),
    "Reuse schemes": ("kvprobe.composing.base", "REUSE_SCHEMES"),
    "Agents": ("kvprobe.agents.base", "AGENTS"),
    "Weight edits": ("kvprobe.baselines.base", "WEIGHT_EDITS"),
    "Architectures": ("kvprobe.models.architectures.base", "ARCHITECTURES"),
    "Model sources": ("kvprobe.models.sources.base", "MODEL_SOURCES"),
}
NOTEBOOKS = ROOT / "notebooks"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation."""
    complete(config.nav or [])
    return config


def complete(navigation: list[dict[str, Any]]) -> None:
    """Put into the navigation what it does not list: further how-tos, the notebooks, the reference of each package."""
    sections: dict[str, list[Any]] = {name: pages for section in navigation for name, pages in section.items()}
    listed = {path for page in sections["How-to"] for path in (page.values() if isinstance(page, dict) else (page,))}
    found = sorted(f"howto/{file.name}" for file in (ROOT / "docs/howto").glob("*.md"))
    sections["How-to"] += [path for path in found if path not in listed]
    sections["Notebooks"] += [{title_of(file): f"notebooks/{file.stem}.md"} for file in notebooks()]
    sections["Reference"] += [{f"kvprobe.{name}": f"reference/{name}.md"} for name in packages()]
    sections["Reference"].append({"kvprobe": "reference/kvprobe.md"})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for path, content in generated_pages():
        files.append(File.generated(config, path, content=content))
    return files


def generated_pages() -> Iterator[tuple[str, str | bytes]]:
    """Path below the site and content of every page that is made, and of the pictures in notebooks."""
    for package in packages():
        yield f"reference/{package}.md", reference_page(f"kvprobe.{package}", modules_of(package))
    yield "reference/kvprobe.md", public_names() + reference_page("kvprobe", modules_on_top())
    yield "reference/names.md", names_page()
    yield "reference/support.md", support_page()
    yield "reference/cli.md", cli_page()
    yield "changelog.md", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for file in notebooks():
        yield from notebook_page(file)


def packages() -> list[str]:
    """The packages of kvprobe but its command line, which has a page of its own."""
    import kvprobe

    found = {module.name for module in pkgutil.iter_modules(kvprobe.__path__) if module.ispkg} - {"cli"}
    return [*(name for name in ORDER if name in found), *sorted(found - set(ORDER))]


def modules_on_top() -> list[str]:
    """Dotted names of the modules that belong to no package."""
    import kvprobe

    return [f"kvprobe.{module.name}" for module in pkgutil.iter_modules(kvprobe.__path__) if not module.ispkg]


def modules_of(package: str) -> list[str]:
    """Dotted names of a package and of all its public modules, those of its subpackages too."""
    name = f"kvprobe.{package}"
    found = importlib.import_module(name)
    every = (module.name for module in pkgutil.walk_packages(found.__path__, f"{name}."))
    return [name, *sorted(each for each in every if not any(part.startswith("_") for part in each.split(".")))]


def reference_page(title: str, modules: Sequence[str]) -> str:
    """The reference of some modules, one after the other."""
    return "\n\n".join([f"# {title}", *(f"::: {module}" for module in modules)]) + "\n"


def public_names() -> str:
    """What `import kvprobe` offers, each with the first line of its docstring and the module that describes it."""
    import kvprobe
    from kvprobe.registry import Registry

    lines = ["# Public names", "", "All of them are imported when they are first used.", ""]
    rows = []
    for name in kvprobe.__all__:
        value = getattr(kvprobe, name)
        registry = isinstance(value, Registry)
        module = value.kind.package if registry else value.__module__
        summary = f"Every {value.kind.name} by name." if registry else (inspect.getdoc(value) or "").split("\n")[0]
        rows.append((f"`kvprobe.{name}`", summary, f"[{module}]({module.split('.')[1]}.md#{module})"))
    return "\n".join([*lines, *table(("name", "what it is", "described in"), rows)]) + "\n\n"


def names_page() -> str:
    """All names that a YAML or a call may use, by kind, as `kvprobe list` shows them."""
    lines = [
        "# Names",
        "",
        "What can be used by name, from the registries themselves; `kvprobe list` shows the same. A package of your "
        "own adds names through the entry point group that is given with each kind.",
    ]
    for title, (module, attribute) in REGISTRIES.items():
        registry = getattr(importlib.import_module(module), attribute)
        lines += ["", f"## {title}", "", f"Entry point group `{registry.kind.entry_point_group}`.", ""]
        lines += table(("name", "what it is"), [(f"`{name}`", text) for name, text in registry.describe().items()])
    return "\n".join(lines) + "\n"


def support_page() -> str:
    """What can be done with each architecture, as the tests measured it."""
    from kvprobe.models.support import MEANING, OPERATIONS, support_matrix

    rows = [(f"`{row.architecture}`", *row.cells, row.reason) for row in support_matrix()]
    lines = [
        "# Architectures",
        "",
        "What can be done with the KV cache of each architecture, as the tests found it on tiny random models; "
        "`kvprobe models support` prints the same.",
        "",
        *(f"- *{status}*: {meaning}." for status, meaning in MEANING.items()),
        "",
        *table(("architecture", *OPERATIONS, "how, or why not"), rows),
    ]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """The command line's own help."""
    import typer
    from typer.cli import get_docs_for_click

    command = command_line()
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="kvprobe", title="Command line")
    # Help texts name numbers in brackets, which markdown would take for links.
    return text.replace("[default:", "\\[default:")


def command_line() -> Any:
    """The `kvprobe` command with all its subcommands."""
    import typer

    import kvprobe.cli
    from kvprobe.cli.app import app

    for module in pkgutil.iter_modules(kvprobe.cli.__path__):
        importlib.import_module(f"kvprobe.cli.{module.name}")
    return typer.main.get_command(app)


def notebooks() -> list[Path]:
    """The notebooks in order."""
    return sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))


def title_of(notebook: Path) -> str:
    """The first heading of a notebook."""
    import nbformat

    cells = nbformat.read(notebook, as_version=4).cells
    headings = (line for cell in cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.lstrip("# ").strip() for line in headings if line.startswith("# ")), notebook.stem)


def notebook_page(notebook: Path) -> Iterator[tuple[str, str | bytes]]:
    """A notebook as a page, and the pictures its cells show."""
    from nbconvert import MarkdownExporter

    body, resources = MarkdownExporter().from_filename(
        str(notebook), resources={"output_files_dir": f"{notebook.stem}_files"}
    )
    yield f"notebooks/{notebook.stem}.md", body.replace(".ipynb)", ".md)")
    for name, content in resources.get("outputs", {}).items():
        yield f"notebooks/{name}", content


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A markdown table."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
