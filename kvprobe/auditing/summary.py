"""The audit in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from kvprobe.auditing.result import AuditResult, FieldAudit, MethodReading, Safety, brief
from kvprobe.auditing.verdict import fixed, resolution
from kvprobe.report.tables import plain_table, short

_STYLES = {Safety.SAFE: "green", Safety.FRAGILE: "yellow", Safety.UNSAFE: "bold red", Safety.IMPOSSIBLE: "dim"}
_SHADES = ("#4d2a14", "#7a3a12", "#a84a0c", "#d55e00")
_LISTED = 8


def summary(result: AuditResult) -> Group:
    """Conclusions first, then the coloured prompt and the table of methods, for each field."""
    return Group(*_pieces(result))


def _pieces(result: AuditResult) -> Iterator[RenderableType]:
    about = f"{result.tokens} tokens{', chat template' if result.chat else ''}, {result.seconds:.1f} s"
    yield Text.assemble((f"Audit of {result.prompt} on {short(result.model['name'])}", "bold"), f" ({about})")
    for warning in result.warnings:
        yield Text(f"Note: {warning}", "yellow")
    for field in result.fields:
        yield Text.assemble("\n", (f"{field.name}: {brief(field.old)} → {brief(field.new)}", "bold"))
        for sentence in field.conclusions:
            yield Text(f"• {sentence}")
        if field.judged:
            yield from _details(field)
    yield Text(result.caveat, "dim")


def _details(field: FieldAudit) -> Iterator[RenderableType]:
    if field.tokens:
        yield Text.assemble(
            "\n",
            ("Where the notes are", "bold"),
            " (recovery when only this token comes from the prompt with the new value)",
        )
        yield _heat(field)
        parts = sorted(field.segments, key=lambda part: -part.recovery)[:_LISTED]
        rows = [(part.name, part.text, fixed(part.recovery)) for part in parts if part.recovery >= 0.005]
        yield plain_table("Whole parts patched", ("part", "text", "recovery"), rows)
    if not field.methods:
        return
    columns = ("method", "old→new", "new→old", "restated", "tokens", "FLOPs", "seconds")
    table = plain_table("Edit methods, cheapest first (costs relative to a new prefill)", columns, [])
    for method in field.methods:
        name = f"{method.name} *" if method.name == field.cheapest else method.name
        table.add_row(Text(f"{method.safety.sign} {name}", _STYLES[method.safety]), *_numbers(method))
    yield table
    yield Text("* cheapest safe  ✓ safe  ~ decisions right, margin short  ✗ a wrong decision  – impossible", "dim")
    impossible = [method for method in field.methods if method.safety is Safety.IMPOSSIBLE]
    for method in impossible:
        yield Text(f"{method.name}: {method.reason}", "dim")


def _numbers(method: MethodReading) -> tuple[str, ...]:
    if method.forward is None or method.backward is None:
        return ("–",) * 6
    moved = max(trial.recovery for trial in method.restated)
    shares = (method.token_share, method.flops_share, method.seconds_share)
    recoveries = (method.forward.recovery, method.backward.recovery, moved)
    return (*map(fixed, recoveries), *(f"{share:.0%}" for share in shares))


def _heat(field: FieldAudit) -> Text:
    limit = max((abs(token.recovery or 0.0) for token in field.tokens), default=0.0) or 1.0
    text = Text()
    for token in field.tokens:
        strength = (token.recovery or 0.0) / limit
        style = ""
        if abs(token.recovery or 0.0) > resolution(field) and abs(strength) >= 0.02:
            shade = _SHADES[min(len(_SHADES) - 1, int(abs(strength) * len(_SHADES)))]
            style = f"white on {shade if strength > 0 else '#0072b2'}"
        if field.span[0] <= token.position < field.span[1]:
            style += " bold underline"
        text.append(token.text.replace("\n", "⏎\n") if style else token.text, style.strip())
    return text
