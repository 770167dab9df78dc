"""Run directories read back: what each run was told to do, how it ended, and what it measured."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.report.run_files import RunFiles

_MARKS = ("summary.json", "status.json", "metrics.jsonl", "plan.json", ".hydra/config.yaml")
"""A folder that holds one of these is a run directory."""
_DEPTH = 4  # outputs/sweeps/<moment>/<job>, and one to spare
_UNNAMED = ("model", "data", "experiment", "debug")
"""Groups whose option is not a field of the configuration."""
_FACTS = ("schedule", "model", "pp", "microbatches", "batch_size", "steps")
"""What summary.json says of the settings, where there is no configuration."""


@dataclass(frozen=True)
class Point:
    """A loss that was logged: after how many steps, and how many seconds after the run's start."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Span:
    """One action of the timeline, in microseconds."""

    start: float
    duration: float
    type: str
    name: str


Lanes = tuple[tuple[Span, ...], ...]
"""The spans of a step, one row a rank."""


@dataclass(frozen=True)
class Run:
    """One run. `settings` are flat, by dotted name, with a group's option under the group's name.

    `status` is finished, failed, interrupted, skipped, or unfinished: still at it, or gone without a word. `job` is
    its number in its sweep, None outside of one. `summary` is empty where there is none.
    """

    directory: Path
    job: int | None
    status: str
    reason: str
    settings: Mapping[str, object]
    overridden: frozenset[str]
    summary: Mapping[str, Any]
    training: tuple[Point, ...]
    validation: tuple[Point, ...]
    measured: Lanes
    predicted: Lanes

    @property
    def finished(self) -> bool:
        """Whether its measurements count."""
        return self.status == "finished"

    def number(self, name: str) -> float | None:
        """A number of the summary; None where there is none."""
        return _number(self.summary.get(name))

    def ranks(self, name: str) -> tuple[float | None, ...]:
        """A number of each rank."""
        return tuple(_number(rank.get(name)) for rank in _mappings(self.summary.get("ranks")))

    @property
    def step_quartiles(self) -> tuple[float, float] | None:
        """A quarter of the steps was shorter, a quarter longer, in seconds."""
        match self.summary.get("step_quartiles"):
            case [int() | float() as first, int() | float() as third]:
                return first, third
        return None

    def idle(self, kind: str) -> dict[str, float]:
        """Idle seconds of a typical step by cause, summed over ranks; `kind` is measured or predicted."""
        total: dict[str, float] = {}
        for rank in _mappings(self.summary.get("idle")):
            causes = rank.get(kind)
            for cause, seconds in causes.items() if isinstance(causes, dict) else ():
                if _number(seconds) is not None:
                    total[cause] = total.get(cause, 0.0) + seconds
        return total


