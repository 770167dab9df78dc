"""The loop: one rank's program, action by action. It decides nothing; the schedule did."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import le

import torch
from torch import Tensor

from pipeline.engine.activations import ActivationMeter
from pipeline.engine.boundary import Boundary, TensorSpec, in_words, specs_of
from pipeline.engine.casts import casts_kept_for_a_step, graph_kept
from pipeline.engine.nest import Nest, flat, mapped
from pipeline.engine.passes import Gradients, Pass, Run
from pipeline.engine.stage import Stage
from pipeline.engine.standing import Activity, Board, Marker
from pipeline.engine.trace import Clock, NoTrace, Trace, clock_for
from pipeline.engine.transport import Receive, Transport
from pipeline.engine.weight_gradient import WeightGradients
from pipeline.engine.wiring import Transfer, wires
from pipeline.schedule.actions import NO_MICROBATCH, Action, ActionType
from pipeline.schedule.grid import grid
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Event

Tensors = tuple[Tensor, ...]


class ActionError(RuntimeError):
    """An action failed: where, with the schedule's grid around it. The cause is chained."""


@dataclass(frozen=True)
class Microbatches:
    """One step's batch as this rank needs it: the microbatches' sizes, and the tensors of the end stages it holds.

    A microbatch of size 0 is one of a short batch: nothing is done for it.
    Inputs and targets of a microbatch are a tensor, or a nest of tensors whose first dimension is the samples.
    `first` is the number of the first one among those of all replicas; `weight` is the whole batch's.
    """

    step: int
    sizes: tuple[int, ...]
    inputs: tuple[Nest, ...] | None
    targets: tuple[Nest, ...] | None
    weight: float
    loss_scale: float = 1.0
    first: int = 0
    kinds: tuple[Hashable, ...] | None = None
    """What microbatches of one shape have in common, where the size doesn't tell it. None: it does."""

    def __len__(self) -> int:
        return len(self.sizes)

    def part(self, piece: slice) -> Microbatches:
        """Some of the microbatches, with their numbers and the weight of all."""
        return replace(
            self,
            sizes=self.sizes[piece],
            inputs=self.inputs and self.inputs[piece],
            targets=self.targets and self.targets[piece],
            first=self.first + piece.start,
            kinds=self.kinds and self.kinds[piece],
        )


