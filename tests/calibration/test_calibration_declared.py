"""Claims come out on the models set by hand as they declare; in full this is what `make calibrate` runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvprobe.models.micro import KINDS
from kvprobe.runs import ClaimKind, Outcome, load_config, run_experiment
from kvprobe.runs.calibration import calibration_faults

ROOT = Path(__file__).parents[2] / "experiments"
IN_FULL = [file for file in sorted(ROOT.glob("section[345]/*.yaml")) if "calibration:" in file.read_text()]


def test_an_outcome_other_than_declared_is_told(tmp_path: Path) -> None:
    result = run_experiment(load_config("locality", profile="calibration"), results_dir=tmp_path)
    assert calibration_faults([result]) == []
    for model, declared in (("micro-note-taker", "holds"), ("micro-reader", "fails")):
        (one,) = (v for v in result.verdicts if (v.claim, v.model) == ("field-alone-does-nothing", model))
        assert one.outcome == declared
        changed = tuple(replace(v, outcome=Outcome.OPEN) if v is one else v for v in result.verdicts)
        (fault,) = calibration_faults([replace(result, verdicts=changed)])
        assert fault.startswith(f"locality/field-alone-does-nothing: open on {model}, declared as '{declared}'.")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", IN_FULL, ids=lambda file: file.stem)
def test_outcomes_are_those_declared(file: Path, tmp_path: Path) -> None:
    result = run_experiment(load_config(file, profile="calibration"), results_dir=tmp_path)
    assert not result.failed
    assert calibration_faults([result]) == []


@pytest.mark.parametrize("file", sorted(ROOT.glob("section3/*.yaml")), ids=lambda file: file.stem)
def test_every_claim_of_the_mechanism_says_how_it_comes_out(file: Path) -> None:
    for claim in load_config(file).claims:
        assert claim.calibration or claim.kind in (ClaimKind.IDENTITY, ClaimKind.COST), claim.id
        assert set(claim.calibration) - {"same"} <= set(KINDS), claim.id
