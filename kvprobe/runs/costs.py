"""What experiments cost on models too large to try: GPU memory and hours, predicted before anything is loaded.

Tokens that an experiment runs through a model are counted once, on an organism; FLOPs for each are the architecture's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from kvprobe.errors import ConfigError, SampleError
from kvprobe.models.catalogue import model_config
from kvprobe.models.config import ModelConfig
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.preparation import make_plan

TOKENS = 1024
"""Length of the prompt that memory is predicted for."""
WORK = "work.json"
_SWEEPS = {"heads": ("heads",), "layers": ("direction", "suffix_concentration", "timing", "seam_repair")}


@dataclass(frozen=True)
class Work:
    """What an experiment runs through a model, for each of its pairs.

    Args:
        tokens: through the decoder layers, cached ones not counted.
        attended: keys of these tokens, added up over them, masked ones included, which kernels compute too.
        layers, heads: of the model it was counted on.
        grows: with what: the `layers` of the model, or all its attention `heads`, where the experiment tries each.
    """

    tokens: float
    attended: float
    layers: int = 1
    heads: int = 1
    grows: Literal["", "layers", "heads"] = ""


@dataclass(frozen=True)
class Cost:
    """What all experiments cost on one model.

    Args:
        weights: bytes, in the dtype it has on a GPU.
        cache_per_token: bytes of keys and values.
        memory: bytes of GPU memory for weights and a sweep over `TOKENS` tokens at its peak, as the planner has it.
        experiments: that name the model and whose work was counted.
        uncounted: that name it and whose work was not.
        flops: of all of them.
        hours: on one GPU.
    """

    model: str
    weights: float
    cache_per_token: float
    memory: float
    experiments: int
    uncounted: int
    flops: float
    hours: float


def paper_tier_costs(configs: Sequence[ExperimentConfig], peak: float, share: float) -> tuple[list[Cost], list[str]]:
    """What the experiments cost on each of their models, and the models of which no shape is known.

    Args:
        configs: the experiments, each with the models it is to be run on.
        peak: FLOPs a second of one GPU.
        share: of it that is reached.
    """
    work, wanted = counted_work(), {name: model_config(name) for config in configs for name in config.models}
    pairs = {config.name: len(make_plan(config).pairs) for config in configs}
    costs, unknown = [], []
    for name, model in wanted.items():
        if not model.shape or model.memory_gb is None:
            unknown.append(name)
            continue
        asked = [config.name for config in configs if name in config.models]
        counted = [(work[one], pairs[one]) for one in asked if one in work]
        flops = sum(count * flops_of(model, each) for each, count in counted)
        weights, cache = model.memory_gb * 1e9, cache_bytes_per_token(model)
        memory = weights + _sweep_bytes(model)
        hours = flops / (peak * share) / 3600
        costs.append(Cost(name, weights, cache, memory, len(counted), len(asked) - len(counted), flops, hours))
    return costs, unknown


def text_config(model: ModelConfig) -> Any:
    """The Hugging Face configuration of a model that need not be here, from the shape in its YAML.

    Raises:
        ConfigError: its YAML gives no shape, or one that its architecture does not take.
    """
    from transformers import AutoConfig

    if not model.shape:
        raise ConfigError(f"The YAML of {model.name!r} has no key 'shape', so its cost is not known; add it.")
    try:
        return AutoConfig.for_model(model.architecture, **model.shape).get_text_config()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"In the YAML of {model.name!r}: 'shape' is wrong ({error}); correct it.") from error


def flops_of(model: ModelConfig, work: Work) -> float:
    """FLOPs of so much work on a model, as if all of it grew where a part of it does."""
    from kvprobe.models.architectures.base import ARCHITECTURES

    config, adapter = text_config(model), ARCHITECTURES.get(model.architecture)()
    layers = int(config.num_hidden_layers)
    growth = {
        "": 1.0,
        "layers": layers / work.layers,
        "heads": layers * int(config.num_attention_heads) / (work.layers * work.heads),
    }[work.grows]
    attention = layers * adapter.flops_per_attended_key(config)
    return growth * (work.tokens * adapter.flops_per_token(config) + work.attended * attention)


def cache_bytes_per_token(model: ModelConfig) -> float:
    """Bytes of one token's keys and values in all layers, two for each number."""
    from kvprobe.models.architectures.base import ARCHITECTURES

    config, adapter = text_config(model), ARCHITECTURES.get(model.architecture)()
    return 2.0 * adapter.cached_numbers(config) * int(config.num_hidden_layers)


def _sweep_bytes(model: ModelConfig) -> int:
    import torch

    from kvprobe.engine.planner import peak_bytes
    from kvprobe.models.architectures.base import ARCHITECTURES

    config = text_config(model)
    unloaded: Any = SimpleNamespace(
        config=config,
        layers=int(config.num_hidden_layers),
        architecture=ARCHITECTURES.get(model.architecture)(),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),  # a GPU's batches would fill whatever is free there
        model=torch.nn.Module(),
    )
    return peak_bytes(unloaded, TOKENS)


def counted_work() -> dict[str, Work]:
    """The work of each experiment that was counted, by its name."""
    content = json.loads(files("kvprobe.runs").joinpath(WORK).read_text(encoding="utf-8"))
    return {name: Work(**values) for name, values in content["experiments"].items()}


@contextmanager
def counting() -> Iterator[dict[str, float]]:
    """Counts what passes through decoder layers inside the block: `tokens` and `attended`, of all layers together.

    Every model counts whose layers are called `…DecoderLayer`, as the model library calls them.
    """
    from torch.nn.modules.module import register_module_forward_hook

    seen = {"tokens": 0.0, "attended": 0.0}

    def count(module: Any, inputs: Sequence[Any], named: Mapping[str, Any], _: Any) -> None:
        if type(module).__name__.endswith("DecoderLayer"):
            hidden = inputs[0] if inputs else named["hidden_states"]
            rows, tokens = hidden.shape[:2]
            mask = named.get("attention_mask")
            seen["tokens"] += rows * tokens
            seen["attended"] += rows * tokens * (tokens if mask is None else mask.shape[-1])

    handle = register_module_forward_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def count_work(config: ExperimentConfig, results: Path) -> Work:
    """Run an experiment on its one model and count.

    Args:
        config: the experiment, with one model.
        results: an empty folder.

    Raises:
        SampleError: no pair was measured.
    """
    from kvprobe.models.loader import load_subject
    from kvprobe.runs.runner import run_experiment

    (name,) = config.models
    subject = load_subject(name)
    with counting() as seen:
        result = run_experiment(config, results_dir=results, load_subject=lambda _: subject)
    gate = result.models[name].gate
    if gate is None or not gate.measured:
        raise SampleError(
            f"{config.where}: no pair was measured on {name}, so nothing can be counted; take another model."
        )
    per_pair = subject.layers * gate.measured
    heads = int(subject.config.num_attention_heads)
    return Work(
        round(seen["tokens"] / per_pair), round(seen["attended"] / per_pair), subject.layers, heads, _grows(config)
    )


def _grows(config: ExperimentConfig) -> Any:
    return next((what for what, probes in _SWEEPS.items() if config.probe in probes), "")
