from __future__ import annotations

import io
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
import torchvision
from rich.console import Console
from torch import nn

from models.gpt import gpt
from models.resnet import resnet
from pipeline.engine.boundary import Boundary, TensorSpec
from pipeline.schedule.library import SCHEDULES
from pipeline.training.plan import make_plan, microbatch_sizes, samples, split, write_schedule
from pipeline.training.plan_text import print_plan
from pipeline.training.settings import PartitionSettings, ScheduleSettings
from tests.engine.harness import CPU, build_ranks, plan_for, plan_with, settings_for
from tests.engine.samples import chain, images, linears, nests, small_gpt, text, vectors
from tests.engine.test_executor import V_SHAPE


def plan_of(model, inputs, schedule="1f1b", pp=2, microbatches=2, batch_size=4, **more):
    return plan_for(settings_for(schedule, pp, microbatches, batch_size, **more), model, inputs)


def test_a_tied_parameter_counts_once_in_the_model_and_on_each_rank_that_holds_it():
    tied, untied = (plan_of(small_gpt(tie=tie), text(4)[0]) for tie in (True, False))
    shared = 32 * 16
    assert untied.parameters - tied.parameters == shared
    assert untied.rank_parameters(0) + untied.rank_parameters(1) == untied.parameters
    assert tied.rank_parameters(0) + tied.rank_parameters(1) == tied.parameters + shared, "each holds a copy"
    assert [tied.stage_parameters(stage) for stage in range(2)] == [tied.rank_parameters(rank) for rank in range(2)]
    assert tied.tied_ranks() == {"embedding.tokens.weight": (0, 1)}
    alone = plan_of(small_gpt(), text(4)[0], pp=1)
    assert alone.rank_parameters(0) == alone.parameters == tied.parameters
    assert alone.tied_ranks() == {}


def test_tied_ranks_are_those_of_all_replicas():
    plan = plan_of(small_gpt(), text(4)[0], dp=2)
    assert plan.tied_ranks() == {"embedding.tokens.weight": (0, 1, 2, 3)}
    assert [plan.microbatches_of(rank) for rank in range(4)] == [slice(0, 2)] * 2 + [slice(2, 4)] * 2
    assert plan.microbatch_sizes == (1, 1, 1, 1)
    assert plan.parameters == plan_of(small_gpt(), text(4)[0]).parameters
    assert plan.rank_parameters(3) == plan.rank_parameters(1)


def test_in_a_v_the_tied_pair_is_one_parameter_of_one_rank():
    plan = plan_with(V_SHAPE, small_gpt(), text(4)[0])
    assert plan.rank_parameters(0) + plan.rank_parameters(1) == plan.parameters
    assert plan.tied_ranks() == {}


def test_three_copies_of_one_parameter():
    """Two of them on the rank that doesn't hold the owner: one parameter there, summed with the owner's."""
    linear = partial(nn.Linear, 4, 4, bias=False)
    model, inputs = chain([linear] * 4, tied={"2.weight": "0.weight", "3.weight": "0.weight"}), vectors(4)[0]
    plan = plan_of(model, inputs)
    assert plan.parameters == 2 * 16
    assert [plan.rank_parameters(rank) for rank in range(2)] == [2 * 16, 16]
    assert plan.tied_ranks() == {"0.weight": (0, 1)}
    _, second = build_ranks(plan, model)
    assert second.parameters["2.weight"] is second.parameters["3.weight"]


def test_counts_are_the_known_ones():
    gpt2 = gpt(layers=12, width=768, heads=12, context=1024, vocabulary=50257)
    assert plan_of(gpt2, torch.zeros(4, 8, dtype=torch.int64), pp=4).parameters == 124_439_808
    expected = sum(p.numel() for p in torchvision.models.resnet18(num_classes=10).parameters())
    assert plan_of(resnet(depth=18, classes=10), images(4)[0]).parameters == expected


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("name", ["uniform", "parameters"])
def test_every_layer_is_on_one_stage(schedule, name):
    plan = plan_of(small_gpt(), text(4)[0], schedule, 3, partition=PartitionSettings(name))
    placed = [layer for stage in range(plan.schedule.stages) for layer in plan.layers_of(stage)]
    assert placed == list(range(8))
    assert len(plan.counts) == plan.schedule.stages == len(plan.boundaries[2]) - 1


def test_a_cut_by_parameters_evens_them_out():
    wide = gpt(layers=6, width=16, heads=2, context=8, vocabulary=2000, tie_embeddings=False)
    plans = [plan_of(wide, text(4)[0], pp=3, partition=PartitionSettings(name)) for name in ("uniform", "parameters")]
    heaviest = [max(map(plan.stage_parameters, range(3))) for plan in plans]
    assert heaviest[1] < heaviest[0]


def test_a_manual_cut():
    plan = plan_of(linears(5), vectors(4)[0], partition=PartitionSettings("manual", [1, 4]))
    assert plan.counts == (1, 4)
    assert list(plan.layers_of(1)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="adds up to 4, the model has 5"):
        plan_of(linears(5), vectors(4)[0], partition=PartitionSettings("manual", [2, 2]))


def test_layers_for_another_partition_than_manual_are_refused():
    with pytest.raises(ValueError, match=r"partition.layers=\[1, 4\] is for partition=manual, not uniform: drop one"):
        plan_of(linears(5), vectors(4)[0], partition=PartitionSettings("uniform", [1, 4]))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="8 stages need at least 8 layers, the model has 5"):
        plan_of(linears(5), vectors(4)[0], "interleaved_1f1b", 4)


