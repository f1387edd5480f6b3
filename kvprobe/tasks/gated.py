"""The gated decision: one session field decides, through a rule, between two actions (protocol 0.8 A, C, D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvprobe.tasks.context import Context, Segment
from kvprobe.tasks.wordings import WORDINGS, Wording

Mode = Literal["direct", "think"]
Rule = Literal["cases", "trigger"]
FieldSlot = Literal["start", "after_policy", "after_filler", "end"]


@dataclass(frozen=True)
class GatedScenario:
    """The abstract content of one decision.

    Args:
        values: the field's two values; `actions[i]` is right under `values[i]`.
        rule: `cases` names both values; `trigger` names `values[trigger]` only and sends all others on.
        case_order: the order in which the cases are stated.
        option_order: the order in which the task offers the actions.
        other_fields: further `(field, value)` lines of the session that no rule mentions.
    """

    domain: str
    entity: str
    field: str
    values: tuple[str, str]
    actions: tuple[str, str]
    request: str
    rule: Rule = "cases"
    trigger: int = 0
    case_order: tuple[int, int] = (0, 1)
    option_order: tuple[int, int] = (0, 1)
    other_fields: tuple[tuple[str, str], ...] = ()

    def cases(self) -> list[tuple[str | None, str]]:
        """The rule as `(value or None for all others, action)` in stated order."""
        if self.rule == "cases":
            return [(self.values[i], self.actions[i]) for i in self.case_order]
        return [(self.values[self.trigger], self.actions[self.trigger]), (None, self.actions[1 - self.trigger])]


@dataclass(frozen=True)
class Layout:
    """Where things stand in the prompt.

    Args:
        field_slot: the place of the session block; all but `start` put the rule before the field.
        notes_before: neutral notes between session and policy (or, with the policy first, before it).
        notes_after: neutral notes after the policy.
    """

    field_slot: FieldSlot = "start"
    notes_before: tuple[str, ...] = ()
    notes_after: tuple[str, ...] = ()


def render(
    scenario: GatedScenario,
    value: str,
    wording: str,
    layout: Layout,
    *,
    mode: Mode = "direct",
    update: str | None = None,
    marks: Sequence[str] = (),
    status: str | None = None,
) -> Context:
    """The prompt for one value of the field.

    Segments in order of the layout: `system`, `session`, `field` (the value alone), `session_rest`,
    `filler_before`, `policy`, `filler`, `conversation`, `update` (the erratum, if any), `task`, `cue`.
    `marks` and `status` annotate the policy; only training texts of the organisms use them.
    """
    style = WORDINGS.get(wording)()
    session = _session_block(style, scenario, value)
    filler_before = ("filler_before", style.filler(layout.notes_before))
    policy = ("policy", style.policy(scenario.entity, scenario.field, scenario.cases(), marks))
    status_line = ("status", style.status(status) if status else "")
    filler = ("filler", style.filler(layout.notes_after))
    conversation = ("conversation", style.conversation(scenario.request, scenario.field))
    body: dict[FieldSlot, list[tuple[str, str]]] = {
        "start": [*session, filler_before, policy, status_line, filler, conversation],
        "after_policy": [filler_before, policy, *session, status_line, filler, conversation],
        "after_filler": [filler_before, policy, filler, *session, status_line, conversation],
        "end": [filler_before, policy, filler, conversation, *session, status_line],
    }
    return Context.of(
        ("system", style.system(scenario.domain)),
        *body[layout.field_slot],
        ("update", style.update(scenario.entity, scenario.field, update) if update else ""),
        ("task", style.task(scenario.field, [scenario.actions[i] for i in scenario.option_order])),
        ("cue", style.thought_cue if mode == "think" else style.answer_cue),
    )


def _session_block(style: Wording, scenario: GatedScenario, value: str) -> list[tuple[str, str]]:
    before, after = style.record(scenario.entity, scenario.field)
    others = [style.line(scenario.entity, name, other) for name, other in scenario.other_fields]
    half = len(others) // 2
    return [
        ("session", style.session_header + "".join(others[:half]) + before),
        ("field", f" {value}"),
        ("session_rest", after + "".join(others[half:])),
    ]


def with_erratum(context: Context, wording: str, entity: str, field: str, value: str) -> Context:
    """The prompt with a one-line erratum, segment `update`, right before the task."""
    return context.insert_before("task", Segment("update", WORDINGS.get(wording)().update(entity, field, value)))


def pick_notes(notes: Sequence[str], count: int, start: int) -> tuple[str, ...]:
    """`count` neutral notes, cycling through the list from `start`."""
    return tuple(notes[(start + i) % len(notes)] for i in range(count))
