"""From measurements to conclusions: what an audit may say about a field, and how it says it."""

from __future__ import annotations

from collections.abc import Sequence

from kvprobe.auditing.prompt import AuditField
from kvprobe.auditing.result import (
    Dependence,
    ErratumReading,
    FieldAudit,
    MethodReading,
    Reading,
    Safety,
    Trial,
    brief,
)
from kvprobe.runs.config import GateConfig

TOLERANCE = 0.25
"""How far a recovery may fall short of 1, or a restated value weaken the margin. With margins of equal size the
decision would change at twice this deviation. A margin that an edit leaves clearer than a new prefill is no fault."""
_NEARLY_A_PREFILL = 0.75
"""Share of a prefill's FLOPs from which on an edit is not worth its trouble."""
_NO_EDIT = ("stale", "full_reprefill")


def dependence(found: FieldAudit, answer_mass: float) -> Dependence:
    """Whether the decision depends on the field; a margin within the noise floor is no decision."""
    floor = noise(found)
    if _speechless(found, answer_mass):
        return Dependence.ELSEWHERE
    decisions = found.stale.decision, found.oracle.decision
    if found.expected is not None and found.expected[0] == found.expected[1]:
        return Dependence.NOT_ASKED if decisions == found.expected else Dependence.WRONG
    if abs(found.oracle.margin - found.stale.margin) <= floor:
        return Dependence.NONE
    if decisions[0] == decisions[1] or found.stale.margin >= -floor or found.oracle.margin <= floor:
        turned_back = found.stale.margin > floor and found.oracle.margin < -floor
        if found.oracle.margin - found.stale.margin > GateConfig().moved_floors * floor:
            return Dependence.MARGIN_ONLY
        return Dependence.WRONG if turned_back else Dependence.SAME
    return Dependence.DEPENDS if found.expected in (None, decisions) else Dependence.WRONG


def _speechless(found: FieldAudit, answer_mass: float) -> list[Reading]:
    """The readings in which the model would say something other than an answer."""
    return [read for read in (found.stale, found.oracle) if read.mass < answer_mass and not read.says_answer]


def fixed(value: float) -> str:
    """Two decimals, and no minus before a zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def noise(found: FieldAudit) -> float:
    """The margin, in logits, below which nothing is decided: the larger of the measured noise and the gate's floor."""
    return max(found.noise_floor, GateConfig().noise_floor)


def judged_safety(forward: Trial, backward: Trial, restated: Sequence[Trial]) -> tuple[Safety, str]:
    """Whether a method may be used, and why."""
    ways = {"old to new": forward, "new to old": backward}
    for way, trial in ways.items():
        if not trial.right:
            return Safety.UNSAFE, f"from {way}, it decides {trial.decision} instead of {trial.oracle}"
    for trial in restated:
        if not trial.right:
            return Safety.UNSAFE, f"restating the value changes the decision from {trial.oracle} to {trial.decision}"
    off = {way: trial.recovery for way, trial in ways.items() if trial.recovery < 1 - TOLERANCE}
    if off:
        told = " and ".join(f"{recovery:.2f} ({way})" for way, recovery in off.items())
        return Safety.FRAGILE, f"the decisions are right, but the recovery is {told} instead of 1"
    moved = max(trial.recovery for trial in restated)
    if moved > TOLERANCE:
        return Safety.FRAGILE, f"the decisions are right, but restating the value weakens the margin by {moved:.2f}"
    return Safety.SAFE, "right in both directions, and restating the value weakens nothing"


def erratum_reading(field: AuditField, methods: Sequence[MethodReading]) -> ErratumReading | None:
    """What the erratum of a field says and does; `None` where it could not be appended."""
    measured = next((method for method in methods if method.name == "erratum"), None)
    if measured is None or measured.forward is None or measured.backward is None:
        return None
    declared, marked = field.placed.declared, field.marked
    return ErratumReading(
        line=declared.said(marked.new).rstrip("\n"),
        line_back=declared.said(marked.old).rstrip("\n"),
        before=erratum_place(field),
        followed=measured.forward.right,
        followed_back=measured.backward.right,
        restated_kept=all(trial.right for trial in measured.restated),
    )


def erratum_place(field: AuditField) -> str:
    """What an erratum of the field goes in front of."""
    known = {"task": "the last line of the prompt", "cue": "the cue", "chat_middle": "the end of the user's turn"}
    place = field.insert_before
    return known.get(place, "the end of a later turn" if place.startswith("chat") else place)


def conclude(found: FieldAudit, answer_mass: float) -> FieldAudit:
    """The field with its cheapest safe method and its conclusions, a sentence each."""
    if found.dependence is Dependence.MARGIN_ONLY:
        return found.model_copy(update={"conclusions": (_margin_only(found), *_notes(found))})
    if found.dependence is not Dependence.DEPENDS:
        return found.model_copy(update={"conclusions": (_no_verdict(found, answer_mass),)})
    safe = [method for method in found.methods if method.safety is Safety.SAFE and method.name not in _NO_EDIT]
    cheapest = safe[0].name if safe else None
    found = found.model_copy(update={"cheapest": cheapest})
    sentences = (_depends(found), *_notes(found), _in_place(found), _cheapest(found), _erratum(found))
    return found.model_copy(update={"conclusions": sentences})


def _depends(found: FieldAudit) -> str:
    stale, oracle = found.stale, found.oracle
    return (
        f"The decision depends on {found.name}: {brief(found.old)} leads to {stale.decision} and {brief(found.new)} to "
        f"{oracle.decision} (margins {stale.margin:+.2f} and {oracle.margin:+.2f} logits)."
    )


