"""What tracing costs a step.

    python -m tests.benchmarks.trace [--quick] [--json FILE]

Prints a row a model, all ranks in this process. `ratio` is the time of a traced step over that of one without, each
the median of many that alternate: as exact as the machine is quiet. `share` is what a trace takes for as many actions,
timed by itself, over the time of a step: what the ratio is above 1 where nothing else disturbs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from models.gpt import gpt
from models.model import Model
from pipeline.engine.executor import Executor, Microbatches, run
from pipeline.engine.trace import HostClock, Trace
from pipeline.schedule.actions import Action
from tests.engine.harness import build_ranks, microbatches_of, plan_for, settings_for

Row = dict[str, str | int | float]
CONTEXT, VOCABULARY, MICROBATCHES, BATCH = 128, 256, 8, 32


def models() -> dict[str, Model]:
    """The default GPT, and one so small that little but the engine is left."""
    sizes = {"gpt": (4, 128, 4), "tiny gpt": (2, 16, 2)}
    return {
        name: gpt(layers=layers, width=width, heads=heads, context=CONTEXT, vocabulary=VOCABULARY)
        for name, (layers, width, heads) in sizes.items()
    }


def measure(name: str, model: Model, schedule: str, steps: int) -> Row:
    """One model under one schedule on two ranks that take turns."""
    settings = settings_for(schedule, 2, MICROBATCHES, BATCH)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
    plan = plan_for(settings, model, tokens, torch.float32)
    executors = [rank.trainer for rank in build_ranks(plan, model, dtype=torch.float32)]
    batch = microbatches_of(plan, model, tokens, tokens)
    actions = [action for row in plan.program.compute_only().rows for action in row]
    traced, plain = alternate(executors, batch, steps)
    return {
        "model": name,
        "schedule": schedule,
        "actions": len(actions),
        "step ms": 1e3 * plain,
        "us an action": 1e6 * trace_seconds(actions) / len(actions),
        "ratio": traced / plain,
        "share": trace_seconds(actions) / plain,
    }


def alternate(executors: Sequence[Executor], batch: Microbatches, steps: int) -> tuple[float, float]:
    """Median seconds of a traced step and of one that isn't."""
    clocks = [executor.clock for executor in executors]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * (steps + 1)):
        tracing = step % 2 == 0
        for executor, clock in zip(executors, clocks, strict=True):
            executor.clock = clock if tracing else None
        begin = perf_counter()
        for result in run(executors, [batch] * len(executors)):
            _ = result.events
        if step > 1:  # the first two warm up
            seconds[tracing].append(perf_counter() - begin)
    return median(seconds[True]), median(seconds[False])


def trace_seconds(actions: Sequence[Action], repeat: int = 200) -> float:
    """What one trace of these actions takes, its events read."""

    def once() -> None:
        trace = Trace(0, HostClock())
        for action in actions:
            trace.add(action, trace.mark())
        trace.events()

    return median(timed(once) for _ in range(repeat))


def timed(call: Callable[[], None]) -> float:
    """Seconds."""
    begin = perf_counter()
    call()
    return perf_counter() - begin


def table(rows: Sequence[Row]) -> str:
    """The rows, one a line."""
    lines = [f"{'model':10}{'schedule':10}{'actions':>9}{'step ms':>10}{'us an action':>14}{'ratio':>9}{'share':>10}"]
    lines += [
        f"{row['model']:10}{row['schedule']:10}{row['actions']:>9}{row['step ms']:>10.2f}{row['us an action']:>14.2f}"
        f"{row['ratio']:>9.4f}{100 * float(row['share']):>8.3f} %"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    steps = {"gpt": 8 if options.quick else 60, "tiny gpt": 40 if options.quick else 400}
    rows = [
        measure(name, model, schedule, steps[name])
        for name, model in models().items()
        for schedule in ("1f1b", "zb_h1")
    ]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
