"""What a run needs before its first forward pass: probe, task, subject, aligned pairs, cells with their keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprobe.engine.planner import peak_bytes
from kvprobe.engine.prefills import share_prefixes
from kvprobe.errors import AlignmentError, ConfigError, KvprobeError, ModelSourceError, did_you_mean
from kvprobe.models.catalogue import model_config
from kvprobe.models.subject import Subject
from kvprobe.probes.base import PROBES, Probe
from kvprobe.probes.calibration import Offsets, answer_offsets
from kvprobe.runs import provenance
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.validation import validated
from kvprobe.stats import is_declared
from kvprobe.tasks.base import TASKS, Task
from kvprobe.tasks.pairs import Pair, PromptPair, Provenance, align
from kvprobe.tasks.worked_cases import with_worked_cases

OWN_PROMPTS = "own_prompt"


@dataclass(frozen=True)
class Cell:
    """The unit of work: one model and one block of instances.

    Args:
        model: its name.
        block: number of the block within the model.
        first: index of its first pair among the model's aligned pairs.
        pairs: the aligned pairs of the block.
        content: everything that determines the cell, as plain values.
        key: hash of its content.
    """

    model: str
    block: int
    first: int
    pairs: tuple[Pair, ...]
    content: Mapping[str, Any]
    key: str


@dataclass(frozen=True)
class Preparation:
    """One subject with its aligned pairs.

    Args:
        name: of the model, as the experiment gives it.
        subject: the loaded model; `None` where it was loaded elsewhere.
        identity: its identity as plain values.
        pairs: aligned, in the task's order.
        unaligned: prompt pairs that this tokenizer does not align.
        first_misfit: what was wrong with the first of them.
        offsets: of the answers' logits, by token id; empty unless they are calibrated.
        peak_bytes: of weights, caches and passes at their largest, as the planner foresees them; `None` without pairs.
    """

    name: str
    subject: Any
    identity: dict[str, Any]
    pairs: tuple[Pair, ...]
    unaligned: int
    first_misfit: str
    peak_bytes: int | None = None
    offsets: Offsets = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """An experiment made ready: its probe, validated, and its prompt pairs, before any model."""

    config: ExperimentConfig
    probe: Probe
    pairs: tuple[PromptPair, ...]

    @property
    def cells(self) -> int:
        """Cells of one model, when all pairs align."""
        return -(-len(self.pairs) // block_size(self.probe, self.config, len(self.pairs)))


def make_plan(config: ExperimentConfig) -> Plan:
    """The experiment made ready.

    Raises:
        UnknownNameError: of the probe or the task, with the nearest names.
        ConfigError: a parameter is wrong, the task makes no pairs, rows have no such cluster, or a claim is about an
            effect that the probe does not measure.
    """
    plan = Plan(config, make_probe(config), tuple(prompt_pairs(make_task(config), config)))
    columns, cluster = ["pair_id", *_labels(plan.pairs[0].scenario)], config.statistics.cluster
    if cluster not in columns:
        # Of the probe's own columns it is known only after measuring whether they are independent.
        wrong = f"'statistics.cluster' is {cluster!r}, by which no row is labelled"
        raise ConfigError(f"{config.where}: {wrong}; {did_you_mean(cluster, columns)}")
    _refuse_unknown_effects(config, plan.probe)
    return plan


def _refuse_unknown_effects(config: ExperimentConfig, probe: Probe) -> None:
    """A claim on what the probe cannot measure is known before anything is."""
    declared = probe.read_by().declared(probe)
    if declared is None:
        return
    for place, claim in enumerate(config.claims):
        if not is_declared(effect := claim.parsed.effect, declared):
            wrong = (
                f"'claims[{place}].statement' is about {effect!r}, which the probe {config.probe!r} does not measure"
            )
            raise ConfigError(f"{config.where}: {wrong}; {did_you_mean(effect, declared)}")


def make_probe(config: ExperimentConfig) -> Probe:
    """The experiment's probe with validated parameters.

    Raises:
        UnknownNameError: with the nearest names.
        ConfigError: a parameter is wrong.
    """
    return validated(PROBES.get(config.probe), config.parameters, where=config.where, prefix="parameters")


def make_task(config: ExperimentConfig) -> Task:
    """The experiment's task with validated parameters.

    Raises:
        UnknownNameError: with the nearest names.
        ConfigError: a parameter is wrong.
    """
    task = validated(TASKS.get(config.task.name), config.task.parameters, where=config.where, prefix="task")
    beside = {name: _beside(config, value) for name, value in task if isinstance(value, tuple)}
    return task.model_copy(update=beside)


def _beside(config: ExperimentConfig, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Files that a task names, from the experiment's own folder where they are there."""
    folder = Path(config.source).parent
    found = [folder / value if isinstance(value, Path) and (folder / value).exists() else value for value in values]
    return tuple(found)


def check_model_names(config: ExperimentConfig) -> None:
    """Look every model's name up before anything is loaded, so that a typo costs no waiting.

    Raises:
        UnknownNameError: with the nearest names.
        ConfigError: a model's own YAML file is wrong.
    """
    for name in config.models:
        # A model that is not there now is this model's own failure, and the others are still measured.
        with contextlib.suppress(ModelSourceError):
            model_config(name)


