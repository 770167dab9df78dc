"""Step time by `prefetch`, the receives that are posted ahead of their use: the measurement behind its default.

    python -m tests.benchmarks.prefetch [--quick] [--json FILE] [--model small] [--schedules 1f1b zbv]

The default run's GPT (conf/model/gpt.yaml is `small`), pp=2 over processes; one pair of processes holds a pipeline for
each value, and their steps alternate. `ratio` is the step of prefetch=0 / this one, the median over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipeline.training.launch import launch
from tests.benchmarks.alternation import Times, Work, alternate
from tests.benchmarks.cases import CASES, TORCH_CLASSES, Case, layer_seconds, plan_of, settings_of
from tests.benchmarks.table import Row, parser, publish

PP = 2
VALUES = (0, 1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")


def measure(case: Case, schedule: str, rounds: int, seconds: float) -> list[Row]:
    """A row for each value."""
    cut_by = layer_seconds(case)
    plans = {
        f"prefetch {value}": plan_of(case, settings_of(case, schedule, cut_by, PP, prefetch=value)) for value in VALUES
    }
    times: list[Times] = []
    launch(alternate, Work(case, plans, rounds, seconds, torch=False), PP, on_message=times.append)
    steps = [[max(ranks) for ranks in zip(*(time.seconds[name] for time in times), strict=True)] for name in plans]
    rows: list[Row] = []
    for value, found in zip(VALUES, steps, strict=True):
        ratio = statistics.median(none / this for none, this in zip(steps[0], found, strict=True))
        row: Row = {"model": case.name, "schedule": schedule, "prefetch": value}
        rows.append(row | {"seconds": statistics.median(found), "ratio": ratio})
    return rows


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, print, and write to the file asked for."""
    options_parser = parser(__doc__, quick="few rounds, about a minute")
    options_parser.add_argument("--model", choices=CASES, default="small")
    options_parser.add_argument("--schedules", nargs="+", choices=TORCH_CLASSES, default=SCHEDULES)
    options = options_parser.parse_args(arguments)
    rounds, seconds = (7, 10.0) if options.quick else (50, 60.0)
    rows = [row for name in options.schedules for row in measure(CASES[options.model], name, rounds, seconds)]
    publish(rows, options.json)
    return rows


if __name__ == "__main__":
    main()
