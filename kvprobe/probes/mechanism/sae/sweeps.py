"""The interventions on one pair's features, and the decisions under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from kvprobe.engine.components import ActivationEdit, add, components
from kvprobe.engine.forward import prefill
from kvprobe.engine.readout import Readout, read_rows
from kvprobe.probes.mechanism.sae.features import FeatureChoice, Floats, matched_units, stepped
from kvprobe.probes.mechanism.sae.notes import Instrument, Notes, clamp, with_error_term
from kvprobe.tasks.pairs import Pair


@dataclass(frozen=True, eq=False)
class Selection:
    """Features chosen without a pair's skeleton, and on all skeletons."""

    fold: int
    held_out: FeatureChoice
    in_sample: FeatureChoice


@dataclass(frozen=True, eq=False)
class Aim:
    """One intervention: its name, the activations `[unit]` it sets, and further columns of its row."""

    name: str
    target: Floats
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Intervention:
    """One row of a sweep: its name, what is added to the residual stream `[place, hidden]`, and further columns."""

    name: str
    delta: Tensor
    columns: Mapping[str, Any] = field(default_factory=dict)


def towards_donor(
    sae: Any,
    note: Notes,
    selection: Selection,
    *,
    sizes: Sequence[int],
    draws: int,
    generator: np.random.Generator,
    single: bool,
) -> list[Intervention]:
    """All interventions on the base prompt.

    Args:
        sae: of the hook.
        note: of the pair.
        selection: features chosen for it.
        sizes: numbers of units.
        draws: matched controls for each size.
        generator: of the controls.
        single: whether every active unit is clamped alone, too.
    """
    own, donor = note.activations
    goal = int(note.conclusions[1])
    aims = [Aim("self_clamp", own), Aim("features", donor)]
    for size in sizes:
        for name, choice in (("held_out", selection.held_out), ("in_sample", selection.in_sample)):
            aims.append(Aim(f"{name}_{size}", clamped(own, choice, size, goal), {"units": len(choice.ranked[:size])}))
        aims += _controls(note, selection.held_out, size, draws, generator)
    if single:
        aims += [_single(note, selection, unit) for unit in selection.in_sample.ranked]
    changes = _interventions(sae, note, 0, aims)
    full = note.residuals[1] - note.residuals[0]
    return [Intervention("full", full), Intervention("error_term", full - changes[1].delta), *changes]


def away_from_donor(sae: Any, note: Notes, choice: FeatureChoice, sizes: Sequence[int]) -> list[Intervention]:
    """Interventions on the donor prompt: `necessity_k`, the best units at their mean under the base's conclusion."""
    own, goal = note.activations[1], int(note.conclusions[0])
    aims = [
        Aim(f"necessity_{size}", clamped(own, choice, size, goal), {"units": len(choice.ranked[:size])})
        for size in sizes
    ]
    return _interventions(sae, note, 1, aims)


def decisions(
    instrument: Instrument,
    pair: Pair,
    note: Notes,
    prompt: int,
    sweep: Sequence[Intervention],
    *,
    batch_size: int | None,
) -> list[Readout]:
    """The unedited decision of prompt 0 or 1 and those under the interventions, run on from the first place."""
    ids, start = (pair.base, pair.donor)[prompt].token_ids, note.places[0]

    def whole(activation: Tensor) -> Tensor:
        return with_error_term(instrument.sae, activation)

    # Units that are at their aim already are left as they are.
    edits = [
        ActivationEdit(
            instrument.site.hook, whole if one.name == "self_clamp" else add(one.delta), note.places, no_op=True
        )
        for one in sweep
    ]
    before = prefill(instrument.subject, ids[:start]).cache
    rows: list[list[ActivationEdit]] = [[], *([edit] for edit in edits)]
    logits = components(instrument.subject).run(ids[start:], rows, cache=before, batch_size=batch_size)
    return read_rows(logits, pair.base_answer_id, pair.donor_answer_id)


def clamped(own: Floats, choice: FeatureChoice, size: int, goal: int) -> Floats:
    """Activations `[unit]` with the best units at their mean under conclusion `goal`."""
    chosen = list(choice.ranked[:size])
    target = own.copy()
    target[chosen] = choice.means[goal, chosen]
    return target


def _interventions(sae: Any, note: Notes, prompt: int, aims: Sequence[Aim]) -> list[Intervention]:
    deltas = clamp(sae, note, prompt, [aim.target for aim in aims])
    return [Intervention(aim.name, delta, aim.columns) for aim, delta in zip(aims, deltas, strict=True)]


def _controls(note: Notes, choice: FeatureChoice, size: int, draws: int, generator: np.random.Generator) -> list[Aim]:
    """Matched active units moved by the chosen ones' steps, and the paper's random entries of the dictionary."""
    own, goal = note.activations[0], int(note.conclusions[1])
    entries = generator.choice(len(own), min(size, len(own)), replace=False)
    dictionary = own.copy()
    dictionary[entries] = choice.means[goal, choice.ranked[0]]
    controls = [Aim(f"dictionary_{size}", dictionary, {"units": len(entries)})]
    for draw in range(draws):
        matched = matched_units(choice, size, len(note.places), generator)
        steps = [(control, choice.means[goal, unit] - own[unit]) for unit, control in matched]
        controls.append(Aim(f"matched_{size}", stepped(own, steps), {"draw": draw, "units": len(matched)}))
    return controls


def _single(note: Notes, selection: Selection, unit: int) -> Aim:
    own, goal = note.activations[0], int(note.conclusions[1])
    step = float(selection.held_out.means[goal, unit] - own[unit])
    place, feature = divmod(unit, len(own) // len(note.places))
    auc = float(selection.in_sample.auc[unit])
    columns = {"measurement": "feature", "place": place, "feature": feature, "auc": auc, "step": step}
    return Aim("single", stepped(own, [(unit, step)]), columns)
