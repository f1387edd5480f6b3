"""What a worker of a Ray cluster needs, and where there is room for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvprobe.errors import KvprobeError
from kvprobe.models.catalogue import model_config
from kvprobe.models.config import ModelConfig, Resources
from kvprobe.runs.capacity import PROCESS_BYTES, weight_bytes


def needs_of(model: str, threads: int) -> Resources:
    """What a worker that holds `model` is given: what its YAML says, and defaults for the rest."""
    config: ModelConfig | None = None
    with suppress(KvprobeError):
        config = model_config(model)
    asked = config.resources if config else Resources()
    paper = config is not None and config.tier == "paper"
    gpus = asked.num_gpus if asked.num_gpus is not None else float(paper)
    memory = asked.memory if asked.memory is not None else 0 if gpus else int(PROCESS_BYTES + weight_bytes(model))
    cpus = asked.num_cpus if asked.num_cpus is not None else 1 if gpus else threads
    return asked.model_copy(update={"num_cpus": cpus, "num_gpus": gpus, "memory": memory})


def places_on(nodes: Sequence[Mapping[str, Any]], needs: Resources) -> int:
    """Workers with these needs that the living ones of Ray's `nodes` could hold if nothing else ran there."""
    wanted = demand(needs)
    there = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(min(int(has.get(name, 0) // amount) for name, amount in wanted.items()) for has in there)


def demand(needs: Resources) -> dict[str, float]:
    """Needs by Ray's names, without those of nothing."""
    named = {"CPU": needs.num_cpus, "GPU": needs.num_gpus, "memory": needs.memory, **needs.custom}
    return {name: amount for name, amount in named.items() if amount}


def told(resources: Mapping[str, float]) -> str:
    """Resources as they are read aloud, without those that Ray adds for itself."""
    units = {"CPU": "{:g} CPU", "GPU": "{:g} GPU", "memory": "{:.1f} GiB of memory"}
    own = {name: amount for name, amount in resources.items() if ":" not in name and name != "object_store_memory"}
    scaled = {name: amount / 2**30 if name == "memory" else amount for name, amount in own.items()}
    return ", ".join(units.get(name, f"{{:g}} {name}").format(amount) for name, amount in sorted(scaled.items()))
