"""A report page of fake runs, for the tests that read it and those that open it in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from section_fakes import CLAIMS, experiment, fix_provenance, run

from kvprobe.html.page.write import Page, load_newest, write_page
from kvprobe.report.write import write_report
from kvprobe.runs import RunResult, provenance

NASTY = """</script><script>document.title = "broken"</script><!-- <img src=x onerror="alert(1)"> & 'all'"""


def finished_runs(folder: Path) -> list[RunResult]:
    """Two experiments of section 3, one of them without a stored figure, and one of section 4 that fails on a model."""
    nasty = [
        *CLAIMS[:2],
        {"id": "odd", "kind": "critique", "statement": "abs(field_only.recovery) <= 0.2", "source": NASTY},
    ]
    configs = [
        experiment("steady", "3.1"),
        experiment("nasty", "3.2", question=NASTY, claims=nasty),
        experiment("wild", "4.1", models=["red", "broken"], claims=CLAIMS[:1]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("source_hash", "code_version"):
            patch.setattr(provenance, name, getattr(provenance, name))
        fix_provenance()
        results = list(run(folder, configs, 1).results)
    for result in (results[0], results[2]):
        write_report(result)
    return results


def written_page(folder: Path) -> Page:
    """The page of what lies in `folder`."""
    found, failures = load_newest(folder)
    return write_page(found, folder, failures)
