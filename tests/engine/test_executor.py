from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from models.resnet import resnet
from pipeline.engine import casts
from pipeline.engine.executor import ActionError, Executor, Microbatches, StepResult, run
from pipeline.engine.trace import HostClock, Trace
from pipeline.engine.transport import InProcessTransport
from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from tests.engine.harness import (
    assert_equal_outcomes,
    build_ranks,
    microbatches_of,
    outcome,
    plain_loop,
    plan_for,
    plan_with,
    settings_for,
    step,
)
from tests.engine.samples import chain, images, linears, small_gpt, text, vectors


def written(name: str, placement: tuple[int, ...], microbatches: int, *rows: str) -> Schedule:
    return Schedule(name, tuple(tuple(map(Action.parse, row.split())) for row in rows), placement, microbatches)


ZERO_BUBBLE = written(
    "zero bubble by hand",
    (0, 1),
    4,
    "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3",
    "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3",
)
V_SHAPE = written(
    "a V by hand",
    (0, 1, 1, 0),
    3,
    "0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2",
    "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2",
)
SPLIT_V = written(
    "a V by hand with I and W",
    (0, 1, 1, 0),
    3,
    "0F0 0F1 3F0 3I0 0F2 3F1 3I1 3W0 0I0 3F2 3I2 3W1 0I1 0W0 0I2 3W2 0W2 0W1",
    "1F0 2F0 1F1 2F1 2I0 1I0 1F2 2F2 2I1 1I1 2W0 1W0 2I2 1I2 1W1 2W1 1W2 2W2",
)
ODD = written(
    "backwards in another order, one microbatch split",
    (0, 1),
    3,
    "0F0 0F1 0F2 0B2 0I0 0B1 0W0",
    "1F0 1F1 1F2 1B2 1I0 1W0 1B1",
)
ONE_RANK = written("one rank, I and W", (0, 0), 2, "0F0 1F0 1I0 0I0 0F1 1F1 0W0 1W0 1I1 1W1 0I1 0W1")
BY_HAND = [ZERO_BUBBLE, V_SHAPE, SPLIT_V, ODD, ONE_RANK]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", BY_HAND, ids=lambda schedule: schedule.name)
def test_any_valid_schedule_equals_the_whole_batch(schedule, checkpoint):
    # tied, so that in the V and on one rank the embedding and the head are one parameter
    model, (inputs, targets) = small_gpt(), text(7)
    plan = plan_with(schedule, model, inputs, checkpoint=checkpoint)
    ranks = build_ranks(plan, model)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    assert_equal_outcomes(outcome(plan, ranks, results), plain_loop(model, inputs, targets))


@pytest.mark.parametrize("schedule", [ZERO_BUBBLE, V_SHAPE], ids=lambda schedule: schedule.name)
def test_any_valid_schedule_runs_a_resnet(schedule):
    model, (inputs, targets) = resnet(depth=18, classes=10), images(8)
    plan = plan_with(schedule, model, inputs, checkpoint="except_last")
    ranks = build_ranks(plan, model)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    assert_equal_outcomes(outcome(plan, ranks, results), plain_loop(model, inputs, targets, schedule.microbatches))


def test_a_tied_pair_on_one_rank_is_one_parameter():
    model, (inputs, _) = small_gpt(), text(6)
    rank, other = build_ranks(plan_with(V_SHAPE, model, inputs), model)
    assert rank.parameters["head.projection.weight"] is rank.parameters["embedding.tokens.weight"]
    assert not other.parameters.keys() & model.tied.keys()


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.requires_grad_(False)


LINEAR = partial(nn.Linear, 4, 4)


@pytest.mark.parametrize("schedule", ["1f1b", "by hand"])
@pytest.mark.parametrize(
    "builds",
    [
        [Frozen, LINEAR, LINEAR, LINEAR],
        [Frozen, Frozen, LINEAR, LINEAR],
        [LINEAR, LINEAR, Frozen, LINEAR],
        [LINEAR, LINEAR, Frozen, Frozen],
        [nn.Identity, nn.Identity, LINEAR, LINEAR],
        [partial(nn.Embedding, 8, 4), LINEAR, nn.Identity, LINEAR],
        [nn.Identity, nn.Identity, partial(nn.Embedding, 8, 4), LINEAR],
    ],
    ids=["first layer", "first stage", "a layer", "last stage", "no parameters", "tokens", "tokens cross a boundary"],
)
def test_frozen_stages_and_stages_without_parameters(schedule, builds):
    model, (inputs, targets) = chain(builds), vectors(5)
    if any(isinstance(build, partial) and build.func is nn.Embedding for build in builds):
        inputs = targets + 3
    plan = (
        plan_for(settings_for("1f1b", 2, 4, 5), model, inputs)
        if schedule == "1f1b"
        else plan_with(ZERO_BUBBLE, model, inputs)
    )
    ranks = build_ranks(plan, model)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    assert_equal_outcomes(outcome(plan, ranks, results), plain_loop(model, inputs, targets))


