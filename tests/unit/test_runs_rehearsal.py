"""A rehearsal writes nothing and foresees what measuring takes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from runs_fakes import FakeProbe, config

from kvprobe.engine.planner import cache_bytes, peak_bytes, plan_batch, weight_bytes
from kvprobe.errors import ConfigError
from kvprobe.models.loader import load_subject
from kvprobe.runs import preparation
from kvprobe.runs.preparation import make_plan
from kvprobe.runs.rehearsal import Forecast, forecast

MODEL = "qwen3-note-taker"


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> FakeProbe:
    fake = FakeProbe()
    monkeypatch.setattr(preparation, "make_probe", lambda config: fake)
    return fake


def foreseen() -> Forecast:
    return forecast(make_plan(config(models=[MODEL])), MODEL, load_subject)


def test_time_grows_with_the_pairs_and_nothing_is_written(tmp_path: Path, probe: FakeProbe) -> None:
    probe.before = lambda subject, pairs: time.sleep(0.02 * len(pairs))
    before = sorted(tmp_path.rglob("*"))
    seen = foreseen()
    assert seen.seconds is not None
    assert seen.seconds == pytest.approx(0.02 * seen.pairs, rel=0.5)
    assert seen.rehearsed == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_probe_that_needs_more_pairs_gets_them(probe: FakeProbe) -> None:
    def refuse_few(subject: Any, pairs: Any) -> None:
        if len(pairs) < 8:
            raise ConfigError("too few pairs for the folds")

    probe.before = refuse_few
    assert foreseen().rehearsed == 8


def test_what_cannot_be_rehearsed_says_why(probe: FakeProbe) -> None:
    def refuse(subject: Any, pairs: Any) -> None:
        raise ConfigError("never enough")

    probe.before = refuse
    seen = foreseen()
    assert seen.seconds is None
    assert seen.reason == "never enough"
    assert seen.peak_bytes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a stretch is asked of Linux")
def test_peak_memory_is_foreseen_within_a_factor() -> None:
    """The growth of a process that sweeps is under what the planner says, and not by an order of magnitude."""
    script = textwrap.dedent(
        """
        import torch
        from pathlib import Path
        from kvprobe.engine.forward import prefill
        from kvprobe.engine.interventions import KVPatch
        from kvprobe.engine.planner import peak_bytes, weight_bytes
        from kvprobe.engine.sweep import run_patches
        from kvprobe.models.loader import load_subject
        torch.set_num_threads(1)
        subject = load_subject("qwen3-note-taker")
        def peak():
            status = Path("/proc/self/status").read_text()
            return 1024 * int(status.split("VmHWM:")[1].split()[0])
        ids = [5 + n % 300 for n in range(700)]
        prefill(subject, ids[:8])
        Path("/proc/self/clear_refs").write_text("5")  # the peak of what follows alone
        before = peak()
        base, donor = prefill(subject, ids).cache, prefill(subject, [6, *ids[1:]]).cache
        rows = [KVPatch((n % 690,), donor) for n in range(300)]
        keep = lambda logits: logits[:, :2]
        run_patches(subject, ids, base, rows, reduce=keep)
        few = peak()
        run_patches(subject, ids, base, rows * 5, reduce=keep)
        print(before, few, peak(), peak_bytes(subject, 700) - weight_bytes(subject))
        """
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    before, few, many, planned = map(int, said.stdout.split())
    assert few - before < 1.2 * planned
    assert few - before > planned / 8
    assert many - few < planned / 2, "five times the rows must not need five times the memory"


def test_planner_sums_up() -> None:
    subject = load_subject("qwen3-note-taker")
    assert weight_bytes(subject) == sum(p.numel() * p.element_size() for p in subject.model.parameters())
    assert cache_bytes(subject, 20) == 2 * cache_bytes(subject, 10)
    assert peak_bytes(subject, 2000) > peak_bytes(subject, 100) > weight_bytes(subject)
    assert plan_batch(subject, 2000) >= plan_batch(subject, 2000, laid_out=True)
