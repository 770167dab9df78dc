"""Proves a schedule before anything runs it: placement, completeness, order, communication, progress, memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.schedule.actions import NO_MICROBATCH, Action, ActionType
from pipeline.schedule.costs import Costs
from pipeline.schedule.errors import Place, ScheduleError, schedule_error
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import in_flight, peak_in_flight
from pipeline.schedule.schedule import Communicator, Schedule, message, one_a_channel
from pipeline.schedule.simulate import simulate

__all__ = ["ScheduleError", "validate"]

F, B, I, W, R = ActionType.F, ActionType.B, ActionType.I, ActionType.W, ActionType.R  # noqa: E741
REDUCE_GRAD = ActionType.REDUCE_GRAD

Key = tuple[ActionType, int, int]
"""An action as type, stage and microbatch: cheaper to make than an Action, and there are hundreds of thousands."""

Places = dict[Key, Place]
"""Where each action stands."""


def validate(
    schedule: Schedule,
    *,
    memory_cap: Sequence[int] | None = None,
    prefetch: Iterable[int] = (),
    communicator: Communicator = one_a_channel,
) -> None:
    """Raise ScheduleError unless `schedule`, compute-only or lowered, does every step's work and finishes.

    Linear in the number of actions.

    Args:
        schedule: a lowered one is proven as it stands: each message is sent and received, a communicator's n-th
            receive takes its n-th send whatever the tags say, and no rank waits forever when a send keeps its place on
            its communicator until the receive is posted.
        memory_cap: bounds each rank's activations in flight, in microbatch x stage, released at B or W.
        prefetch: windows of receives posted ahead (see `lower`) under which a compute-only schedule must finish, too.
        communicator: which communicator each channel uses; the engine's are one a channel.
    """
    _check_shape(schedule)
    places = _check_places(schedule)
    _check_complete(schedule, places)
    _check_order(schedule, places)
    _check_reductions(schedule, places)
    if schedule.is_lowered:
        _check_boundaries(schedule, places)
    if memory_cap is not None:
        _check_memory(schedule, memory_cap)
    # Finds deadlocks and crossed receives. Whether a schedule finishes doesn't depend on the costs.
    simulate(schedule, Costs(), communicator=communicator)
    for window in prefetch:
        if schedule.is_lowered:
            raise ValueError(f"schedule {schedule.name} holds sends and receives already: use compute_only() first")
        simulate(lower(schedule, prefetch=window), Costs(), communicator=communicator)


def _check_shape(schedule: Schedule) -> None:
    if schedule.microbatches < 1:
        raise schedule_error(f"microbatches is {schedule.microbatches}: use 1 or more", schedule)
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.pp:
            raise schedule_error(f"stage {stage} is on rank {rank}, but ranks are 0 to {schedule.pp - 1}", schedule)
    for rank in range(schedule.pp):
        if not schedule.stages_of(rank):
            raise schedule_error(f"rank {rank} holds no stage: give it one or use fewer ranks", schedule)


def _check_places(schedule: Schedule) -> Places:
    """Every action belongs where it stands, and stands there once."""
    places: Places = {}
    for rank, row in enumerate(schedule.rows):
        for at, action in ((at, part) for at, whole in enumerate(row) for part in whole.compute):
            problem = _misplaced(schedule, rank, action)
            if problem is not None:
                raise schedule_error(f"{action} {problem}", schedule, [(rank, at)])
            key = (action.type, action.stage, action.microbatch)
            if key in places:
                raise schedule_error(f"{action} appears twice on rank {rank}", schedule, [places[key], (rank, at)])
            places[key] = (rank, at)
    return places


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str | None:
    if not 0 <= action.stage < schedule.stages:
        return f"names stage {action.stage}, but stages are 0 to {schedule.stages - 1}"
    if action.type is not REDUCE_GRAD and not 0 <= action.microbatch < schedule.microbatches:
        return f"names microbatch {action.microbatch}, but microbatches are 0 to {schedule.microbatches - 1}"
    holder = schedule.stage_to_rank[action.stage]
    return None if holder == rank else f"is on rank {rank}, but stage {action.stage} is on rank {holder}"


def _check_complete(schedule: Schedule, places: Places) -> None:
    """Each stage runs each microbatch forward and, unless forward-only, backward: as B, or as I and W."""
    for stage, rank in enumerate(schedule.stage_to_rank):
        for microbatch in range(schedule.microbatches):
            found = [kind for kind in (F, R, B, I, W) if (kind, stage, microbatch) in places]
            problem = _forward_only_problem(found) if schedule.forward_only else _problem(found)
            if problem is not None:
                words = " ".join(str(Action(stage, kind, microbatch)) for kind in found) or "none of it"
                raise schedule_error(
                    f"rank {rank} must run stage {stage} on microbatch {microbatch} {problem}: its row has {words}",
                    schedule,
                    [places[kind, stage, microbatch] for kind in found],
                )


def _problem(found: list[ActionType]) -> str | None:
    if F not in found:
        return "forward, with one F"
    if [kind for kind in found if kind not in (F, R)] not in ([B], [I, W]):
        return "backward, with one B or with one I and one W"
    return None


def _forward_only_problem(found: list[ActionType]) -> str | None:
    return None if found == [F] else "forward only, with one F"


def _check_order(schedule: Schedule, places: Places) -> None:
    """What depends on an action of the same rank comes after it."""
    for (kind, stage, microbatch), place in places.items():
        for input_kind, offset in _INPUTS[kind]:
            other = places.get((input_kind, stage + offset, microbatch))
            if other is not None and other[0] == place[0] and other[1] >= place[1]:
                late, early = Action(stage + offset, input_kind, microbatch), Action(stage, kind, microbatch)
                where = "comes before" if other[1] > place[1] else "is overlapped with"
                raise schedule_error(
                    f"{early} {where} {late} on rank {place[0]}, but needs it", schedule, [place, other]
                )


_BACKWARD_INPUTS = ((F, 0), (R, 0), (B, 1), (I, 1), (ActionType.RECV_B, 0))

_INPUTS: Mapping[ActionType, tuple[tuple[ActionType, int], ...]] = {
    F: ((F, -1), (ActionType.RECV_F, 0)),
    R: ((F, 0),),
    B: _BACKWARD_INPUTS,
    I: _BACKWARD_INPUTS,
    W: ((I, 0),),
    ActionType.SEND_F: ((F, 0),),
    ActionType.SEND_B: ((B, 0), (I, 0)),
    ActionType.RECV_F: (),
    ActionType.RECV_B: (),
    REDUCE_GRAD: (),
}
"""What an action needs of those its own rank may hold, as type and offset of the stage, for the same microbatch."""


def _check_reductions(schedule: Schedule, places: Places) -> None:
    """Gradients are reduced, if the schedule reduces any, once in every stage, after all its backwards."""
    for (kind, stage, microbatch), place in places.items():
        reduced = places.get((REDUCE_GRAD, stage, NO_MICROBATCH))
        if kind in (B, I, W) and reduced is not None and reduced < place:
            early, late = Action(stage, REDUCE_GRAD, NO_MICROBATCH), Action(stage, kind, microbatch)
            raise schedule_error(
                f"{early} comes before {late} on rank {place[0]}, but needs it", schedule, [reduced, place]
            )
        if kind is REDUCE_GRAD and schedule.forward_only:
            early = Action(stage, kind, microbatch)
            raise schedule_error(f"{early} on rank {place[0]} has no gradient to reduce", schedule, [place])
    reductions = {stage: place for (kind, stage, _), place in places.items() if kind is REDUCE_GRAD}
    missing = [stage for stage in range(schedule.stages) if stage not in reductions]
    if reductions and missing:
        raise schedule_error(
            f"rank {schedule.stage_to_rank[missing[0]]} has no {Action(missing[0], REDUCE_GRAD, NO_MICROBATCH)}, but "
            f"other stages are reduced: reduce the gradients of every stage, or of none",
            schedule,
            reductions.values(),
        )


def _check_boundaries(schedule: Schedule, places: Places) -> None:
    """Each message between two ranks has its send and its receive, and nothing else is sent or received."""
    expected = dict.fromkeys(_communication(schedule))
    for kind, stage, microbatch in expected:
        if (kind, stage, microbatch) not in places:
            action = Action(stage, kind, microbatch)
            moved = message(action)
            owners = ((owner, stage, microbatch) for owner in ((F,) if moved.kind == "activation" else (B, I)))
            raise schedule_error(
                f"rank {schedule.stage_to_rank[stage]} has no {action}: the {moved.kind} of stage "
                f"{moved.source_stage}, microbatch {microbatch}, needs a send and a receive",
                schedule,
                [places[owner] for owner in owners if owner in places],
            )
    for (kind, stage, microbatch), place in places.items():
        if kind.is_communication and (kind, stage, microbatch) not in expected:
            action = Action(stage, kind, microbatch)
            raise schedule_error(f"{action} on rank {place[0]} crosses no boundary between ranks", schedule, [place])


def _communication(schedule: Schedule) -> Iterator[Key]:
    """Every send and receive that the placement asks for."""
    ranks = schedule.stage_to_rank
    for stage in range(schedule.stages - 1):
        if ranks[stage] == ranks[stage + 1]:
            continue
        for microbatch in range(schedule.microbatches):
            yield ActionType.SEND_F, stage, microbatch
            yield ActionType.RECV_F, stage + 1, microbatch
            if not schedule.forward_only:
                yield ActionType.SEND_B, stage + 1, microbatch
                yield ActionType.RECV_B, stage, microbatch


def _check_memory(schedule: Schedule, cap: Sequence[int]) -> None:
    if len(cap) != schedule.pp:
        raise ValueError(f"memory_cap has {len(cap)} entries for {schedule.pp} ranks: use one a rank")
    for rank, (peak, most) in enumerate(zip(peak_in_flight(schedule), cap, strict=True)):
        if peak > most:
            first = next(at for at, held in enumerate(in_flight(schedule, rank)) if held > most)
            raise schedule_error(
                f"rank {rank} holds up to {peak} activations (microbatch x stage), over its cap of {most}",
                schedule,
                [(rank, first)],
            )
