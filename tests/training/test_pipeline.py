"""`Pipeline` against plain PyTorch on one device, in float64."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline import Microbatched, Pipeline
from pipeline.engine.executor import ActionError
from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.schedule import Schedule
from pipeline.training.settings import ActivationCheckpointSettings
from tests import command
from tests.training import pipeline_script

TWO_A_RANK = ("interleaved_1f1b", "zbv", "dualpipe_v")


def model(seed=0, width=8, outputs=5, layers=8, dtype=torch.float64):
    torch.manual_seed(seed)
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    return nn.Sequential(*hidden, nn.Linear(width, outputs)).to(dtype)


def batch(samples=8, *shape, width=8, classes=5, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *shape, width, generator=generator, dtype=dtype)
    return inputs, torch.randint(classes, (samples, *shape), generator=generator)


def pipeline_of(modules, loss=F.cross_entropy, **options):
    return Pipeline(modules, loss, **{"pp": 4, "microbatches": 4, **options})


def plain_step(modules, inputs, targets, loss=F.cross_entropy):
    value = loss(modules(inputs), targets)
    value.backward()
    return value.detach()


def assert_equal_gradients(modules, expected, tolerance=1e-12):
    for (name, parameter), other in zip(modules.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, other.grad, rtol=tolerance, atol=1e-14), name


def assert_same_step(ours, plain, inputs, targets, loss=F.cross_entropy, **options):
    """One step of both: loss and gradients."""
    pipe = pipeline_of(ours, loss, **options)
    found, expected = pipe.step(inputs, targets), plain_step(plain, inputs, targets, loss)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert_equal_gradients(ours, plain)
    return pipe


# The same as on one device


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always", "selective"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", *TWO_A_RANK])
def test_steps_are_those_of_plain_pytorch(schedule, checkpoint):
    """Losses, norms, gradients, and what a real optimizer makes of them, over batches of 7 in 4 microbatches."""
    ours, plain = model(), model()
    pp = 2 if schedule in TWO_A_RANK else 4
    pipe = pipeline_of(ours, schedule=schedule, pp=pp, activation_checkpoint=checkpoint)
    optimizers = [torch.optim.AdamW(pipe.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)]
    for step in range(3):
        inputs, targets = batch(7, seed=step)
        loss = pipe.step(inputs, targets)
        assert torch.allclose(loss, plain_step(plain, inputs, targets), rtol=1e-12)
        assert (loss.shape, loss.dtype, loss.requires_grad) == ((), torch.float64, False)
        assert_equal_gradients(ours, plain, 1e-10)
        norms = pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert torch.allclose(*norms, rtol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter, plain.get_parameter(name), rtol=1e-8, atol=1e-12), name
    assert torch.allclose(pipe.evaluate(inputs, targets), F.cross_entropy(plain(inputs), targets), rtol=1e-9)


def test_gradients_add_up_until_they_are_dropped():
    ours, plain = model(), model()
    pipe = pipeline_of(ours)
    for seed in (1, 2):
        pipe.step(*batch(seed=seed))
        plain_step(plain, *batch(seed=seed))
    assert_equal_gradients(ours, plain)
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in ours.parameters())


def by_token(outputs, targets, reduction="mean", ignore_index=-100):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction=reduction, ignore_index=ignore_index)


def test_one_pipeline_takes_batches_of_every_shape():
    ours, plain = model(), model()
    pipe = pipeline_of(ours, by_token, schedule="zb_h1")
    for shape in ((8, 3), (4, 1), (9, 5), (8, 3), (32, 2)):
        inputs, targets = batch(*shape)
        assert torch.allclose(pipe.step(inputs, targets), plain_step(plain, inputs, targets, by_token), rtol=1e-12)
    assert_equal_gradients(ours, plain)


def test_short_batches_and_microbatches_of_their_own_shapes():
    """Three samples in four microbatches; then sentences of another length in each."""
    ours, plain = model(), model()
    pipe = pipeline_of(ours, by_token, schedule="zb_h1")
    inputs, targets = batch(3, 2)
    assert torch.allclose(pipe.step(inputs, targets), plain_step(plain, inputs, targets, by_token), rtol=1e-12)
    assert torch.allclose(pipe.evaluate(inputs, targets), by_token(plain(inputs), targets), rtol=1e-12)
    pieces = [batch(2, length, seed=length) for length in (3, 1, 4, 2)]
    cut = [Microbatched(part) for part in zip(*pieces, strict=True)]
    found = pipe.step(*cut)
    tokens = sum(targets.numel() for _, targets in pieces)
    expected = sum(by_token(plain(inputs), targets, reduction="sum") / tokens for inputs, targets in pieces)
    expected.backward()
    assert torch.allclose(found, expected, rtol=1e-12)
    assert_equal_gradients(ours, plain)
    assert torch.allclose(pipe.evaluate(*cut), expected, rtol=1e-12)
    for outputs, (inputs, _) in zip(pipe.predict(cut[0]), pieces, strict=True):
        assert torch.allclose(outputs, plain(inputs), rtol=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_padding_counts_for_nothing_even_where_a_microbatch_is_nothing_else(schedule):
    inputs, targets = batch(7, 6)
    targets[2:4] = -100  # the second of (2, 2, 2, 1)
    targets[4, 1:] = -100
    pp = 2 if schedule == "zbv" else 4
    assert_same_step(model(), model(), inputs, targets, by_token, schedule=schedule, pp=pp)


def test_a_batch_of_padding_alone_has_loss_0_and_gradients_of_0():
    ours = model()
    inputs, targets = batch(8)
    pipe = pipeline_of(ours)
    loss = pipe.step(inputs, torch.full_like(targets, -100))
    assert loss == 0
    assert all(parameter.grad.count_nonzero() == 0 for parameter in ours.parameters())


@pytest.mark.parametrize("as_module", [False, True])
def test_classes_have_weights(as_module):
    weight = torch.tensor([0.1, 3.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    inputs, targets = batch(9)
    targets[:3] = 2  # the first of (3, 2, 2, 2) weighs nothing
    loss = nn.CrossEntropyLoss(weight) if as_module else partial(F.cross_entropy, weight=weight)
    assert_same_step(model(), model(), inputs, targets, loss)


def test_a_loss_without_a_sum_is_a_mean_over_samples():
    def margin(outputs, targets):
        return (outputs.logsumexp(-1) - outputs.gather(-1, targets[:, None])[:, 0]).square().mean()

    assert_same_step(model(), model(), *batch(7), margin)


class Join(nn.Module):
    """Takes a pair, gives a dict."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(3, 6)

    def forward(self, pair):
        return {"joined": self.left(pair[0]) + self.right(pair[1]), "skipped": pair[1]}


