"""DualPipeV: DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe) cut in half."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library._common import check_counts, numbered, v_placement
from pipeline.schedule.schedule import Row, Schedule

F, B, I, W = ActionType.F, ActionType.B, ActionType.I, ActionType.W  # noqa: E741


def dualpipe_v(pp: int, microbatches: int) -> Schedule:
    """A V of two stages a rank whose steady phase runs a forward and a full backward as one overlapped action.

    Makespan 2m(F+I+W) + (p-1)(F + 2B - 3W) in the times of one stage, for F=I=W and a pair that takes F+B, with 2p+1
    stage inputs in flight. ValueError unless both counts are 1 or more and there are 2p microbatches or more.
    """
    check_counts(pp, microbatches)
    if microbatches < 2 * pp:
        fewer_ranks = f", or pp={microbatches // 2}" if microbatches > 1 else ""
        raise ValueError(
            f"dualpipe_v needs microbatches ({microbatches}) to be at least 2 x pp ({2 * pp}): "
            f"use {2 * pp} or more{fewer_ranks}"
        )
    rows = tuple(_row(rank, pp, microbatches) for rank in range(pp))
    return Schedule("dualpipe_v", rows, v_placement(pp), microbatches)


def _row(rank: int, pp: int, microbatches: int) -> Row:
    """DeepSeek's order in its eight steps, a line each but for the last two."""
    down, up = rank, 2 * pp - 1 - rank
    forward, backward, for_input = ((kind, down) for kind in (F, B, I))
    forward_up, backward_up, for_input_up, for_weight_up = ((kind, up) for kind in (F, B, I, W))
    hops = pp - 1 - rank
    warmup = [
        *[forward] * (2 * hops),
        *[forward, forward_up] * (rank + 1),
        *[for_input_up, for_weight_up, forward_up] * hops,
    ]
    steady = [
        *[forward, backward_up, forward_up, backward] * (microbatches - 2 * pp + rank + 1),
        *[backward_up, forward_up, backward] * hops,
    ]
    # Of the backwards that no forward is left for, the second half is split.
    full, split = [backward_up, backward] * (rank + 1), [for_input_up, for_input] * (rank + 1)
    inputs = [*split[rank + 1 :], *[for_input] * hops]
    weights = [(W, stage) for _, stage in inputs]
    cooldown = [
        *full[: rank + 1],
        *inputs[: rank + 1],
        *chain.from_iterable(zip(weights[:hops], inputs[rank + 1 :], strict=True)),
        *weights[hops:],
    ]
    # The last rank's first forward stays alone: the ranks before wait for its output.
    alone = len(warmup) + (hops == 0)
    return _overlapped(numbered([*warmup, *steady, *cooldown]), alone)


def _overlapped(actions: Sequence[Action], start: int) -> Row:
    """From `start` on every F with the B directly after it."""
    row = list(actions[:start])
    for action in actions[start:]:
        if action.type is B and len(row) > start and row[-1].type is F:
            row[-1] = Action.overlap(row[-1], action)
        else:
            row.append(action)
    return tuple(row)
