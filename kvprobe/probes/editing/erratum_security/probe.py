"""Forged errata: an erratum is an instruction in the context, and whoever writes there can write one (issue 4, item 6).

*Attack.* The context is clean: nothing has changed and the field is true. The user's own text claims another value, in
the forms of `FORGERIES` and at `PLACEMENTS`. A decision for that value's action is a false override.

*Defences*, which act when the prompt is run from the user's text on:

    none           the prompt as it is
    hidden         no later token can attend to the user's text (an attention knockout: stripped for all that decides)
    operator_last  the operator's own line with the current value stands last, behind all text of the user

*Operator's edit.* The value really changes, as an `erratum` or, without any text, as `full_downstream` (a KV-only
amendment), with no forgery (`legitimate`) and with a user who forges the old value as a line of their own right before
the task (`contested`). An erratum comes behind the user's text and an amendment before it.

Effects: `none.last_turn.quoted.override_rate`; `none.override_rate` over all forgeries and `hidden.prevented`, the
difference to it within pairs; `clean.hidden.correct_rate`, decisions without a forgery;
`legitimate.erratum.hidden.new_rate` and `contested.full_downstream.none.new_rate`, operator's edits that are followed;
and the costs, `operator_last.tokens`, `edit.erratum.tokens`, `edit.full_downstream.tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvprobe.edit.base import CachedPrompt, make_method
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward
from kvprobe.engine.interventions import AttentionKnockout
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.edit_cases import EditCase, field_edit, measure_cases, reading_row
from kvprobe.probes.kit.pair_lines import piece_of, subjects_of, with_pieces
from kvprobe.tasks.context import Span, encode_segment
from kvprobe.tasks.erratum_lines import FORGERIES, PLACEMENTS, conversation_texts, forged_texts
from kvprobe.tasks.extra_lines import Subjects, line_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

DEFENCES = ("none", "hidden", "operator_last")
METHODS = ("erratum", "full_downstream")
CONTESTED = ("own_line", "last_turn")
"""The forgery that an operator's edit is contested with."""
_OPERATOR = "operator"


@PROBES.register("erratum_security")
class ErratumSecurity(Probe):
    """How often the user's text overrides the true field, and what stops it at which cost to the operator."""

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each forgery and defence, and for each edit, defence and contest.

        Raises:
            ConfigError: a pair does not say its entity, field and values, or has no conversation before its task.
        """

        def rows(case: EditCase, _: int) -> Iterator[Measurement]:
            yield from _attacks(subject, case)
            yield from _operator_edits(subject, case.pair)

        return measure_cases(subject, pairs, progress, rows)


def _attacks(subject: Subject, case: EditCase) -> Iterator[Measurement]:
    """Prompts on the clean context, with and without a forgery, under every defence."""
    pair, said = case.pair, subjects_of(case.pair)
    forgeries = [("none", "none"), *((form, place) for form in FORGERIES for place in PLACEMENTS)]
    for form, placement in forgeries:
        prompt = with_user_text(subject, pair, said, form, placement)
        for defence in DEFENCES:
            defended, tokens = _defended(subject, prompt, said, defence)
            base, hidden = defended.base, defence == "hidden"
            logits = run_from_user(subject, case.stale.cache, base.token_ids, base.spans, hidden=hidden)
            reading = read(logits, pair.base_answer_id, pair.donor_answer_id)
            yield {
                "part": "attack",
                "defence": defence,
                "form": form,
                "placement": placement,
                "method": "none",
                "extra_tokens": tokens,
                "edit_tokens": None,
                **reading_row(reading),
            }


def _operator_edits(subject: Subject, pair: Pair) -> Iterator[Measurement]:
    """The value really changes, with and without a user who forges the old one."""
    said = subjects_of(pair)
    forging_old = replace(said, new=said.old)
    for part, (form, placement) in {"legitimate": ("none", "none"), "contested": CONTESTED}.items():
        prompt = with_user_text(subject, pair, forging_old, form, placement)
        stale = CachedPrompt.prefilled(subject, prompt.base.token_ids, prompt.base.spans)
        edit = field_edit(prompt, subject.tokenizer)
        for method in METHODS:
            edited = make_method(method).apply(subject, stale, edit)
            made = edited.prompt
            hidden = run_from_user(subject, made.cache, made.token_ids, made.spans, hidden=True)
            for defence, logits in (("none", made.decide(subject).logits), ("hidden", hidden)):
                reading = read(logits, pair.base_answer_id, pair.donor_answer_id)
                yield {
                    "part": part,
                    "defence": defence,
                    "form": form,
                    "placement": placement,
                    "method": method,
                    "extra_tokens": 0,
                    "edit_tokens": edited.receipt.tokens_appended,
                    **reading_row(reading),
                }


def with_user_text(subject: Subject, pair: Pair, said: Subjects, form: str, placement: str) -> Pair:
    """The pair with the conversation in pieces, so that the user's own text is known by its span."""
    tokenizer, skeleton = subject.tokenizer, pair.scenario.skeleton
    user, rest = conversation_texts(said, skeleton)
    texts = [("user", user), ("conversation", rest)]
    _, held = piece_of(pair, "conversation")
    if encode_segment(user + rest, tokenizer) != list(held):
        raise ConfigError("The conversation is not the library's request and promise: use task gated_decision.")
    if form != "none":
        texts = forged_texts(said, skeleton, form, placement)
    pieces = [(name, encode_segment(text, tokenizer)) for name, text in texts]
    return with_pieces(pair, "conversation", pieces, tokenizer)


def _defended(subject: Subject, pair: Pair, said: Subjects, defence: str) -> tuple[Pair, int]:
    """The prompt that a defence makes of another, and how many tokens it adds."""
    if defence != "operator_last":
        return pair, 0
    line = line_tokens("old_value", said, subject.tokenizer)
    pieces = [(_OPERATOR, line), piece_of(pair, "task")]
    return with_pieces(pair, "task", pieces, subject.tokenizer), len(line)


def run_from_user(
    subject: Subject, cache: KVCache, token_ids: Sequence[int], spans: Mapping[str, Span], *, hidden: bool
) -> Tensor:
    """Logits `[vocab]` of a prompt run from the user's text on, which later tokens may not be allowed to see."""
    start = spans["user"].start
    users = [span for name, span in spans.items() if name.startswith("user")] if hidden else []
    # A sliding window may have lost sight of the user's text, and then hiding it rightly changes nothing.
    knockouts = [
        AttentionKnockout(tuple(range(span.end, len(token_ids))), tuple(span.positions), no_op=True) for span in users
    ]
    return forward(subject, token_ids[start:], cache.take(slice(0, start)), knockouts=knockouts).logits