class Head(nn.Linear):
    """Takes the dict."""

    def forward(self, given):
        return super().forward(torch.cat([given["joined"].tanh(), given["skipped"]], -1))


def two_tasks(outputs, targets):
    return F.cross_entropy(outputs, targets["class"]) + F.mse_loss(outputs.sum(-1), targets["sum"])


def test_batches_and_what_layers_pass_on_may_hold_several_tensors():
    def joining():
        torch.manual_seed(1)
        return [layer.double() for layer in (Join(), nn.Identity(), nn.Identity(), Head(9, 5))]

    ours, plain = joining(), nn.Sequential(*joining())
    (first, classes), (second, sums) = batch(7), batch(7, width=3)
    inputs, targets = (first, second), {"class": classes, "sum": sums.double()}
    pipe = pipeline_of(ours, two_tasks)
    assert torch.allclose(pipe.step(inputs, targets), plain_step(plain, inputs, targets, two_tasks), rtol=1e-12)
    assert_equal_gradients(nn.Sequential(*ours), plain)


class Keeps(nn.Linear):
    """Gives its input for a skip connection."""

    gives = ("kept",)

    def forward(self, x):
        return super().forward(x).tanh(), x


class Adds(nn.Linear):
    """Takes it, some layers later."""

    takes = ("kept",)

    def forward(self, x, kept):
        return super().forward(x + kept)


