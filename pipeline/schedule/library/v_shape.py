"""Zero-bubble schedules of a V: two stages a rank, down the ranks and back up, so that the last stage is on rank 0.

A rank's two stages together hold the activations of a microbatch equally long on every rank, so that peaks are equal.
"""

from __future__ import annotations

from pipeline.schedule.actions import ActionType
from pipeline.schedule.library._building_block import Block, repeat_block
from pipeline.schedule.library._common import check_counts, numbered, v_placement
from pipeline.schedule.schedule import Row, Schedule


def zbv(pp: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al., arXiv 2401.10241, section 6), any number of microbatches.

    For F=I=W and m >= 2p-1 no rank idles between its first and its last action and the makespan is 2m(F+I+W) + (p-1)F
    in the times of one stage, with 2p stage inputs in flight on every rank: the memory of 1F1B's first rank. ValueError
    unless both counts are 1 or more.
    """
    check_counts(pp, microbatches)
    rows = tuple(_zbv_row(rank, pp, microbatches) for rank in range(pp))
    return Schedule("zbv", rows, v_placement(pp), microbatches)


def v_half(pp: int, microbatches: int) -> Schedule:
    """V-Half (Qi et al., arXiv 2405.15362): half of 1F1B's memory, at about half of its idle time.

    In flight on a rank: at most 2 floor((p+2)/2) stage inputs. Any number of microbatches. ValueError unless both
    counts are 1 or more.
    """
    check_counts(pp, microbatches)
    wait = 0 if pp % 2 else 3
    block = [
        (2 * rank, 3 * pp - 2 - rank, 3 * pp - 1 + wait + 2 * rank, 6 * pp - 2 + wait - rank) for rank in range(pp)
    ]
    return _of_block("v_half", block, microbatches)


def v_min(pp: int, microbatches: int) -> Schedule:
    """V-Min (Qi et al., arXiv 2405.15362): a third of 1F1B's memory, the least at which the block runs at full speed.

    In flight on a rank: at most 2 floor((p+4)/3) stage inputs. Any number of microbatches. ValueError unless both
    counts are 1 or more.
    """
    check_counts(pp, microbatches)
    wait = 0 if pp % 3 else 2
    block = [(rank, 2 * pp - 1 - rank, 2 * pp + wait + rank, 4 * pp - 1 + wait - rank) for rank in range(pp)]
    return _of_block("v_min", block, microbatches)


def _of_block(name: str, block: Block, microbatches: int) -> Schedule:
    return Schedule(name, repeat_block(block, microbatches), v_placement(len(block)), microbatches)


def _zbv_row(rank: int, pp: int, microbatches: int) -> Row:
    """The row for the 2p-1 microbatches or more that fill the pipeline, without those that are too many."""
    down, up = rank, 2 * pp - 1 - rank
    forward, for_input, for_weight = ((kind, down) for kind in (ActionType.F, ActionType.I, ActionType.W))
    forward_up, for_input_up, for_weight_up = ((kind, up) for kind in (ActionType.F, ActionType.I, ActionType.W))
    full = max(2 * pp - 1, microbatches)
    hops = pp - 1 - rank
    turns = [
        *[forward] * (2 * hops + 1),
        *[forward_up, forward] * rank,
        *[forward_up, for_input_up, for_weight_up] * (hops + 1),
        *[forward, for_input, for_weight, forward_up, for_input_up, for_weight_up] * (full - pp - hops),
        *[for_input, for_weight, forward_up, for_input_up, for_weight_up] * hops,
        *[for_input, for_input_up] * rank,
        *[for_input, for_weight] * (hops + 1),
        *[for_weight_up] * rank,
        *[for_weight] * rank,
    ]
    return tuple(action for action in numbered(turns) if action.microbatch < microbatches)
