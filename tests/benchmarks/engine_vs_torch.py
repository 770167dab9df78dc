"""Our engine beside torch.distributed.pipelining: the same model, microbatches and processes, steps in turn, pp=2.

    python -m tests.benchmarks.engine_vs_torch [--quick] [--json FILE] [--models tiny wide] [--schedules 1f1b]

One pair of processes holds both engines and the whole model alone, so that both get the same threads (1 a rank),
allocator settings (those of the environment) and noise. A step is forward and backward of all microbatches; its time is
the slower rank's. Layers are cut where the slowest stage, measured first, is fastest. Columns:

    throughput_ratio  torch's step / ours, the median over rounds
    efficiency        bound / ours; torch_efficiency likewise. The bound is the plain loop's time (a copy of it on each
                      core at once) / pp / (1 - the schedule's makespan bubble at equal stages, F=1, B=2 or I=W=1)
    memory_ratio      ours / torch's peak of resident memory, without weights and libraries, each engine in processes
                      of its own, the rank that needs more: below 1, we need less
    error             the largest difference from the plain loop, in terms of the largest entry of each gradient
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.training.launch import launch
from pipeline.training.plan import Plan
from tests.benchmarks.alternation import ALONE, MemoryWork, Times, Work, alternate, remember
from tests.benchmarks.cases import CASES, TORCH_CLASSES, Case, layer_seconds, plan_of, settings_of
from tests.benchmarks.table import Row, geometric_mean, parser, publish, table

PP = 2
QUICK_MODELS = ("tiny", "small", "wide", "resnet50")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb")


@dataclass(frozen=True)
class Effort:
    """How long is measured: at most so many rounds and seconds a model, and the steps of a memory measurement."""

    rounds: int
    seconds: float
    memory_steps: int


FULL = Effort(rounds=25, seconds=60.0, memory_steps=3)
QUICK = Effort(rounds=9, seconds=8.0, memory_steps=1)


def compare(case: Case, schedules: Sequence[str], effort: Effort) -> list[Row]:
    """A row for each schedule."""
    seconds = layer_seconds(case)
    plans = {name: plan_of(case, settings_of(case, name, seconds, PP)) for name in schedules}
    times: list[Times] = []
    launch(alternate, Work(case, plans, effort.rounds, effort.seconds), PP, on_message=times.append)
    steps = _steps(times)
    rows = []
    for name, plan in plans.items():
        row = {"model": case.name, "schedule": name, "torch": TORCH_CLASSES[name].__name__.removeprefix("Schedule")}
        row |= {"cut": "+".join(map(str, plan.counts)), **_speed(plan, steps), **_memory(case, plan, effort)}
        rows.append(row | {"error": max(time.errors[name] for time in times)})
    return rows


def _steps(times: Sequence[Times]) -> dict[str, list[float]]:
    """Seconds of each engine's rounds: a pipeline's step ends with its slower rank, lone loops have their mean."""
    steps = {}
    for engine in times[0].seconds:
        rounds = zip(*(time.seconds[engine] for time in times), strict=True)
        steps[engine] = [statistics.mean(ranks) if engine == ALONE else max(ranks) for ranks in rounds]
    return steps


def _speed(plan: Plan, steps: Mapping[str, Sequence[float]]) -> Row:
    ours, theirs = steps[plan.schedule.name], steps[f"torch {plan.schedule.name}"]
    bound = statistics.median(steps[ALONE]) / PP / (1 - plan.predicted.makespan_bubble)
    return {
        "seconds": statistics.median(ours),
        "torch_seconds": statistics.median(theirs),
        "throughput_ratio": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "efficiency": bound / statistics.median(ours),
        "torch_efficiency": bound / statistics.median(theirs),
    }


def _memory(case: Case, plan: Plan, effort: Effort) -> Row:
    ours, theirs = (peak_bytes(MemoryWork(case, plan, torch, effort.memory_steps)) for torch in (False, True))
    return {"memory_mb": ours / 1e6, "torch_memory_mb": theirs / 1e6, "memory_ratio": ours / theirs}


def peak_bytes(work: MemoryWork) -> int:
    """Of the rank that needs most."""
    peaks: list[int] = []
    launch(remember, work, PP, on_message=peaks.append)
    return max(peaks)


def summary(rows: Sequence[Row]) -> str:
    """Geometric means, and where we are slowest."""
    lines = []
    for column in ("throughput_ratio", "efficiency", "memory_ratio"):
        worst = (max if column == "memory_ratio" else min)(rows, key=lambda row: row[column])
        mean = geometric_mean([float(row[column]) for row in rows])
        where = f"{worst['model']} {worst['schedule']}"
        lines.append(f"{column}: geometric mean {mean:.3f}, worst {worst[column]:.3f} ({where})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, print, and write to the file asked for."""
    options_parser = parser(__doc__, quick="few rounds of half the batch, without resnet152: 3 minutes at most")
    options_parser.add_argument("--models", nargs="+", choices=CASES, help="all by default")
    options_parser.add_argument("--schedules", nargs="+", choices=TORCH_CLASSES, default=SCHEDULES)
    options_parser.add_argument("--rounds", type=int, help="steps of each engine that are timed, at most")
    options = options_parser.parse_args(arguments)
    effort = QUICK if options.quick else FULL
    effort = replace(effort, rounds=options.rounds or effort.rounds)
    rows: list[Row] = []
    for name in options.models or (QUICK_MODELS if options.quick else CASES):
        case = CASES[name].halved() if options.quick else CASES[name]
        found = compare(case, options.schedules, effort)
        print(table(found), flush=True)
        rows += found
    publish(rows, options.json)
    print(summary(rows))
    return rows


if __name__ == "__main__":
    main()
