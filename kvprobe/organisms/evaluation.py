"""What an organism turned out to be: measured on held-out skeletons, never assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import prefill
from kvprobe.engine.generation import generate
from kvprobe.engine.interventions import KVPatch, PatchRow
from kvprobe.engine.sweep import run_patches
from kvprobe.models.subject import Subject
from kvprobe.organisms.picture_reader import evaluate_picture_reader
from kvprobe.tasks.gated import with_erratum
from kvprobe.tasks.gated_decision import GatedDecision
from kvprobe.tasks.pairs import Pair, PromptPair, align
from kvprobe.tasks.tokenizer import END

_LONG = {"notes_before": (0, 40), "notes_after": (30, 42)}


def evaluate(subject: Subject, *, size: int = 120, seed: int = 1) -> dict[str, Any]:
    """Accuracy, notes, errata, chains and long prompts of one organism.

    Returns a flat record: shares with the number of decisions behind them in `n_...`; `field_only` and
    `downstream_only` are ratios of sums over pairs whose decision flips. Of a picture reader, shares of right answers.
    """
    if subject.identity.architecture == "qwen2_5_vl":
        return evaluate_picture_reader(subject, size)
    direct = _decisions(subject, GatedDecision(size=size, seed=seed))
    record = {
        "accuracy": direct["accuracy"],
        "n_accuracy": direct["n"],
        "flips": direct["flips"],
        "margin_old": direct["margin_old"],
        "margin_new": direct["margin_new"],
        "field_only": direct["field_only"],
        "downstream_only": direct["downstream_only"],
        "answer_balance": direct["balance"],
    }
    for name, task in _variants(size // 2, seed).items():
        result = _decisions(subject, task)
        record[f"accuracy_{name}"], record[f"n_{name}"] = result["accuracy"], result["n"]
        record[f"field_only_{name}"] = result["field_only"]
    record |= _errata(subject, GatedDecision(size=size // 2, seed=seed))
    record |= _chains(subject, GatedDecision(size=min(size // 2, 48), seed=seed, mode="think"))
    return {key: _rounded(value) for key, value in record.items()}


def _rounded(value: Any) -> Any:
    """Four places; None where nothing could be measured (no pair flips), so that a card stays strict JSON."""
    if not isinstance(value, float):
        return value
    return None if np.isnan(value) else round(value, 4)


def _variants(size: int, seed: int) -> dict[str, GatedDecision]:
    plain = GatedDecision(size=size, seed=seed)
    return {
        "trigger": plain.model_copy(update={"rules": ("trigger",)}),
        "policy_first": plain.model_copy(update={"field_slots": ("after_policy", "after_filler", "end")}),
        "long": plain.model_copy(update=_LONG),
    }


def _pairs(subject: Subject, prompt_pairs: Sequence[PromptPair]) -> list[Pair]:
    return [align(pair, subject.tokenizer) for pair in prompt_pairs]


def _decisions(subject: Subject, task: GatedDecision) -> dict[str, Any]:
    old: list[float] = []
    new: list[float] = []
    edited: list[float] = []
    notes: list[float] = []
    for pair in _pairs(subject, list(task.prompt_pairs())):
        base, donor = (prefill(subject, context.token_ids) for context in (pair.base, pair.donor))
        answers = pair.donor_answer_id, pair.base_answer_id
        logits = run_patches(
            subject,
            pair.base.token_ids,
            base.cache,
            [KVPatch(tuple(span.positions), donor.cache) for span in (pair.field, pair.downstream)],
        )
        for margins, row in ((old, base.logits), (new, donor.logits), (edited, logits[0]), (notes, logits[1])):
            margins.append(float(row[answers[0]] - row[answers[1]]))
    before, after, field, rest = (np.asarray(margins) for margins in (old, new, edited, notes))
    flips = (before < 0) & (after > 0)
    gap = (after - before)[flips].sum() if flips.any() else float("nan")
    return {
        "n": 2 * len(before),
        "accuracy": float(((before < 0).mean() + (after > 0).mean()) / 2),
        "flips": float(flips.mean()),
        "margin_old": float(before.mean()),
        "margin_new": float(after.mean()),
        "field_only": float((field - before)[flips].sum() / gap),
        "downstream_only": float((rest - before)[flips].sum() / gap),
        "balance": float(((before > 0).mean() + (after > 0).mean()) / 2),
    }


def _errata(subject: Subject, task: GatedDecision) -> dict[str, Any]:
    """Share of stale prompts that follow an erratum to the new value, and that leave it when it names the old."""
    follows: list[bool] = []
    stays: list[bool] = []
    for pair in task.prompt_pairs():
        attributes = pair.scenario.attributes
        for hits, value in ((follows, attributes["new"]), (stays, attributes["old"])):
            erratum = pair.scenario.wording, attributes["entity"], attributes["field"], value
            amended = replace(pair, base=with_erratum(pair.base, *erratum), donor=with_erratum(pair.donor, *erratum))
            aligned = align(amended, subject.tokenizer)
            logits = prefill(subject, aligned.base.token_ids).logits
            says_new = bool(logits[aligned.donor_answer_id] > logits[aligned.base_answer_id])
            hits.append(says_new == (hits is follows))
    return {
        "erratum_followed": float(np.mean(follows)),
        "erratum_of_old_value_kept": float(np.mean(stays)),
        "n_erratum": len(follows),
    }


def _chains(subject: Subject, task: GatedDecision) -> dict[str, Any]:
    """Generated chains: right on a plain prompt, and following the new value on a cache edited in place."""
    plain, edited = [], []
    for pair in _pairs(subject, list(task.prompt_pairs())):
        base, donor = (prefill(subject, context.token_ids).cache for context in (pair.base, pair.donor))
        amended = KVPatch(tuple(pair.field.positions), donor)
        answers = _answers_after_chain(subject, pair, base, [(), amended])
        plain.append(answers[0] == pair.base_answer_id)
        edited.append(answers[1] == pair.donor_answer_id)
    return {
        "think_accuracy": float(np.mean(plain)),
        "think_follows_edited_field": float(np.mean(edited)),
        "n_think": len(plain),
    }


def _answers_after_chain(
    subject: Subject, pair: Pair, cache: KVCache, rows: Sequence[PatchRow], limit: int = 40
) -> list[int | None]:
    """For each row the token before the end token of a greedy chain; None for a chain that does not end."""
    end = subject.tokenizer.convert_tokens_to_ids(END)
    ids = pair.base.token_ids
    chains = generate(subject, ids, cache, rows, limit=limit, ends=(end,))
    return [None if chain.censored else (ids[-1], *chain.token_ids)[-2] for chain in chains]
