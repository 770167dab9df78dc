"""What an engine takes for itself: microseconds a step action when the stages do next to nothing.

    python -m tests.benchmarks.overhead [--quick] [--json FILE]

A stage is one multiplication of a tensor of one number. Columns, each the median step divided by the number of F and B
(I, W) of all ranks:

    in_process_us  ours, all ranks taking turns in one process: the loop and a message that is the tensor itself
    us             ours, a process a rank, messages as a run between processes carries them
    torch_us       torch.distributed.pipelining in the same processes, steps in turn
    plain_us       the same stages' passes in a loop without an engine: part of each of the others
    ratio          torch_us / us
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from pipeline.engine.executor import run
from pipeline.engine.stage import Placement
from pipeline.engine.transport import InProcessTransport
from pipeline.training.launch import launch
from pipeline.training.plan import Plan
from tests.benchmarks.alternation import ALONE, Times, Work, alternate
from tests.benchmarks.cases import EMPTY, TORCH_CLASSES, Case, plan_of, settings_of
from tests.benchmarks.engines import FP32_ON_CPU, Ours, clear
from tests.benchmarks.table import Row, parser, publish

PP = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb")
ROUNDS = 200
QUICK_ROUNDS = 40


def measure(case: Case, schedule: str, rounds: int) -> Row:
    """One schedule's row."""
    plan = plan_of(case, settings_of(case, schedule, [1.0] * len(case.build().layers), PP))
    actions = sum(map(len, plan.schedule.rows))
    times: list[Times] = []
    launch(alternate, Work(case, {schedule: plan}, rounds, seconds=60.0), PP, on_message=times.append)
    ours, theirs = (_slower(times, name) for name in (schedule, f"torch {schedule}"))
    alone = statistics.median(times[0].seconds[ALONE])
    return {
        "schedule": schedule,
        "torch": TORCH_CLASSES[schedule].__name__.removeprefix("Schedule"),
        "actions": actions,
        "in_process_us": 1e6 * in_process(case, plan, rounds) / actions,
        "us": 1e6 * ours / actions,
        "torch_us": 1e6 * theirs / actions,
        "plain_us": 1e6 * alone / actions,
        "ratio": theirs / ours,
    }


def _slower(times: Sequence[Times], engine: str) -> float:
    """The median round, each as long as its slower rank's."""
    return statistics.median(map(max, zip(*(time.seconds[engine] for time in times), strict=True)))


def in_process(case: Case, plan: Plan, rounds: int, where: Placement = FP32_ON_CPU) -> float:
    """Seconds of the median step of all ranks in this process."""
    transport = InProcessTransport()
    ranks = [Ours(case, plan, rank, transport, where) for rank in range(plan.schedule.pp)]
    executors, batches = [rank.executor for rank in ranks], [rank.batch for rank in ranks]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run(executors, batches)
    seconds = []
    for _ in range(rounds):
        for rank in ranks:
            clear(rank)
        start = now(where.device)
        run(executors, batches)
        seconds.append(now(where.device) - start)
    torch.set_num_threads(threads)
    return statistics.median(seconds)


def now(device: torch.device) -> float:
    """Seconds, once all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, print, and write to the file asked for."""
    options = parser(__doc__, quick=f"{QUICK_ROUNDS} rounds, half a minute").parse_args(arguments)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    rows = [measure(EMPTY, schedule, rounds) for schedule in SCHEDULES]
    publish(rows, options.json)
    return rows


if __name__ == "__main__":
    main()