class Twice(nn.Linear):
    """One weight at two places of one path."""

    def forward(self, x):
        return super().forward(super().forward(x).relu())


def test_a_split_backward_counts_a_weight_used_twice_twice():
    model, (inputs, targets) = chain([Twice_, Twice_]), vectors(4)
    plan = plan_with(ZERO_BUBBLE, model, inputs)
    ranks = build_ranks(plan, model)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    assert_equal_outcomes(outcome(plan, ranks, results), plain_loop(model, inputs, targets))


Twice_ = partial(Twice, 4, 4)


class Transposed(nn.Module):
    def forward(self, x):
        return x.repeat(1, 2)[:, ::2].t().contiguous().t()


def test_what_crosses_a_boundary_need_not_be_contiguous():
    model, (inputs, targets) = chain([LINEAR, Transposed, Transposed, LINEAR]), vectors(4)
    plan = plan_for(settings_for("1f1b", 2, 2, 4), model, inputs)
    ranks = build_ranks(plan, model)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    assert_equal_outcomes(outcome(plan, ranks, results), plain_loop(model, inputs, targets))


def test_ignored_targets_have_no_weight_wherever_they_are():
    """One microbatch has no valid target at all, another has few: the mean is over the batch's valid ones."""
    model, (inputs, targets) = small_gpt(), text(8)
    targets = targets.clone()
    targets[2:4], targets[5, 1:] = -100, -100
    plan = plan_for(settings_for("1f1b", 2, 4, 8), model, inputs)
    ranks = build_ranks(plan, model)
    results = step(ranks, microbatches_of(plan, model, inputs, targets))
    found = outcome(plan, ranks, results)
    assert torch.isfinite(found.loss)
    assert_equal_outcomes(found, plain_loop(model, inputs, targets))


def test_the_loss_is_summed_in_microbatch_order():
    """Whatever the order of the schedule: bit for bit the same number."""
    model, (inputs, targets) = small_gpt(), text(7)
    losses = set()
    for schedule in (ZERO_BUBBLE, written("all forward first", (0,), 4, "0F3 0F1 0F0 0F2 0B0 0B1 0B2 0B3")):
        plan = plan_with(schedule, model, inputs, dtype=torch.float32)
        results = step(build_ranks(plan, model, dtype=torch.float32), microbatches_of(plan, model, inputs, targets))
        losses |= {result.loss.item() for result in results if result.loss is not None}
    assert len(losses) == 1


def test_the_sum_of_losses_is_in_microbatch_order():
    big = 2.0**24
    losses = {2: torch.tensor(-big), 0: torch.tensor(big), 1: torch.tensor(1.0)}
    in_order, as_they_came = torch.tensor([big, 1.0, -big]).sum(), torch.tensor([-big, big, 1.0]).sum()
    assert in_order != as_they_came
    assert StepResult(losses, Trace(0, HostClock())).loss == in_order


# Failures


class Breaks(nn.Linear):
    """Fails on its third real forward."""

    calls = 0

    def forward(self, x):
        if type(x) is torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                raise OverflowError("the third forward breaks")
        return super().forward(x)


def failing_step(model, step_number=7, schedule="1f1b"):
    inputs, targets = vectors(4)
    plan = plan_for(settings_for(schedule, 2, 4, 4), model, inputs)
    ranks = build_ranks(plan, model)
    with pytest.raises(ActionError) as caught:
        step(ranks, microbatches_of(plan, model, inputs, targets, step_number))
    return caught.value


def test_a_failure_names_rank_action_microbatch_and_step_and_shows_the_grid():
    error = failing_step(chain([LINEAR, partial(Breaks, 4, 4)]))
    first, *rest = str(error).splitlines()
    assert first == "rank 1 failed in 1F2 (microbatch 2) of step 8: the third forward breaks"
    assert ">F2<" in "\n".join(rest)
    assert "\n".join(rest).count(">") == 1
    assert sum(line.startswith("rank") for line in rest) == 2
    assert isinstance(error.__cause__, OverflowError)


class ChangesShape(nn.Linear):
    """Real outputs are not what fake ones promise."""

    def forward(self, x):
        output = super().forward(x)
        return output[:, :3] if type(x) is torch.Tensor else output


