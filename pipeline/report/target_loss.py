"""When did a run reach a loss? And which loss did all of them reach?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from pipeline.report.runs import Point, Run

SMOOTHED = 5
"""A training loss is one batch's: what counts is the mean of the last five that were logged (fewer at the start)."""


@dataclass(frozen=True)
class Target:
    """A loss to reach, of the validations or of the smoothed training losses."""

    loss: float
    kind: Literal["validation", "training"]

    def reached(self, run: Run) -> Point | None:
        """The first logged point at or below the target; None where there is none."""
        return next((point for point in curve(run, self.kind) if point.loss <= self.loss), None)


def curve(run: Run, kind: Literal["validation", "training"]) -> tuple[Point, ...]:
    """The losses that count."""
    return run.validation if kind == "validation" else smoothed(run.training)


def smoothed(points: Sequence[Point]) -> tuple[Point, ...]:
    """Each loss replaced by the mean of the last ones up to it."""
    windows = (points[max(0, at + 1 - SMOOTHED) : at + 1] for at in range(len(points)))
    means = (fmean(point.loss for point in window) for window in windows)
    return tuple(Point(point.step, point.seconds, mean) for point, mean in zip(points, means, strict=True))


def choose_target(runs: Sequence[Run], loss: float | None = None) -> Target | None:
    """The target of runs of one problem: `loss`, or the worst that a finished run ends with, which all have reached.

    Of the validations where every finished run has two or more, else of the smoothed training losses. None where a
    finished run has logged none.
    """
    finished = [run for run in runs if run.finished]
    kind: Literal["validation", "training"] = "training"
    if finished and all(len(run.validation) > 1 for run in finished):
        kind = "validation"
    curves = [curve(run, kind) for run in finished]
    if not curves or not all(curves):
        return None
    return Target(max(points[-1].loss for points in curves) if loss is None else loss, kind)
