"""Mechanistic interpretability of KV caches: probe, edit and compose what a model wrote at prefill.

Everything in `__all__` is imported when it is first used, so that `import kvprobe` is instant and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvprobe.viewing import Viewable

if TYPE_CHECKING:
    from kvprobe.auditing import audit as audit
    from kvprobe.composing.base import compose as compose
    from kvprobe.composing.chunk import precompile as precompile
    from kvprobe.composing.library import SkillLibrary as SkillLibrary
    from kvprobe.composing.prompts import as_cached_prompt as as_cached_prompt
    from kvprobe.composing.prompts import composition as composition
    from kvprobe.edit.base import EDIT_METHODS as EDIT_METHODS
    from kvprobe.edit.base import EditMethod as EditMethod
    from kvprobe.edit.context import EditableContext as EditableContext
    from kvprobe.edit.fields import Field as Field
    from kvprobe.engine.cache import KVCache as KVCache
    from kvprobe.engine.forward import forward as forward
    from kvprobe.engine.forward import prefill as prefill
    from kvprobe.engine.interventions import AttentionKnockout as AttentionKnockout
    from kvprobe.engine.interventions import KVPatch as KVPatch
    from kvprobe.engine.operations import recompute as recompute
    from kvprobe.engine.operations import reposition as reposition
    from kvprobe.engine.readout import read as read
    from kvprobe.engine.readout import read_rows as read_rows
    from kvprobe.engine.sweep import run_patches as run_patches
    from kvprobe.html import audit_page as audit_page
    from kvprobe.html import effect_table as effect_table
    from kvprobe.html import heat_map as heat_map
    from kvprobe.html import token_map as token_map
    from kvprobe.models.catalogue import organism_folder as organism_folder
    from kvprobe.models.loader import load_subject as load_subject
    from kvprobe.models.subject import Subject as Subject
    from kvprobe.probes.base import PROBES as PROBES
    from kvprobe.probes.base import Probe as Probe
    from kvprobe.probes.base import Reading as Reading
    from kvprobe.report.write import write_report as write_report
    from kvprobe.runs.config import ExperimentConfig as ExperimentConfig
    from kvprobe.runs.config import load_config as load_config
    from kvprobe.runs.explain import explain as explain
    from kvprobe.runs.results import find_runs as find_runs
    from kvprobe.runs.results import load_result as load_result
    from kvprobe.runs.run import run as run
    from kvprobe.stats import Effect as Effect
    from kvprobe.tasks.base import TASKS as TASKS
    from kvprobe.tasks.base import Task as Task
    from kvprobe.tasks.gated_decision import GatedDecision as GatedDecision
    from kvprobe.tasks.own_prompt import PromptFile as PromptFile
    from kvprobe.tasks.pairs import align as align

__version__ = "0.1.0"

# A function must not be called like a package beside this file: importing the package would put it in its place.
_NAMES_BY_MODULE = {
    "models.loader": ("load_subject",),
    "models.subject": ("Subject",),
    "models.catalogue": ("organism_folder",),
    "engine.forward": ("prefill", "forward"),
    "engine.cache": ("KVCache",),
    "engine.operations": ("recompute", "reposition"),
    "engine.interventions": ("KVPatch", "AttentionKnockout"),
    "engine.sweep": ("run_patches",),
    "engine.readout": ("read", "read_rows"),
    "edit.context": ("EditableContext",),
    "edit.fields": ("Field",),
    "edit.base": ("EditMethod", "EDIT_METHODS"),
    "composing.chunk": ("precompile",),
    "composing.prompts": ("composition", "as_cached_prompt"),
    "composing.base": ("compose",),
    "composing.library": ("SkillLibrary",),
    "tasks.gated_decision": ("GatedDecision",),
    "tasks.pairs": ("align",),
    "tasks.own_prompt": ("PromptFile",),
    "tasks.base": ("Task", "TASKS"),
    "probes.base": ("Probe", "Reading", "PROBES"),
    "auditing": ("audit",),
    "runs.config": ("ExperimentConfig", "load_config"),
    "runs.run": ("run",),
    "runs.results": ("find_runs", "load_result"),
    "runs.explain": ("explain",),
    "report.write": ("write_report",),
    "stats": ("Effect",),
    "html": ("audit_page", "effect_table", "heat_map", "token_map"),
}
_MODULE_OF = {name: f"kvprobe.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}
__all__ = list(_MODULE_OF)


if not TYPE_CHECKING:  # else a type checker would believe that there is a name for every misspelling

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'kvprobe' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _draw(value: object) -> str:
    from kvprobe.html.views import html_of

    return html_of(value)


# The only place that knows both the objects and what draws them; `kvprobe.html` is imported at the first view.
Viewable.drawn_by = _draw
