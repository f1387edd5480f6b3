"""What a notebook shows of each kind of object."""

from __future__ import annotations

from functools import singledispatch

from kvprobe.auditing.result import AuditResult
from kvprobe.edit.context import EditableContext
from kvprobe.edit.readings import Cost, Decision, Seam
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import Forward
from kvprobe.engine.receipt import Receipt
from kvprobe.html.audit import audit_html
from kvprobe.html.costs import cache_html, cost_html, decision_html, forward_html, receipt_html, seam_html
from kvprobe.html.effects import effect_html
from kvprobe.html.tokens import context_html, editable_html, pair_html
from kvprobe.html.verdicts import model_html, run_html, verdict_html
from kvprobe.runs.claims import Verdict
from kvprobe.runs.results import ModelResult, RunResult
from kvprobe.stats import Effect
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair


@singledispatch
def html_of(value: object) -> str:
    """A value as a piece of HTML; it needs no network and no script.

    Raises:
        TypeError: values of this type have no view.
    """
    raise TypeError(f"{type(value).__name__} has no view; show its text instead.")


html_of.register(AuditResult, audit_html)
html_of.register(Cost, cost_html)
html_of.register(Decision, decision_html)
html_of.register(EditableContext, editable_html)
html_of.register(Effect, effect_html)
html_of.register(Forward, forward_html)
html_of.register(KVCache, cache_html)
html_of.register(ModelResult, model_html)
html_of.register(Pair, pair_html)
html_of.register(Receipt, receipt_html)
html_of.register(RunResult, run_html)
html_of.register(Seam, seam_html)
html_of.register(TokenizedContext, context_html)
html_of.register(Verdict, verdict_html)