@dataclass
class StepState:
    """Everything a step knows. Born in `Executor.program`, gone with it."""

    batch: Microbatches
    trace: Trace
    boundaries: Sequence[Sequence[Boundary]] = ()
    """For each microbatch what every stage receives; nothing for an empty one."""
    passes: dict[tuple[int, int], Pass] = field(default_factory=dict)
    weights: dict[tuple[int, int], WeightGradients] = field(default_factory=dict)
    handover: dict[Hashable, Tensors] = field(default_factory=dict)
    receives: dict[Hashable, tuple[Receive, ...]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """What a rank knows of a finished step."""

    losses: Mapping[int, Tensor]
    """By microbatch, what the last stage gave: its share of the loss, or what was read in its place."""
    trace: Trace

    @property
    def loss(self) -> Tensor | None:
        """The batch's loss, summed in microbatch order; None where the last stage is elsewhere."""
        if not self.losses:
            return None
        return torch.stack([self.losses[microbatch] for microbatch in sorted(self.losses)]).sum()

    @property
    def events(self) -> tuple[Event, ...]:
        """The compute actions' spans; waits for a GPU that is still at them."""
        return self.trace.events()


class Executor:
    """Runs one rank's row of a lowered schedule.

    Args:
        rank: of all replicas' ranks: it runs row `rank % pp`, and its messages stay in replica `rank // pp`.
        schedule: the complete program of all ranks: compute, recomputation and communication.
        stages: the rank's stages by index.
        boundaries: for each kind of microbatch what every stage receives (`pipeline.engine.boundary.boundaries`).
        transport: moves messages; the other ranks' executors must use its other ends.
        marker: moved with every action, so that others can see where this rank stands.
        reduce: begins to sum a stage's gradients over the replicas, if there are several.
    """

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        boundaries: Mapping[Hashable, Sequence[Boundary]],
        transport: Transport,
        marker: Marker | None = None,
        reduce: Callable[[int], None] | None = None,
    ) -> None:
        self.rank = rank
        self.schedule = schedule
        self.stages = stages
        self.boundaries = boundaries
        self._transport = transport
        self._marker = marker or Board.in_memory(1).marker(0)
        self._place = rank % schedule.pp
        self._row = schedule.rows[self._place]
        self._wires = wires(schedule, rank)
        self._device = next(iter(stages.values())).placement.device
        self._recomputed = {(a.stage, a.microbatch) for a in self._row if a.type is ActionType.R}
        self._split = {(a.stage, a.microbatch) for a in self._row if a.type is ActionType.W}
        split = {stage for stage, _ in self._split}
        for index, stage in stages.items():
            if index in split:
                stage.split_backward()
            elif not schedule.forward_only:
                stage.whole_backward()
        self._handlers = {
            ActionType.F: self._evaluate if schedule.forward_only else self._forward,
            ActionType.R: self._recompute,
            ActionType.B: self._backward,
            ActionType.I: self._backward,
            ActionType.W: self._backward_weight,
            ActionType.OVERLAP_F_B: self._overlapped,
            ActionType.REDUCE_GRAD: self._reduce,
            ActionType.SEND_F: self._send,
            ActionType.SEND_B: self._send,
            ActionType.RECV_F: self._post_receive,
            ActionType.RECV_B: self._post_receive,
        }
        self.reduce = reduce or nothing_to_reduce
        self.meter: ActivationMeter | None = None
        self.clock: Clock | None = clock_for(self._device)  # None: nothing is traced
        self.position = 0
        self.completed = 0

    def program(self, batch: Microbatches) -> Generator[Action, None, StepResult]:
        """Run one step. Yields the action at hand whenever its message has not arrived and the transport can't block.

        The generator's return value is the `StepResult`.

        Raises:
            ActionError: an action failed; the cause is chained.
        """
        with casts_kept_for_a_step(), self._metering(batch):
            return (yield from self._program(batch))

    def _program(self, batch: Microbatches) -> Generator[Action, None, StepResult]:
        trace = NoTrace() if self.clock is None else Trace(self.rank, self.clock)
        state = StepState(batch, trace, [self.boundaries.get(kind, ()) for kind in batch.kinds or batch.sizes])
        self._begin()
        self._marker.begin(Activity.EVALUATING if self.schedule.forward_only else Activity.TRAINING, batch.step)
        for position, action in self._actions(batch):
            self.position = position
            awaited = self._awaited(action, state)
            self._marker.move(position, waiting=bool(awaited))
            while not all(receive.arrived() for receives in awaited.values() for receive in receives):
                yield action
            try:
                self._run(action, state, awaited)
            except Exception as error:
                raise ActionError(self._describe(action, batch.step + 1, error)) from error
            self._transport.progress()
            self.completed += 1
        self._marker.move(len(self._row), waiting=True)
        while not self._transport.finish_step():
            yield action
        self.completed += 1
        return StepResult(state.losses, state.trace)

    def _actions(self, batch: Microbatches) -> Iterable[tuple[int, Action]]:
        """What the row has to be done for this batch, with the positions."""
        if all(batch.sizes):
            return enumerate(self._row)
        return [
            (position, part)
            for position, action in enumerate(self._row)
            for part in _without_empty(action, batch.sizes)
        ]

    def _run(self, action: Action, state: StepState, awaited: Mapping[Hashable, tuple[Receive, ...]]) -> None:
        if not action.type.is_compute:
            self._handlers[action.type](state, action)
            return
        for needed, receives in awaited.items():
            state.handover[needed] = tuple([receive.wait() for receive in receives])
        if awaited:
            self._marker.move(self.position)
        start = state.trace.mark()
        self._handlers[action.type](state, action)
        state.trace.add(action, start)

    def _awaited(self, action: Action, state: StepState) -> dict[Hashable, tuple[Receive, ...]]:
        """The posted receives that bring what `action` takes."""
        return {moved: state.receives.pop(moved) for moved in self._wires[action].awaits}

    # Compute

    def _forward(self, state: StepState, action: Action) -> None:
        key = action.stage, action.microbatch
        passed = Pass(
            self.stages[action.stage],
            self._take_inputs(state, action),
            recomputed=key in self._recomputed,
            weights=self._deferred(action),
            meter=self.meter,
        )
        state.passes[key] = passed
        self._hand_on(state, action, passed.forward(self._run_of(state, action)))

    def _evaluate(self, state: StepState, action: Action) -> None:
        run = self._run_of(state, action)
        with graph_kept(False):
            output = run(self._take_inputs(state, action))
        self._hand_on(state, action, output)

    def _recompute(self, state: StepState, action: Action) -> None:
        state.passes[action.stage, action.microbatch].recompute(self._run_of(state, action))

    def _backward(self, state: StepState, action: Action) -> None:
        """B, and I: the same pass, for I has left the weights' gradients of plain modules to W."""
        passed = state.passes.pop((action.stage, action.microbatch))
        gradients = passed.backward(self._take_gradients(state, action, passed.surely_trained()))
        self._hand_back(state, action, gradients, passed.inputs)
        if passed.weights is not None:
            state.weights[action.stage, action.microbatch] = passed.weights

    def _backward_weight(self, state: StepState, action: Action) -> None:
        state.weights.pop((action.stage, action.microbatch)).apply()

    def _overlapped(self, state: StepState, action: Action) -> None:
        """Both parts, one after the other; under `release="each"` the forward's output leaves between them."""
        for part in action.parts:
            self._handlers[part.type](state, part)
            send = Action(part.stage, ActionType.SEND_F, part.microbatch)
            if self.schedule.release == "each" and part.type is ActionType.F and send in self._wires:
                self._send(state, send)

    def _reduce(self, state: StepState, action: Action) -> None:
        self.reduce(action.stage)

    def _deferred(self, action: Action) -> WeightGradients | None:
        if (action.stage, action.microbatch) not in self._split:
            return None
        return WeightGradients(None if self.meter is None else self.meter.hold)

    def _run_of(self, state: StepState, action: Action) -> Run:
        """The stage's forward on the action's microbatch."""
        stage, batch = self.stages[action.stage], state.batch
        targets = None
        if stage.loss is not None:
            assert batch.targets is not None, "the last stage's rank loads the targets"
            targets = mapped(lambda tensor: tensor.to(self._device), batch.targets[action.microbatch])
        number = batch.first + action.microbatch
        return partial(stage.forward, targets=targets, weight=batch.weight, step=batch.step, microbatch=number)

    # What goes in and out of a pass

    def _take_inputs(self, state: StepState, action: Action) -> Nest:
        if self.stages[action.stage].first:
            assert state.batch.inputs is not None, "the first stage's rank loads the inputs"
            inputs: Nest = mapped(self.stages[0].placement.loaded, state.batch.inputs[action.microbatch])
            return inputs
        boundary = self._boundary(state, action.stage, action.microbatch)
        tensors = state.handover.pop(self._wires[action].takes)
        return boundary.value(tensors) if self.schedule.forward_only else boundary.leaves(tensors)

    def _hand_on(self, state: StepState, action: Action, output: Nest) -> None:
        tensors = flat(output)
        if self.stages[action.stage].loss is not None:
            (state.losses[action.microbatch],) = tensors
            return
        self._check(tensors, self._boundary(state, action.stage + 1, action.microbatch).tensors, action)
        state.handover[self._wires[action].makes] = tensors

    def _take_gradients(self, state: StepState, action: Action, trained: tuple[bool, ...]) -> Gradients:
        if self.stages[action.stage].loss is not None:
            return [state.losses[action.microbatch].new_full((), state.batch.loss_scale)]
        boundary = self._boundary(state, action.stage + 1, action.microbatch)
        if trained != boundary.trained and not all(map(le, trained, boundary.trained)):
            raise ValueError(
                f"stage {action.stage} trains now and was frozen when the run was planned: unfreeze layers before, or "
                "plan again"
            )
        return boundary.spread(state.handover.pop(self._wires[action].takes))

    def _hand_back(self, state: StepState, action: Action, gradients: Gradients, inputs: Nest) -> None:
        if not self.stages[action.stage].first:
            boundary = self._boundary(state, action.stage, action.microbatch)
            given = boundary.returned(gradients, flat(inputs))
            self._check(given, boundary.gradients, action)
            state.handover[self._wires[action].makes] = given

    # Communication

    def _send(self, state: StepState, action: Action) -> None:
        transfer = self._transfer(action)
        tensors = state.handover.pop(transfer.message, ())  # none if it left in the middle of an overlapped pair
        boundary = self._boundary(state, transfer.stage, action.microbatch)
        for tensor in boundary.outgoing(transfer.channel.kind, tensors):
            self._transport.send(transfer.channel, transfer.message, tensor)

    def _post_receive(self, state: StepState, action: Action) -> None:
        transfer = self._transfer(action)
        specs = self._boundary(state, transfer.stage, action.microbatch).message(transfer.channel.kind)
        state.receives[transfer.message] = tuple(
            [self._transport.receive(transfer.channel, transfer.message, spec) for spec in specs]
        )

    def _transfer(self, action: Action) -> Transfer:
        transfer = self._wires[action].transfer
        assert transfer is not None, "a send or a receive"
        return transfer

    # Small things

    def _boundary(self, state: StepState, stage: int, microbatch: int) -> Boundary:
        return state.boundaries[microbatch][stage]

    def _check(self, tensors: Tensors, expected: tuple[TensorSpec, ...], action: Action) -> None:
        if len(tensors) != len(expected) or not all(map(TensorSpec.fits, expected, tensors)):
            found = in_words(specs_of(tensors))
            raise TypeError(f"stage {action.stage} made {found} for its neighbor, which expects {in_words(expected)}")

    @contextmanager
    def in_mode(self) -> Iterator[None]:
        """While open, the layers are in evaluation mode if that is what the program is for."""
        with ExitStack() as stack:
            if self.schedule.forward_only:
                for stage in self.stages.values():
                    stack.enter_context(stage.evaluating())
            yield

    def _begin(self) -> None:
        if not self.schedule.forward_only:
            for stage in self.stages.values():
                stage.begin_step()

    def commit(self) -> None:
        """Move what moves once a step; call it when no rank of this process can fail in the step any more."""
        if not self.schedule.forward_only:
            for stage in self.stages.values():
                stage.commit_step()

    def _metering(self, batch: Microbatches) -> AbstractContextManager[None]:
        given = flat((batch.inputs, batch.targets))
        return nullcontext() if self.meter is None else self.meter.excluding(given)

    def _describe(self, action: Action, step: int, error: Exception) -> str:
        first = self.rank - self._place
        marked = grid(self.schedule, mark={(self._place, self.position)}, width=160, first_rank=first)
        of = "" if action.microbatch == NO_MICROBATCH else f" (microbatch {action.microbatch})"
        return f"rank {self.rank} failed in {action}{of} of step {step}: {error}\n{marked}"


