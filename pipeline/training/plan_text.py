"""The plan as people read it before a run: who holds what, the grid, and what the simulator promises."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pipeline.schedule.actions import ActionType
from pipeline.schedule.grid import grid
from pipeline.training.plan import Plan
from pipeline.training.progress import bytes_text, flops_text, percent_text

_LONGEST_GRID = 16
"""Ranks beyond which the grid says less than it takes room."""


def print_plan(plan: Plan, model: str, console: Console) -> None:
    """Print the stages, the grid and the predictions."""
    # no title of the table: rich pads one with spaces to the table's width
    title = f"{model}: {plan.parameters:,} parameters in {len(plan.layers)} layers"
    if plan.flops_per_step:
        title += f", {flops_text(plan.flops_per_step)} a step"
    console.print(title, highlight=False, markup=False)
    console.print(_stages(plan))
    console.print(f"partition  {plan.partition}", highlight=False, markup=False)
    if plan.schedule.pp <= _LONGEST_GRID:
        console.print(grid(plan.program, width=console.width), highlight=False, markup=False, no_wrap=True)
    console.print(_predictions(plan), highlight=False)


def _stages(plan: Plan) -> Table:
    table = Table()
    for name in ("stage", "rank", "layers", "parameters", "FLOPs"):
        table.add_column(name, justify="right" if name in ("parameters", "FLOPs") else "left")
    for stage, rank in enumerate(plan.schedule.stage_to_rank):
        names = [plan.layers[index].name for index in plan.layers_of(stage)]
        span = ", ".join(names) if len(names) < 2 else f"{names[0]} .. {names[-1]} ({len(names)})"
        table.add_row(
            str(stage), str(rank), span, f"{plan.stage_parameters(stage):,}", percent_text(plan.stage_flops(stage))
        )
    return table


def _predictions(plan: Plan) -> str:
    """The simulator's numbers under nominal costs, and what each rank holds in flight; lines of under 80 columns."""
    predicted = plan.predicted
    per_rank = plan.schedule.stages // plan.schedule.pp
    unit = "microbatches" if per_rank == 1 else f"microbatches x stages ({per_rank} stages a rank)"
    sizes = sorted(set(plan.microbatch_sizes), reverse=True)
    samples = f"{' or '.join(map(str, sizes))} {'sample' if sizes == [1] else 'samples'}"
    recomputing = any(action.type is ActionType.R for row in plan.program.rows for action in row)
    costs = f"F=1, B=2, R={_recomputed(plan)}" if recomputing else "F=1, B=2"
    return (
        f"{_replicas(plan)}{plan.schedule.microbatches} microbatches of {samples}\n"
        f"predicted with {costs} a rank and no transfer: makespan {predicted.makespan:g}\n"
        f"predicted bubbles: makespan {100 * predicted.makespan_bubble:.1f} %, "
        f"span {100 * predicted.span_bubble:.1f} %\n"
        f"in flight at most, by rank: {', '.join(map(str, predicted.peak_in_flight))} {unit}{_bytes(plan)}"
    )


def _replicas(plan: Plan) -> str:
    return "" if plan.dp == 1 else f"{plan.dp} replicas of these ranks, numbered on, each with\n"


def _recomputed(plan: Plan) -> str:
    """R as a part of F: one number, or the least and the most of a stage."""
    parts = [f"{plan.recomputed.share(count):.2g}" for count in plan.counts]
    least, most = min(parts, key=float), max(parts, key=float)
    return least if least == most else f"{least}-{most}"


def _bytes(plan: Plan) -> str:
    if plan.peak_activation_bytes is None:
        return ""
    return (
        f"\nactivations at most, by rank: {', '.join(map(bytes_text, plan.peak_activation_bytes[: plan.schedule.pp]))}"
    )
