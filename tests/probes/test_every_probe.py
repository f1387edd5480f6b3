"""Laws that every probe keeps: what it measures, what its rows are read as, what its figure shows.

Measured on a tiny random model that reads the organisms' words; read from the rows of the released runs.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest
from matplotlib.figure import Figure
from pydantic import ValidationError
from worded_models import aligned, gated, worded

from kvprobe.composing.chunk import Header
from kvprobe.engine.forward import prefill
from kvprobe.errors import ConfigError, KvprobeError
from kvprobe.figures.panel import Panel
from kvprobe.probes.base import PROBES
from kvprobe.report.reference import paper_model, paper_value, reference
from kvprobe.report.write import panels
from kvprobe.runs import load_config
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.preparation import make_cells, make_probe, make_task, prepare
from kvprobe.runs.readings import EffectsOfRows
from kvprobe.runs.results import RunResult, find_runs, load_result
from kvprobe.runs.store import table_of
from kvprobe.stats import Effect, is_declared
from kvprobe.tasks.field_position import FieldPosition
from kvprobe.tasks.lookup import Lookup
from kvprobe.tasks.pairs import Pair
from tests.released.reread import RELEASED, differences, effects_again, filter_faults

ROOT = Path(__file__).parents[2]
EXPERIMENTS = {config.name: config for config in map(load_config, sorted(ROOT.glob("experiments/section*/*.yaml")))}
OF_PROBE = {config.probe: config for config in EXPERIMENTS.values()}
RUNS = {folder.parent.name: folder for folder in find_runs(RELEASED)}
FOLDED, FEW = 10, 2
"""Pairs to measure: enough for folds where a probe sees all of them at once, else few."""
# Why a tiny random model that only knows words cannot be measured.
NOT_HERE = {
    "image_splice": "needs a model that sees",
    "tool_calls": "needs a model that writes calls",
}


@cache
def released(experiment: str) -> RunResult:
    """A released run with one of the models that were measured, another one for each experiment."""
    result = load_result(RUNS[experiment])
    measured = sorted(name for name, model in result.models.items() if model.effects)
    place = int(hashlib.sha256(experiment.encode()).hexdigest(), 16)
    if not measured:
        return replace(result, models={})
    name = measured[place % len(measured)]
    kept, left_out = result.models[name].stored_effects, getattr(result.models[name].effects, "left_out", 0)
    effects = EffectsOfRows(kept, left_out, lambda: tuple(effects_again(result.folder, name)))
    return replace(result, models={name: replace(result.models[name], effects=effects)})


def test_every_probe_has_an_experiment() -> None:
    assert set(PROBES.names()) - {name for name in PROBES.names() if name.startswith("test_")} <= set(OF_PROBE)


@pytest.mark.parametrize("name", sorted(OF_PROBE))
def test_parameters_are_declared_and_an_unknown_one_is_named(name: str) -> None:
    kind = PROBES.get(name)
    assert PROBES.describe()[name]
    assert all(field.description for field in kind.model_fields.values())
    probe = make_probe(OF_PROBE[name])
    for field in kind.model_fields:
        with pytest.raises(ValidationError):
            setattr(probe, field, getattr(probe, field))
    wrong = OF_PROBE[name].model_copy(update={"parameters": {"sizzes": 1}})
    with pytest.raises(ConfigError, match=r"'parameters\.sizzes' is not a known key"):
        make_probe(wrong)


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        *(("k_sweep", {"sizes": sizes}, "increasing sizes from 0 on") for sizes in ((4, 2), (-1, 2), (1, 1))),
        ("seam_repair", {"seams": (0, 2)}, "0 and 1"),
        ("weight_editing", {"weight_edits": {"rome": ()}}, "at least one set"),
        ("keystone", {"headers": ("none", "none")}, "twice"),
        ("keystone", {"headers": ("none",), "return_arms": ("erratum",)}, "return_header"),
        ("keystone", {"return_arms": ("eratum",)}, "'eratum'"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(name: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PROBES.get(name)(**parameters)


@pytest.mark.parametrize("name", sorted(OF_PROBE))
def test_no_number_that_would_not_end_is_taken(name: str) -> None:
    """Nor one that counts something twice."""
    given = make_probe(OF_PROBE[name]).model_dump()

    def refused(field: str, value: Any, said: str | None = None) -> None:
        with pytest.raises(ValidationError, match=said):
            PROBES.get(name)(**{**given, field: value})

    for field, value in given.items():
        if isinstance(value, int) and not isinstance(value, bool) and not field.endswith(("seed", "bytes")):
            refused(field, 99_999_999, field)
            refused(field, -1)
        if isinstance(value, tuple) and value:
            refused(field, (*value, value[0]))
            if isinstance(value[0], int):
                refused(field, (*value, 99_999_999), field)
                refused(field, (*value, -1))
            elif isinstance(value[0], float):
                refused(field, (*value, -1.0))


# Which pairs a probe cannot use, and what it says is needed.
UNFIT = {
    **dict.fromkeys(("auto", "multi_field", "repeated_edit"), ("gated", "use task two_fields")),
    **dict.fromkeys(("unified_agent", "long_trajectory"), ("gated", "agent_turns")),
    **{name: ("gated", f"use task {name}") for name in ("facts", "tool_calls", "field_position")},
    **dict.fromkeys(("wording", "frontier", "k_sweep"), ("unsaid", "say their entity: use task gated_decision")),
    "n_skills": ("gated", "use task skills"),
    "dissociation": ("gated", "use task polarity"),
    "cot_gate": ("gated", "set mode: think"),
    "transplant": ("lookup", "use task field_position"),
    "offsets": ("rule last", "other than 'start'"),
}


def unfit_pairs(kind: str) -> list[Pair]:
    if kind == "lookup":
        return aligned(Lookup(size=1))
    if kind == "rule last":
        return aligned(FieldPosition(size=1, field_slots=("start",), notes=(1,), mentions=(0,)))
    pairs = gated(2)
    return [replace(p, scenario=replace(p.scenario, attributes={})) for p in pairs] if kind == "unsaid" else pairs


@pytest.mark.parametrize("name", UNFIT)
def test_pairs_that_a_probe_cannot_use_are_refused_and_what_it_needs_is_named(name: str) -> None:
    kind, said = UNFIT[name]
    with pytest.raises(ConfigError, match=said):
        make_probe(OF_PROBE[name]).measure(worded(), unfit_pairs(kind), lambda done, total: None)


@pytest.mark.parametrize("name", sorted(OF_PROBE))
def test_what_the_paper_measured_stands_in_its_table(name: str) -> None:
    known = set(reference()[["experiment", "condition", "metric"]].itertuples(index=False, name=None))
    for entry in make_probe(OF_PROBE[name]).read_by().paper.values():
        assert (entry.experiment, entry.condition, entry.metric) in known


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_claims_quote_the_papers_table(name: str) -> None:
    entries = make_probe(EXPERIMENTS[name]).read_by().paper
    for claim in EXPERIMENTS[name].claims:
        entry = entries.get(claim.parsed.effect)
        if entry is None:
            continue
        known = {model: paper_value(entry, model) for model in reference()["model"].dropna().unique()}
        for model, quoted in claim.paper_values.items():
            value = known.get(paper_model(model))
            assert value is None or quoted == pytest.approx(value, abs=5e-4), (claim.id, model)
        assert claim.paper_value in {None, *known.values()}, claim.id


def tiny_config(name: str) -> ExperimentConfig:
    """The probe's experiment with few pairs and its quick parameters."""
    source = Path(OF_PROBE[name].source)
    config = load_config(source, profile="quick")
    most = FOLDED if PROBES.get(name).needs_all_pairs else FEW
    task = config.task.model_copy(update={"size": min(most, config.task.parameters.get("size", most))})
    return config.model_copy(update={"task": task})


