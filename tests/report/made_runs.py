"""Small run directories, made by hand: what a sweep of two schedules leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CAUSES = ("warmup", "communication", "imbalance", "dependency", "tail")


def made_run(directory: Path, *, rate: float = 100.0, job: int | None = None, **changes: Any) -> Path:
    """A finished run of 1F1B; `changes` are settings, by dotted name with __ for a dot, and `summary`."""
    summary_changes = changes.pop("summary", {})
    config: dict[str, Any] = {
        "task": "train",
        "seed": 0,
        "microbatches": 8,
        "schedule": {"name": "1f1b", "stages_per_rank": 1},
        "model": {"width": 128},
        "data": {"context": 128},
        "logger": {"name": "none", "tags": []},
    }
    choices = {"model": changes.pop("model", "gpt"), "data": changes.pop("data", "python_text"), "experiment": None}
    for name, value in changes.items():
        *above, last = name.split("__")
        node = config
        for part in above:
            node = node[part]
        node[last] = {**node[last], "name": value} if isinstance(node[last], dict) else value
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in changes.items()]
    hydra = directory / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(yaml.safe_dump(config))
    (hydra / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    (hydra / "overrides.yaml").write_text(yaml.safe_dump([*overrides, f"model={choices['model']}"]))
    status = {"job": job or 0, "overrides": overrides, "status": "finished", "error": None}
    write(directory / "status.json", status)
    idle = dict.fromkeys(CAUSES, 0.001)
    summary = {
        "status": "finished",
        "error": None,
        "samples_per_second": rate,
        "step_seconds": 32 / rate,
        "step_quartiles": [30 / rate, 34 / rate],
        "bubble_measured": 0.2,
        "bubble_predicted": 0.1,
        "bubble_span_measured": 0.15,
        "bubble_span_predicted": 0.125,
        "profiled": {"bubble_makespan": 0.175},
        "idle": [{"rank": rank, "measured": idle, "predicted": idle} for rank in range(2)],
        "train_loss": 1.5,
        "validation_loss": 2.5,
        "ranks": [{"rank": r, "peak_memory_bytes": (5 + r) << 20, "peak_activation_bytes": 1 << 20} for r in range(2)],
    }
    write(directory / "summary.json", {**summary, **summary_changes})
    rows = [{"step": step, "loss": 4.0 - step / 10, "seconds": float(step)} for step in (5, 10, 15, 20)]
    rows += [{"step": 20, "validation_loss": 2.5, "seconds": 21.0}]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write(directory / "timeline.json", {"traceEvents": [process(0, "measured"), span(0, 0), span(0, 1)]})
    return directory


def made_sweep(place: Path, *, repeats: int = 1) -> Path:
    """GPipe at 100 and 1F1B at 120 samples/s, a drift common to both slowing down each repeat; taking turns."""
    place.mkdir(parents=True)
    (place / "multirun.yaml").write_text("{}\n")
    for seed in range(repeats):
        for at, (schedule, rate) in enumerate((("gpipe", 100.0), ("1f1b", 120.0))):
            job = 2 * seed + at
            wobble = 1 + 0.001 * (seed % 2) * (-1) ** at
            made_run(place / str(job), job=job, rate=rate * 0.9**seed * wobble, schedule=schedule, seed=seed)
    return place


def fail(directory: Path, error: str, status: str = "failed") -> None:
    """Make it a job that was refused before it started."""
    for name in ("summary.json", "metrics.jsonl", "timeline.json"):
        (directory / name).unlink()
    write(
        directory / "status.json",
        {**json.loads((directory / "status.json").read_text()), "status": status, "error": error},
    )


def process(pid: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}


def span(pid: int, rank: int) -> dict[str, Any]:
    return {"name": f"{rank}F0", "cat": "F", "ph": "X", "ts": 10.0 * rank, "dur": 10.0, "pid": pid, "tid": rank}


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
