"""Linear probes (protocol 1.5, 2.1): is the conclusion linearly readable where the paper places the notes?

A linear probe reads the residual stream at one place after a given number of blocks. It predicts whether the rule's
first case fires, which is the exclusive or of the field's value and the order of the cases: no word and no pair of
words determines it, and both prompts of a pair, which share every word but the field's, have opposite answers. It is
tested on skeletons it never saw (critique ME4), in five degrees of novelty (`prompt_splits`).

What a probe could pick up without any conclusion being there, and the control against it:

    the words                   other skeletons, other vocabulary, other wordings; shuffled labels; at the field, before
                                the rule is read, accuracy must be exactly at chance
    any interaction of words    another exclusive or of the same two places, which no rule asks for: `selectivity` is
                                the accuracy on the conclusion beyond that on this control. In a handful of cells any
                                labelling can be separated, so it is tested where cells may recur too (split `pair`)
    repetition of a word        a case that fires names the very word in the field. A model that marks repeated words
                                and concludes nothing would pass at the cases; whether the mark *acts* is for the probes
                                that intervene. At the task and at the decision token no word gives it away
    the choice of the layer     the layer is chosen by cross-validation within the training skeletons

Then the probe at the decision token is applied to the residual stream of the same token on a stale cache, on one edited
in place, after an erratum, and on a recomputed one (protocol 1.5): which conclusion does it read?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.decoding import Array, Fold, Split, cross_predictions, prompt_splits, residuals, trained_on
from kvprobe.probes.kit.prefilled_pair import prefill_pair
from kvprobe.probes.kit.rule_positions import Place, Target, labels, place_positions
from kvprobe.probes.mechanism.linear_probe.readout import ARMS, decision_residuals, says_new
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

# What each split is used for; splits other than `skeleton` show what a weaker or a stronger test would have said.
TARGETS: Mapping[Split, tuple[str, ...]] = {
    "skeleton": ("conclusion", "other_xor", "option", "field", "shuffled"),
    "pair": ("conclusion", "other_xor", "field"),
    "vocabulary": ("conclusion",),
    "wording": ("conclusion",),
    "field": ("conclusion",),
}
# The options are named in the task.
_KNOWS_OPTIONS = ("task", "decision")


@dataclass(frozen=True, eq=False)
class Readings:
    """Activations of all pairs.

    Attributes:
        pairs: the pairs.
        features: `[prompt, place, layer, hidden]`, prompt `2 * i + side` being the base (0) or donor (1) of pair i.
        arms: by arm `[pair, layer, hidden]`, the decision token on an edited cache.
        common: for each pair the columns that all its rows carry.
    """

    pairs: Sequence[Pair]
    features: Array
    arms: Mapping[str, Array]
    common: Sequence[Mapping[str, float]]


@PROBES.register("linear_probe")
class LinearProbe(Probe):
    """Whether the conclusion can be read linearly off the notes and off the decision token, apart from the words."""

    needs_all_pairs: ClassVar[bool] = True

    places: tuple[Place, ...] = Field(
        ("field", "first_case", "rule", "conversation", "task", "decision"), description="tokens that are read"
    )
    folds: int = Field(default=5, ge=2, description="sets of skeletons, each tested by probes of the others")
    inner_folds: int = Field(default=3, ge=2, description="of the choice of a layer inside the training skeletons")
    shuffles: int = Field(default=2, ge=1, description="random labellings")
    seed: int = Field(default=0, ge=0, description="of folds and random draws")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """A row for each pair, target, split, place and layer, and one for each pair, arm and layer."""
        readings = self._read(subject, pairs, progress)
        targets = self._targets(pairs)
        chosen = self._chosen_layers(readings, targets["conclusion"])
        rows = self._probe_rows(readings, targets, chosen)
        if "decision" in self.places:
            place = self.places.index("decision")
            splits = self._splits(readings, "skeleton")
            said = says_new(readings.features[:, place], readings.arms, targets["conclusion"], splits)
            rows += _readout_rows(said, chosen[:, place])
        return [{**readings.common[row["pair"]], **row} for row in rows]

    def _read(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> Readings:
        features, common = [], []
        arms: dict[str, list[Array]] = {arm: [] for arm in ARMS}
        for index, pair in enumerate(pairs):
            positions = place_positions(pair, self.places)
            features += [residuals(subject, prompt.token_ids, positions) for prompt in (pair.base, pair.donor)]
            unedited = prefill_pair(subject, pair)
            common.append(unedited.common())
            for arm, residual in decision_residuals(subject, pair, unedited).items():
                arms[arm].append(residual)
            progress(index + 1, len(pairs))
        return Readings(pairs, np.stack(features), {arm: np.stack(rows) for arm, rows in arms.items()}, common)

    def _targets(self, pairs: Sequence[Pair]) -> dict[str, NDArray[np.bool_]]:
        """`[prompt]` by target, `[prompt, draw]` for shuffled labels, which stay opposite within a pair."""
        kinds: tuple[Target, ...] = ("conclusion", "other_xor", "option", "field")
        targets: dict[str, NDArray[np.bool_]] = {
            kind: np.array([label for pair in pairs for label in labels(pair, kind)]) for kind in kinds
        }
        generator = np.random.Generator(np.random.PCG64(self.seed))
        flips = generator.integers(0, 2, (len(pairs), self.shuffles)).astype(bool)
        return {**targets, "shuffled": targets["conclusion"][:, None] ^ np.repeat(flips, 2, axis=0)}

    def _splits(self, readings: Readings, split: Split) -> list[Fold]:
        return prompt_splits(readings.pairs, split, self.folds, self.seed, trained_on(readings.common))

    def _chosen_layers(self, readings: Readings, target: NDArray[np.bool_]) -> NDArray[np.intp]:
        """`[pair, place]` the layer whose probe is best within the skeletons that the pair's probe is trained on."""
        pairs, features = readings.pairs, readings.features
        chosen = np.zeros((len(pairs), len(self.places)), dtype=np.intp)
        for train, test in self._splits(readings, "skeleton"):
            inside = [pairs[prompt // 2] for prompt in train[::2]]
            inner = prompt_splits(inside, "skeleton", self.inner_folds, self.seed, [True] * len(inside))
            for place in range(len(self.places)):
                accuracy = [
                    float((cross_predictions(rows, target[train][:, None], inner)[:, 0] == target[train]).mean())
                    for rows in np.moveaxis(features[train, place], 1, 0)
                ]
                chosen[test // 2, place] = int(np.argmax(accuracy))
        return chosen

    def _probe_rows(
        self, readings: Readings, targets: Mapping[str, NDArray[np.bool_]], chosen: NDArray[np.intp]
    ) -> list[Measurement]:
        rows: list[Measurement] = []
        wordings = {pair.scenario.wording for pair in readings.pairs}
        for split, kinds in TARGETS.items():
            if split == "wording" and len(wordings) < 2:
                continue
            truth = np.column_stack([targets[kind] for kind in kinds])
            columns = [kind for kind in kinds for _ in range(targets[kind].ndim == 1 or targets[kind].shape[1])]
            splits = self._splits(readings, split)
            for number, place in enumerate(self.places):
                for layer in range(readings.features.shape[2]):
                    right = cross_predictions(readings.features[:, number, layer], truth, splits) == truth
                    tested = {"measurement": "probe", "split": split, "place": place, "layer": layer}
                    rows += _rows_of(tested, columns, right, chosen[:, number] == layer)
        return rows


def _rows_of(
    tested: Mapping[str, Any], targets: Sequence[str], right: NDArray[np.bool_], chosen: NDArray[np.bool_]
) -> list[Measurement]:
    """Rows of one place and layer; `right` is `[prompt, target]`."""
    by_pair = right.reshape(len(chosen), 2, len(targets))
    return [
        {
            **tested,
            "pair": pair,
            "target": target,
            "draw": targets[:column].count(target),
            "chosen": bool(chosen[pair]),
            "right_base": bool(by_pair[pair, 0, column]),
            "right_donor": bool(by_pair[pair, 1, column]),
        }
        for column, target in enumerate(targets)
        if target != "option" or tested["place"] in _KNOWS_OPTIONS
        for pair in range(len(chosen))
    ]


def _readout_rows(said: Mapping[str, NDArray[np.bool_]], chosen: NDArray[np.intp]) -> list[Measurement]:
    """Rows of what probes say under each arm; `chosen` is each pair's layer."""
    return [
        {
            "pair": pair,
            "measurement": "readout",
            "arm": arm,
            "place": "decision",
            "layer": layer,
            "chosen": bool(chosen[pair] == layer),
            "says_new": bool(new),
        }
        for arm, of_arm in said.items()
        for pair, of_pair in enumerate(of_arm)
        for layer, new in enumerate(of_pair)
    ]
