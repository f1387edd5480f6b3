"""What an SAE sees at a pair's notes, what it changes there, and how well it stands in for the activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprobe.engine.components import ActivationEdit, components, set_to
from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.probes.kit.rule_positions import labels
from kvprobe.probes.mechanism.sae.site import Site
from kvprobe.probes.mechanism.sae.training import reconstructed, training_fvu
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject


@dataclass(frozen=True, eq=False)
class Instrument:
    """A model, where it is asked, and the SAELens SAE of the activation there."""

    subject: Subject
    site: Site
    sae: Any


@dataclass(frozen=True, eq=False)
class Notes:
    """A pair's two prompts at the hook, before any intervention; prompt 0 is the base and prompt 1 the donor.

    Attributes:
        places: positions of the notes.
        conclusions: of the two prompts: whether the first case of the rule fires.
        decisions: of the two prompts.
        residuals: `[prompt, place, hidden]`.
        activations: `[prompt, unit]` of the SAE's features, unit = place x features + feature.
        tokens: `[token, hidden]` residuals of the base prompt, the first token left out.
    """

    places: tuple[int, ...]
    conclusions: tuple[bool, bool]
    decisions: tuple[Readout, Readout]
    residuals: Tensor
    activations: NDArray[np.float64]
    tokens: Tensor


def read_notes(instrument: Instrument, pair: Pair, count: int) -> Notes:
    """Both prompts at the hook and the SAE's features at their `count` places.

    Raises:
        UnsupportedError: the prompts have no rule with two named actions, or too few known places.
    """
    site = instrument.site
    places = site.places(pair, count)
    engine, answers = components(instrument.subject), (pair.base_answer_id, pair.donor_answer_id)
    base, donor = (engine.capture(prompt.token_ids, [site.hook]) for prompt in (pair.base, pair.donor))
    residuals = torch.stack([prompt.activations[site.hook][list(places)] for prompt in (base, donor)])
    return Notes(
        places=places,
        conclusions=labels(pair, "conclusion"),
        decisions=(read(base.logits, *answers), read(donor.logits, *answers)),
        residuals=residuals,
        activations=instrument.sae.encode(residuals).flatten(1).double().cpu().numpy(),
        tokens=base.activations[site.hook][1:],
    )


def clamp(sae: Any, notes: Notes, prompt: int, targets: Sequence[NDArray[np.float64]]) -> Tensor:
    """What clamping the features adds to the residual stream, `[target, place, hidden]`.

    The error term, which is what the SAE does not reconstruct, stays as it is (critique CI6): only the changes of the
    features are added, along their decoder rows, so that a clamp to a feature's own value adds exactly nothing.

    Args:
        sae: of the hook.
        notes: of the pair.
        prompt: 0 or 1.
        targets: activations `[unit]` of all features, each set to be reached in an intervention of its own.
    """
    change = torch.as_tensor(np.stack(targets) - notes.activations[prompt]).to(sae.W_dec)
    added: Tensor = change.unflatten(1, (len(notes.places), -1)) @ sae.W_dec
    return added.to(notes.residuals)


def with_error_term(sae: Any, residuals: Tensor) -> Tensor:
    """Reconstruction and error term put together again: the residuals `[..., hidden]` themselves but for rounding."""
    features = sae.encode(residuals)
    error = residuals - sae.decode(features)
    return sae.decode(features) + error


def reconstruction_rows(instrument: Instrument, pairs: Sequence[Pair], notes: Sequence[Notes]) -> list[dict[str, Any]]:
    """How much of the activation the SAE misses on each base prompt, and what that costs the decision.

    Squared errors and the squared distance from the mean over all prompts, of all tokens but the first and of the
    places alone. Losses are those of the right decision, in nats: of the model, with the reconstruction in place of
    the activation of all tokens but the first and no error term, and with the mean activation there. Zeros in place of
    the mean, as is usual, would do more harm and flatter the SAE.
    """
    sae = instrument.sae
    mean = torch.cat([note.tokens for note in notes]).double().mean(0)
    of_places = torch.cat([note.residuals for note in notes]).double().mean(0)
    rows = []
    for pair, note in zip(pairs, notes, strict=True):
        losses = _losses(instrument, pair, mean)
        at_places = note.residuals[0]
        rows.append(
            {
                "measurement": "reconstruction",
                "squared_error": _squares(note.tokens - reconstructed(sae, note.tokens)),
                "variance": _squares(note.tokens - mean),
                "squared_error_places": _squares(at_places - reconstructed(sae, at_places)),
                "variance_places": _squares(at_places - of_places),
                "fvu_training": training_fvu(sae),
                "loss_clean": losses[0],
                "loss_spliced": losses[1],
                "loss_ablated": losses[2],
            }
        )
    return rows


def _losses(instrument: Instrument, pair: Pair, mean: Tensor) -> list[float]:
    ids, hook = pair.base.token_ids, instrument.site.hook
    first = prefill(instrument.subject, ids[:1]).cache
    splice = ActivationEdit(hook, lambda activation: reconstructed(instrument.sae, activation))
    ablate = ActivationEdit(hook, set_to(mean))
    logits = components(instrument.subject).run(ids[1:], [[], [splice], [ablate]], cache=first)
    target = torch.full((len(logits),), pair.base_answer_id)
    losses: list[float] = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none").tolist()
    return losses


def _squares(difference: Tensor) -> float:
    return float(difference.double().square().sum())
