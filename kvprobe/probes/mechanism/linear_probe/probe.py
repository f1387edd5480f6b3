"""Linear probes (protocol 1.5, 2.1): is the conclusion written where the paper says notes are, apart from the words?

A linear probe reads the residual stream at one place and after one number of blocks. It is to say whether the rule's
first case fires, which is the exclusive or of the field's value and of the order of the cases: no word and no pair of
words tells it, and both prompts of a pair, which share every word but the field's, have opposite answers. It is tested
on skeletons that it never saw (critique ME4), in five grades of strangeness (`prompt_splits`).

What it could still pick up without there being a conclusion, and what stands against it:

    the words                   other skeletons, other vocabulary, other wordings; shuffled labels; at the field, before
                                the rule is read, it must be at chance exactly
    any interaction of words    another exclusive or of the same two places, which no rule asks for: `selectivity` is
                                the accuracy on the conclusion beyond that on it. In a handful of cells any labelling
                                can be separated, so it is tested where cells may recur too (split `pair`)
    that a word occurs again    a case that fires names the very word in the field. A model that marks repeated words
                                and concludes nothing would pass at the cases; whether the mark *acts* is for the probes
                                that intervene. At the task and at the decision token no word tells it
    that a layer suits          the layer is chosen by cross-validation inside the training skeletons

Then the probe at the decision token is applied to the residual of the same token on a stale cache, on one edited in
place, after an erratum, and on a recomputed one (protocol 1.5): which conclusion does it say?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from kvprobe.engine.operations import overwrite
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.decoding import (
    Array,
    Fold,
    Split,
    cross_predictions,
    predictions,
    prompt_splits,
    residuals,
    trained_on,
)
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.rule_positions import Place, Target, labels, place_positions, segment
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, mean, proportion
from kvprobe.tasks.extra_lines import Subjects, line_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

ARMS = ("stale", "in_place", "erratum", "full")
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
        features: `[prompt, place, layer, hidden]`, prompt `2 * i + side` being the base (0) or donor (1) of pair i.
        arms: by arm `[pair, layer, hidden]`, the decision token on an edited cache.
        common: for each pair the columns that all its rows carry.
    """

    features: Array
    arms: Mapping[str, Array]
    common: Sequence[Mapping[str, float]]


