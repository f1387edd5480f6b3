"""SAE (protocol 4.3): do a few features of a sparse autoencoder carry the note's conclusion?

A TopK SAE is trained on the residual stream of training skeletons at the layer where their notes lie. On other
skeletons its features are read at the notes' places, ranked by how well they predict the conclusion, and clamped to
their values under the other conclusion, in a prefill that continues from there.

    held_out_k    the k best features as chosen on other skeletons, clamped to their mean under the donor's conclusion
    in_sample_k   the k best as chosen on all skeletons, as the paper does
    matched_k     for each of them another active feature of similar mean activation, moved by the same step
    dictionary_k  k random entries of the dictionary driven to the best one's target: the paper's control, mostly dead
    features      all features as they are in the donor
    error_term    what the SAE does not reconstruct as it is in the donor
    full          the whole residual stream of the donor, which is both
    self_clamp    features clamped to their own values: changes nothing
    necessity_k   in the donor prompt, the k best of `held_out_k` clamped to their mean under the base's conclusion

The **conclusion** cannot be an action, since every skeleton has its own. It is whether the first case of the rule
fires: opposite in a pair's two prompts, the same question in every skeleton, known where the notes are written (unlike
which option of the task is right: the options come later), and determined by neither the field alone nor the rule
alone.

Unlike in the paper (critique CI6), the SAE never sees a skeleton it is evaluated on, the variance it leaves unexplained
is measured on evaluation prompts, features are chosen by cross-fitting over skeletons against permuted labels, the
error term is kept, and controls are active. For every active feature, the table of decoding against cause pairs its AUC
with the recovery by its clamp alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from kvprobe.engine.readout import Readout
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.probes.kit.decisions import decision_row
from kvprobe.probes.kit.training_pairs import training_pairs
from kvprobe.probes.mechanism.sae.features import FeatureChoice, choose_features
from kvprobe.probes.mechanism.sae.notes import Instrument, Notes, read_notes, reconstruction_rows
from kvprobe.probes.mechanism.sae.site import find_site
from kvprobe.probes.mechanism.sae.sweeps import Intervention, Selection, away_from_donor, decisions, towards_donor
from kvprobe.probes.mechanism.sae.training import SAESettings, trained_sae
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

STRONG = 0.45
"""A feature is strong when its AUC is so far from one half."""


@PROBES.register("sae")
class SparseAutoencoder(Probe):
    """Whether a few features of a sparse autoencoder carry a note's conclusion, and whether what tells it causes it."""

    needs_all_pairs: ClassVar[bool] = True

    sae: SAESettings = Field(SAESettings(), description="dictionary, active units and training of the autoencoder")
    training_task: str = Field("gated_decision", description="task whose training skeletons the SAE is trained on")
    training_pairs: int = Field(120, ge=1, description="pairs of it; both prompts of each are used")
    site_pairs: int = Field(12, ge=1, description="of these, pairs that say where the notes lie")
    places: int = Field(2, ge=1, description="positions that are clamped: a rule of two cases has two notes")
    sizes: tuple[PositiveInt, ...] = Field(
        (1, 3, 10, 30), description="numbers of clamped units, a unit being a feature at a place"
    )
    folds: int = Field(5, ge=2, description="groups of skeletons; features of each are chosen on the others")
    active_share: float = Field(0.05, gt=0, le=1, description="share of prompts a unit must be active in")
    permutations: int = Field(999, ge=99, description="of the null of the choice")
    draws: int = Field(2, ge=1, description="matched controls per pair and size")
    cause_pairs: int = Field(10, ge=1, description="pairs, each of another skeleton, on which all units are clamped")
    seed: int = Field(0, ge=0, description="of folds, permutations, controls and training pairs")
    batch_size: int | None = Field(default=None, ge=1, description="interventions in one forward pass")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair a row for its reconstruction, its best features in both prompts, and each intervention.

        Raises:
            SampleError: too few skeletons, or nothing to learn the notes' places from.
            UnsupportedError: the prompts have no rule with two named actions.
        """
        progress(0, len(pairs))
        instrument = self._instrument(subject, pairs)
        notes = [read_notes(instrument, pair, self.places) for pair in pairs]
        selections = self._select(pairs, notes)
        reconstructions = reconstruction_rows(instrument, pairs, notes)
        causes = self._cause_pairs(pairs)
        rows: list[Measurement] = []
        for number, (pair, note, selection) in enumerate(zip(pairs, notes, selections, strict=True)):
            base_sweep = towards_donor(
                instrument.sae,
                note,
                selection,
                sizes=self.sizes,
                draws=self.draws,
                generator=np.random.Generator(np.random.PCG64([self.seed, number])),
                single=number in causes,
            )
            donor_sweep = away_from_donor(instrument.sae, note, selection.held_out, self.sizes)
            base, *edited = decisions(instrument, pair, note, 0, base_sweep, batch_size=self.batch_size)
            donor, *undone = decisions(instrument, pair, note, 1, donor_sweep, batch_size=self.batch_size)
            common = _common(note, base, donor)
            measured = [reconstructions[number], *_decoding_rows(note, selection)]
            measured += _rows(base_sweep, base, edited) + _rows(donor_sweep, donor, undone)
            rows += [{"pair": number, "layer": instrument.site.layer, **common, **row} for row in measured]
            progress(number + 1, len(pairs))
        return rows

    def _instrument(self, subject: Subject, pairs: Sequence[Pair]) -> Instrument:
        """The site to read and the SAE to read it with, both from training skeletons alone."""
        training = training_pairs(subject, self.training_task, self.training_pairs, self.seed, like=pairs)
        site = find_site(subject, training[: self.site_pairs], self.places)
        prompts = [prompt.token_ids for pair in training for prompt in (pair.base, pair.donor)]
        return Instrument(subject, site, trained_sae(subject, site.hook, prompts, self.sae))

    def _select(self, pairs: Sequence[Pair], notes: Sequence[Notes]) -> list[Selection]:
        activations = np.stack([note.activations for note in notes])
        conclusions = np.array([note.conclusions for note in notes])

        def choose(index: list[int]) -> FeatureChoice:
            shares = self.active_share, self.permutations, self.seed
            return choose_features(activations[index], conclusions[index], *shares)

        in_sample = choose(list(range(len(pairs))))
        splits = folds([pair.scenario.skeleton for pair in pairs], self.folds, self.seed)
        of_pair = {
            pair: Selection(fold, choice, in_sample)
            for fold, (selection, evaluation) in enumerate(splits)
            for choice in [choose(selection)]
            for pair in evaluation
        }
        return [of_pair[number] for number in range(len(pairs))]

    def _cause_pairs(self, pairs: Sequence[Pair]) -> set[int]:
        first = {pair.scenario.skeleton: number for number, pair in reversed(list(enumerate(pairs)))}
        return set(sorted(first.values())[: self.cause_pairs])


def _rows(sweep: Sequence[Intervention], unedited: Readout, readings: Sequence[Readout]) -> list[Measurement]:
    return [
        {**decision_row(one.name, unedited, reading, positions=len(one.delta)), **one.columns}
        for one, reading in zip(sweep, readings, strict=True)
    ]


def _decoding_rows(note: Notes, selection: Selection) -> list[Measurement]:
    """The best unit of either choice in both prompts, its sign turned so that more of it means the first case."""
    rows = []
    for name in ("held_out", "in_sample"):
        choice: FeatureChoice = getattr(selection, name)
        unit = choice.ranked[0]
        place, feature = divmod(unit, note.activations.shape[1] // len(note.places))
        sign = 1.0 if choice.auc[unit] >= 0.5 else -1.0
        for prompt, conclusion in enumerate(note.conclusions):
            rows.append(
                {
                    "measurement": "decoding",
                    "selection": name,
                    "fold": selection.fold if name == "held_out" else 0,
                    "prompt": ("base", "donor")[prompt],
                    "place": place,
                    "feature": feature,
                    "activation": sign * float(note.activations[prompt, unit]),
                    "conclusion": conclusion,
                    "selection_auc": 0.5 + abs(float(choice.auc[unit]) - 0.5),
                    "null_auc": choice.null_auc(),
                    "p_value": choice.p_value,
                    "active_features": len(choice.ranked),
                    "strong_features": int(np.sum(np.abs(choice.auc - 0.5) > STRONG)),
                }
            )
    return rows


def _common(note: Notes, base: Readout, donor: Readout) -> dict[str, float]:
    """Columns of every row; the noise floor compares two ways of computing the same margins."""
    floor = max(
        abs(unedited.margin - whole.margin) for unedited, whole in zip((base, donor), note.decisions, strict=True)
    )
    return gate_columns(base, donor, floor)
