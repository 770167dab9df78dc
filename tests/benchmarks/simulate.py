"""How long schedules take to write, lower, simulate and prove, and that it grows with the number of actions alone.

    python -m tests.benchmarks.simulate [--quick] [--json FILE]

Prints a table: seconds of processor time for each step, and microseconds an action for the whole. The full run goes up
to 64 ranks x 1,024 microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time
from typing import TypeVar

from pipeline.schedule.costs import Costs
from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import Footprint
from pipeline.schedule.simulate import simulate
from pipeline.schedule.validate import validate
from tests.benchmarks.table import Row, parser, publish

SCHEDULES = ("1f1b", "interleaved_1f1b", "zbv")
SIZES = ((8, 64), (16, 256), (64, 256), (64, 1024))
QUICK = ((8, 32), (8, 128), (8, 512))
COSTS = Costs(transfer=0.1)
FOOTPRINT = Footprint(activation=1.0, boundary=0.1)

Result = TypeVar("Result")


def measure(name: str, pp: int, microbatches: int) -> Row:
    """The seconds that each step takes for one schedule."""
    seconds: dict[str, float] = {}

    def timed(step: str, run: Callable[[], Result]) -> Result:
        start = process_time()
        result = run()
        seconds[step] = process_time() - start
        return result

    schedule = timed("write", lambda: write(name, pp, microbatches))
    simulation = timed("simulate", lambda: simulate(schedule, COSTS))
    timed("idle", lambda: simulation.idle)
    timed("bytes", lambda: simulation.peak_bytes(FOOTPRINT))
    program = timed("lower", lambda: lower(schedule))
    timed("simulate lowered", lambda: simulate(program, COSTS))
    timed("validate lowered", lambda: validate(program))
    actions = sum(map(len, schedule.rows))
    row: Row = {"schedule": name, "pp": pp, "microbatches": microbatches, "actions": actions}
    row |= {"lowered actions": sum(map(len, program.rows)), **seconds}
    row["us an action"] = 1e6 * sum(seconds.values()) / actions
    return row


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, print, and write to the file asked for."""
    options = parser(__doc__, quick="small sizes, a few seconds").parse_args(arguments)
    sizes = QUICK if options.quick else SIZES
    rows = [measure(name, pp, microbatches) for name in SCHEDULES for pp, microbatches in sizes]
    publish(rows, options.json)
    return rows


if __name__ == "__main__":
    main()
