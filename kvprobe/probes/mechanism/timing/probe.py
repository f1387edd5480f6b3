"""Timing (protocol 2.2): is the conclusion in the notes at an earlier depth than in the decision token?

The paper set a probe at one place against a logit lens at another. Here each instrument reads both places (critique
ME5): the *note*, which is the tokens where the value, the action and the end of the rule's two cases stand, and the
*decision* token.

    probe    a linear probe of "the first case fires" on other skeletons (see `linear_probe`) over all tokens of the
             place. Its onset is the depth at which its accuracy passes 0.9.
    patch    the residual stream of the donor put in place of the base's after one block, at all tokens of the place.
             Its onset is the depth at which half of the gap is recovered: what the decision needs is there, be it the
             conclusion or still the field's content, from which blocks above conclude. At the note the effect falls
             again once the note has been read: what is changed after that comes too late.
    lens     the residual stream read as if it were the top one, by the final norm and the unembedding, each applied
             once: as it is (`lens`), or through an affine map of each layer to the top, fitted to all kinds of tokens
             of other skeletons (`tuned`). Its onset is the depth at which it is right in 0.9 of the prompts, and its
             `commit` the paper's: the mean over prompts of the depth from which on it stays right, which comes early by
             chance, since a lens that says nothing yet is right in half of the prompts from the start. At the end of
             the rule, where no action is next, it is shown and not timed.

Depth is the number of blocks run over the number of blocks; onsets are interpolated between blocks. An instrument that
never gets there has an onset of one block beyond the top, and so a lead over it says only that the note's came: read
`peak` beside it. `lead` is the onset at the decision minus that at the note, unknown where neither comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from kvprobe.engine.components import ActivationEdit, components, set_to
from kvprobe.engine.readout import read_rows
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.decoding import (
    Array,
    Fold,
    cross_predictions,
    prompt_splits,
    residual_hooks,
    residuals,
    trained_on,
)
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.probes.kit.rule_positions import case_positions, labels
from kvprobe.probes.legacy import Probe
from kvprobe.probes.mechanism.timing.lenses import lens_margins, through, tuned_lens
from kvprobe.stats import Effect, StatisticsConfig, bootstrapped, maximum, mean, ratio_of_sums
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

Place = Literal["note", "decision"]
PLACES: tuple[Place, ...] = ("note", "decision")
# Accuracy, share of the gap, share of prompts.
LEVELS: Mapping[str, float] = {"probe": 0.9, "patch": 0.5, "lens": 0.9, "tuned": 0.9}
SAME_AT_BOTH = ("probe", "patch")
# Among the tokens that are read, after the six of the cases, the last of which is the end of the rule.
_DECISION = 6


@PROBES.register("timing")
class Timing(Probe):
    """At which depth the conclusion is in the notes and in the decision token, by the same instruments at both."""

    name: ClassVar[str] = "timing"
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        "probe_note.onset": PaperEntry("timing", "write_lets_check", "relative_depth"),
        "lens_decision.commit": PaperEntry("timing", "decision_commit_logit_lens", "relative_depth"),
    }

    class Parameters(base.Parameters):
        """How probes and tuned lenses are trained."""

        folds: int = Field(
            default=5, ge=2, description="sets of skeletons, each read by probes and lenses of the others"
        )
        lens_tokens: int = Field(default=16, ge=1, description="tokens of each prompt that a tuned lens is fitted to")
        seed: int = Field(default=0, ge=0)

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """For each pair, place and layer a row of each instrument; layer l is after l blocks."""
        generator = np.random.Generator(np.random.PCG64(self.parameters.seed))
        read: list[Array] = []
        commons = []
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            sampled = generator.integers(0, len(pair.base.token_ids), self.parameters.lens_tokens).tolist()
            positions = [*case_positions(pair), pair.decision_position, *sampled]
            read += [residuals(subject, prompt.token_ids, positions) for prompt in (pair.base, pair.donor)]
            unedited = prefill_pair(subject, pair)
            commons.append(unedited.common())
            rows += [{"pair": index, **row} for row in patch_rows(subject, pair, unedited)]
            progress(index + 1, len(pairs))
        splits = prompt_splits(pairs, "skeleton", self.parameters.folds, self.parameters.seed, trained_on(commons))
        states = np.stack(read)
        rows += _probe_rows(states[:, : _DECISION + 1], pairs, splits)
        ends = states[:, [_DECISION - 1, _DECISION]]
        rows += _lens_rows(subject, pairs, "lens", ends)
        tuned = np.zeros_like(ends)
        for train, test in splits:
            lens = tuned_lens(np.concatenate(states[train, _DECISION + 1 :]))
            for place in range(len(PLACES)):
                tuned[test, place] = through(lens, ends[test, place])
        rows += _lens_rows(subject, pairs, "tuned", tuned)
        return [{**commons[row["pair"]], **row} for row in rows]

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Onsets and peaks, leads of the probe and of the patch, commits of the lenses, and the lens's error."""
        layers = int(rows["layer"].max())
        table = score_table(rows, statistics.cluster)
        effects: list[Effect] = []
        for instrument in LEVELS:
            effects += [_peak(f"{instrument}_{place}", table, statistics) for place in PLACES]
            # Before the decision no action is next, so a lens has nothing to be early with there.
            timed = PLACES if instrument in SAME_AT_BOTH else PLACES[1:]
            effects += [_onset(instrument, (place,), table, statistics) for place in timed]
        effects += [_onset(instrument, PLACES, table, statistics) for instrument in SAME_AT_BOTH]
        lenses = rows[(rows["measurement"].isin(["lens", "tuned"])) & (rows["place"] == "decision")]
        for name in ("lens", "tuned"):
            part = lenses[lenses["measurement"] == name]
            effects.append(_commit(f"{name}_decision.commit", part, layers, statistics))
        top = lenses[(lenses["measurement"] == "lens") & (lenses["layer"] == layers)]
        error = np.maximum((top["base"] - top["m_base"]).abs(), (top["donor"] - top["m_donor"]).abs())
        effects.append(maximum("lens_decision.error", error, clusters=top[statistics.cluster]))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Accuracy, recovery and lens by depth at both places; one column for each model."""
        from kvprobe.probes.mechanism.timing.figure import draw_timing

        return draw_timing(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Onsets at the note and at the decision, by model."""
        from kvprobe.probes.mechanism.timing.figure import timing_panel

        timing_panel(axes, panels)