@PROBES.register("linear_probe")
class LinearProbe(Probe):
    """Whether the conclusion can be read linearly off the notes and off the decision token, apart from the words."""

    name: ClassVar[str] = "linear_probe"
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        "conclusion.decision.accuracy": PaperEntry(
            "linear_decodability", "layer26_leave_one_domain_out", "probe_accuracy"
        ),
        **{
            f"readout.{arm}.says_new": PaperEntry("linear_decodability", f"readout_under_{arm}", "P_probe_says_new")
            for arm in ARMS
        },
    }

    class Parameters(base.Parameters):
        """Where to read, and how probes are trained and tested."""

        places: tuple[Place, ...] = ("field", "first_case", "rule", "conversation", "task", "decision")
        folds: int = Field(default=5, ge=2, description="sets of skeletons, each tested by probes of the others")
        inner_folds: int = Field(default=3, ge=2, description="of the choice of a layer inside the training skeletons")
        shuffles: int = Field(default=2, ge=1, description="random labellings")
        seed: int = Field(default=0, ge=0)

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """A row for each pair, target, split, place and layer, and one for each pair, arm and layer."""
        readings = self._read(subject, pairs, progress)
        usable = trained_on(readings.common)
        targets = self._targets(pairs)
        chosen = self._chosen_layers(readings.features, targets["conclusion"], pairs, usable)
        rows = self._probe_rows(readings.features, targets, chosen, pairs, usable)
        rows += self._readout_rows(readings, targets["conclusion"], chosen, pairs, usable)
        return [{**readings.common[row["pair"]], **row} for row in rows]

    def _read(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> Readings:
        features, common = [], []
        arms: dict[str, list[Array]] = {arm: [] for arm in ARMS}
        for index, pair in enumerate(pairs):
            positions = place_positions(pair, self.parameters.places)
            features += [residuals(subject, prompt.token_ids, positions) for prompt in (pair.base, pair.donor)]
            unedited = prefill_pair(subject, pair)
            common.append(unedited.common())
            for arm, residual in decision_residuals(subject, pair, unedited).items():
                arms[arm].append(residual)
            progress(index + 1, len(pairs))
        return Readings(np.stack(features), {arm: np.stack(rows) for arm, rows in arms.items()}, common)

    def _targets(self, pairs: Sequence[Pair]) -> dict[str, NDArray[np.bool_]]:
        """`[prompt]` by target, `[prompt, draw]` for shuffled labels, which stay opposite within a pair."""
        kinds: tuple[Target, ...] = ("conclusion", "other_xor", "option", "field")
        targets: dict[str, NDArray[np.bool_]] = {
            kind: np.array([label for pair in pairs for label in labels(pair, kind)]) for kind in kinds
        }
        generator = np.random.Generator(np.random.PCG64(self.parameters.seed))
        flips = generator.integers(0, 2, (len(pairs), self.parameters.shuffles)).astype(bool)
        return {**targets, "shuffled": targets["conclusion"][:, None] ^ np.repeat(flips, 2, axis=0)}

    def _chosen_layers(
        self, features: Array, target: NDArray[np.bool_], pairs: Sequence[Pair], usable: Sequence[bool]
    ) -> NDArray[np.intp]:
        """`[pair, place]` the layer whose probe is best inside the skeletons that the pair's probe is trained on."""
        options, places = self.parameters, features.shape[1]
        chosen = np.zeros((len(pairs), places), dtype=np.intp)
        for train, test in prompt_splits(pairs, "skeleton", options.folds, options.seed, usable):
            inside = [pairs[prompt // 2] for prompt in train[::2]]
            inner = prompt_splits(inside, "skeleton", options.inner_folds, options.seed, [True] * len(inside))
            for place in range(places):
                accuracy = [
                    float((cross_predictions(rows, target[train][:, None], inner)[:, 0] == target[train]).mean())
                    for rows in np.moveaxis(features[train, place], 1, 0)
                ]
                chosen[test // 2, place] = int(np.argmax(accuracy))
        return chosen

    def _probe_rows(
        self,
        features: Array,
        targets: Mapping[str, NDArray[np.bool_]],
        chosen: NDArray[np.intp],
        pairs: Sequence[Pair],
        usable: Sequence[bool],
    ) -> list[Measurement]:
        rows: list[Measurement] = []
        wordings = {pair.scenario.wording for pair in pairs}
        for split, kinds in TARGETS.items():
            if split == "wording" and len(wordings) < 2:
                continue
            truth = np.column_stack([targets[kind] for kind in kinds])
            columns = [kind for kind in kinds for _ in range(targets[kind].ndim == 1 or targets[kind].shape[1])]
            splits = prompt_splits(pairs, split, self.parameters.folds, self.parameters.seed, usable)
            for number, place in enumerate(self.parameters.places):
                for layer in range(features.shape[2]):
                    right = cross_predictions(features[:, number, layer], truth, splits) == truth
                    tested = {"measurement": "probe", "split": split, "place": place, "layer": layer}
                    rows += _rows_of(tested, columns, right, chosen[:, number] == layer)
        return rows

    def _readout_rows(
        self,
        readings: Readings,
        target: NDArray[np.bool_],
        chosen: NDArray[np.intp],
        pairs: Sequence[Pair],
        usable: Sequence[bool],
    ) -> list[Measurement]:
        rows: list[Measurement] = []
        if "decision" not in self.parameters.places:
            return rows
        place = self.parameters.places.index("decision")
        splits = prompt_splits(pairs, "skeleton", self.parameters.folds, self.parameters.seed, usable)
        for arm, said in _says_new(readings, place, target, splits).items():
            rows += [
                {
                    "pair": pair,
                    "measurement": "readout",
                    "arm": arm,
                    "place": "decision",
                    "layer": layer,
                    "chosen": bool(chosen[pair, place] == layer),
                    "says_new": bool(said[pair, layer]),
                }
                for pair in range(len(pairs))
                for layer in range(said.shape[1])
            ]
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Accuracies at layers chosen on other skeletons and, in sample, at the best layer; selectivity; readouts."""
        probes = rows[rows["measurement"] == "probe"]
        effects: list[Effect] = []
        for (target, place), part in probes[probes["split"] == "skeleton"].groupby(["target", "place"], sort=False):
            effects.append(_accuracy(f"{target}.{place}.accuracy", part[part["chosen"]], statistics))
            if target == "conclusion":
                effects.append(_accuracy(f"{target}.{place}.in_sample", _best_layer(part), statistics))
        for (target, place, split), part in probes.groupby(["target", "place", "split"], sort=False):
            if split != "skeleton":
                effects.append(_accuracy(f"{target}.{place}.{split}.accuracy", part[part["chosen"]], statistics))
        effects += [_selectivity(place, part, statistics) for place, part in probes.groupby("place", sort=False)]
        read = rows[(rows["measurement"] == "readout") & rows["chosen"].astype(bool)]
        for arm, part in read.groupby("arm", sort=False):
            said = part["says_new"].astype(float)
            name = f"readout.{arm}.says_new"
            effects.append(proportion(name, said, clusters=part[statistics.cluster], statistics=statistics))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Accuracy over layers by place above, and what the probe says under each arm below."""
        from kvprobe.probes.mechanism.linear_probe.figure import draw_linear_probe

        return draw_linear_probe(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Accuracy on the conclusion, and on the other exclusive or, by place and model."""
        from kvprobe.probes.mechanism.linear_probe.figure import linear_probe_panel

        linear_probe_panel(axes, panels)


def decision_residuals(subject: Subject, pair: Pair, unedited: PrefilledPair) -> dict[str, Array]:
    """By arm, the decision token's residual stream `[layer, hidden]` on a cache that holds the base's notes or not.

    stale      the base's cache
    in_place   the base's cache with the field's entries of the donor (protocol 5.1: equal to recomputing them)
    erratum    the base's cache up to the task, then the one-line erratum and the task, run anew
    full       the donor's cache
    """
    before, ids = slice(0, pair.decision_position), pair.base.token_ids
    in_place, _ = overwrite(unedited.stale, pair.field, unedited.oracle)
    task = segment(pair, "task").start
    said = pair.scenario.attributes
    subjects = Subjects(pair.scenario.wording, said["entity"], said["field"], said["old"], said["new"])
    rerun = [*line_tokens("override", subjects, subject.tokenizer), *ids[task:]]
    runs = {
        "stale": (ids[-1:], unedited.stale.take(before)),
        "in_place": (ids[-1:], in_place.take(before)),
        "erratum": (rerun, unedited.stale.take(slice(0, task))),
        "full": (ids[-1:], unedited.oracle.take(before)),
    }
    return {arm: residuals(subject, tokens, [-1], cache)[0] for arm, (tokens, cache) in runs.items()}


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


def _says_new(
    readings: Readings, place: int, target: NDArray[np.bool_], splits: Sequence[Fold]
) -> dict[str, NDArray[np.bool_]]:
    """`[pair, layer]` by arm: whether a probe of other skeletons reads the donor's conclusion."""
    donor = target[1::2]
    said = {arm: np.zeros(residual.shape[:2], dtype=bool) for arm, residual in readings.arms.items()}
    truth = np.concatenate([target, *[donor] * len(said)])[:, None]
    for layer in range(readings.features.shape[2]):
        rows = np.concatenate([readings.features[:, place, layer], *(arm[:, layer] for arm in readings.arms.values())])
        for train, test in splits:
            pairs = np.unique(test // 2)
            read = predictions(rows, truth, train)[len(target) :, 0].reshape(len(said), len(donor))
            for arm, conclusion in zip(said, read, strict=True):
                said[arm][pairs, layer] = conclusion[pairs] == donor[pairs]
    return said


def _accuracy(name: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Effect:
    right = pd.concat([rows["right_base"], rows["right_donor"]]).astype(float)
    clusters = pd.concat([rows[statistics.cluster]] * 2)
    return proportion(name, right, clusters=clusters, statistics=statistics)


def _best_layer(rows: pd.DataFrame) -> pd.DataFrame:
    right = rows[["right_base", "right_donor"]].astype(float).mean(axis=1)
    return rows[rows["layer"] == right.groupby(rows["layer"]).mean().idxmax()]


def _selectivity(place: Any, rows: pd.DataFrame, statistics: StatisticsConfig) -> Effect:
    """Accuracy on the conclusion beyond that on the other exclusive or, at the same layer and in the same pairs."""
    part = rows[(rows["split"] == "skeleton") & rows["chosen"].astype(bool)]
    right = part.assign(right=part[["right_base", "right_donor"]].astype(float).mean(axis=1))
    by_pair = right[right["draw"] == 0].pivot(index="pair", columns="target", values="right")
    clusters = part.groupby("pair")[statistics.cluster].first().loc[by_pair.index]
    difference = by_pair["conclusion"] - by_pair["other_xor"]
    return mean(f"selectivity.{place}", difference, clusters=clusters, statistics=statistics)
