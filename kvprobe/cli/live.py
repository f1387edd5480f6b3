"""The live line of one experiment or of many: what is measured, how far it is, how long it will take."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvprobe.cli.terminal import Terminal
from kvprobe.runs import events


class LiveRun:
    """A listener that draws on `console`; where that is no terminal, one line a model, or an experiment, is all."""

    def __init__(self, console: Terminal) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=1.0, left="")
        self._models: dict[str, str] = {}
        self._section: events.SectionStarted | None = None
        self.folder = ""

    def __enter__(self) -> LiveRun:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: events.Event) -> None:
        """Take in an event of the run."""
        match event:
            case events.SectionStarted():
                self._begin(event)
            case events.ExperimentFinished():
                self._experiment(event)
            case events.Progress():
                self._bar.update(self._task, completed=event.fraction, left=time_left(event.seconds_left))
            case events.CellFailed():
                self._console.print(f"{event.model}, block {event.block}: {event.message}", style="red")
            case events.Warned():
                self._console.print(event.message, style="yellow")
            case _ if self._section is None:
                self._one_run(event)

    def _begin(self, event: events.SectionStarted) -> None:
        if event.experiments == 1:
            return
        self._section = event
        at_once = f", {event.jobs} models at a time" if event.jobs > 1 else ""
        self._console.print(Text.assemble((event.section, "bold"), f": {event.experiments} experiments{at_once}"))
        self._describe(f"{event.section}: 0 of {event.experiments} experiments")

    def _experiment(self, event: events.ExperimentFinished) -> None:
        if self._section is None:
            return
        count = f"{event.number} of {event.experiments}"
        if event.failure:
            self._console.print(f"{count}  {event.experiment} failed: {event.failure}", style="bold red")
        else:
            self._console.print(f"{count}  {event.experiment}, {event.seconds:.0f} s", highlight=False)
        self._describe(f"{self._section.section}: {count} experiments")

    def _one_run(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self.folder = event.folder
                told = f": {event.models} models, {event.pairs} pairs each"
                self._console.print(Text.assemble((event.experiment, "bold"), told))
            case events.ModelStarted():
                self._models[event.model] = f"{event.model} ({event.number} of {event.models})"
                self._describe(f"loading {self._models[event.model]}")
            case events.ModelReady():
                peak = "" if event.peak_bytes is None else f", up to {event.peak_bytes / 1e9:.2f} GB"
                self._describe(f"{self._models[event.model]}{peak}")
                if event.finished:
                    self._console.print(f"{event.model}: {event.finished} of {event.cells} cells were there.")
            case events.ModelFinished():
                self._console.print(f"{self._models.get(event.model, event.model)}: {event.status}", highlight=False)

    def _describe(self, what: str) -> None:
        self._bar.update(self._task, description=what)


def time_left(seconds: float | None) -> str:
    """`3 min 20 s left`; empty while it is not known."""
    return "" if seconds is None else f"{time_taken(seconds)} left"


def time_taken(seconds: float) -> str:
    """`2 h 5 min`, `3 min 20 s` or `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