def patch_rows(subject: Subject, pair: Pair, unedited: PrefilledPair) -> list[Measurement]:
    """The base's decision with the donor's residual stream after each number of blocks, at the note or the decision."""
    ids, hooks, model = pair.base.token_ids, residual_hooks(subject.layers), components(subject)
    donor = model.capture(pair.donor.token_ids, hooks).activations
    note = tuple(sorted(set(case_positions(pair))))
    rows: list[Measurement] = []
    for place, positions in (("note", note), ("decision", (pair.decision_position,))):
        first = positions[0]
        edits = [[ActivationEdit(hook, set_to(donor[hook][list(positions)]), positions)] for hook in hooks]
        logits = model.run(ids[first:], edits, cache=unedited.stale.take(slice(0, first)))
        readings = read_rows(logits, pair.base_answer_id, pair.donor_answer_id)
        rows += [
            {"measurement": "patch", "place": place, "layer": layer, "margin": reading.margin}
            for layer, reading in enumerate(readings)
        ]
    return rows


def _probe_rows(states: Array, pairs: Sequence[Pair], splits: Sequence[Fold]) -> list[Measurement]:
    """`states` is `[prompt, token, layer, hidden]`, the tokens of the note and then the decision token."""
    truth = np.array([label for pair in pairs for label in labels(pair, "conclusion")])[:, None]
    rows: list[Measurement] = []
    for place, tokens in (("note", slice(0, _DECISION)), ("decision", slice(_DECISION, None))):
        for layer in range(states.shape[2]):
            features = states[:, tokens, layer].reshape(len(states), -1)
            right = (cross_predictions(features, truth, splits) == truth).reshape(-1, 2)
            rows += [
                {
                    "pair": pair,
                    "measurement": "probe",
                    "place": place,
                    "layer": layer,
                    "right_base": bool(base_right),
                    "right_donor": bool(donor_right),
                }
                for pair, (base_right, donor_right) in enumerate(right)
            ]
    return rows


def _lens_rows(subject: Subject, pairs: Sequence[Pair], instrument: str, states: Array) -> list[Measurement]:
    """`base` and `donor` are the margins read in the two prompts; `states` is `[prompt, place, layer, hidden]`."""
    rows: list[Measurement] = []
    for index, pair in enumerate(pairs):
        own = states[2 * index : 2 * index + 2]
        answers = pair.base_answer_id, pair.donor_answer_id
        margins = lens_margins(subject, own.reshape(-1, own.shape[-1]), answers).reshape(own.shape[:-1])
        rows += [
            {
                "pair": index,
                "measurement": instrument,
                "place": place,
                "layer": layer,
                "base": float(margins[0, number, layer]),
                "donor": float(margins[1, number, layer]),
                "right_base": bool(margins[0, number, layer] < 0),
                "right_donor": bool(margins[1, number, layer] > 0),
            }
            for number, place in enumerate(PLACES)
            for layer in range(own.shape[2])
        ]
    return rows