def prompt_pairs(task: Task, config: ExperimentConfig) -> list[PromptPair]:
    """All prompt pairs of the task, after the experiment's worked cases.

    Raises:
        ConfigError: there are none, or the task has no worked cases.
    """
    pairs = list(task.prompt_pairs())
    if not pairs:
        raise ConfigError(f"{config.where}: the task {config.task.name!r} makes no pairs; raise its size.")
    if not config.worked_cases:
        return pairs
    try:
        return with_worked_cases(task, pairs, config.worked_cases)
    except ConfigError as error:
        raise ConfigError(f"{config.where}: {error}") from error


def prepare(
    name: str, pairs: Sequence[PromptPair], config: ExperimentConfig, load_subject: Callable[[str], Any]
) -> Preparation:
    """Load a model and align the pairs with its tokenizer.

    Pairs that the tokenizer does not align are counted and left out, unless they are a user's own prompts.

    Raises:
        AlignmentError: a user's own prompt is not aligned; names the tokens.
    """
    subject = load_subject(name)
    chat = _chat_arguments(name, config)
    aligned, misfits = [], []
    for pair in pairs:
        try:
            aligned.append(align(pair, subject.tokenizer, chat=chat))
        except AlignmentError as error:
            if config.task.name == OWN_PROMPTS:
                raise
            misfits.append(str(error))
    identity = provenance.identity_record(subject)
    first_misfit, peak = misfits[0] if misfits else "", _peak_bytes(subject, aligned)
    if prefixes := {pair.shared_prefix for pair in aligned if pair.shared_prefix}:
        share_prefixes(subject, sorted(prefixes))
    offsets = answer_offsets(subject, aligned) if config.calibrate and aligned else {}
    return Preparation(name, subject, identity, tuple(aligned), len(misfits), first_misfit, peak, offsets)


def _peak_bytes(subject: Any, pairs: Sequence[Pair]) -> int | None:
    if not pairs or not isinstance(subject, Subject):
        return None
    return peak_bytes(subject, max(len(prompt.token_ids) for pair in pairs for prompt in (pair.base, pair.donor)))


def _chat_arguments(name: str, config: ExperimentConfig) -> dict[str, Any] | None:
    """The experiment's arguments of the chat template, else those of the model's own YAML."""
    if config.chat is True:
        with contextlib.suppress(KvprobeError):
            return {**(config.chat_arguments or {}), **model_config(name).chat_arguments}
    return config.chat_arguments


def block_size(probe: Probe, config: ExperimentConfig, pairs: int) -> int:
    """Pairs in one cell: as the experiment says, or all of a model's where the probe must see them together."""
    return max(1, pairs) if probe.needs_all_pairs else config.block_size


def make_cells(prepared: Preparation, probe: Probe, config: ExperimentConfig) -> list[Cell]:
    """The model's blocks of pairs, each with its key."""
    # Where the weights lie on this machine does not change what they compute; their hash is in the identity.
    identity = {key: value for key, value in prepared.identity.items() if key != "source"}
    common = {
        "model": prepared.name,
        "identity": identity,
        "probe": config.probe,
        "probe_source": provenance.plugin_hash(probe),
        "parameters": probe.model_dump(mode="json"),
        "source": provenance.source_hash(),
        "packages": provenance.package_versions(),
    }
    if prepared.offsets:
        common["offsets"] = {str(token): offset for token, offset in prepared.offsets.items()}
    cells = []
    size = block_size(probe, config, len(prepared.pairs))
    for block, first in enumerate(range(0, len(prepared.pairs), size)):
        pairs = prepared.pairs[first : first + size]
        content = {**common, "first": first, "pairs": [provenance.pair_record(pair) for pair in pairs]}
        cells.append(Cell(prepared.name, block, first, pairs, content, provenance.cell_key(content)))
    return cells


def cell_provenance(cell: Cell, config: ExperimentConfig) -> dict[str, Any]:
    """What is written beside a cell's rows and what determines them: the run that measured it (design section 6)."""
    return {
        "experiment": config.name,
        "experiment_hash": config.hash,
        "block": cell.block,
        "task": config.task.model_dump(mode="json"),
        "code": provenance.code_version(),
        "threads": provenance.threads(),
    }


def labelled(rows: Sequence[Mapping[str, Any]], cell: Cell) -> list[dict[str, Any]]:
    """The probe's rows with their model, pair and scenario."""
    result = []
    for row in rows:
        if not isinstance(row.get("pair"), int) or not 0 <= row["pair"] < len(cell.pairs):
            raise ValueError("every row of a probe must carry 'pair', the index into the pairs it was given")
        pair = cell.pairs[row["pair"]]
        place = {"model": cell.model, "pair": cell.first + row["pair"], "pair_id": provenance.pair_id(pair)}
        measured = {key: value for key, value in row.items() if key != "pair"}
        result.append({**place, **_labels(pair.scenario), **measured})
    return result


def _labels(scenario: Provenance) -> dict[str, Any]:
    """What every row on a pair says of its scenario."""
    attributes = {f"scenario_{key}": value for key, value in sorted(scenario.attributes.items())}
    told = {"skeleton": scenario.skeleton, "wording": scenario.wording, "scenario_seed": scenario.seed}
    return told | attributes
