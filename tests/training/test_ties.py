"""Tied parameters: summed once, clipped once, counted once, saved once, wherever their copies are."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from pipeline.training.checkpoint import find_checkpoint
from pipeline.training.group import LocalGroup
from pipeline.training.messages import StepMetrics
from pipeline.training.plan import draft_plan
from pipeline.training.ranks import Ranks
from pipeline.training.saving import Saving
from pipeline.training.settings import OptimizerSettings
from pipeline.training.ties import check_ties
from tests.engine.harness import (
    assert_equal_outcomes,
    build_ranks,
    pipelined,
    plain_loop,
    plan_for,
    plan_with,
    settings_for,
)
from tests.engine.samples import chain, vectors
from tests.engine.test_executor import V_SHAPE
from tests.training.harness import FP64, Numbers, SmallData, equal_states, settings_to_train, train, vector_data
from tests.training.test_trainer import plain_training

LINEAR = partial(nn.Linear, 4, 4, bias=False)


def names(*pairs: tuple[int, int]) -> dict[str, str]:
    return {f"{alias}.weight": f"{owner}.weight" for alias, owner in pairs}


TIES = {
    "three ways": names((2, 0), (5, 0)),
    "a chain": names((2, 0), (3, 2), (5, 3)),
    "two groups": names((4, 0), (5, 1)),
    "neighbors": names((1, 0)),
    "the last owns": names((0, 5)),
    "all of them": names(*[(index, 0) for index in range(1, 6)]),
}
SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("zb_h1", 3), ("interleaved_1f1b", 2), ("zbv", 3)]
"""Copies in one stage, in stages of one rank, and on several ranks."""


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize(("schedule", "pp"), SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_every_copy_has_the_sum(ties, schedule, pp, checkpoint):
    model = chain([LINEAR] * 6, tied=TIES[ties])
    found = pipelined(settings_for(schedule, pp, 4, 7, checkpoint=checkpoint), model, *vectors(7))
    assert_equal_outcomes(found, plain_loop(model, *vectors(7)))


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize(("schedule", "pp"), SCHEDULES)
def test_it_is_clipped_counted_and_moved_once(ties, schedule, pp):
    """Losses, norms and weights of torch's own optimizer and clipping on the whole model."""
    batch = vectors(6)[0].double(), vectors(6)[1]
    model, data = (
        chain([LINEAR] * 6, tied=TIES[ties]),
        SmallData(Numbers(lambda _: batch), Numbers(lambda _: batch), "", 1),
    )
    optimizer = OptimizerSettings("sgd", learning_rate=0.1, warmup_steps=0, decay="constant", weight_decay=0.0)
    settings = settings_to_train(schedule, pp, 3, 6, 3, precision=FP64, optimizer=optimizer, gradient_clip=0.05)
    run = train(settings, model, data)
    losses, norms, parameters = plain_training(model, data, settings, 3)
    assert run.losses == pytest.approx(losses, rel=1e-11)
    assert [message.gradient_norm for message in run.of(StepMetrics)] == pytest.approx(norms, rel=1e-11)
    state = run.state()
    for name, tensor in state.items():
        assert torch.allclose(tensor, parameters[name], rtol=1e-9, atol=1e-12), name
    for alias, owner in model.tied.items():
        assert torch.equal(state[alias], state[owner])


@pytest.mark.parametrize("ties", ["three ways", "a chain", "the last owns"])
def test_it_is_saved_once_and_comes_back_everywhere(ties, tmp_path):
    model, data = chain([LINEAR] * 6, tied=TIES[ties]), vector_data(6)
    settings = settings_to_train("1f1b", 3, 3, 6, 2, precision=FP64)
    run = train(settings, model, data, saved=Saving(tmp_path / "checkpoints", 2, 1))
    checkpoint = find_checkpoint(tmp_path)
    assert set(checkpoint.model) == {f"{index}.weight" for index in range(6)} - set(model.tied)
    settings.steps = 3
    whole = train(settings, model, data)
    again = train(dataclasses.replace(settings), model, data, resumed=checkpoint)
    assert equal_states(again.state(), whole.state())
    assert not equal_states(again.state(), run.state())


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.requires_grad_(False)


@pytest.mark.parametrize(("schedule", "pp"), SCHEDULES)
def test_frozen_copies_get_no_gradient(schedule, pp):
    model = chain([Frozen, LINEAR, Frozen, LINEAR, LINEAR, Frozen], tied=names((2, 0), (5, 0), (4, 1)))
    found = pipelined(settings_for(schedule, pp, 4, 7), model, *vectors(7))
    assert set(found.gradients) == {"1.weight", "3.weight", "4.weight"}
    assert_equal_outcomes(found, plain_loop(model, *vectors(7)))
    state = train(settings_to_train(schedule, pp, 4, 7, 2, precision=FP64), model, vector_data(7)).state()
    assert torch.equal(state["0.weight"], state["5.weight"])


@pytest.mark.parametrize("schedule", [None, V_SHAPE])
def test_the_norm_takes_it_once(schedule):
    model, (inputs, targets) = chain([LINEAR] * 6, tied=TIES["all of them"]), vectors(4)
    plan = plan_for(settings_for("1f1b", 3, 2, 4), model, inputs) if schedule is None else None
    plan = plan or plan_with(schedule, model, inputs)
    ranks = Ranks(plan, build_ranks(plan, model), model.loss, LocalGroup(plan.schedule.pp))
    ranks.train(ranks.cut(0, inputs, targets))
    expected = plain_loop(model, inputs, targets).gradients["0.weight"].norm()
    assert ranks.gradient_norm() == pytest.approx(float(expected), rel=1e-12)


# What can't be


@dataclasses.dataclass(frozen=True)
class Other:
    """A model of somebody else's class, with ties as they were written."""

    layers: tuple
    tied: dict
    name: str = "other"


@pytest.mark.parametrize(
    ("builds", "tied", "message"),
    [
        ([LINEAR] * 2, names((7, 0)), r"7.weight is tied to 0.weight, but other has no parameter 7.weight: use its"),
        ([LINEAR] * 2, names((1, 7)), r"1.weight is tied to 7.weight, but other has no parameter 7.weight"),
        ([LINEAR] * 3, names((1, 0), (2, 1)), r"2.weight is tied to 1.weight, which is tied itself, to 0.weight: tie"),
        ([LINEAR] * 2, names((1, 1)), r"1.weight is tied to 1.weight, which is tied itself"),
        ([LINEAR, partial(nn.Linear, 4, 3)], names((1, 0)), r"their shapes are \[3, 4\] and \[4, 4\]: tie parameters"),
        ([LINEAR, Frozen], names((1, 0)), r"1.weight is tied to 0.weight, but only 1.weight is frozen: freeze both"),
        ([Frozen, LINEAR], names((1, 0)), r"1.weight is tied to 0.weight, but only 0.weight is frozen: freeze both"),
    ],
)
def test_ties_that_cannot_be_kept_are_refused(builds, tied, message):
    with pytest.raises(ValueError, match=message):
        check_ties(Other(chain(builds).layers, tied))


def test_a_plan_refuses_them():
    with pytest.raises(ValueError, match=r"is tied to 7\.weight"):
        draft_plan(settings_for("1f1b", 2, 2, 4), chain([LINEAR] * 2, tied=names((1, 7))))


@pytest.mark.parametrize("pairs", [[(1, 1)], [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 1)]])
def test_circles_are_refused(pairs):
    with pytest.raises(ValueError, match=r"\d.weight is tied to itself by way of \d.weight: tie all to one"):
        chain([LINEAR] * 3, tied=names(*pairs))