def test_values_go_past_layers_by_name():
    torch.manual_seed(2)
    layers = [layer.double() for layer in (Keeps(8, 8), nn.Linear(8, 8), nn.Tanh(), Adds(8, 8), nn.Linear(8, 5))]
    plain, (inputs, targets) = copy.deepcopy(layers), batch(7)
    hidden, kept = plain[0](inputs)
    expected = F.cross_entropy(plain[4](plain[3](plain[2](plain[1](hidden)), kept)), targets)
    expected.backward()
    assert torch.allclose(pipeline_of(layers).step(inputs, targets), expected, rtol=1e-12)
    assert_equal_gradients(nn.Sequential(*layers), nn.Sequential(*plain))


def tied():
    """An embedding that is a part of the first, the third and the last layer."""
    torch.manual_seed(3)
    words = nn.Embedding(9, 8)
    head, again = nn.Linear(8, 9, bias=False), nn.Linear(8, 9)
    head.weight = again.weight = words.weight
    parts = [words, nn.Linear(8, 8), again, nn.Linear(9, 8), nn.Tanh(), head]
    return nn.Sequential(*parts).double()


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 4), ("zb_h1", 4), ("zbv", 2), ("1f1b", 1)])
def test_parameters_that_layers_share_are_one(schedule, pp):
    ours, plain = tied(), tied()
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(9, (7,), generator=generator), torch.randint(9, (7,), generator=generator)
    pipe = pipeline_of(ours, schedule=schedule, pp=pp)
    for _ in range(2):
        assert torch.allclose(pipe.step(inputs, targets), plain_step(plain, inputs, targets), rtol=1e-12)
    assert ours[0].weight is ours[-1].weight
    assert_equal_gradients(ours, plain)
    assert list(map(id, pipe.parameters())) == list(map(id, ours.parameters()))
    assert torch.allclose(pipe.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(plain.parameters(), 0.01), rtol=1e-12)
    assert_equal_gradients(ours, plain, 1e-11)


def test_a_module_in_two_places_is_one_module():
    def twice():
        torch.manual_seed(4)
        shared = nn.Linear(8, 8)
        return nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 8), shared, nn.Linear(8, 5)).double()

    ours = twice()
    pipe = assert_same_step(ours, twice(), *batch(7), schedule="zb_h1", activation_checkpoint="always")
    assert pipe.state_dict().keys() == ours.state_dict().keys()
    ours.train()
    pipe.evaluate(*batch(7))
    assert all(part.training for part in ours.modules())


@pytest.mark.parametrize("frozen", [(0,), (0, 2, 4), (6, 8), (14,), tuple(range(0, 14, 2))])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_frozen_layers_stay_without_gradients(frozen, checkpoint):
    ours, plain = model(), model()
    for modules in (ours, plain):
        for index in frozen:
            modules[index].requires_grad_(False)
    assert_same_step(ours, plain, *batch(7), schedule="zb_h1", activation_checkpoint=checkpoint)


def test_layers_may_be_frozen_and_thawed_between_steps():
    ours, plain = model(), model()
    for modules in (ours, plain):
        modules[:8].requires_grad_(False)
    pipe = pipeline_of(ours)
    for thawed in (8, 4, 0):
        for modules in (ours, plain):
            modules[thawed:].requires_grad_(True)
        pipe.step(*batch(7))
        plain_step(plain, *batch(7))
        assert_equal_gradients(ours, plain)


def normalized():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
    ).double()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_statistics_move_with_each_microbatch_or_once(checkpoint):
    inputs, targets = batch(8)
    ours, plain = normalized(), normalized()
    pipeline_of(ours, pp=2, activation_checkpoint=checkpoint).step(inputs, targets)
    for part in inputs.split(2):
        plain(part)
    for (name, buffer), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(buffer, other, rtol=1e-12), name
    ours, plain = normalized(), normalized()
    pipeline_of(ours, pp=2, activation_checkpoint=checkpoint, batch_norm="deferred").step(inputs, targets)
    plain(inputs)
    assert torch.allclose(ours[1].running_var, plain[1].running_var, rtol=1e-12)
    assert ours[1].num_batches_tracked == 1


