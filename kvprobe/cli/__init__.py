"""The command line: `kvprobe`."""

from kvprobe.cli.app import main

__all__ = ["main"]
