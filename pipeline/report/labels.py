"""Short labels by the thousand: each distinct one is outlined once and stamped wherever it stands."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from matplotlib.collections import PathCollection
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CAPITAL = 0.73  # of the size: how high DejaVu's digits are


class Labels:
    """Collects labels, centered on points of an axes' data; `draw` puts them there. matplotlib's own text takes
    milliseconds apiece."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, float, str], list[tuple[float, float]]] = defaultdict(list)

    def add(self, x: float, y: float, text: str, size: float, color: str) -> None:
        """`size` in points."""
        self._places[text, round(size, 1), color].append((x, y))

    def draw(self, axes: Axes) -> None:
        """Each distinct label is one collection, named by its text."""
        points = Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans
        for (text, size, color), places in self._places.items():
            centered = Affine2D().translate(-text_width(text, size) / 2, -_CAPITAL * size / 2)
            axes.add_collection(
                PathCollection(
                    [centered.transform_path(_outline(text, size))],
                    offsets=places,
                    offset_transform=axes.transData,
                    transform=points,
                    facecolors=color,
                    linewidths=0,
                    label=text,
                ),
                autolim=False,
            )


def text_width(text: str, size: float) -> float:
    """How many points `text` takes."""
    return _width(text) * size if text else 0.0


@lru_cache(maxsize=4096)
def _width(text: str) -> float:
    return float(_outline(text, 10.0).get_extents().x1) / 10.0


@lru_cache(maxsize=4096)
def _outline(text: str, size: float) -> TextPath:
    return TextPath((0, 0), text, size=size)
