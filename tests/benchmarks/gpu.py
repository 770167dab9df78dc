"""One GPU, all ranks of every schedule in one process: right in bf16, memory as predicted, and what the engine takes.

    python -m tests.benchmarks.gpu [--quick] [--json FILE]

Without a GPU it prints one line and ends. A GPT under bf16 autocast, pp=4, beside a plain loop over its microbatches:

    error         the largest difference from the plain loop, in terms of the largest entry of each gradient
    slowdown      our step / the plain loop's, both with the GPU to themselves: the engine's part of a real step
    measured_mb   most bytes of activations that a rank held (counted by what autograd saves)
    predicted_mb  the simulator's, from the profiled stages; memory_ratio is measured / predicted, of the rank where
                  that is furthest from 1
    allocated_mb  what the GPU's allocator saw, all ranks together and workspaces included

Then microseconds an action with empty stages.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.engine.executor import run
from pipeline.engine.profile import profile_stages
from pipeline.engine.stage import Placement
from pipeline.engine.transport import InProcessTransport
from pipeline.schedule.library import SCHEDULES
from pipeline.schedule.simulate import simulate
from pipeline.training.measured_costs import to_costs
from pipeline.training.memory import peak_memory_bytes, reset_peak_memory
from pipeline.training.plan import Plan
from pipeline.training.precision import autocast, parameter_dtype
from pipeline.training.settings import PrecisionSettings, Settings
from tests.benchmarks.cases import EMPTY, Case, gpt_case, plan_of
from tests.benchmarks.engines import Alone, Ours, clear, error
from tests.benchmarks.overhead import in_process, now
from tests.benchmarks.table import Row, parser, table, write

PP = 4
BF16 = PrecisionSettings("bf16", "float32", "bfloat16")
OVERHEAD_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")
CASE = gpt_case("gpu", layers=8, width=1024, heads=16, context=512, batch_size=32)
TOLERANCE = 0.03
"""bf16 has 8 bits, and a split backward rounds a product and a sum in one."""


def placement_on(device: torch.device, precision: PrecisionSettings) -> Placement:
    """As a run with this precision places its stages."""
    return Placement(device, parameter_dtype(precision), autocast(precision, device.type), 0)


class Measured:
    """One schedule's ranks, in this process, beside the plain loop."""

    def __init__(self, case: Case, plan: Plan, where: Placement, alone: Alone) -> None:
        self._case, self._plan, self._where, self._alone = case, plan, where, alone
        transport = InProcessTransport()
        self._ranks = [Ours(case, plan, rank, transport, where) for rank in range(plan.schedule.pp)]

    def row(self, rounds: int) -> Row:
        """Everything but the overhead."""
        self._step()
        self._clear()
        measured, allocated = self._memory()
        found = max(error(rank, self._alone) for rank in self._ranks)
        predicted = self._predicted()
        ratios = [mine / theirs for mine, theirs in zip(measured, predicted, strict=True)]
        return {
            "schedule": self._plan.schedule.name,
            "error": found,
            "slowdown": self._slowdown(rounds),
            "measured_mb": max(measured) / 1e6,
            "predicted_mb": max(predicted) / 1e6,
            "memory_ratio": max(ratios, key=lambda ratio: abs(math.log(ratio))),
            "allocated_mb": allocated / 1e6,
        }

    def _step(self) -> None:
        results = run([rank.executor for rank in self._ranks], [rank.batch for rank in self._ranks])
        for rank, result in zip(self._ranks, results, strict=True):
            rank.loss = result.loss

    def _clear(self) -> None:
        for rank in self._ranks:
            clear(rank)

    def _memory(self) -> tuple[list[int], int]:
        """A step's peak of each rank's activations, and of the device above what it held before."""
        device = self._where.device
        for rank in self._ranks:
            rank.measure_activations(True)
        reset_peak_memory(device)
        before = peak_memory_bytes(device) or 0
        self._step()
        allocated = (peak_memory_bytes(device) or 0) - before
        measured = [rank.measure_activations(False) for rank in self._ranks]
        return [peak for peak in measured if peak is not None], allocated

    def _predicted(self) -> tuple[float, ...]:
        """The simulator's peak bytes of each rank, from each stage's profile."""
        inputs, targets = self._case.batch()
        size = self._plan.microbatch_sizes[0]
        model, counts = self._case.build(), self._plan.counts
        profiles = profile_stages(model, counts, self._where, inputs[:size], targets[:size], repeats=1)
        costs, footprint = to_costs(profiles, Settings())
        return simulate(self._plan.program, costs).peak_bytes(footprint)

    def _slowdown(self, rounds: int) -> float:
        """The median over rounds that alternate."""
        ratios = []
        for _ in range(rounds):
            start = now(self._where.device)
            self._step()
            middle = now(self._where.device)
            self._alone.step()
            ratios.append((middle - start) / (now(self._where.device) - middle))
        return statistics.median(ratios)


@dataclass(frozen=True)
class Setup:
    """What is measured, and where; a test of this file takes a small case to the CPU."""

    device: torch.device
    case: Case = CASE
    pp: int = PP
    schedules: tuple[str, ...] = tuple(SCHEDULES)


def measure(setup: Setup, rounds: int) -> list[Row]:
    """A row for each schedule."""
    where = placement_on(setup.device, BF16)
    alone = Alone(setup.case, where)
    rows = []
    for name in setup.schedules:
        clear(alone)
        alone.step()
        even = [1.0] * len(setup.case.build().layers)
        plan = plan_of(setup.case, name, even, setup.pp, setup.device, precision=BF16)
        rows.append(Measured(setup.case, plan, where, alone).row(rounds))
    return rows


def overhead(setup: Setup, rounds: int) -> list[Row]:
    """Microseconds an action with empty stages."""
    where = placement_on(setup.device, PrecisionSettings())
    rows: list[Row] = []
    for name in OVERHEAD_SCHEDULES:
        plan = plan_of(EMPTY, name, [1.0] * 4, 2, setup.device)
        actions = sum(map(len, plan.schedule.rows))
        rows.append(
            {"schedule": name, "actions": actions, "us": 1e6 * in_process(EMPTY, plan, rounds, where) / actions}
        )
    return rows


def main(arguments: Sequence[str] | None = None, setup: Setup | None = None) -> list[Row]:
    """Measure, print, and write to the file asked for.

    Raises:
        SystemExit: a gradient is wrong; what was measured is printed and written.
    """
    options = parser(__doc__, quick="fewer rounds").parse_args(arguments)
    if setup is None and not torch.cuda.is_available():
        print("gpu: this machine has none, nothing was measured")
        return []
    setup = setup or Setup(torch.device("cuda", 0))
    rounds = 3 if options.quick else 10
    rows = measure(setup, rounds)
    print(table(rows), flush=True)
    empty = overhead(setup, 10 * rounds)
    print(table(empty), flush=True)
    write([*rows, *empty], options.json)
    wrong = [str(row["schedule"]) for row in rows if not float(row["error"]) <= TOLERANCE]
    if wrong:
        raise SystemExit(f"gradients of {', '.join(wrong)} are off by more than {TOLERANCE}")
    return [*rows, *empty]


if __name__ == "__main__":
    main()