class ChangesType(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return output.half() if type(x) is torch.Tensor else output


@pytest.mark.parametrize(
    ("build", "made"),
    [(partial(ChangesShape, 4, 4), r"float64\[1, 3\]"), (partial(ChangesType, 4, 4), r"float16\[1, 4\]")],
)
def test_an_output_unlike_the_foreseen_one_names_stage_found_and_expected(build, made):
    error = failing_step(chain([build, LINEAR]))
    assert isinstance(error.__cause__, TypeError)
    with pytest.raises(TypeError, match=rf"stage 0 made {made} for its neighbor, which expects float64\[1, 4\]"):
        raise error.__cause__


def test_ranks_that_wait_for_each_other_are_an_error_not_a_hang():
    model, (inputs, targets) = linears(2), vectors(2)
    plan = plan_for(settings_for("gpipe", 2, 2, 2), model, inputs)
    ranks = build_ranks(plan, model)
    batch = microbatches_of(plan, model, inputs, targets)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] wait for messages that nobody sends"):
        run([ranks[1].trainer], [batch])


# Measurement and lifetimes


def test_events_are_the_rows_compute_actions_in_order():
    model, (inputs, targets) = linears(4), vectors(4)
    plan = plan_for(settings_for("interleaved_1f1b", 2, 4, 4, checkpoint="always"), model, inputs)
    results = step(build_ranks(plan, model), microbatches_of(plan, model, inputs, targets))
    for rank, result in enumerate(results):
        assert [event.action for event in result.events] == list(plan.program.compute_only().rows[rank])
        assert {event.rank for event in result.events} == {rank}
        times = [time for event in result.events for time in (event.start, event.end)]
        assert times == sorted(times)


class Remembers(nn.Linear):
    """Keeps weak references to every tensor that it sees."""

    seen: list[weakref.ref] = []  # noqa: RUF012

    def forward(self, x):
        output = super().forward(x)
        if type(x) is torch.Tensor:
            self.seen += [weakref.ref(x), weakref.ref(output)]
        return output


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "by hand"])
def test_nothing_of_a_step_survives_it(schedule, checkpoint):
    model, (inputs, targets) = chain([partial(Remembers, 4, 4)] * 4), vectors(4)
    plan = (
        plan_with(ZERO_BUBBLE, model, inputs, checkpoint=checkpoint)
        if schedule == "by hand"
        else plan_for(settings_for(schedule, 2, 4, 4, checkpoint=checkpoint), model, inputs)
    )
    ranks = build_ranks(plan, model)
    Remembers.seen = []
    gc.collect()
    gc.disable()  # reference counts alone must do it
    try:
        results = step(ranks, microbatches_of(plan, model, inputs, targets))
        alive = [reference() for reference in Remembers.seen if reference() is not None]
        assert Remembers.seen, "the spy sees nothing"
        assert [tensor for tensor in alive if tensor is not inputs] == []
    finally:
        gc.enable()
    assert sum(result.loss is not None for result in results) == 1


def test_a_forward_only_program_keeps_no_graph_and_no_gradients():
    model, (inputs, targets) = linears(4), vectors(4)
    plan = plan_for(settings_for("1f1b", 2, 2, 4, checkpoint="always"), model, inputs)
    assert not any(action.type is ActionType.R for row in plan.evaluation.rows for action in row)
    ranks = build_ranks(plan, model)
    batch = microbatches_of(plan, model, inputs, targets)
    (loss,) = [
        result.loss for result in run([rank.evaluator for rank in ranks], [batch] * 2) if result.loss is not None
    ]
    assert not loss.requires_grad
    assert all(parameter.grad is None for rank in ranks for parameter in rank.parameters.values())


def test_gradients_add_up_over_steps_until_they_are_dropped():
    model, (inputs, targets) = linears(2), vectors(4)
    plan = plan_for(settings_for("1f1b", 2, 2, 4), model, inputs)
    ranks = build_ranks(plan, model)
    batch = microbatches_of(plan, model, inputs, targets)
    step(ranks, batch)
    once = ranks[0].parameters["0.weight"].grad.clone()
    step(ranks, batch)
    assert torch.allclose(ranks[0].parameters["0.weight"].grad, 2 * once)
    ranks[0].clear_gradients()
    assert ranks[0].parameters["0.weight"].grad is None


def test_the_callers_batch_is_left_alone():
    """The first stage works on views of it (`boundaries` refuses a layer that would overwrite its input)."""
    model, (inputs, targets) = linears(2), vectors(4)
    before = inputs.clone()
    plan = plan_for(settings_for("1f1b", 2, 2, 4), model, inputs, torch.float32)
    step(build_ranks(plan, model, dtype=torch.float32), microbatches_of(plan, model, inputs, targets))
    assert torch.equal(inputs, before)
    assert inputs.grad is None
    assert not inputs.requires_grad