def _margin_only(found: FieldAudit) -> str:
    stale, oracle = found.stale, found.oracle
    return (
        f"Margin only, no decision turns: it is {stale.decision} for {brief(found.old)} and {oracle.decision} for "
        f"{brief(found.new)}, but the margin moves by {oracle.margin - stale.margin:+.2f} logits towards the new "
        f"value's answer (noise floor {noise(found):.2g}). What follows is about that margin; edits are not assessed."
    )


def _no_verdict(found: FieldAudit, answer_mass: float) -> str:
    stale, oracle = found.stale, found.oracle
    nothing = "No further conclusions are drawn."
    match found.dependence:
        case Dependence.ELSEWHERE:
            worst = min(_speechless(found, answer_mass), key=lambda read: read.mass)
            return (
                f"The answers together have {worst.mass:.1%} of the probability, below the required "
                f"{answer_mass:.0%}; the most likely next token is {worst.says!r}. {nothing} Rewrite the cue so that "
                "it asks for one of the answers (a worked example above it helps), or try a larger model."
            )
        case Dependence.NOT_ASKED:
            return (
                f"The decision is {stale.decision} for both values of {found.name}, as the file expects; there is no "
                "effect to locate and no edit to assess."
            )
        case Dependence.WRONG:
            expected = found.expected or ("", "")
            return (
                f"The model decides incorrectly: {brief(found.old)} leads to {stale.decision} and {brief(found.new)} "
                f"to {oracle.decision}, but the file expects {expected[0]} and {expected[1]}. {nothing} Reword the "
                "rule, try a larger model, or give the answers as a list to study the model's own decision."
            )
        case Dependence.SAME:
            return (
                f"The decision does not depend on {found.name}: it is {stale.decision} for the old value and "
                f"{oracle.decision} for the new one, although the margin moves by "
                f"{oracle.margin - stale.margin:+.2f} logits. {nothing} State the rule more explicitly for both "
                "values, or try a larger model."
            )
        case _:
            moved = oracle.margin - stale.margin
            return (
                f"The decision does not depend on {found.name}: the margin moves by {moved:+.2g} logits, which is "
                f"within the noise floor of {noise(found):.2g}. {nothing} Check that the rule refers to this field, or "
                "try a larger model."
            )


def _notes(found: FieldAudit) -> tuple[str, ...]:
    if not found.sets:
        return ()
    field, rest = found.set("field").recovery, _recovery(found, "downstream")
    shares = f"the field's own cache entries carry {fixed(field)} of the effect, the entries after it {fixed(rest)}"
    if rest >= 1 - TOLERANCE > field:
        where = f"The model decides from notes written after the field: {shares}"
    elif field >= 1 - TOLERANCE > rest:
        where = f"The model reads the field itself: {shares}"
    else:
        where = f"The model uses both the field and notes written after it: {shares}"
    later = [token for token in found.tokens if token.recovery is not None and token.position >= found.span[1]]
    strongest = sorted(later, key=lambda token: -(token.recovery or 0.0))[:3]
    told = [
        f"{token.text.strip() or 'line break'!r} in {token.segment} ({token.recovery:.2f})"
        for token in strongest
        if (token.recovery or 0.0) > max(0.02, resolution(found))
    ]
    strongest_told = f"Strongest later tokens: {', '.join(told)}." if told else "No later token stands out."
    return (f"{where}. {strongest_told}",)


def resolution(found: FieldAudit) -> float:
    """The noise floor of a recovery."""
    return found.noise_floor / max(abs(found.oracle.margin - found.stale.margin), 1e-9)


def _recovery(found: FieldAudit, name: str) -> float:
    return next((each.recovery for each in found.sets if each.name == name), 0.0)


def _in_place(found: FieldAudit) -> str:
    method = found.method("field_only")
    told = {Safety.SAFE: "is safe here", Safety.FRAGILE: "is unreliable", Safety.UNSAFE: "is not safe"}
    return f"An in-place edit of the field alone {told.get(method.safety, 'is impossible')}: {method.reason}."


def _cheapest(found: FieldAudit) -> str:
    if found.cheapest is None:
        return "No cheaper edit is safe; prefill the whole prompt again."
    method = found.method(found.cheapest)
    if method.flops_share >= _NEARLY_A_PREFILL:
        return (
            f"The cheapest safe edit, {method.name}, costs nearly a new prefill ({method.flops_share:.0%} of its "
            "FLOPs); prefill again."
        )
    fragile = [other for other in found.methods if other.safety is Safety.FRAGILE and other.flops < method.flops]
    sentence = (
        f"The cheapest safe edit is {method.name}: {method.token_share:.0%} of the tokens, {method.flops_share:.0%} of "
        f"the FLOPs and {method.seconds_share:.0%} of the time of a new prefill."
    )
    if fragile:
        names = ", ".join(f"{other.name} ({other.flops_share:.0%})" for other in fragile)
        sentence += f" Cheaper methods decide correctly here but miss the margin; test them on more prompts: {names}."
    return sentence


def _erratum(found: FieldAudit) -> str:
    erratum = found.erratum
    if erratum is None:
        return "No erratum could be appended."
    follows = {
        (True, True): "follows it in both directions",
        (True, False): f"follows it to {brief(found.new)} and not back to {brief(found.old)}",
        (False, True): f"does not follow it to {brief(found.new)}, only back to {brief(found.old)}",
        (False, False): "does not follow it",
    }[erratum.followed, erratum.followed_back]
    kept = (
        "leaves the decision unchanged"
        if erratum.restated_kept
        else "changes the decision although the value is the same"
    )
    joint = "and" if (erratum.followed and erratum.followed_back) == erratum.restated_kept else "but"
    return (
        f"An erratum before {erratum.before} would read {brief(erratum.line, 200)!r}; the model {follows}, {joint} one "
        f"that restates the value {kept}."
    )
