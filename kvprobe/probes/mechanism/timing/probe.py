"""Timing (protocol 2.2): is the conclusion in the notes at an earlier depth than in the decision token?

The paper compared a probe at one place with a logit lens at another. Here each instrument reads both places (critique
ME5): the *note*, which is the tokens where the value, the action and the end of the rule's two cases stand, and the
*decision* token.

    probe    a linear probe of "the first case fires" on other skeletons (see `linear_probe`) over all tokens of the
             place. Its onset is the depth at which its accuracy passes 0.9.
    patch    the residual stream of the donor put in place of the base's after one block, at all tokens of the place.
             Its onset is the depth at which half of the gap is recovered: what the decision needs is there, whether the
             conclusion or still the field's content, from which later blocks conclude. At the note the effect falls
             again once the note has been read: later changes come too late.
    lens     the residual stream read as if it were the top one, by the final norm and the unembedding, each applied
             once: directly (`lens`), or through an affine map of each layer to the top, fitted to all kinds of tokens
             of other skeletons (`tuned`). Its onset is the depth at which it is right in 0.9 of the prompts. Its
             `commit` is the paper's: the mean over prompts of the depth from which on it stays right. That comes early
             by chance, since a lens that says nothing yet is right in half of the prompts from the start. At the end of
             the rule, where no action is next, it is shown and not timed.

Depth is the number of blocks run over the number of blocks; onsets are interpolated between blocks. An instrument that
never reaches its level has an onset of one block beyond the top, so a lead over it says only that the note's was
reached: read `peak` beside it. `lead` is the onset at the decision minus that at the note, unknown where neither is
reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from kvprobe.engine.components import ActivationEdit, components, set_to
from kvprobe.engine.readout import read_rows
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
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
from kvprobe.probes.mechanism.timing.lenses import lens_margins, through, tuned_lens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

Place = Literal["note", "decision"]
PLACES: tuple[Place, ...] = ("note", "decision")
# Among the tokens that are read, after the six of the cases, the last of which is the end of the rule.
_DECISION = 6


@PROBES.register("timing")
class Timing(Probe):
    """At which depth the conclusion is in the notes and in the decision token, by the same instruments at both."""

    needs_all_pairs: ClassVar[bool] = True

    folds: int = Field(default=5, ge=2, description="sets of skeletons, each read by probes and lenses of the others")
    lens_tokens: int = Field(default=16, ge=1, description="tokens of each prompt that a tuned lens is fitted to")
    seed: int = Field(default=0, ge=0, description="of folds and random draws")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """For each pair, place and layer a row of each instrument; layer l is after l blocks."""
        generator = np.random.Generator(np.random.PCG64(self.seed))
        read: list[Array] = []
        commons = []
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            sampled = generator.integers(0, len(pair.base.token_ids), self.lens_tokens).tolist()
            positions = [*case_positions(pair), pair.decision_position, *sampled]
            read += [residuals(subject, prompt.token_ids, positions) for prompt in (pair.base, pair.donor)]
            unedited = prefill_pair(subject, pair)
            commons.append(unedited.common())
            rows += [{"pair": index, **row} for row in patch_rows(subject, pair, unedited)]
            progress(index + 1, len(pairs))
        splits = prompt_splits(pairs, "skeleton", self.folds, self.seed, trained_on(commons))
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


def patch_rows(subject: Subject, pair: Pair, unedited: PrefilledPair) -> list[Measurement]:
    """The base's decision with the donor's residual stream after each number of blocks, at the note or the decision."""
    ids, hooks, model = pair.base.token_ids, residual_hooks(subject.layers), components(subject)
    donor = model.capture(pair.donor.token_ids, hooks).activations
    note = tuple(sorted(set(case_positions(pair))))
    rows: list[Measurement] = []
    for place, positions in (("note", note), ("decision", (pair.decision_position,))):
        first = positions[0]
        # Before the first block both prompts hold the same tokens there.
        edits = [[ActivationEdit(hook, set_to(donor[hook][list(positions)]), positions, no_op=True)] for hook in hooks]
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
