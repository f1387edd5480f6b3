"""Draws the pictures of the concept pages, each in a light and a dark version: `python docs/pictures/draw.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

HERE = Path(__file__).parent
CELL, GAP = 26, 4
STEP = CELL + GAP
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Scheme:
    """Colours of one version."""

    ink: str
    faint: str
    stale: str
    new: str
    run: str
    moved: str
    line: str
    good: str


SCHEMES = {
    "light": Scheme("#1f2933", "#66727f", "#dfe4ea", "#f2a33a", "#2f7fc1", "#8f7cc3", "#9aa5b1", "#2b8a5b"),
    "dark": Scheme("#e6e9ed", "#a3adb8", "#454d5c", "#e59a35", "#4e9fe0", "#a08fd6", "#7b8794", "#56b98a"),
}


class Picture:
    """An SVG that is drawn piece by piece; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str, scheme: Scheme) -> None:
        box = f"0 0 {width} {height}"
        self.root = ET.Element(
            "svg", xmlns="http://www.w3.org/2000/svg", viewBox=box, width=str(width), height=str(height), role="img"
        )
        self.root.set("font-family", FONT)
        ET.SubElement(self.root, "title").text = title
        marker = ET.SubElement(
            ET.SubElement(self.root, "defs"),
            "marker",
            id="head",
            viewBox="0 0 8 8",
            refX="7",
            refY="4",
            markerWidth="7",
            markerHeight="7",
            orient="auto-start-reverse",
        )
        ET.SubElement(marker, "path", d="M0 0L8 4L0 8z", fill=scheme.ink)
        self.scheme = scheme

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, dashed: bool = False) -> None:
        """A rounded rectangle."""
        stroke = {"stroke": self.scheme.line, "stroke-dasharray": "4 3"} if dashed else {}
        place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
        ET.SubElement(self.root, "rect", {**place, "rx": "4", "fill": fill, **stroke})

    def text(self, x: float, y: float, words: str, *, size: int = 14, anchor: str = "start", **style: str) -> None:
        """One line of text; `anchor` is start, middle or end."""
        fill = style.pop("fill", self.scheme.ink)
        place = {"x": f"{x:g}", "y": f"{y:g}", "font-size": str(size), "text-anchor": anchor, "fill": fill}
        ET.SubElement(self.root, "text", {**place, **{k.replace("_", "-"): v for k, v in style.items()}}).text = words

    def line(
        self, points: Sequence[tuple[float, float]], color: str, width: float = 1.5, *, arrow: bool = False
    ) -> None:
        """A line through points."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self._path(path, color, width, arrow=arrow)

    def arc(self, start: tuple[float, float], end: tuple[float, float], lift: float, color: str) -> None:
        """An arrow that bows by `lift`."""
        (x0, y0), (x1, y1) = start, end
        middle = (x0 + x1) / 2, min(y0, y1) - lift
        self._path(f"M{x0:g} {y0:g}Q{middle[0]:g} {middle[1]:g} {x1:g} {y1:g}", color, 2, arrow=True)

    def cells(self, x: float, y: float, fills: Sequence[str]) -> None:
        """A row of cache entries."""
        for number, fill in enumerate(fills):
            self.box(x + number * STEP, y, CELL, CELL, fill)

    def key(self, x: float, y: float, entries: Sequence[tuple[str, str, int]]) -> None:
        """What colours mean: colour, words, and how wide the entry is."""
        for fill, words, width in entries:
            self.box(x, y - 12, 15, 15, fill)
            self.text(x + 21, y, words, size=13)
            x += width

    def save(self, file: Path) -> None:
        """Write the picture."""
        ET.indent(self.root)
        file.write_text(ET.tostring(self.root, encoding="unicode") + "\n", encoding="utf-8")

    def _path(self, path: str, color: str, width: float, *, arrow: bool) -> None:
        head = {"marker-end": "url(#head)"} if arrow else {}
        ET.SubElement(
            self.root, "path", {"d": path, "fill": "none", "stroke": color, "stroke-width": f"{width:g}", **head}
        )


def notes(scheme: Scheme) -> Picture:
    """A field, the note that prefill makes of it, and the decision that reads the note."""
    picture = Picture(
        860, 330, "A field's value is noted in later entries at prefill, and the decision reads the note", scheme
    )
    words = ["status:", "pending", "Policy", "If", "pending,", "then", "cancel", ".", "Task:", "reply", "Answer:"]
    width, x0, y = 70, 20, 150
    xs = [x0 + number * (width + 6) for number in range(len(words))]
    fills = {1: scheme.new, 7: scheme.run, 10: "none"}
    for number, (word, x) in enumerate(zip(words, xs, strict=True)):
        picture.text(x + width / 2, y - 14, word, size=13, anchor="middle")
        picture.box(x, y, width, 34, fills.get(number, scheme.stale), dashed=number == 10)
    picture.text(xs[1] + width / 2, y + 22, "field", size=13, anchor="middle", font_weight="bold", fill="#1f2933")
    picture.text(xs[7] + width / 2, y + 22, "note", size=13, anchor="middle", font_weight="bold", fill="#ffffff")
    picture.text(xs[10] + width / 2, y + 22, "decision", size=12, anchor="middle")
    centre = [x + width / 2 for x in xs]
    picture.arc((centre[1], y - 32), (centre[7], y - 32), 95, scheme.ink)
    picture.text(
        (centre[1] + centre[7]) / 2,
        38,
        "at prefill, the rule's tokens work out what the value means …",
        anchor="middle",
    )
    picture.line(
        [(centre[10], y + 42), (centre[10], y + 86), (centre[7], y + 86), (centre[7], y + 44)],
        scheme.ink,
        2,
        arrow=True,
    )
    picture.text((centre[7] + centre[10]) / 2, y + 108, "… and the decision reads the note,", anchor="middle")
    picture.text((centre[7] + centre[10]) / 2, y + 126, "not the field", anchor="middle")
    picture.text(x0, y + 78, "KV cache: one entry for each token.", size=13, fill=scheme.faint)
    picture.text(x0, y + 98, "Overwrite the field alone and the note still says “cancel”.", size=13, fill=scheme.faint)
    picture.text(x0, y + 118, "Overwrite what comes after it alone and the decision turns.", size=13, fill=scheme.faint)
    return picture


def words(scheme: Scheme) -> Picture:
    """A pair of contexts by segments, and recovery on the axis of margins."""
    picture = Picture(
        860, 380, "A pair of contexts with named segments, and recovery as a place between two margins", scheme
    )
    segments = [("system", 110), ("session", 100), ("field", 90), ("policy", 190), ("task", 130), ("cue", 80)]
    for y, name, value in ((50, "base", "pending"), (110, "donor", "shipped")):
        picture.text(20, y + 22, name, font_weight="bold")
        x = 90.0
        for segment, width in segments:
            changed = segment == "field"
            fill = (scheme.stale if name == "base" else scheme.new) if changed else scheme.stale
            picture.box(x, y, width, 34, fill, dashed=changed)
            label = value if changed else segment
            dark = changed and name == "donor"
            picture.text(
                x + width / 2, y + 22, label, size=13, anchor="middle", **({"fill": "#1f2933"} if dark else {})
            )
            x += width + 5
    picture.text(90 + 110 + 5 + 100 + 5 + 45, 40, "field", size=13, anchor="middle", fill=scheme.faint)
    start, end = 90 + 315, 90 + 725
    picture.line([(start, 154), (start, 160), (end - 24, 160), (end - 24, 154)], scheme.line)
    picture.text(
        (start + end) / 2,
        178,
        "downstream: all cached entries after the field",
        size=13,
        anchor="middle",
        fill=scheme.faint,
    )
    picture.text(end - 8, 40, "decision", size=13, anchor="middle", fill=scheme.faint)
    axis = 290
    picture.line([(90, axis), (820, axis)], scheme.line, 2, arrow=True)
    picture.text(820, axis + 46, "margin: logit(new) − logit(old)", size=13, anchor="end", fill=scheme.faint)
    for x, above, below, fill in (
        (170, "base (stale)", "recovery 0", scheme.line),
        (560, "intervention x", "recovery 0.75", scheme.run),
        (690, "donor (oracle)", "recovery 1", scheme.new),
    ):
        ET.SubElement(picture.root, "circle", cx=str(x), cy=str(axis), r="8", fill=fill)
        picture.text(x, axis - 18, above, size=13, anchor="middle")
        picture.text(x, axis + 27, below, size=13, anchor="middle", fill=scheme.faint)
    picture.line([(430, axis - 9), (430, axis + 9)], scheme.ink)
    picture.text(430, axis + 27, "0", size=13, anchor="middle", fill=scheme.faint)
    picture.text(90, 238, "Recovery", font_weight="bold")
    picture.text(90, 30, "A pair", font_weight="bold")
    return picture


EDITS: tuple[tuple[str, str, str], ...] = (
    # s stale, n the new value, r run by the model, d run for every decision, - not there
    ("stale", "sssss-sssssssd", "nothing: still the old value"),
    ("field_only", "sssnn-sssssssd", "the field alone: the notes stay old"),
    ("selective", "sssnn-ssrsrssd", "the field and K chosen tokens"),
    ("erratum", "sssssssssrrrrd", "a line in front of the task says it"),
    ("full_downstream", "sssnn-rrrrrrrd", "all from the field on: the oracle"),
)


def editing(scheme: Scheme) -> Picture:
    """What each edit method keeps, and what it runs."""
    picture = Picture(
        860, 330, "Which cache entries each edit method keeps and which it runs through the model", scheme
    )
    picture.text(190, 26, "prompt", size=13, fill=scheme.faint)
    picture.text(190 + 3 * STEP + CELL, 26, "field", size=13, anchor="middle", fill=scheme.faint)
    picture.text(190 + 13 * STEP + CELL / 2, 26, "decision", size=13, anchor="middle", fill=scheme.faint)
    fills = {"s": scheme.stale, "n": scheme.new, "r": scheme.run, "d": "none"}
    for number, (name, entries, words_) in enumerate(EDITS):
        y = 40 + number * 46
        picture.text(20, y + 18, name, font_weight="bold")
        for place, entry in enumerate(entry for entry in entries if entry != "-"):
            picture.box(190 + place * STEP, y, CELL, CELL, fills[entry], dashed=entry == "d")
        picture.text(190 + 14 * STEP + 16, y + 18, words_, size=13)
    picture.key(
        20,
        310,
        [
            (scheme.stale, "kept from the stale cache", 200),
            (scheme.new, "the new value, run on the prefix", 240),
            (scheme.run, "run anew", 100),
        ],
    )
    return picture


def composing(scheme: Scheme) -> Picture:
    """A chunk is compiled once behind a header, its keys are turned, and it stands in another prompt."""
    picture = Picture(860, 330, "A chunk compiled once is moved into prompts by rotating its keys", scheme)
    picture.text(20, 30, "compiled once", font_weight="bold")
    picture.cells(190, 14, [scheme.line] * 3 + [scheme.moved] * 6)
    picture.text(190 + 1.5 * STEP, 60, "header, dropped", size=13, anchor="middle", fill=scheme.faint)
    picture.text(190 + 6 * STEP, 60, "chunk: positions 3 to 8", size=13, anchor="middle", fill=scheme.faint)
    for number in range(0, 6, 2):
        x = 190 + (3 + number) * STEP + STEP
        picture.line([(x, 72), (x + 3 * STEP, 128)], scheme.ink, 1.5, arrow=True)
    picture.text(190 + 13 * STEP, 92, "keys turned by +3 in float32,", size=13)
    picture.text(190 + 13 * STEP, 110, "from the originals; nothing is run", size=13)
    picture.text(20, 152, "composed", font_weight="bold")
    picture.cells(190, 136, [scheme.run] * 6 + [scheme.moved] * 6 + [scheme.run] * 3)
    picture.box(190 + 15 * STEP, 136, CELL, CELL, "none", dashed=True)
    picture.text(190 + 3 * STEP, 182, "own text", size=13, anchor="middle", fill=scheme.faint)
    picture.text(190 + 9 * STEP, 182, "chunk: positions 6 to 11", size=13, anchor="middle", fill=scheme.faint)
    picture.text(190 + 14 * STEP, 182, "task", size=13, anchor="middle", fill=scheme.faint)
    picture.text(20, 232, "with a seam", font_weight="bold")
    picture.cells(190, 216, [scheme.run] * 8 + [scheme.moved] * 4 + [scheme.run] * 3)
    picture.box(190 + 15 * STEP, 216, CELL, CELL, "none", dashed=True)
    picture.text(190 + 16.5 * STEP, 234, "first tokens run in place", size=13)
    picture.key(
        20,
        310,
        [(scheme.run, "run for this prompt", 180), (scheme.moved, "reused, moved", 150), (scheme.line, "dropped", 90)],
    )
    return picture


def verdicts(scheme: Scheme) -> Picture:
    """Four intervals beside a claim's threshold."""
    picture = Picture(860, 300, "The verdict on a claim comes from where the interval lies", scheme)
    picture.text(20, 28, "claim: field_only.recovery < 0.15", font_weight="bold")
    left, zero, threshold, right = 190, 280, 400, 610
    picture.box(left, 44, threshold - left, 200, scheme.good)
    picture.root[-1].set("opacity", "0.18")
    picture.line([(threshold, 40), (threshold, 250)], scheme.good, 2)
    picture.text(threshold, 268, "0.15", size=13, anchor="middle")
    picture.text(zero, 268, "0", size=13, anchor="middle")
    picture.line([(zero, 244), (zero, 250)], scheme.line)
    picture.line([(left, 250), (right, 250)], scheme.line)
    rows: tuple[tuple[str, float | None, float, str], ...] = (
        ("holds", 285, 30, "all of the interval satisfies it"),
        ("fails", 520, 45, "none of it does"),
        ("open", 385, 60, "part of it does"),
        ("not applicable", None, 0, "the model failed the gate"),
    )
    for number, (name, x, half, words_) in enumerate(rows):
        y = 74 + number * 48
        picture.text(20, y + 5, name, font_weight="bold")
        picture.text(right + 10, y + 5, words_, size=12)
        if x is None:
            continue
        picture.line([(x - half, y), (x + half, y)], scheme.ink, 2.5)
        ET.SubElement(picture.root, "circle", cx=f"{x:g}", cy=str(y), r="6", fill=scheme.run)
    return picture