def score_table(rows: pd.DataFrame, cluster: str) -> pd.DataFrame:
    """A row for each pair: `X_l` is the score of instrument and place X after l blocks, and `X` what it is out of.

    The score of a patch is its shift out of the gap, in logits; that of the others how many of the two prompts are
    read rightly.
    """
    shift = rows["margin"] - rows["m_base"]
    right = rows[["right_base", "right_donor"]].astype(float).sum(axis=1)
    patched = rows["measurement"] == "patch"
    names = rows["measurement"] + "_" + rows["place"]
    scored = rows.assign(score=right.where(~patched, shift), column=names + "_" + rows["layer"].astype(str))
    table = scored.pivot(index="pair", columns="column", values="score")
    pairs = rows.groupby("pair")[["m_base", "m_donor", cluster]].first().loc[table.index]
    whole = {name: pairs["m_donor"] - pairs["m_base"] if name.startswith("patch") else 2.0 for name in names.unique()}
    return table.assign(**whole, cluster=pairs[cluster])


def crossing(profile: NDArray[np.float64], level: float) -> float:
    """Depth at which `profile` `[layer]` first reaches `level`, interpolated; one block beyond the top if never."""
    top = len(profile) - 1
    reached = np.flatnonzero(profile >= level)
    if not len(reached):
        return (top + 1) / top
    after = int(reached[0])
    if not after:
        return 0.0
    before = profile[after - 1]
    return float(after - 1 + (level - before) / (profile[after] - before)) / top


def _onset(instrument: str, places: Sequence[Place], table: pd.DataFrame, statistics: StatisticsConfig) -> Effect:
    """The onset at one place; of two places, the lead of the first over the second."""
    columns = [_columns(f"{instrument}_{place}", table) for place in places]
    level = LEVELS[instrument]

    def onsets(part: pd.DataFrame) -> list[float]:
        sums = part.to_numpy().sum(axis=0).reshape(len(places), -1)
        return [crossing(profile[:-1] / profile[-1], level) for profile in sums]

    def statistic(part: pd.DataFrame) -> float:
        found = onsets(part)
        return found[0] if len(found) == 1 else found[1] - found[0]

    name = f"{instrument}.lead" if len(places) > 1 else f"{instrument}_{places[0]}.onset"
    numbers = table[[column for of_place in columns for column in of_place]].astype(float)
    effect = bootstrapped(name, numbers, statistic, clusters=table["cluster"], statistics=statistics, unit="depth")
    if len(places) > 1 and min(onsets(numbers)) > 1:
        return replace(effect, low=-np.inf, high=np.inf, method="reached at neither place")
    return effect


def _columns(name: str, table: pd.DataFrame) -> list[str]:
    """Scores by layer, and last what they are out of."""
    layers = sum(column.startswith(f"{name}_") for column in table.columns)
    return [*(f"{name}_{layer}" for layer in range(layers)), name]


def _peak(name: str, table: pd.DataFrame, statistics: StatisticsConfig) -> Effect:
    """The highest score over all layers, chosen in the same pairs: it says whether there is anything to time."""
    columns = _columns(name, table)
    best = str(table[columns[:-1]].sum().idxmax())
    return ratio_of_sums(f"{name}.peak", table[best], table[name], clusters=table["cluster"], statistics=statistics)


def _commit(name: str, rows: pd.DataFrame, layers: int, statistics: StatisticsConfig) -> Effect:
    """Mean over prompts of the depth from which on the lens is right; prompts that end wrong are excluded."""
    depths, clusters, excluded = [], [], 0
    for _, part in rows.groupby("pair"):
        ordered = part.sort_values("layer")
        for side in ("right_base", "right_donor"):
            wrong = np.flatnonzero(~ordered[side].to_numpy(dtype=bool))
            first = int(wrong[-1]) + 1 if len(wrong) else 0
            if first > layers:
                excluded += 1
                continue
            depths.append(first / layers)
            clusters.append(part[statistics.cluster].iloc[0])
    return mean(name, depths, clusters=clusters, statistics=statistics, excluded=excluded, unit="depth")
