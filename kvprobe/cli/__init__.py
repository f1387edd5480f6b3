"""The command line: `kvprobe`."""


def main() -> None:
    """The `kvprobe` command."""
    try:
        # Commands add themselves to the application when they are imported.
        from kvprobe.cli import audit, doctor, explore, look, models, organisms, release, run  # noqa: F401
        from kvprobe.cli.app import app
    except KeyboardInterrupt:
        # Before anything could say a sentence; the exit code of an interrupt.
        raise SystemExit(130) from None
    app()