def layers(scheme: Scheme) -> Picture:
    """How the packages lie on each other."""
    picture = Picture(860, 300, "From a task to a verdict: which package does what", scheme)
    steps = [
        ("tasks", "pairs of prompts"),
        ("models", "a subject"),
        ("engine", "interventions"),
        ("probes", "rows"),
        ("stats", "effects"),
        ("runs", "verdicts"),
        ("report", "figures"),
    ]
    for number, (name, what) in enumerate(steps):
        x = 16 + number * 120
        picture.box(x, 40, 104, 62, scheme.stale)
        picture.text(x + 52, 67, name, anchor="middle", font_weight="bold")
        picture.text(x + 52, 88, what, size=12, anchor="middle")
        if number:
            picture.line([(x - 15, 71), (x - 2, 71)], scheme.ink, 1.5, arrow=True)
    users = [
        ("edit", "changes a cached prompt"),
        ("compose", "puts chunks into one"),
        ("agents", "do both, turn by turn"),
    ]
    for number, (name, what) in enumerate(users):
        x = 136 + number * 210
        picture.box(x, 170, 190, 58, scheme.moved)
        picture.text(x + 95, 194, name, anchor="middle", font_weight="bold", fill="#ffffff")
        picture.text(x + 95, 215, what, size=12, anchor="middle", fill="#ffffff")
    picture.line([(308, 166), (308, 106)], scheme.ink, 1.5, arrow=True)
    picture.text(
        318, 140, "stand on the engine; probes may use them, never the other way round", size=13, fill=scheme.faint
    )
    picture.text(
        20, 272, "Data flows one way, and lower parts know nothing of higher ones.", size=13, fill=scheme.faint
    )
    return picture


PICTURES: dict[str, Callable[[Scheme], Picture]] = {
    draw.__name__: draw for draw in (notes, words, editing, composing, verdicts, layers)
}


def main() -> None:
    """Write all pictures beside this file."""
    for name, draw in PICTURES.items():
        for scheme, colours in SCHEMES.items():
            draw(colours).save(HERE / f"{name}-{scheme}.svg")


if __name__ == "__main__":
    main()