def nothing_to_reduce(stage: int) -> None:
    """A single replica's gradients are complete as they stand."""


def _without_empty(action: Action, sizes: Sequence[int]) -> tuple[Action, ...]:
    """What is left of an action where microbatches of size 0 have nothing to do: of a pair perhaps the other part."""
    if action.type is ActionType.REDUCE_GRAD:
        return (action,)
    left = tuple(part for part in action.compute if sizes[part.microbatch])
    return (action,) if left == action.compute else left


def run(
    executors: Sequence[Executor], batches: Sequence[Microbatches], settle: Callable[[], None] | None = None
) -> list[StepResult]:
    """Run one step of several ranks that share a process, taking turns whenever a message is missing.

    With one executor on a blocking transport this is a plain run to the end. `settle` is called when all are there and
    before what moves once a step is moved.

    Raises:
        RuntimeError: no rank can go on (a validated schedule can't do this).
    """
    with ExitStack() as stack:
        for executor in executors:
            stack.enter_context(executor.in_mode())
        results = _take_turns(executors, batches)
    if settle is not None:
        settle()
    for executor in executors:
        executor.commit()
    return [results[executor.rank] for executor in executors]


def _take_turns(executors: Sequence[Executor], batches: Sequence[Microbatches]) -> dict[int, StepResult]:
    programs = {executor.rank: executor.program(batch) for executor, batch in zip(executors, batches, strict=True)}
    results: dict[int, StepResult] = {}
    try:
        while programs:
            before = sum(executor.completed for executor in executors)
            for rank, program in list(programs.items()):
                try:
                    next(program)
                except StopIteration as stop:
                    results[rank] = stop.value
                    del programs[rank]
            if programs and before == sum(executor.completed for executor in executors):
                raise RuntimeError(f"ranks {sorted(programs)} wait for messages that nobody sends")
    finally:
        for program in programs.values():  # whose ranks wait for one that failed: the traceback would keep them alive
            program.close()
    return results