@pytest.mark.parametrize("name", sorted(set(OF_PROBE) - set(NOT_HERE)))
def test_measuring(name: str) -> None:
    """Rows for the gate, no number that is none, progress to the end, a model left as it was; same seed, same rows."""
    config, subject = tiny_config(name), worded()
    probe = make_probe(config)
    prepared = prepare(subject.identity.name, list(make_task(config).prompt_pairs()), config, lambda _: subject)
    pairs = make_cells(prepared, probe, config)[0].pairs
    ids = pairs[0].base.token_ids
    before, told = prefill(subject, ids).logits, list[tuple[int, int]]()
    if (refused := probe.refusal(subject, pairs[0])) is not None:
        pytest.skip(refused)
    try:
        rows = probe.measure(subject, pairs, lambda done, total: told.append((done, total)))
    except KvprobeError as error:
        pytest.skip(str(error))
    assert (prefill(subject, ids).logits == before).all()
    assert told
    assert all(0 <= done <= total for done, total in told)
    assert table_of(rows).num_rows == len(rows) > 0
    assert {row["pair"] for row in rows} <= set(range(len(pairs)))
    table = pd.DataFrame(rows)
    if "seed" in type(probe).model_fields:
        again = pd.DataFrame(probe.measure(subject, pairs, lambda done, total: None))
        timed = [name for name in table if "seconds" in name]
        pd.testing.assert_frame_equal(table.drop(columns=timed), again.drop(columns=timed))
    assert table[["m_base", "m_donor"]].notna().all(axis=None)
    if "noise_floor" in table:
        assert table["noise_floor"].between(0, 0.05).all()


