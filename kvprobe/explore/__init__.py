"""A local web page on one prompt and one model: change a field, transplant tokens, edit, see the decision."""

from kvprobe.explore.session import Session
from kvprobe.explore.state import Choice, State, read_state

__all__ = ["Choice", "Session", "State", "read_state"]
