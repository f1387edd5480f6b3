"""How objects show themselves in a notebook, and interactive figures over tokens and layers."""

from kvprobe.display.effects import effect_table
from kvprobe.display.heat import heat_map
from kvprobe.display.page import Html
from kvprobe.display.tokens import token_map

__all__ = ["Html", "effect_table", "heat_map", "token_map"]
