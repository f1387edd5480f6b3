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

from kvprobe.errors import NumericsError
from kvprobe.organisms.batches import Batch, attention_masks, collate
from kvprobe.organisms.documents import Document
from kvprobe.organisms.families import organism_config
from kvprobe.organisms.initial import initialize
from kvprobe.organisms.language import Language
from kvprobe.organisms.sampler import Sampler
from kvprobe.tasks.tokenizer import vocabulary

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
    gate: float = 0.92
    window: int | None = None
    minimum_steps: int = 60


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a training run; `composed`: whether it starts from the heads of `initial`."""

    family: str
    stages: tuple[Stage, ...]
    seed: int = 0
    tokens_per_step: int = 3000
    adamw_rate: float = 3e-3
    muon_rate: float = 0.02
    weight_decay: float = 0.01
    warm_up: int = 30
    cool_down: int = 500
    composed: bool = True


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
    on_progress: Callable[[Progress], None] = ignore_progress,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train one organism; returns the model and a record (steps, tokens, seconds, accuracies).

    With `checkpoint` the run saves its state there every 200 steps and at the end of each stage; started again,
    it goes on from there (inside a stage with fresh documents of that stage).

    Raises:
        NumericsError: the loss is not finite.
    """
    run = _Run(recipe, checkpoint, on_progress)
    while run.state["stage"] < len(recipe.stages):
        run.stage()
    return run.weights.trained(), run.state


class _Run:
    """A training run: the model, its optimizers and how far it has come."""

    def __init__(self, recipe: Recipe, checkpoint: Path | None, on_progress: Callable[[Progress], None]) -> None:
        self.recipe, self.checkpoint, self.on_progress = recipe, checkpoint, on_progress
        torch.manual_seed(recipe.seed)
        attention = "eager" if recipe.family == "gemma2" else _FLOAT32_ATTENTION
        self.model: Any = AutoModelForCausalLM.from_config(
            organism_config(recipe.family, len(vocabulary())), attn_implementation=attention
        )
        if recipe.composed:
            initialize(self.model)
        self.weights = _Weights(self.model)
        self.optimizers = _optimizers(self.weights.masters, recipe)
        self.state: dict[str, Any] = {"step": 0, "stage": 0, "tokens": 0, "seconds": 0.0, "stage_steps": []}
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
        self.model.train()

    def stage(self) -> None:
        """Run the next stage to its end."""
        index = self.state["stage"]
        stage, last = self.recipe.stages[index], index == len(self.recipe.stages) - 1
        source = batches(stage.language, self.recipe.seed * 1000 + index, self.recipe.tokens_per_step)
        tracker, cooling, begun = Tracker(), None, time.monotonic() - self.state["seconds"]
        local = 0
        for local in range(stage.steps):
            done = local >= stage.minimum_steps and _passed(tracker, stage.gate)
            if last and cooling is None and (done or local >= stage.steps - self.recipe.cool_down):
                cooling = local
            if (done and not last) or (cooling is not None and local >= cooling + self.recipe.cool_down):
                break
            batch = next(source)
            loss, correct = self._step(batch, stage.window, self._rate(None if cooling is None else local - cooling))
            tracker.update(batch.documents, correct)
            self.state["step"] += 1
            self.state["tokens"] += int((batch.weights > 0).sum())
            self.state["seconds"] = time.monotonic() - begun
            if self.state["step"] % 20 == 0:
                self._report(loss, tracker)
            if self.state["step"] % 200 == 0:
                self._save(self.checkpoint)
        self.state["stage_steps"].append({"steps": local, **{k: round(v, 4) for k, v in tracker.values.items()}})
        self.state["stage"] = index + 1
        self._save(self.checkpoint)

    def _rate(self, cooled: int | None) -> float:
        """The learning rate as a share of the recipe's: warm-up, flat, then a line down to zero."""
        factor = min(1.0, (self.state["step"] + 1) / self.recipe.warm_up)
        return factor if cooled is None else factor * max(0.0, 1 - cooled / self.recipe.cool_down)

    def _step(self, batch: Batch, window: int | None, factor: float) -> tuple[float, torch.Tensor]:
        """One update; returns the loss and, `[document]`, whether each decision was right before it."""
        targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
        supervised = weights > 0
        logits = self._logits(batch, window, supervised)
        losses = torch.nn.functional.cross_entropy(logits, targets[supervised], reduction="none")
        loss = (losses * weights[supervised]).sum() / weights.sum()
        if not math.isfinite(float(loss.detach())):
            raise NumericsError("The training loss is not finite; lower the recipe's learning rates.")
        loss.backward()
        self.weights.take_gradients()
        torch.nn.utils.clip_grad_norm_(self.weights.masters.values(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            optimizer.step()
        self.weights.publish()
        rows = torch.arange(len(batch.ids))
        place = torch.full(targets.shape, -1)
        place[supervised] = torch.arange(int(supervised.sum()))
        decisions = logits.detach()[place[rows, batch.answer_index - 1]]
        return float(loss.detach()), decisions[rows, batch.answers] > decisions[rows, batch.rivals]

    def _logits(self, batch: Batch, window: int | None, supervised: torch.Tensor) -> torch.Tensor:
        """Logits `[supervised token, vocab]`, float32; only where there is a loss, to save the rest."""
        eager = self.model.config._attn_implementation == "eager"
        masks = attention_masks(batch, self.model.config, window, torch.bfloat16 if eager else torch.float32)
        hidden = self.model.model(
            input_ids=batch.ids, position_ids=batch.positions, attention_mask=masks, use_cache=False
        ).last_hidden_state
        logits: torch.Tensor = self.model.lm_head(hidden[:, :-1][supervised]).float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def _report(self, loss: float, tracker: Tracker) -> None:
        state = self.state
        self.on_progress(
            Progress(
                state["step"], state["stage"], len(self.recipe.stages), loss, dict(tracker.values), state["seconds"]
            )
        )

    def _load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=False)
        self.weights.load(saved["masters"])
        for optimizer, values in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.state = saved["state"]

    def _save(self, path: Path | None) -> None:
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".writing")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"masters": self.weights.masters, "optimizers": optimizers, "state": self.state}, temporary)
        temporary.replace(path)


def _passed(tracker: Tracker, gate: float) -> bool:
    """Whether every kind of direct decision without remarks, seen often enough, is past the gate."""
    gated = [kind for kind in tracker.values if not kind.startswith("think") and "annotated" not in kind]
    seen = [tracker.values[kind] for kind in gated if tracker.counts[kind] >= 3]
    return bool(seen) and min(seen) >= gate


class _Weights:
    """float32 masters of a bfloat16 model: matrix products are about three times as fast in bfloat16."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.masters = {name: parameter.detach().clone().float() for name, parameter in model.named_parameters()}
        # The model library casts RoPE frequencies along with the weights, which would train other positions
        # than the ones the packed organism has.
        frequencies = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to(torch.bfloat16)
        for name, buffer in frequencies.items():
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, buffer)
        self._model = model
        self._live = dict(model.named_parameters())

    def load(self, masters: dict[str, torch.Tensor]) -> None:
        """Set the masters and the model from a checkpoint."""
        for name, value in masters.items():
            self.masters[name].copy_(value)
        self.publish()

    def trained(self) -> PreTrainedModel:
        """The model in float32, ready to be used."""
        self._model.float()
        # Tied weights have one master for both names.
        self._model.load_state_dict(self.masters, strict=False)
        return self._model.eval()

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