# The modules are the user's


def test_the_modules_given_are_the_ones_that_are_trained():
    ours = model()
    names, parameters = list(ours.state_dict()), list(ours.parameters())
    pipe = pipeline_of(ours)
    pipe.step(*batch())
    assert list(pipe.parameters()) == parameters == list(ours.parameters())
    assert [name for name, _ in pipe.named_parameters()] == names == list(pipe.state_dict())
    assert all(pipe.state_dict()[name].data_ptr() == tensor.data_ptr() for name, tensor in ours.state_dict().items())
    assert pipe.evaluate(*batch()) == F.cross_entropy(ours(batch()[0]), batch()[1])


def test_layers_compute_in_the_mode_they_are_in():
    ours, plain = normalized(), normalized()
    for modules in (ours, plain):
        modules[1].eval()
    pipe = pipeline_of(ours, pp=2)
    pipe.step(*batch())
    assert torch.equal(ours[1].running_mean, plain[1].running_mean)
    assert not torch.equal(ours[4].running_mean, plain[4].running_mean)
    pipe.evaluate(*batch())
    assert [part.training for part in ours] == [True, False, True, True, True, True]


@pytest.mark.parametrize("samples", [1, 3, 4, 7, 32])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_evaluation_and_prediction_take_any_number_of_samples(samples, schedule):
    """Fewer than microbatches too; with running statistics, so that a microbatch may be one sample."""
    ours = normalized()
    pipe = pipeline_of(ours, pp=2, schedule="1f1b") if schedule == "1f1b" else pipeline_of(ours, pp=1, schedule="zbv")
    pipe.step(*batch(8))
    before = copy.deepcopy(ours.state_dict())
    inputs, targets = batch(samples)
    targets[:1] = -100
    targets[-1:] = 1
    loss, outputs = pipe.evaluate(inputs, targets), pipe.predict(inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())
    assert ours.training
    with torch.no_grad():
        expected = ours.eval()(inputs)
    assert torch.allclose(outputs, expected, rtol=1e-12)
    assert not outputs.requires_grad
    assert torch.allclose(loss, F.cross_entropy(expected, targets), rtol=1e-12)


def test_a_prediction_has_all_that_the_last_layer_gives():
    join = Join().double()
    inputs = batch(5)[0], batch(5, width=3)[0]
    found = pipeline_of([nn.Identity(), join], F.mse_loss, pp=2).predict(inputs)
    assert found.keys() == {"joined", "skipped"}
    assert torch.allclose(found["joined"], join(inputs)["joined"], rtol=1e-12)
    assert torch.equal(found["skipped"], inputs[1])


def test_hooks_see_every_microbatch_and_nothing_else():
    ours, seen = model(), []
    ours[2].register_forward_hook(lambda module, given, output: seen.append((type(output), len(output))))
    ours[4].weight.register_hook(lambda gradient: gradient * 0)
    pipe = pipeline_of(ours, schedule="zb_h1")
    pipe.step(*batch(7))
    assert seen == [(torch.Tensor, 2)] * 3 + [(torch.Tensor, 1)]
    assert ours[4].weight.grad.count_nonzero() == 0
    assert ours[2].weight.grad.count_nonzero() > 0


def test_a_second_pipeline_takes_over():
    """Of the same modules, under another schedule; a model on its own, copied, computes as ever."""
    ours, plain = model(), model()
    for schedule in ("zb_h1", "1f1b", "zb_h2"):
        pipeline_of(ours, schedule=schedule).step(*batch(7))
        plain_step(plain, *batch(7))
        assert_equal_gradients(ours, plain)
    plain_step(ours, *batch(7))
    plain_step(plain, *batch(7))
    assert_equal_gradients(ours, plain)
    assert torch.equal(copy.deepcopy(ours)(batch()[0]), plain(batch()[0]))


