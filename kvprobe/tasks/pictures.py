"""Drawn pictures of one shape in one corner, whose every property is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import ConfigError

COLOURS: Final = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.75, 0.1),
    "blue": (0.15, 0.2, 0.95),
    "yellow": (0.95, 0.9, 0.1),
    "purple": (0.7, 0.1, 0.8),
    "white": (1.0, 1.0, 1.0),
}
SHAPES: Final = ("circle", "square", "triangle", "cross")
CORNERS: Final = ("northwest", "northeast", "southwest", "southeast")
ATTRIBUTES: Final = {"colour": tuple(COLOURS), "shape": SHAPES, "corner": CORNERS}
"""What can be said of a picture, and every word for it."""
ASKED: Final = ("colour", "shape")
"""What is asked; the corner makes the same answer look different."""

_GROUND, _NOISE = 0.4, 0.06


@dataclass(frozen=True)
class Picture:
    """What a picture shows; each value is one of `ATTRIBUTES`.

    Raises:
        ConfigError: a value is none of them.
    """

    colour: str
    shape: str
    corner: str

    def __post_init__(self) -> None:
        for attribute, known in ATTRIBUTES.items():
            value = getattr(self, attribute)
            if value not in known:
                raise ConfigError(f"No picture has the {attribute} {value!r}; use one of {', '.join(known)}.")

    @property
    def words(self) -> str:
        """The description: colour, shape and corner."""
        return f"{self.colour} {self.shape} {self.corner}"

    @classmethod
    def of(cls, words: str) -> Picture:
        """The picture of a description.

        Raises:
            ConfigError: these are not a colour, a shape and a corner.
        """
        values = words.split()
        if len(values) != len(ATTRIBUTES):
            raise ConfigError(f"{words!r} describes no picture; give a colour, a shape and a corner.")
        return cls(*values)


def draw(picture: Picture, size: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Pixels `[3, size, size]` from 0 to 1; size and place of the shape and the noise of the ground vary."""
    rows, columns = np.mgrid[0:size, 0:size] + 0.5
    quarter = size / 4
    radius = quarter * rng.uniform(0.7, 0.9)
    middle_row = quarter * (3 if picture.corner.startswith("south") else 1) + rng.uniform(-0.1, 0.1) * quarter
    middle_column = quarter * (3 if picture.corner.endswith("east") else 1) + rng.uniform(-0.1, 0.1) * quarter
    down, across = (rows - middle_row) / radius, (columns - middle_column) / radius
    inside = {
        "circle": down**2 + across**2 <= 1,
        "square": np.maximum(abs(down), abs(across)) <= 0.85,
        "triangle": (abs(across) <= (down + 1) / 2) & (abs(down) <= 1),
        "cross": (np.minimum(abs(down), abs(across)) <= 0.3) & (np.maximum(abs(down), abs(across)) <= 1),
    }[picture.shape]
    pixels = np.full((3, size, size), _GROUND)
    pixels[:, inside] = np.array(COLOURS[picture.colour])[:, None]
    noisy = np.clip(pixels + rng.normal(0.0, _NOISE, pixels.shape), 0.0, 1.0)
    return noisy.astype(np.float32)