@pytest.mark.parametrize("experiment", sorted(RUNS))
def test_released_rows_are_read_as_they_were(experiment: str) -> None:
    """The effects of the released summary, and each of a few again from nothing but its own rows."""
    result = released(experiment)
    assert list(differences(result)) == []
    assert list(filter_faults(result, only=4)) == []


@pytest.mark.parametrize("experiment", sorted(RUNS))
def test_effects_are_known_by_name_before_anything_is_measured(experiment: str) -> None:
    """All that are made and claimed; one misspelt is not."""
    config = EXPERIMENTS[experiment]
    declared = names_of(config)
    made = {effect.name for model in released(experiment).models.values() for effect in model.effects}
    claimed = {claim.parsed.effect for claim in config.claims}
    assert {name for name in made | claimed if not is_declared(name, declared)} == set()
    spelt = [name for name in declared if "*" not in name]
    for name in claimed:
        if is_declared(name, spelt):
            assert not any(is_declared(name[:place] + "~" + name[place + 1 :], spelt) for place in range(len(name)))
    assert not is_declared("no.such_effect", declared)


# Parameters under which a probe makes all that its figure can show, where neither its defaults nor an experiment do.
WIDEST: dict[str, dict[str, Any]] = {"keystone": {"headers": get_args(Header)}}


def test_the_papers_table_and_findings_are_about_effects_that_can_be_made() -> None:
    for name in OF_PROBE:
        reading = PROBES.get(name).read_by()
        assert _unknown({*reading.paper, *re.findall(r"\{([^}]+)\}", reading.finding)}, name) == set()


def _unknown(asked: set[str], probe: str) -> set[str]:
    """Those of which the probe makes no effect of that metric, or none of a condition in the same words, of any size."""
    made = [make_probe(config) for config in EXPERIMENTS.values() if config.probe == probe]
    made.append(PROBES.get(probe)(**WIDEST.get(probe, {})))
    names = {_sizeless(name) for one in made for name in one.read_by().declared(one) or ()}
    metrics, words = {name.rpartition(".")[2] for name in names}, {word for name in names for word in name.split(".")}
    return {name for name in asked if not _is_made_of(_sizeless(name), metrics, words)}


def _is_made_of(name: str, metrics: set[str], words: set[str]) -> bool:
    condition, _, metric = name.rpartition(".")
    return all(
        any(fnmatchcase(part, word) or part == "#" for word in known)
        for part, known in ((metric, metrics), *((part, words) for part in condition.split(".") if part))
    )


