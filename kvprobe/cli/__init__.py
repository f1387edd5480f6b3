"""The command line: `kvprobe`."""


def main() -> None:
    """The `kvprobe` command."""
    # Commands add themselves to the application when they are imported.
    from kvprobe.cli import audit, doctor, explore, look, models, organisms, release, run  # noqa: F401
    from kvprobe.cli.app import app

    app()