def test_state_dicts_come_and_go():
    ours, other = model(seed=1), model(seed=2)
    pipe = pipeline_of(ours)
    pipe.load_state_dict(other.state_dict())
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in ours.state_dict().items())
    state = other.state_dict()
    for wrong in (
        {name: tensor for name, tensor in state.items() if name != "2.bias"},
        {**state, "16.bias": state["2.bias"]},
        {**state, "2.bias": torch.zeros(9)},
    ):
        with pytest.raises(ValueError, match=r"another model's: (2|16)\.bias is missing, unknown or of another shape"):
            pipe.load_state_dict(wrong)


# Random numbers


def noisy():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)]
    return {f"layer {index}": layer.double() for index, layer in enumerate(layers)}


def test_dropout_depends_on_seed_and_step_alone():
    def losses(pp, schedule, checkpoint, **more):
        pipe = pipeline_of(noisy(), pp=pp, schedule=schedule, activation_checkpoint=checkpoint, **more)
        return torch.stack([pipe.step(*batch(8, classes=8)) for _ in range(2)])

    first = losses(4, "1f1b", "never")
    assert first[0] != first[1]
    assert torch.equal(first, losses(1, "gpipe", "always"))
    assert torch.equal(first, losses(2, "zbv", "except_last"))
    assert not torch.equal(first, losses(4, "1f1b", "never", seed=1))


def test_random_numbers_outside_go_on_as_without_a_step():
    pipe = pipeline_of(noisy())
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    pipe.step(*batch(8, classes=8))
    assert torch.equal(torch.rand(3), expected)


# What is asked for


def test_a_list_a_dict_and_pairs_are_models_too():
    modules = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)]
    named = dict(zip("abc", modules, strict=True))
    expected = {"weight": (8, 8), "bias": (8,)}
    for given in (modules, nn.ModuleList(modules)):
        state = pipeline_of(given, pp=3, partition=[1, 1, 1]).state_dict()
        assert {name: tuple(tensor.shape) for name, tensor in state.items() if name[0] == "0"} == {
            f"0.{name}": shape for name, shape in expected.items()
        }
    for given in (named, list(named.items()), nn.ModuleDict(named)):
        assert list(pipeline_of(given, pp=3).state_dict()) == ["a.weight", "a.bias", "c.weight", "c.bias"]


def test_a_partition_by_counts_or_by_names():
    for given in ([1, 2, 4, 1], ("0", "2", "6", "14")):
        pipe = assert_same_step(model(), model(), *batch(7), partition=given)
        assert pipe._draft.counts == (1, 2, 4, 1)


def test_a_schedule_of_ones_own():
    rows = tuple(
        (*(Action(rank, ActionType.F, m) for m in range(4)), *(Action(rank, ActionType.B, m) for m in (3, 2, 1, 0)))
        for rank in range(4)
    )
    lifo = Schedule("lifo", rows, stage_to_rank=(0, 1, 2, 3), microbatches=4)
    pipe = assert_same_step(model(), model(), *batch(7), schedule=lifo)
    assert pipe.schedule == lifo
    with pytest.raises(ValueError, match="has 4 ranks and 4 microbatches, the pipeline pp=2 and microbatches=4: use"):
        pipeline_of(model(), schedule=lifo, pp=2)


def test_settings_of_checkpointing():
    window = ActivationCheckpointSettings("window", keep_microbatches=1)
    assert_same_step(model(), model(), *batch(7), activation_checkpoint=window)


def test_bf16_autocast_computes_as_pytorchs():
    ours, plain = model(dtype=torch.float32), model(dtype=torch.float32)
    inputs, targets = batch(8, dtype=torch.float32)
    pipe = pipeline_of(ours, autocast=torch.bfloat16)
    loss = pipe.step(inputs, targets)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(plain(inputs), targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())


class Breaks(nn.Linear):
    when = 0

    def forward(self, x):
        if type(x) is torch.Tensor:
            self.when -= 1
            if self.when == 0:
                raise OverflowError("this layer breaks")
        return super().forward(x)