class RemembersMemory(nn.Linear):
    """Knows which memory its inputs came in, and how many of them lived when the last one came."""

    def __init__(self):
        super().__init__(4, 4)
        self.inputs = []

    def forward(self, x):
        if type(x) is torch.Tensor:
            self.inputs.append(weakref.ref(x.untyped_storage()))
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_are_loaded_by_their_forward(dtype):
    """Views of the batch; where they are converted, no more copies than microbatches are in flight."""
    model, (inputs, targets) = chain([RemembersMemory, *[LINEAR] * 3]), vectors(8)
    plan = plan_for(settings_for("1f1b", 2, 8, 8), model, inputs, dtype)
    ranks = build_ranks(plan, model, dtype=dtype)
    most, program = 0, ranks[0].trainer._handlers[ActionType.F]
    layer = ranks[0].stages[0].modules[0]

    def counted(state, action):
        nonlocal most
        program(state, action)
        most = max(most, sum(storage() is not None for storage in layer.inputs))

    ranks[0].trainer._handlers[ActionType.F] = counted
    step(ranks, microbatches_of(plan, model, inputs, targets))
    shared = {storage()._cdata for storage in layer.inputs if storage() is not None}
    assert len(layer.inputs) == 8
    if dtype == inputs.dtype:
        assert shared == {inputs.untyped_storage()._cdata}
    else:
        assert (most, shared) == (2, set())


def test_a_batch_knows_its_number_of_microbatches():
    assert len(Microbatches(0, (2, 2, 1), None, None, 1.0)) == 3


# Replicas of a pipeline


class AddsARandomNumber(nn.Module):
    """The first that is drawn for the microbatch."""

    def forward(self, x):
        return x + torch.rand(())


def test_microbatches_are_numbered_on_over_replicas():
    """The second half of a batch in a second replica draws what it would draw in one pipeline."""
    model = replace(chain([partial(nn.Linear, 4, 4), AddsARandomNumber]), stochastic=True)
    inputs, targets = vectors(8)
    whole = plan_for(settings_for("1f1b", 2, 4, 8), model, inputs)
    half = plan_for(settings_for("1f1b", 2, 2, 4), model, inputs[:4])
    batch = microbatches_of(whole, model, inputs, targets)
    expected = step(build_ranks(whole, model), batch)[1].loss
    found = 0
    for first in (0, 2):
        piece = slice(first, first + 2)
        part = replace(batch, sizes=(2, 2), inputs=batch.inputs[piece], targets=batch.targets[piece], first=first)
        found += step(build_ranks(half, model), part)[1].loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-14)


def second_replica(model, inputs, reduce=None):
    """Ranks 2 and 3 of two replicas of a pipeline of two."""
    plan = plan_for(settings_for("1f1b", 2, 4, 8), model, inputs)
    plan = replace(plan, program=lower(plan.schedule, replicas=2))
    stages = [rank.stages for rank in build_ranks(plan, model)]
    transport = InProcessTransport()
    return plan, [
        Executor(2 + row, plan.program, held, plan.boundaries, transport, reduce=reduce)
        for row, held in enumerate(stages)
    ]


def test_a_rank_of_another_replica_runs_the_row_of_its_like_and_reduces_each_stage_once():
    model, (inputs, targets) = linears(4), vectors(8)
    reduced = []
    plan, executors = second_replica(model, inputs, reduced.append)
    results = run(executors, [microbatches_of(plan, model, inputs, targets)] * 2)
    assert [result.loss is None for result in results] == [True, False]
    assert sorted(reduced) == [0, 1]
    assert {event.rank for event in results[0].events} == {2}


def test_an_error_calls_the_rank_by_its_number_among_all():
    model, (inputs, targets) = chain([partial(nn.Linear, 4, 4), partial(Breaks, 4, 4)]), vectors(8)
    plan, executors = second_replica(model, inputs)
    with pytest.raises(ActionError, match=r"rank 3 failed in 1F2 .*\n(.*\n)*rank 2 .*\nrank 3 .*>F2<"):
        run(executors, [microbatches_of(plan, model, inputs, targets)] * 2)


def test_a_failed_step_leaves_no_rank_in_the_middle_of_one(monkeypatch):
    """A traceback may be kept, as a debugger does; weights must not be taken for those of the failed step for that."""
    model, (inputs, targets) = chain([LINEAR] * 4), vectors(8)
    plan = plan_for(settings_for("1f1b", 4, 4, 8), model, inputs)
    ranks = build_ranks(plan, model)

    def fails(*_):
        raise OverflowError

    monkeypatch.setattr(ranks[3].trainer, "_run", fails)
    with pytest.raises(ActionError) as kept:
        step(ranks, microbatches_of(plan, model, inputs, targets))
    assert kept.traceback
    assert casts._kept.steps == 0