def names_of(config: ExperimentConfig) -> list[str]:
    probe = make_probe(config)
    declared = probe.read_by().declared(probe)
    assert declared
    return declared


class _Names(dict[str, Effect]):
    """Effects that remember which names were asked for."""

    def __init__(self, effects: Mapping[str, Effect], asked: set[str]) -> None:
        super().__init__(effects)
        self.asked = asked

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Effect:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


class _Asking(Panel):
    def select(self, condition: str, metric: str, **parameters: object) -> list[Effect]:
        assert isinstance(self.effects, _Names)
        self.effects.asked.add(f"{condition}.{metric}" if condition else metric)
        return super().select(condition, metric, **parameters)


def _sizeless(name: str) -> str:
    return re.sub(r"\{\w+\}|\d+(\.\d+)?", "#", name)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted(RUNS))
def test_every_effect_of_every_released_run_is_made_again_from_its_own_rows(experiment: str) -> None:
    result = load_result(RUNS[experiment])
    assert list(differences(result)) == []
    assert list(filter_faults(result)) == []


@pytest.mark.parametrize("experiment", sorted(RUNS))
def test_what_the_paper_gives_a_value_for_is_measured(experiment: str) -> None:
    result = released(experiment)
    reading = make_probe(result.config).read_by()
    for model in result.models.values():
        names = {effect.name for effect in model.effects}
        missing = {
            name
            for name in set(reading.paper) - names
            if not any(fnmatchcase(name, pattern) for pattern in reading.may_lack)
        }
        # A size that this experiment leaves out is no typing error: its neighbours in the same words are there.
        stems = {_stem(name) for name in names}
        assert {name for name in missing if _stem(name) not in stems} <= _of_other_parameters(experiment, missing)


def _stem(name: str) -> str:
    return "".join("#" if c.isdigit() else c for c in name).replace("##", "#").replace("##", "#").replace("##", "#")


def _of_other_parameters(experiment: str, missing: set[str]) -> set[str]:
    """Effects that another released run of the same probe has."""
    probe = EXPERIMENTS[experiment].probe
    others = [released(name) for name, config in EXPERIMENTS.items() if config.probe == probe and name in RUNS]
    if not all(run.models for run in others):
        # A run in which no model passed the gate says nothing of names.
        return missing
    names = {effect.name for run in others for model in run.models.values() for effect in model.effects}
    stems = {_stem(name) for name in names}
    return {name for name in missing if _stem(name) in stems}


@pytest.mark.parametrize("name", sorted(OF_PROBE))
def test_the_figure_shows_every_model_and_says_why_one_is_missing(name: str) -> None:
    result = released(OF_PROBE[name].name)
    reading = make_probe(result.config).read_by()
    gone = Panel("absent", note="failed: its weights are damaged")
    asked = set[str]()
    shown = [_Asking(**{**vars(panel), "effects": _Names(panel.effects, asked)}) for panel in panels(result)]
    drawn = reading.draw([*shown, gone])
    drawn.draw_without_rendering()
    said = " ".join(text.get_text() for axes in drawn.axes for text in axes.texts).replace("\n", " ")
    assert "its weights are damaged" in said
    assert "its weights are damaged" in " ".join(
        text.get_text() for axes in reading.draw([gone]).axes for text in axes.texts
    ).replace("\n", " ")
    if reading.has_main:
        axes = Figure().subplots()
        reading.draw_main(axes, [*shown, Panel("absent")])
        assert axes.get_title()
        if shown:
            assert axes.has_data()
            assert all(math.isfinite(end) for end in (*axes.get_xlim(), *axes.get_ylim()))
    assert _unknown(asked, name) == set()


def test_the_paper_has_models_for_the_families() -> None:
    assert {paper_model(name) for name in ("qwen3-8b", "gemma-2-9b-it")} == {"Qwen3-8B", "Gemma-2-9B"}