def test_a_failure_shows_the_grid_and_the_next_step_is_in_order():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Breaks(8, 8), nn.Linear(8, 5)).double()
    plain = copy.deepcopy(ours)
    pipe = pipeline_of(ours, schedule="zb_h1")
    ours[2].when = 3
    with pytest.raises(
        ActionError, match=r"rank 2 failed in 2F2 \(microbatch 2\) of step 1: this layer breaks"
    ) as info:
        pipe.step(*batch())
    assert "rank 3 " in str(info.value), "the grid of all ranks"
    assert pipe.steps == 0
    pipe.zero_grad()
    pipe.step(*batch())
    plain_step(plain, *batch())
    assert_equal_gradients(ours, plain)


# What can't be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": nn.Linear(8, 5)}, "the model is a Linear, .*: give an nn.Sequential"),
        ({"modules": nn.Sequential()}, "the model has no layers: give an nn.Sequential"),
        ({"modules": [nn.Linear(8, 5), torch.relu]}, "layer 1 is a builtin_function_or_method: every layer must be"),
        ({"modules": [("a", nn.Tanh()), ("a", nn.Tanh())]}, "'a' can't be a layer's name, or is another's too"),
        ({"modules": [nn.LazyLinear(5)]}, "0.weight is lazy, it has no shape yet: run the model once"),
        (
            {"modules": [nn.Linear(8, 8), nn.Linear(8, 5).double()]},
            r"of several types \(torch.float32, torch.float64\)",
        ),
        ({"modules": model(dtype=torch.float16)}, "parameters are torch.float16: convert it"),
        ({"modules": model().to("meta")}, "the model is on meta: move all of it to one device"),
        ({"modules": model(layers=3)}, "4 stages"),
        ({"loss": "mse"}, "loss='mse' can't be called: use a function"),
        ({"schedule": "2f2b"}, "no schedule is called '2f2b'"),
        ({"pp": 0}, "pp=0 is too small: use 1 or more"),
        ({"microbatches": 0}, "microbatches=0 is too small"),
        ({"partition": [1, 2]}, r"partition.layers=\[1, 2\] names 2 stages, the schedule has 4"),
        ({"partition": "halves"}, "partition.name=halves is unknown"),
        ({"stages_per_rank": 2}, "stages_per_rank"),
        ({"activation_checkpoint": "sometimes"}, "activation_checkpoint.name=sometimes is unknown"),
        ({"autocast": torch.float16}, "autocast=torch.float16 would need a loss scale"),
        ({"device": "tpu"}, "device=tpu is unknown"),
        ({"microbatches": 2.5}, "microbatches=2.5 is no whole number"),
        ({"pp": "4"}, "pp='4' is no whole number"),
        ({"schedule": None}, "schedule=None is no schedule: use a name such as '1f1b'"),
        ({"activation_checkpoint": None}, "activation_checkpoint=None is unknown: use a name"),
        ({"dp": 2}, "dp=2 replicas in one process would only take turns"),
        ({"timeout": 0.0}, "timeout=0 is out of range"),
    ],
)
def test_what_cannot_be_built(options, message):
    with pytest.raises(ValueError, match=message):
        pipeline_of(**{"modules": model(), **options})


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (batch(0)[0], batch(0)[1], "the batch is empty: give one sample or more"),
        (
            Microbatched(batch(8)[0].split(2)),
            batch(8)[1],
            r"inputs are cut as \[2, 2, 2, 2\] and targets as whole: cut both alike",
        ),
        (Microbatched(batch(8)[0].split(4)), Microbatched(batch(8)[1].split(4)), "cut into 2 microbatches, .* has 4"),
        (batch(8)[0], batch(7)[1], "the batch has 8 inputs and 7 targets"),
        (batch(8)[0], None, r"targets are no batch \(None\)"),
        ([1.0], batch(8)[1], r"inputs are no batch \(float\)"),
        (torch.tensor(1.0), batch(8)[1], "let the first dimension of each be the samples"),
        ((batch(8)[0], batch(7)[0]), batch(8)[1], "let the first dimension of each be the samples"),
        (batch(8)[0].requires_grad_(), batch(8)[1], "the inputs require a gradient, which nobody gives them: detach"),
        (batch(8)[0][:0], batch(8)[1][:0], "the batch is empty: give one sample or more"),
        (torch.zeros(8, 9), batch(8)[1], r"layer 0 refuses its input float64\[2, 9\]"),
    ],
)
def test_what_is_no_batch(inputs, targets, message):
    pipe = pipeline_of(model())
    with pytest.raises(ValueError, match=message):
        pipe.step(inputs, targets)
    pipe.step(*batch())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_autograd_around_it_change_nothing(mode):
    """An evaluation is where they are found; the plan it makes is the step's too."""
    ours, plain = model(), model()
    pipe = pipeline_of(ours)
    with mode():
        loss = pipe.evaluate(*batch())
    pipe.step(*batch())
    assert torch.allclose(loss, plain_step(plain, *batch()), rtol=1e-12)
    assert_equal_gradients(ours, plain)


