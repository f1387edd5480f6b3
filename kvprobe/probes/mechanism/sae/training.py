"""Sparse autoencoders trained by SAELens on one activation of one model, and kept as ordinary SAELens SAEs.

The paper trained on 36 near-copies of its evaluation prompts (critique CI6). Here the prompts come from skeletons that
no evaluation sees, and the caller says which. The first token is left out of training: with no earlier token to attend
to, it has an activation of its own kind, often of a norm far above all others.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kvprobe.engine.components import components
from kvprobe.errors import SampleError, StoreError
from kvprobe.models.files import cache_folder, sha256_of_all

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

# A feature counts as dead, and SAELens' auxiliary loss revives it, after as many steps without firing.
_DEAD_AFTER = 50
_BATCHES_FOR_THE_NORM = 10
_TRAINING_FVU = "training_fvu"
_CHECKSUM = "sha256"


class SAESettings(BaseModel):
    """How a TopK SAE is trained; the paper's is 16384 features, k = 32, 4000 steps of 2048 (protocol 4.3)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    features: int = Field(512, ge=2, description="size of the dictionary")
    k: int = Field(16, ge=1, description="features active at once")
    vectors: int = Field(
        100_000, ge=1, le=20_000_000, description="activation vectors seen in training, repeats included"
    )
    batch_size: int = Field(512, ge=1, description="vectors of one step")
    learning_rate: float = Field(2e-3, gt=0, description="of Adam; it falls to a tenth over the last fifth")
    seed: int = Field(0, ge=0)


def trained_sae(subject: Subject, hook: str, prompts: Sequence[Sequence[int]], settings: SAESettings) -> Any:
    """The SAELens SAE of `hook` trained on `prompts`: read from the cache, or trained and put there.

    It lies in the folder of pulled models under `saes`, named by a hash of everything that determines it, and loads
    with `sae_lens.SAE.load_from_disk`. One that was cut short or changed since is trained again.

    Args:
        subject: the model.
        hook: TransformerLens name of an activation `[position, hidden]`.
        prompts: token ids, in order.
        settings: of the SAE.

    Raises:
        SampleError: the prompts hold fewer vectors than one batch.
        StoreError: the folder cannot be written.
    """
    folder = cache_folder() / "saes" / _key(subject, hook, prompts, settings)
    if not _is_whole(folder):
        sae = train_sae(subject, hook, prompts, settings)
        try:
            _save(sae, folder)
        except OSError as error:
            raise StoreError(f"The SAE cannot be written to {folder} ({error.strerror}); set KVPROBE_CACHE.") from error
    return load_sae(folder, subject.device)


def load_sae(folder: Path, device: torch.device) -> Any:
    """A saved SAELens SAE, frozen."""
    from sae_lens import SAE

    return SAE.load_from_disk(folder, device=str(device)).requires_grad_(False).eval()


def train_sae(subject: Subject, hook: str, prompts: Sequence[Sequence[int]], settings: SAESettings) -> Any:
    """SAELens' `TopKTrainingSAE` after training, inputs centred and scaled by their mean norm, both folded in.

    Raises:
        SampleError: the prompts hold fewer vectors than one batch.
    """
    from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.saes.sae import SAEMetadata

    vectors = activation_vectors(subject, hook, prompts)
    if len(vectors) < settings.batch_size:
        raise SampleError(f"{len(vectors)} activation vectors are less than a batch; train on more prompts.")
    sae_config = TopKTrainingSAEConfig(
        d_in=vectors.shape[1],
        d_sae=settings.features,
        k=settings.k,
        device=str(subject.device),
        normalize_activations="expected_average_only_in",
        metadata=SAEMetadata(model_name=subject.name, hook_name=hook, weights_sha256=subject.identity.weights_sha256),
    )
    steps = max(1, settings.vectors // settings.batch_size)
    trainer_config = SAETrainerConfig(
        total_training_samples=steps * settings.batch_size,
        train_batch_size_samples=settings.batch_size,
        lr=settings.learning_rate,
        lr_end=settings.learning_rate / 10,
        lr_decay_steps=steps // 5,
        device=str(subject.device),
        dead_feature_window=_DEAD_AFTER,
        n_batches_for_norm_estimate=_BATCHES_FOR_THE_NORM,
    )
    # SAELens draws initial weights from torch's global generator and draws its progress bars on stderr.
    mean = vectors.mean(0)
    with torch.random.fork_rng(), redirect_stderr(io.StringIO()):
        torch.manual_seed(settings.seed)
        sae = TopKTrainingSAE(sae_config)
        SAETrainer(trainer_config, sae, _batches(vectors - mean, settings)).fit()
    with torch.no_grad():
        # Trained about the mean: a large channel that is the same everywhere would take all of a short training.
        sae.b_dec += mean
    sae.cfg.metadata[_TRAINING_FVU] = fraction_unexplained(sae, vectors)
    return sae


def training_fvu(sae: Any) -> float:
    """Fraction of variance unexplained on the vectors the SAE was trained on, as `train_sae` noted it."""
    return float(sae.cfg.metadata[_TRAINING_FVU])


def activation_vectors(subject: Subject, hook: str, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Activations `[vector, hidden]` at every token of the prompts but the first."""
    engine = components(subject)
    return torch.cat([engine.capture(ids, [hook]).activations[hook][1:].float() for ids in prompts])


def reconstructed(sae: Any, activations: Tensor) -> Tensor:
    """What the SAE makes of activations `[..., hidden]`, in their dtype."""
    with torch.no_grad():
        return sae.decode(sae.encode(activations)).to(activations)


def fraction_unexplained(sae: Any, vectors: Tensor) -> float:
    """Squared error of the reconstruction of vectors `[vector, hidden]` over their squared distance from their mean."""
    error = (vectors - reconstructed(sae, vectors)).double().square().sum()
    return float(error / (vectors - vectors.mean(0)).double().square().sum())


def _batches(vectors: Tensor, settings: SAESettings) -> Iterator[Tensor]:
    """Shuffled batches without end, each epoch in an order of its own."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        order = torch.randperm(len(vectors), generator=generator).to(vectors.device)
        for start in range(0, len(order) - settings.batch_size + 1, settings.batch_size):
            yield vectors[order[start : start + settings.batch_size]]


def _key(subject: Subject, hook: str, prompts: Sequence[Sequence[int]], settings: SAESettings) -> str:
    identity = subject.identity
    content = {
        "model": identity.fingerprint,
        "attention": identity.attention,
        "hook": hook,
        "settings": settings.model_dump(mode="json"),
        "prompts": hashlib.sha256(json.dumps([list(ids) for ids in prompts]).encode()).hexdigest(),
        "sae_lens": version("sae-lens"),
        "code": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _is_whole(folder: Path) -> bool:
    """Whether the folder holds what was written there."""
    try:
        return (folder / _CHECKSUM).read_text(encoding="ascii") == _checksum(folder)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(folder: Path) -> str:
    return sha256_of_all(file for file in folder.iterdir() if file.name != _CHECKSUM)


def _save(sae: Any, folder: Path) -> None:
    """Write the SAE for inference beside `folder` and move it there in one step; a damaged one there goes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        sae.save_inference_model(temporary)
        (temporary / _CHECKSUM).write_text(_checksum(temporary), encoding="ascii")
        if folder.exists() and not _is_whole(folder):
            shutil.rmtree(folder)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process was first; what it wrote is the same SAE.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
