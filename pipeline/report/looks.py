"""How things look in every picture: colors, fonts, and how a figure becomes a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.schedule.actions import ActionType


@dataclass(frozen=True)
class Look:
    """How one kind of thing is drawn: its color, that of the text on it, and its line in the legend."""

    face: str
    text: str
    label: str


# A ladder of lightness, so that gray tells them apart where bars are too thin for hatches and letters too; the hues are
# near Okabe and Ito's, which color-blind readers tell apart. An overlapped pair is an F over a B.
LOOKS = {
    ActionType.F: Look("#c3ddf0", "#10242f", "F forward"),
    ActionType.B: Look("#0b3a63", "#ffffff", "B backward"),
    ActionType.I: Look("#d9701a", "#1f1200", "I backward for input"),
    ActionType.W: Look("#74cda8", "#06231a", "W backward for weights"),
    ActionType.R: Look("#7b3f78", "#ffffff", "R recompute"),
}
IDLE = Look("#f5f5f5", "#222222", "idle")
MESSAGES = {
    "activation": Look("#222222", "#222222", "activation under way"),
    "gradient": Look("#8c8c8c", "#222222", "gradient under way"),
}
"""Thin marks under the lane that sends: never as tall as a bar, so in gray they are no compute."""

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "pipeline",
    "text.parse_math": False,
}
"""The settings to draw under, with `matplotlib.rc_context`: nothing of pyplot's global state stays changed."""

DPI = 150


def make_figure(width: float, height: float) -> Figure:
    """A figure of its own on Agg, in inches: no window."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG or an SVG, as the name ends; the same figure makes the same file. ValueError for another ending."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("png", "svg"):
        raise ValueError(f"cannot draw {path.name}: use a name that ends in .png or .svg")
    metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format=kind, metadata=metadata)
