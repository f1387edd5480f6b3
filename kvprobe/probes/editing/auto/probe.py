"""AUTO: which edit suffices, predicted before it is paid for (protocol 5.6, critique ED7).

Each pair of task `two_fields` gives two edits of the same stale cache:

    asked    the field that the task is to be decided by
    other    the second field: named by the same rule, by a rule of its own or by none, so that it seldom matters

Every candidate of `kvprobe.edit.auto` is carried out on both and compared with a full reprefill. AUTO is fitted on the
edits of other skeletons (cross-fitting) and then chooses from signals that are read off the tokens. Policies:

    always_<candidate>   the same edit every time
    field_and_erratum    the dearest amendment by a line
    if_mentioned         an erratum if the old value is named after the field, else nothing: the rule by hand that AUTO
                         must beat
    cheapest_right       the cheapest candidate that decides as the full reprefill: what no predictor can beat
    auto_<C>             AUTO with an error costing C full prefills; `auto` is the first of them

A decision is an error when it differs from the full reprefill's. `auto.needs.precision` and so on judge, as the paper
does, the prediction that more than an in-place edit is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveFloat

from kvprobe.edit.auto import CANDIDATES, Auto, Case, candidate, token_shares
from kvprobe.edit.base import FieldEdit, make_method
from kvprobe.edit.signals import free_signals
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.probes.kit.edit_cases import EditCase, baseline_columns, edit_case, worded_edit
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

IN_PLACE = ("stale", "field_only")
"""Candidates that amend no note."""
_DEAREST = "field_and_erratum"
_RIGHT = "cheapest_right"
_BY_HAND = "if_mentioned"


@PROBES.register("auto")
class AutoProbe(Probe):
    """What AUTO chooses, how often it errs and what it costs, against always doing the same."""

    # What is chosen on some skeletons is judged on others.
    needs_all_pairs: ClassVar[bool] = True

    error_costs: tuple[PositiveFloat, ...] = Field(
        (10.0, 0.3, 1.0, 3.0, 30.0, 100.0), min_length=1, description="cost of an error, in full prefills"
    )
    folds: int = Field(5, ge=2, description="groups of skeletons; AUTO is fitted on the edits of the others")
    seed: int = Field(0, ge=0, description="of the folds")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair and edit one row for each policy.

        Raises:
            ConfigError: a pair has no second field.
            SampleError: there are fewer skeletons than folds.
        """
        cases, edits = [], []
        for index, pair in enumerate(pairs):
            case = edit_case(subject, pair)
            cases.append(case)
            for kind, edit in (("asked", case.edit), ("other", second_edit(pair, subject.tokenizer))):
                edits.append(_outcomes(subject, case, edit) | {"pair": index, "edit": kind})
            progress(index + 1, len(pairs))
        baselines = baseline_columns(pairs, subject.tokenizer)
        skeletons = [pairs[edit["pair"]].scenario.skeleton for edit in edits]
        rows: list[Measurement] = []
        for selection, evaluation in folds(skeletons, self.folds, self.seed):
            # A model that decides nothing rightly is stopped by the gate, not here.
            chosen = [i for i in selection if _decided(cases, edits[i])] or selection
            known = [Case(edits[i]["signals"], edits[i]["agrees"]) for i in chosen]
            models = Auto.fit(known).models
            fitted = {cost: Auto(models, cost) for cost in self.error_costs}
            for outcome in (edits[i] for i in evaluation):
                shared = {**cases[outcome["pair"]].common(), **baselines[outcome["pair"]]}
                rows += [{**shared, **row} for row in _policy_rows(outcome, fitted)]
        return sorted(rows, key=lambda row: (row["pair"], row["edit"]))


def auto_name(cost: float) -> str:
    """Name of AUTO with an error that costs so many full prefills."""
    return f"auto_{cost:g}"


def second_edit(pair: Pair, tokenizer: object) -> FieldEdit:
    """The edit of a pair's second field to its other value.

    Raises:
        ConfigError: the pair has no second field.
    """
    attributes = pair.scenario.attributes
    if "second_new" not in attributes or "second_field" not in pair.base.spans:
        raise ConfigError("The probe auto needs pairs with a second field: use task two_fields.")
    about = attributes["second_entity"], attributes["second_field"], attributes["second_new"]
    new_ids = encode_segment(f" {about[2]}", tokenizer)
    return worded_edit("second_field", new_ids, pair.scenario.wording, about, tokenizer)


def _outcomes(subject: Subject, case: EditCase, edit: FieldEdit) -> Measurement:
    """Signals, token shares and, for every candidate, whether it decides as the full reprefill does."""
    signals = free_signals(case.stale, edit)
    reprefill, dearest = make_method("full_reprefill"), make_method(_DEAREST)
    truth = case.read(subject, reprefill.apply(subject, case.stale, edit)).margin
    methods = {name: candidate(name) for name in CANDIDATES} | {_DEAREST: dearest}
    margins = {
        name: case.read(subject, method.apply(subject, case.stale, edit)).margin for name, method in methods.items()
    }
    whole = reprefill.tokens(case.stale, edit)
    return {
        "signals": signals,
        "agrees": {name: (margin > 0) == (truth > 0) for name, margin in margins.items()},
        "shares": token_shares(case.stale, edit),
        "tokens": {name: method.tokens(case.stale, edit) / whole for name, method in methods.items()},
        "margins": margins,
        "truth": truth,
        "joint": case.pair.scenario.attributes["joint"],
    }


def _decided(cases: Sequence[EditCase], edit: Measurement) -> bool:
    """Whether the model decides the edit's pair rightly at all; only then is there something to learn."""
    case = cases[edit["pair"]]
    return case.base.margin < 0 < case.donor.margin


def _policy_rows(edit: Measurement, fitted: Mapping[float, Auto]) -> Iterator[Measurement]:
    agrees, tokens = edit["agrees"], edit["tokens"]
    right = [name for name in CANDIDATES if agrees[name]]
    policies = {f"always_{name}": name for name in CANDIDATES} | {_DEAREST: _DEAREST}
    policies[_BY_HAND] = "erratum" if edit["signals"]["old_value_mentions"] else "stale"
    policies[_RIGHT] = min(right, key=tokens.__getitem__) if right else list(CANDIDATES)[-1]
    policies |= {auto_name(cost): auto.choose(edit["signals"], edit["shares"]) for cost, auto in fitted.items()}
    for policy, chosen in policies.items():
        yield {
            "pair": edit["pair"],
            "edit": edit["edit"],
            "joint": edit["joint"],
            "policy": policy,
            "chosen": chosen,
            "margin": edit["margins"][chosen],
            "truth": edit["truth"],
            "error": not agrees[chosen],
            "token_share": tokens[chosen],
            "erratum_share": tokens["erratum"],
            "predicted": chosen not in IN_PLACE,
            "needed": not agrees["field_only"],
        }
