from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.training.precision import LossScale, autocast, parameter_dtype
from pipeline.training.settings import PrecisionSettings


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_parameters_have_the_dtype_named(name):
    assert parameter_dtype(PrecisionSettings(parameters=name)) is getattr(torch, name)


@pytest.mark.parametrize(("name", "dtype"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_autocast_computes_in_the_dtype_named(name, dtype):
    make = autocast(PrecisionSettings(autocast=name), "cpu")
    for _ in range(2):
        with make():
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is dtype
    assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_unknown_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"precision.parameters=float8 is unknown: use float64, .* or float16"):
        parameter_dtype(PrecisionSettings(parameters="float8"))
    with pytest.raises(ValueError, match=r"precision.autocast=int8 is unknown"):
        autocast(PrecisionSettings(autocast="int8"), "cpu")


def test_a_scale_halves_on_overflow_and_doubles_after_a_good_run():
    scale = LossScale.start(8.0)
    scale.growth_interval = 3
    values = []
    for overflow in (False, False, True, False, False, False, False, False, False, True):
        scale.update(overflow=overflow)
        values.append(scale.value)
    assert values == [8, 8, 4, 4, 4, 8, 8, 8, 16, 8]


def test_a_scale_of_one_stays():
    scale = LossScale.start(1.0)
    assert not scale.dynamic
    for _ in range(5000):
        scale.update(overflow=False)
    scale.update(overflow=True)
    assert scale.value == 1.0


def test_a_scale_shrinks_down_to_one_alone():
    scale = LossScale.start(4.0)
    while scale.can_shrink:
        scale.update(overflow=True)
    assert scale.value == 1.0
    assert not LossScale.start(1.0).can_shrink


@pytest.mark.parametrize("value", [0.5, 0.0, -1.0, float("nan")])
def test_a_scale_under_one_is_refused(value):
    with pytest.raises(ValueError, match=r"precision.loss_scale=.* is under 1: use 1 \(no scaling\) or more"):
        LossScale.start(value)