def test_a_plan_is_picklable_and_repeats():
    plan = plan_of(small_gpt(), text(5)[0], "interleaved_1f1b", 2, 3, 5, checkpoint="except_last")
    assert pickle.loads(pickle.dumps(plan)) == plan
    again = plan_of(small_gpt(), text(5)[0], "interleaved_1f1b", 2, 3, 5, checkpoint="except_last")
    assert again == plan


@pytest.mark.parametrize(("batch_size", "microbatches"), [(10, 4), (8, 3), (7, 4), (4, 4), (9, 1)])
def test_microbatches_are_torchs_tensor_split(batch_size, microbatches):
    sizes = microbatch_sizes(batch_size, microbatches)
    batch = torch.arange(batch_size)
    pieces = split(batch, sizes)
    assert all(torch.equal(*pair) for pair in zip(pieces, batch.tensor_split(microbatches), strict=True))
    assert len(pieces) == microbatches
    assert set(plan_of(linears(2), vectors(batch_size)[0], "1f1b", 2, microbatches, batch_size).boundaries) == set(
        sizes
    )


def test_a_batch_of_several_tensors_is_cut_in_each():
    inputs, _ = nests(7)
    pieces = split(inputs, microbatch_sizes(7, 4))
    assert [samples(piece) for piece in pieces] == [2, 2, 2, 1]
    for name, tensor in inputs.items():
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), tensor)


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [((torch.zeros(3, 2), torch.zeros(4)), r"\(3, 2\), \(4,\)"), (torch.zeros(()), r"\(\)"), ([], "none")],
)
def test_tensors_must_agree_on_the_samples(batch, shapes):
    with pytest.raises(ValueError, match=f"a batch of tensors of shapes {shapes}: let the first dimension of each be"):
        samples(batch)


def test_boundaries_are_those_of_each_microbatch_size():
    plan = plan_of(small_gpt(), text(5)[0], "1f1b", 2, 2, 5)
    assert plan.microbatch_sizes == (3, 2)
    for size in (3, 2):
        assert plan.boundaries[size] == (
            Boundary(TensorSpec((size, 8), torch.int64), (False,), (False,)),
            Boundary(TensorSpec((size, 8, 16), torch.float64), (True,), (True,)),
            Boundary(TensorSpec((size, 8, 32), torch.float64), (True,), (True,)),
        )


def test_nominal_predictions():
    plan = plan_of(linears(8), vectors(8)[0], "interleaved_1f1b", 4, 8, 8)
    assert plan.predicted.makespan_bubble == pytest.approx(3 / (2 * 8 + 3))
    plan = plan_of(linears(8), vectors(8)[0], "1f1b", 4, 8, 8)
    assert plan.predicted.makespan_bubble == pytest.approx(3 / (8 + 3))
    assert plan.predicted.peak_in_flight == (4, 3, 2, 1)


def test_schedules_take_their_stages_per_rank():
    settings = settings_for("interleaved_1f1b", 2, 4, 4)
    for stages_per_rank in (1, 2, 3):
        settings.schedule = ScheduleSettings("interleaved_1f1b", stages_per_rank)
        assert write_schedule(settings).stages == 2 * stages_per_rank
    settings.schedule = ScheduleSettings("1f1b", 2)
    with pytest.raises(ValueError, match="1f1b takes no option stages_per_rank"):
        write_schedule(settings)
    settings.schedule = ScheduleSettings("1b1f")
    with pytest.raises(ValueError, match="no schedule is called '1b1f'"):
        write_schedule(settings)
    assert "1f1b" in SCHEDULES


def test_a_model_with_too_few_outputs_for_the_data_is_refused():
    plan = plan_of(small_gpt(), text(4)[0])
    plan.check_targets(32)
    with pytest.raises(
        ValueError, match=r"the model tells 32 classes apart and the data has 33: use model.vocabulary=33"
    ):
        plan.check_targets(33)


def test_rank_of_an_unknown_parameter():
    plan = plan_of(linears(2), vectors(4)[0])
    assert [plan.rank_of(f"{index}.bias") for index in range(2)] == [0, 1]
    with pytest.raises(KeyError, match="nobody"):
        plan.rank_of("nobody")


def test_nothing_of_the_model_is_given_memory():
    """A thousand gigabytes of parameters are planned at once."""
    huge = chain([partial(nn.Linear, 500_000, 500_000)])
    inputs = TensorSpec((2, 500_000), torch.float32)
    assert make_plan(settings_for("1f1b", 1, 1, 2), huge, inputs, CPU).parameters == 500_000 * 500_001


def test_the_plan_as_people_read_it():
    plan = replace(plan_of(small_gpt(), text(5)[0], "1f1b", 2, 2, 5), flops=(0, *[1000] * 6, 2000))
    written = io.StringIO()
    print_plan(plan, "small", Console(width=100, file=written))
    shown = written.getvalue()
    assert f"{plan.parameters:,} parameters in 8 layers, 0.024 MFLOP a step" in shown
    assert "37.5 %" in shown
    assert "62.5 %" in shown
    assert "partition  uniform: 4+4 layers" in shown
    assert "embedding .. block.2 (4)" in shown
    assert f"{plan.stage_parameters(1):,}" in shown
    assert "F0" in shown
    assert "2 microbatches of 3 or 2 samples" in shown
    assert f"{100 * plan.predicted.makespan_bubble:.1f}" in shown
    assert "replicas" not in shown


def test_a_plan_of_replicas_says_what_each_gets():
    plan = plan_of(small_gpt(), text(5)[0], "1f1b", 2, 2, 5, dp=2)
    written = io.StringIO()
    print_plan(plan, "small", Console(width=80, file=written))
    assert "2 replicas of these ranks, numbered on, each with\n2 microbatches of 2 or 1 samples\n" in written.getvalue()