def test_autocast_around_a_step_is_refused():
    pipe = pipeline_of(model(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"use Pipeline\(..., autocast="):
        pipe.step(*batch())


# Under a launcher


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Both processes' files, and how they ended."""
    folder = tmp_path_factory.mktemp("launched")
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", pipeline_script.__name__]
    done = subprocess.run(
        [sys.executable, *arguments, str(folder)],
        cwd=command.ROOT,
        env=command.environment(folder),
        capture_output=True,
        text=True,
        timeout=command.LIMIT,
    )
    return folder, done


def test_the_same_lines_under_torchrun(launched):
    """Losses, norms and weights; each process holds its own stages' alone."""
    folder, done = launched
    assert (folder / "rank 0.pt").exists(), done.stderr
    _, alone = pipeline_script.train()
    parts = [torch.load(folder / f"rank {rank}.pt") for rank in range(2)]
    for part in parts:
        assert torch.allclose(part["losses"], alone["losses"], rtol=1e-12), done.stderr
        assert torch.allclose(part["norms"], alone["norms"], rtol=1e-12)
        assert torch.allclose(part["evaluated"], alone["evaluated"], rtol=1e-12)
        assert part["elsewhere"] == {"cpu", "meta"}
    assert parts[0]["predicted"] is None
    assert torch.allclose(parts[1]["predicted"], alone["predicted"], rtol=1e-9)
    assert parts[0]["state"].keys() == {"words.weight", "middle.0.weight", "middle.0.bias"}
    together = parts[0]["state"] | parts[1]["state"]
    assert together.keys() == alone["state"].keys()
    for name, tensor in together.items():
        assert torch.allclose(tensor, alone["state"][name], rtol=1e-9, atol=1e-12), name
    assert torch.equal(together["words.weight"], together["last.weight"])


def test_replicas_under_torchrun(launched):
    """Each trains the whole model, and both have what one process has; dropout included."""
    _, alone = pipeline_script.train()
    for rank in range(2):
        found = torch.load(launched[0] / f"rank {rank}.pt")["replicas"]
        for name in ("losses", "norms", "evaluated", "predicted"):
            assert torch.allclose(found[name], alone[name], rtol=1e-9), name
        for name, tensor in found["state"].items():
            assert torch.allclose(tensor, alone["state"][name], rtol=1e-9, atol=1e-12), name


def test_processes_with_different_weights_or_batches_say_so(launched):
    for rank in range(2):
        found = torch.load(launched[0] / f"rank {rank}.pt")
        assert found["other weights"].startswith("words.weight has other values on rank 1 than on another rank")
        assert "rank 0: step of int64[8, 3] and int64[8]" in found["other batch"]
        assert "rank 1: step of int64[7, 3] and int64[7]" in found["other batch"]


def test_a_launcher_with_another_number_of_processes_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="started 3 processes, and pp=2 with dp=2 takes 4: let it start as many, or"):
        pipeline_of(model(), pp=2, dp=2)


def test_a_failure_ends_every_process(launched):
    folder, done = launched
    assert done.returncode != 0
    assert "rank 1 failed in 1F0 (microbatch 0) of step 6: this layer breaks" in done.stderr
    assert "rank 0 failed" in Path(folder / "error of rank 0").read_text()
