"""An experiment as a YAML file: what is asked, of which models, how, and what is claimed beforehand."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvprobe.errors import ConfigError, did_you_mean
from kvprobe.models.catalogue import model_names, standing
from kvprobe.runs.claims import Claim, ClaimKind
from kvprobe.runs.experiments import experiment_file, located
from kvprobe.runs.validation import validated
from kvprobe.shipped import shipped
from kvprobe.stats import StatisticsConfig
from kvprobe.yaml_files import mapping, read_yaml

MAXIMUM_INCLUDES = 8
MAXIMUM_NAME = 100
"""Characters of a name that files are called by."""
_LATER_GATE_KEYS = ("moved_share", "moved_floors")


class TaskConfig(BaseModel):
    """The `task` block: the task's name; every other key is one of the task's own parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """The task's own parameters, which its class validates."""
        return dict(self.model_extra or {})


class GateConfig(BaseModel):
    """The inclusion gate: what a model and a pair must pass before anything measured on them counts (G2, G4).

    Args:
        oracle_accuracy: share of right decisions a model needs on the unedited prompts, base and donor.
        noise_floor: a margin closer to 0 than this many logits is no decision. Where rows carry a measured
            `noise_floor`, the larger of the two holds.
        answer_mass: mean probability of the two answers together a model needs, where rows carry
            `mass_base` and `mass_donor`.
        minimum_pairs: pairs that must pass for a model to be judged.
        moved_share: share of pairs whose margin must move from base to donor, the right way, for a model that decides
            too few prompts to be judged on margins alone.
        moved_floors: by how many noise floors a margin must move.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    oracle_accuracy: float = Field(default=0.9, ge=0.0, le=1.0)
    noise_floor: float = Field(default=0.01, ge=0.0)
    answer_mass: float = Field(default=0.5, ge=0.0, le=1.0)
    minimum_pairs: int = Field(default=5, ge=1)
    moved_share: float = Field(default=0.9, ge=0.0, le=1.0)
    moved_floors: float = Field(default=10.0, ge=1.0)


class ExperimentConfig(BaseModel):
    """A whole experiment.

    Args:
        name: also the name of its folder under the results.
        section: of the paper.
        question: what it answers, in one sentence.
        probe: registered name.
        models: names the model loader knows.
        parameters: the probe's own, which its class validates.
        chat: whether prompts are put into the tokenizer's chat template, where it has one; as a mapping, the
            template's arguments.
        worked_cases: skeletons, other than those scored, of which both values are told with their answers as turns of
            the chat before every prompt.
        calibrate: whether the model's bias towards either answer, measured on content-free prompts, is taken off the
            logits; see `kvprobe.probes.calibration`.
        block_size: pairs per cell; a cell is what an interrupted run loses at most.
        profile: the profile that was applied when the file was read.
        source: the file it was read from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(max_length=MAXIMUM_NAME)
    section: str = Field(default="", max_length=MAXIMUM_NAME)
    question: str = ""
    probe: str
    models: list[str] = Field(min_length=1)
    task: TaskConfig
    parameters: dict[str, Any] = Field(default_factory=dict)
    statistics: StatisticsConfig = Field(default_factory=StatisticsConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    claims: list[Claim] = Field(default_factory=list)
    chat: bool | dict[str, Any] = True
    worked_cases: int = Field(default=0, ge=0)
    calibrate: bool = False
    block_size: int = Field(default=8, ge=1)
    profile: str | None = None
    source: str = ""

    @field_validator("name", "section")
    @classmethod
    def _can_name_files(cls, text: str, info: ValidationInfo) -> str:
        of_name = info.field_name == "name"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_\-]*" if of_name else r"[A-Za-z0-9_\-. ]*", text):
            also = "" if of_name else ", points and blanks"
            raise ValueError(f"files are called by it, so write letters, digits, '-' and '_'{also} only")
        return text

    @field_validator("models")
    @classmethod
    def _no_model_twice(cls, models: list[str]) -> list[str]:
        _refuse_repeats(models, "model")
        return models

    @field_validator("claims")
    @classmethod
    def _no_claim_twice(cls, claims: list[Claim]) -> list[Claim]:
        _refuse_repeats([claim.id for claim in claims], "claim id")
        return claims

    @model_validator(mode="before")
    @classmethod
    def _bare_task_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("task"), str):
            return {**values, "task": {"name": values["task"]}}
        return values

    @property
    def where(self) -> str:
        """What messages about this experiment begin with."""
        return self.source or f"experiment {self.name}"

    @property
    def chat_arguments(self) -> dict[str, Any] | None:
        """Keyword arguments of the chat template; `None` for plain text.

        Thinking is switched off unless asked for: the next token would open a think block (critique G4).
        """
        if self.chat is False:
            return None
        return {"enable_thinking": False, **(self.chat if isinstance(self.chat, dict) else {})}

    @property
    def hash(self) -> str:
        """sha256 of all that is measured and how; not of the claims on it, nor of where the file lies."""
        content = self.model_dump(mode="json", exclude={"source", "profile", "claims"})
        # Keys of later versions, at their defaults, measure what was measured before.
        for key in ("worked_cases", "calibrate"):
            if not content[key]:
                content.pop(key)
        content["gate"] = {
            key: value
            for key, value in content["gate"].items()
            if key not in _LATER_GATE_KEYS or value != GateConfig.model_fields[key].default
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """A YAML file that gives this very experiment again, profile and includes resolved."""
        content = self.model_dump(mode="json", exclude={"source", "profile"})
        others = {name for claim in self.claims for name in claim.models} - set(self.models)
        if others:
            # Claims on models that were left out of this run stay readable.
            content["models"] = {"run": self.models, "others": sorted(others)}
        return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def load_config(
    path_or_name: str | Path, *, profile: str | None = None, models: str | Sequence[str] | None = None
) -> ExperimentConfig:
    """Read and validate an experiment.

    A file may `include` others (a path or a list; its own keys win), hold `profiles` (named sets of keys laid over
    the file, such as a `quick` task size) and give `models` as named groups. Included paths are relative to the
    file; where nothing is there, `configs/...` and `experiments/...` are those that ship with kvprobe.

    Args:
        path_or_name: the YAML file, or the name of an experiment of `kvprobe list experiments`.
        profile: name of the profile to apply; `full` and `None` are the file as it is unless it says otherwise.
        models: in place of the file's models: the name of one of its groups, a comma-separated list, or a list.

    Raises:
        ConfigError: one sentence with the file, the key, what is wrong and the mend.
        UnknownNameError: there is no experiment of that name; with the nearest names.
    """
    path = experiment_file(path_or_name)
    file = located(path)
    values = _read(file)
    profiles = values.pop("profiles", None) or {}
    if not isinstance(profiles, dict):
        raise ConfigError(f"{file}: 'profiles' is wrong: it must map names to the keys they change.")
    if profile in profiles:
        values = overlaid(values, mapping(profiles[profile], file, f"profiles.{profile}"))
    elif profile not in (None, "full"):
        known = ", ".join(["full", *(str(name) for name in profiles)])
        raise ConfigError(f"{file}: there is no profile {profile!r}; known: {known}.")
    named = {name for each in (values, *profiles.values()) for name in _named(each)}
    values["models"] = _models(values.get("models"), models, file)
    for key in ("profile", "source"):
        if key in values:
            raise ConfigError(f"{file}: {key!r} is not a known key; remove it, kvprobe sets it.")
    config = validated(ExperimentConfig, {**values, "profile": profile, "source": str(path)}, where=str(file))
    # Configurations stored by earlier versions have claims without a kind; files must not.
    for place, claim in enumerate(config.claims):
        if claim.kind is None:
            kinds = ", ".join(ClaimKind)
            raise ConfigError(f"{config.where}: the key 'claims[{place}].kind' is missing; add it, one of: {kinds}.")
    _refuse_claims_on_others(config, {*config.models, *named})
    return config


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on it: mappings are merged key by key, everything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = overlaid(result[key], value)
        else:
            result[key] = value
    return result


def _read(file: Path, depth: int = 0) -> dict[str, Any]:
    if depth > MAXIMUM_INCLUDES:
        raise ConfigError(f"{file}: the includes go in a circle; remove one.")
    values = read_yaml(file)
    if isinstance(values.get("task"), str):
        # As a mapping, so that a profile can add to it.
        values["task"] = {"name": values["task"]}
    includes = values.pop("include", None) or []
    base: dict[str, Any] = {}
    for include in [includes] if isinstance(includes, str) else includes:
        if not isinstance(include, str):
            raise ConfigError(f"{file}: 'include' is wrong: give a path or a list of paths.")
        beside = file.parent / include
        base = overlaid(base, _read(beside if beside.exists() else shipped(Path(include)) or beside, depth + 1))
    return overlaid(base, values)


def _models(given: Any, asked: str | Sequence[str] | None, file: Path) -> Any:
    groups = given if isinstance(given, dict) else {}
    if isinstance(asked, str):
        if asked in groups:
            return groups[asked]
        return [name.strip() for name in asked.split(",") if name.strip()]
    if asked is not None:
        return list(asked)
    if isinstance(given, dict):
        if not groups:
            raise ConfigError(f"{file}: 'models' is wrong: name at least one group of models.")
        return next(iter(groups.values()))
    return [given] if isinstance(given, str) else given


def _named(values: Any) -> Iterator[str]:
    """The models of all groups."""
    given = values.get("models") if isinstance(values, dict) else None
    for group in given.values() if isinstance(given, dict) else [given]:
        yield from (name for name in group if isinstance(name, str)) if isinstance(group, list) else ()


def _refuse_claims_on_others(config: ExperimentConfig, models: set[str]) -> None:
    """A claim on a model that no group and no profile of the file has would be dropped without a word."""
    known = models | set(model_names())
    for place, claim in enumerate(config.claims):
        if not set(claim.models) <= models:
            models |= {beside for name in models if (beside := standing(name).paper_model)}
        for key, names, allowed in (("models", claim.models, models), ("paper_values", claim.paper_values, known)):
            for name in names:
                if name not in allowed:
                    wrong = f"'claims[{place}].{key}' names {name!r}, which is no model of the experiment"
                    raise ConfigError(f"{config.where}: {wrong}; {did_you_mean(name, allowed)}")


def _refuse_repeats(names: Sequence[str], what: str) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"the {what} {repeated[0]!r} stands twice")
