"""Training an organism from scratch: a curriculum of languages, gated on first decisions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvprobe.organisms.batches import Batch, attention_masks, collate
from kvprobe.organisms.families import organism_config
from kvprobe.organisms.language import Document, Language, Sampler
from kvprobe.organisms.tokenizer import vocabulary

_FLOAT32_ATTENTION = "kvprobe_float32_sdpa"


def _float32_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    # The backward pass of bfloat16 attention is several times slower on a CPU than that of float32.
    output, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return output.to(query.dtype), None


AttentionInterface.register(_FLOAT32_ATTENTION, _float32_sdpa)
AttentionMaskInterface.register(_FLOAT32_ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: left when the gates pass, or after `steps` at most."""

    language: Language
    steps: int
    gate: float = 0.96
    window: int | None = None
    minimum_steps: int = 60


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a training run."""

    family: str
    stages: tuple[Stage, ...]
    seed: int = 0
    tokens_per_step: int = 3000
    adamw_rate: float = 3e-3
    muon_rate: float = 0.02
    weight_decay: float = 0.01
    warm_up: int = 30
    cool_down: int = 200


@dataclass
class Tracker:
    """Running accuracies of first decisions by kind of document (every document is fresh, so unbiased)."""

    decay: float = 0.97
    values: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def update(self, documents: tuple[Document, ...], correct: torch.Tensor) -> None:
        """Fold in one batch; `correct` is `[document]`."""
        groups: dict[str, list[float]] = {}
        for document, right in zip(documents, correct.tolist(), strict=True):
            groups.setdefault(document.kind, []).append(float(right))
        for kind, hits in groups.items():
            weight = 1 - self.decay ** min(len(hits), 30) if kind in self.values else 1.0
            weight = max(weight, 1 / (1 + self.counts.get(kind, 0)))
            self.values[kind] = (1 - weight) * self.values.get(kind, 0.5) + weight * sum(hits) / len(hits)
            self.counts[kind] = self.counts.get(kind, 0) + 1


@dataclass(frozen=True)
class Progress:
    """What a running training tells its caller."""

    step: int
    stage: int
    stages: int
    loss: float
    accuracy: dict[str, float]
    seconds: float


def batches(language: Language, seed: int, tokens_per_step: int) -> Iterator[Batch]:
    """Endless batches of about `tokens_per_step` tokens, documents of like length together."""
    sampler = Sampler(language, seed)
    while True:
        pool = sorted((sampler.document() for _ in range(512)), key=lambda document: len(document.ids))
        groups: list[list[Document]] = [[]]
        for document in pool:
            if groups[-1] and len(document.ids) * (len(groups[-1]) + 1) > tokens_per_step:
                groups.append([])
            groups[-1].append(document)
        sampler.random.shuffle(groups)
        yield from (collate(group) for group in groups)


def ignore_progress(progress: Progress) -> None:
    """Tell nobody."""


def train(
    recipe: Recipe,
    *,
    checkpoint: Path | None = None,
    start: dict[str, torch.Tensor] | None = None,
    on_progress: Callable[[Progress], None] = ignore_progress,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train one organism; returns the model and a record (steps, tokens, seconds, accuracies).

    With `checkpoint` the run saves its state there and, started again, goes on from it.
    """
    torch.manual_seed(recipe.seed)
    config = organism_config(recipe.family, len(vocabulary()))
    attention = "eager" if recipe.family == "gemma2" else _FLOAT32_ATTENTION
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    _initialize(model)
    if start is not None:
        model.load_state_dict(start)
    weights = _Weights(model)
    optimizers = _optimizers(weights.masters, recipe)
    state: dict[str, Any] = {"step": 0, "stage": 0, "tokens": 0, "seconds": 0.0, "stage_steps": []}
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        weights.load(saved["masters"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        state = saved["state"]
    model.train()
    for index in range(state["stage"], len(recipe.stages)):
        _run_stage(model, weights, optimizers, recipe, index, state, checkpoint, on_progress)
    model.float()
    model.load_state_dict(weights.masters, strict=False)
    return model.eval(), state


@torch.no_grad()
def _initialize(model: Any) -> None:
    """Wide embeddings, and a matcher as the first query head of every KV head: its queries equal its keys.

    A token then attends to earlier copies of itself, which is what comparing a rule's case with the field
    needs; found by gradient descent alone it takes most of the training (compare the "mimetic
    initialization" of Trockman and Kolter, 2023).
    """
    config = model.config
    # The usual 0.02 drowns the words in what the layers add; Gemma multiplies embeddings by sqrt(hidden).
    spread = 0.1 if config.model_type.startswith("gemma") else 0.3
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=spread)
    group, width = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    for layer in model.model.layers:
        attention = layer.self_attn
        for weight in (attention.q_proj.weight, attention.k_proj.weight):
            torch.nn.init.normal_(weight, std=config.hidden_size**-0.5)
        queries = attention.q_proj.weight.view(config.num_key_value_heads, group, width, -1)
        queries[:, 0] = attention.k_proj.weight.view(config.num_key_value_heads, width, -1)


def _run_stage(
    model: PreTrainedModel,
    weights: _Weights,
    optimizers: list[torch.optim.Optimizer],
    recipe: Recipe,
    index: int,
    state: dict[str, Any],
    checkpoint: Path | None,
    on_progress: Callable[[Progress], None],
) -> None:
    stage, last = recipe.stages[index], index == len(recipe.stages) - 1
    tracker = Tracker()
    source = batches(stage.language, recipe.seed * 1000 + index, recipe.tokens_per_step)
    begun, cooling = time.monotonic(), None
    for local in range(stage.steps):
        if cooling is None and (
            local >= stage.steps - (recipe.cool_down if last else 0)
            or (local >= stage.minimum_steps and _passed(tracker, stage.gate))
        ):
            if not last:
                break
            cooling = local
        if cooling is not None and local >= cooling + recipe.cool_down:
            break
        factor = min(1.0, (state["step"] + 1) / recipe.warm_up)
        if cooling is not None:
            factor *= max(0.0, 1 - (local - cooling) / recipe.cool_down)
        batch = next(source)
        loss, correct = _step(model, weights, optimizers, batch, stage.window, factor)
        tracker.update(batch.documents, correct)
        state["step"] += 1
        state["tokens"] += int((batch.weights > 0).sum())
        if state["step"] % 20 == 0:
            on_progress(
                Progress(
                    state["step"],
                    index,
                    len(recipe.stages),
                    loss,
                    dict(tracker.values),
                    state["seconds"] + time.monotonic() - begun,
                )
            )
        if checkpoint is not None and state["step"] % 200 == 0:
            _save(checkpoint, weights, optimizers, {**state, "seconds": state["seconds"] + time.monotonic() - begun})
    state["seconds"] += time.monotonic() - begun
    state["stage_steps"].append({"steps": local, **{k: round(v, 4) for k, v in tracker.values.items()}})
    state["stage"] = index + 1
    if checkpoint is not None:
        _save(checkpoint, weights, optimizers, state)
        _save(checkpoint.with_suffix(f".stage{index}"), weights, optimizers, state)


def _passed(tracker: Tracker, gate: float) -> bool:
    return bool(tracker.values) and all(
        value >= gate for kind, value in tracker.values.items() if "annotated" not in kind and tracker.counts[kind] >= 3
    )


def _step(
    model: Any,
    masters: _Weights,
    optimizers: list[torch.optim.Optimizer],
    batch: Batch,
    window: int | None,
    factor: float,
) -> tuple[float, torch.Tensor]:
    hidden = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask=attention_masks(
            batch,
            model.config,
            window,
            torch.bfloat16 if model.config._attn_implementation == "eager" else torch.float32,
        ),
        use_cache=False,
    ).last_hidden_state
    targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    supervised = weights > 0
    logits = model.lm_head(hidden[:, :-1][supervised]).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    losses = torch.nn.functional.cross_entropy(logits, targets[supervised], reduction="none")
    loss = (losses * weights[supervised]).sum() / weights.sum()
    loss.backward()
    masters.take_gradients()
    torch.nn.utils.clip_grad_norm_(masters.masters.values(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        optimizer.step()
    masters.publish()
    rows = torch.arange(len(batch.ids))
    full = torch.full((*targets.shape,), -1, dtype=torch.long)
    full[supervised] = torch.arange(int(supervised.sum()))
    decisions = logits.detach()[full[rows, batch.answer_index - 1]]
    correct = decisions[rows, batch.answers] > decisions[rows, batch.rivals]
    if not math.isfinite(float(loss.detach())):
        raise FloatingPointError("the training loss is not finite; lower the learning rate")
    return float(loss.detach()), correct


class _Weights:
    """float32 masters of a bfloat16 model: matrix products are about three times as fast in bfloat16."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.masters = {name: parameter.detach().clone().float() for name, parameter in model.named_parameters()}
        model.to(torch.bfloat16)
        self._live = dict(model.named_parameters())

    def load(self, masters: dict[str, torch.Tensor]) -> None:
        """Set the masters and the model from a checkpoint."""
        for name, value in masters.items():
            self.masters[name].copy_(value)
        self.publish()

    def take_gradients(self) -> None:
        """Move the model's gradients to the masters."""
        for name, parameter in self._live.items():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for name, parameter in self._live.items():
            parameter.copy_(self.masters[name])


def _optimizers(masters: dict[str, torch.Tensor], recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, parameter in masters.items():
        (matrices if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name else others).append(
            parameter
        )
    muon = torch.optim.Muon(matrices, lr=recipe.muon_rate, momentum=0.95, weight_decay=recipe.weight_decay)
    adamw = torch.optim.AdamW(others, lr=recipe.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer, rate in ((muon, recipe.muon_rate), (adamw, recipe.adamw_rate)):
        for group in optimizer.param_groups:
            group["base_lr"] = rate
    return [muon, adamw]


def _save(path: Path, weights: _Weights, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    torch.save(
        {"masters": weights.masters, "optimizers": [o.state_dict() for o in optimizers], "state": state}, temporary
    )
    temporary.replace(path)
