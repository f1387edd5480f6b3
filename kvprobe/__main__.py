"""`python -m kvprobe`, the same as the command `kvprobe`."""

from kvprobe.cli import main

main()
