"""Prefix caching of a prompt that is written for it: the state comes last (critique UA1)."""

from __future__ import annotations

from typing import ClassVar

from kvprobe.agents.base import AGENTS
from kvprobe.agents.prefix_caching import PrefixCaching


@AGENTS.register("prefix_caching_hoist")
class PrefixCachingHoist(PrefixCaching):
    """State the state right before the question, so that its changes leave the prefix as it is."""

    name: ClassVar[str] = "prefix_caching_hoist"
    hoisted: ClassVar[bool] = True