def read_runs(places: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The training runs of run directories, or of folders that hold some; and a line for each file that is damaged.

    Runs of other tasks are left out. A directory that is given twice is read once.

    Raises:
        ValueError: a place is not there, or holds no run directory.
    """
    directories = {directory.resolve(): directory for place in places for directory in find_runs(place)}
    runs, problems = [], []
    for directory in directories.values():
        files = RunFiles(directory)
        run = _read(files)
        if run is not None:
            runs.append(run)
            problems += files.problems
    return runs, problems


def find_runs(place: Path) -> list[Path]:
    """The run directories at or below a place, in the order of their numbers.

    Raises:
        ValueError: the place is not there, or holds none.
    """
    if not place.is_dir():
        raise ValueError(f"{place} is no directory: give a run directory, or a sweep's")
    found = list(_below(place, _DEPTH))
    if not found:
        raise ValueError(f"{place} holds no run: give a directory with a summary.json, or one that holds such")
    return found


def _below(place: Path, depth: int) -> Iterator[Path]:
    if any((place / mark).is_file() for mark in _MARKS):
        yield place
    elif depth:
        for child in sorted(place.iterdir(), key=_natural):
            if child.is_dir() and not child.name.startswith(".") and child.name != "wandb":
                yield from _below(child, depth - 1)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.findall(r"\d+|\D+", path.name)
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _read(files: RunFiles) -> Run | None:
    """One run; None for another task than training."""
    summary, said = files.mapping("summary.json"), files.mapping("status.json")
    settings, overridden = _settings(files, summary)
    if settings.pop("task", "train") != "train":
        return None
    status, reason = _status(files, summary, said)
    rows = _in_order(files.lines("metrics.jsonl", expected=bool(summary)))
    job = said.get("job")
    return Run(
        directory=files.directory,
        job=job if isinstance(job, int) and (files.directory.parent / "multirun.yaml").is_file() else None,
        status=status,
        reason=reason,
        settings=settings,
        overridden=overridden,
        summary=summary,
        training=_points(rows, "loss"),
        validation=_points(rows, "validation_loss"),
        **_timeline(files, expected=status == "finished"),
    )


def _status(files: RunFiles, summary: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[str, str]:
    """How it ended, and why. status.json is the job's word, summary.json the training's."""
    interrupted = summary.get("status") == "interrupted"
    source = summary if interrupted or said.get("status") in (None, "finished") else said
    status = source.get("status")
    if not isinstance(status, str) or (not summary and status == "finished"):
        return "unfinished", "; ".join(files.problems) or "there is no summary.json"
    lines = str(source.get("error") or source.get("reason") or "").splitlines()
    return status, "" if status == "finished" or not lines else lines[0]


def _settings(files: RunFiles, summary: Mapping[str, Any]) -> tuple[dict[str, object], frozenset[str]]:
    """The settings by name, and the names of those that were given on the command line."""
    config = files.yaml(".hydra/config.yaml", expected=False)
    if not isinstance(config, dict):
        return {name: summary[name] for name in _FACTS if name in summary}, frozenset()
    flat = dict(_flatten(config))
    chosen = files.yaml(".hydra/hydra.yaml", expected=False)
    for part in ("hydra", "runtime", "choices"):
        chosen = chosen.get(part) if isinstance(chosen, dict) else None
    choices = chosen if isinstance(chosen, dict) else {"model": summary.get("model")}
    flat |= {group: choices[group] for group in _UNNAMED if choices.get(group) is not None}
    given = files.yaml(".hydra/overrides.yaml", expected=False)
    overrides = given if isinstance(given, list) else []
    return flat, frozenset(str(override).partition("=")[0].lstrip("+~") for override in overrides)


def _flatten(node: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Dotted names and values; `schedule.name` is `schedule`."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{path}{key}.")
        elif key == "name" and path:
            yield path[:-1], value
        else:
            yield f"{path}{key}", value


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a run, steps and seconds rising: a resumed one repeats steps, and starts the clock again."""
    kept: list[dict[str, Any]] = []
    clock = offset = 0.0
    for row in rows:
        step, seconds = _number(row.get("step")), _number(row.get("seconds"))
        if step is None or seconds is None:
            continue
        if seconds < clock:
            kept = [other for other in kept if other["step"] < step]
            offset = kept[-1]["seconds"] if kept else 0.0
        clock = seconds
        kept.append({**row, "step": int(step), "seconds": offset + seconds})
    return kept


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[Point, ...]:
    known = ((row, _number(row.get(name))) for row in rows)
    return tuple(Point(row["step"], row["seconds"], loss) for row, loss in known if loss is not None)


def _timeline(files: RunFiles, *, expected: bool) -> dict[str, Lanes]:
    """The spans of timeline.json, written by trace.py."""
    lanes: dict[str, dict[int, list[Span]]] = {"measured": {}, "predicted": {}}
    names: dict[int, str] = {}
    try:
        for entry in files.mapping("timeline.json", expected=expected).get("traceEvents", ()):
            if entry["name"] == "process_name":
                names[entry["pid"]] = entry["args"]["name"]
            elif entry["ph"] == "X":
                span = Span(float(entry["ts"]), float(entry["dur"]), entry["cat"], entry["name"])
                lanes[names[entry["pid"]]].setdefault(int(entry["tid"]), []).append(span)
    except (KeyError, TypeError, ValueError) as error:
        files.problems.append(f"{files.directory / 'timeline.json'} is no trace that this program wrote ({error!r})")
        lanes = {"measured": {}, "predicted": {}}
    return {kind: tuple(tuple(rows[rank]) for rank in sorted(rows)) for kind, rows in lanes.items()}


def _mappings(values: object) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _number(value: object) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and math.isfinite(value) else None  # type: ignore[return-value, arg-type]
