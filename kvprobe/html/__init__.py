"""HTML of every kind: the report page, the audit page, and what a notebook shows of objects, tokens and layers."""

from kvprobe.html.audit import audit_page
from kvprobe.html.effects import effect_table
from kvprobe.html.heat import heat_map
from kvprobe.html.templating import Html
from kvprobe.html.tokens import token_map
from kvprobe.html.views import html_of

__all__ = ["Html", "audit_page", "effect_table", "heat_map", "html_of", "token_map"]
