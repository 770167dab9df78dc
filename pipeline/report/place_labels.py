"""Where labels of a scatter plot go, so that they cover neither each other nor a point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import cos, hypot, pi, sin
from typing import NamedTuple

from pipeline.report.labels import text_width

_MARKER = 5.0  # how far a point's marker reaches, in points
_BOLD = 1.12  # how much wider bold letters are
_DISTANCES = (7.0, 12.0, 20.0, 30.0, 42.0, 56.0, 72.0)
_DIRECTIONS = tuple(pi * degrees / 180 for degrees in (0, 180, 90, 270, 45, 315, 135, 225, 22, 338, 158, 202))


class Box(NamedTuple):
    """A rectangle; x goes right and y up."""

    left: float
    bottom: float
    right: float
    top: float

    @classmethod
    def around(cls, one: tuple[float, float], other: tuple[float, float], margin: float) -> Box:
        """The smallest that holds both points and a margin."""
        (x, y), (u, v) = one, other
        return cls(min(x, u) - margin, min(y, v) - margin, max(x, u) + margin, max(y, v) + margin)

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, wide) * max(0.0, high)

    def distance(self, x: float, y: float) -> float:
        """From the nearest point of the box."""
        return hypot(max(self.left - x, 0.0, x - self.right), max(self.bottom - y, 0.0, y - self.top))

    @property
    def area(self) -> float:
        """Of all of it."""
        return (self.right - self.left) * (self.top - self.bottom)


def place_labels(
    points: Sequence[tuple[float, float]], labels: Sequence[str], size: float, within: Box, avoid: Sequence[Box] = ()
) -> list[Box]:
    """A box for each point's label: the nearest place that is free, of what is to `avoid` too; else the one that covers
    least.

    All lengths, and the labels' `size`, are in points; a label may have several lines.
    """
    taken = [Box.around(point, point, _MARKER) for point in points]
    taken.extend(avoid)
    result = []
    for point, label in zip(points, labels, strict=True):
        best = min(_candidates(point, label, size), key=lambda box: _covered(box, taken, within))
        taken.append(best)
        result.append(best)
    return result


def _covered(box: Box, taken: Sequence[Box], within: Box) -> float:
    outside = box.area - box.overlap(within)
    return sum(map(box.overlap, taken)) + outside


def _candidates(point: tuple[float, float], label: str, size: float) -> Iterator[Box]:
    lines = label.split("\n")
    wide, high = _BOLD * max(text_width(line, size) for line in lines), 1.25 * size * len(lines)
    x, y = point
    for distance in _DISTANCES:
        for direction in _DIRECTIONS:
            across, up = cos(direction), sin(direction)
            left = x + distance * across + wide * (across - 1) / 2
            bottom = y + distance * up + high * (up - 1) / 2
            yield Box(left, bottom, left + wide, bottom + high)
