"""One GPU, all ranks of every schedule in one process: right in bf16, memory as predicted, and what the engine takes.

    python -m tests.benchmarks.gpu [--quick] [--json FILE]

Without a GPU it prints one line and ends. A GPT under bf16 autocast, pp=4, beside a plain loop over its microbatches:

    error         the largest difference from the plain loop, in terms of the largest entry of each gradient
    slowdown      our step / the plain loop's, both with the GPU to themselves: the engine's part of a real step
    measured_mb   most bytes of activations that a rank held (counted by what autograd saves)
    predicted_mb  what the plan predicts from the order of the rows; memory_ratio is measured / predicted, of the rank
                  where that is furthest from 1
    allocated_mb  what the GPU's allocator saw, all ranks together and workspaces included

Then the same of compiled layers, with the seconds until the code was there, and microseconds an action with empty
stages.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.engine.compilation import Compiler
from pipeline.engine.executor import run
from pipeline.engine.footprint import measure_footprint
from pipeline.engine.stage import Placement
from pipeline.engine.transport import InProcessTransport
from pipeline.schedule.library import SCHEDULES
from pipeline.schedule.memory import peak_activation_bytes
from pipeline.training.memory import peak_memory_bytes, reset_peak_memory
from pipeline.training.placement import place
from pipeline.training.plan import Plan
from pipeline.training.settings import PrecisionSettings, Settings
from tests.benchmarks.cases import EMPTY, Case, gpt_case, plan_of, settings_of
from tests.benchmarks.engines import Alone, Ours, clear, error
from tests.benchmarks.overhead import in_process, now
from tests.benchmarks.table import Row, parser, table, write

PP = 4
BF16 = PrecisionSettings("bf16", "float32", "bfloat16")
COMPILED_SCHEDULES = ("1f1b", "zbv")
OVERHEAD_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")
CASE = gpt_case("gpu", layers=8, width=1024, heads=16, context=512, batch_size=32)
TOLERANCE = 0.05
"""bf16 has 8 bits; a split backward rounds a product and a sum in one, fused operators round less often."""


class Measured:
    """One schedule's ranks, in this process, beside the plain loop."""

    def __init__(self, case: Case, plan: Plan, where: Placement, alone: Alone) -> None:
        self._case, self._plan, self._where, self._alone = case, plan, where, alone
        transport = InProcessTransport()
        self._ranks = [Ours(case, plan, rank, transport, where) for rank in range(plan.schedule.pp)]

    def correctness(self) -> Row:
        """Its second step's gradients and loss beside the plain loop's."""
        self._step()
        self._clear()
        self._step()
        clear(self._alone)
        self._alone.step()
        return {"error": max(error(rank, self._alone) for rank in self._ranks)}

    def memory(self) -> Row:
        """Peaks of one step, gradients in place."""
        measured, allocated = self._peaks()
        predicted = self._predicted()
        ratios = [mine / theirs for mine, theirs in zip(measured, predicted, strict=True)]
        return {
            "measured_mb": max(measured) / 1e6,
            "predicted_mb": max(predicted) / 1e6,
            "memory_ratio": max(ratios, key=lambda ratio: abs(math.log(ratio))),
            "allocated_mb": allocated / 1e6,
        }

    def slowdown(self, rounds: int) -> float:
        """Our step / the plain loop's: the median over rounds that alternate."""
        ratios = []
        for _ in range(rounds):
            start = now(self._where.device)
            self._step()
            middle = now(self._where.device)
            self._alone.step()
            ratios.append((middle - start) / (now(self._where.device) - middle))
        return statistics.median(ratios)

    def _step(self) -> None:
        results = run([rank.executor for rank in self._ranks], [rank.batch for rank in self._ranks])
        for rank, result in zip(self._ranks, results, strict=True):
            rank.loss = result.loss

    def _clear(self) -> None:
        for rank in self._ranks:
            clear(rank)

    def _peaks(self) -> tuple[list[int], int]:
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
        """The peak bytes of each rank, from the stages on tensors without memory."""
        inputs, targets = self._case.batch()
        size = self._plan.microbatch_sizes[0]
        model, counts = self._case.build(), self._plan.counts
        footprint = measure_footprint(model, counts, self._where, inputs[:size], targets[:size])
        return peak_activation_bytes(self._plan.program, footprint)


@dataclass(frozen=True)
class Setup:
    """What is measured, and where; a test of this file takes a small case to the CPU."""

    device: torch.device
    case: Case = CASE
    pp: int = PP
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    compiler: Callable[[], Compiler] = Compiler

    def measured(self, schedule: str, alone: Alone, *, compiled: bool) -> Measured:
        """The schedule's ranks; the plain loop has done its step."""
        settings = settings_of(self.case, schedule, [1.0] * len(self.case.build().layers), self.pp, precision=BF16)
        where = place(settings, self.device)
        if compiled:
            where = replace(where, compiler=self.compiler())
        return Measured(self.case, plan_of(self.case, settings, self.device), where, alone)


def measure(setup: Setup, alone: Alone, rounds: int) -> list[Row]:
    """A row for each schedule."""
    rows = []
    for name in setup.schedules:
        measured = setup.measured(name, alone, compiled=False)
        rows.append({"schedule": name, **measured.correctness(), "slowdown": measured.slowdown(rounds)})
        rows[-1] |= measured.memory()
    return rows


def measure_compiled(setup: Setup, alone: Alone, rounds: int) -> list[Row]:
    """A row for each schedule, whole backwards and split ones."""
    rows = []
    for name in COMPILED_SCHEDULES:
        start = now(setup.device)
        measured = setup.measured(name, alone, compiled=True)
        row: Row = {"schedule": name, "compiled": 1, **measured.correctness()}
        row["compile_seconds"] = now(setup.device) - start
        rows.append(row | {"slowdown": measured.slowdown(rounds)})
    return rows


def overhead(setup: Setup, rounds: int) -> list[Row]:
    """Microseconds an action with empty stages."""
    rows: list[Row] = []
    for name in OVERHEAD_SCHEDULES:
        settings = settings_of(EMPTY, name, [1.0] * 4, 2)
        plan = plan_of(EMPTY, settings, setup.device)
        actions = sum(map(len, plan.schedule.rows))
        seconds = in_process(EMPTY, plan, rounds, place(settings, setup.device))
        rows.append({"schedule": name, "actions": actions, "us": 1e6 * seconds / actions})
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
    alone = Alone(setup.case, place(Settings(precision=BF16), setup.device))
    alone.step()
    tables = [measure(setup, alone, rounds), measure_compiled(setup, alone, rounds), overhead(setup, 10 * rounds)]
    for rows in tables:
        print(table(rows), flush=True)
    every = [row for rows in tables for row in rows]
    write(every, options.json)
    wrong = [str(row["schedule"]) for row in every if "error" in row and not float(row["error"]) <= TOLERANCE]
    if wrong:
        raise SystemExit(f"gradients of {', '.join(wrong)} are off by more than {TOLERANCE}")
    return every


if __name__ == "__main__":
    main()
