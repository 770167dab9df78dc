"""deterministic=true: the same bits again, and what has no such algorithm is named."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from models.gpt import gpt
from pipeline.training.determinism import deterministic
from pipeline.training.messages import StepMetrics
from tests.engine.samples import chain
from tests.training.harness import BF16_TRUE, settings_to_train, vector_data
from tests.training.test_job import job_for, record_of


class Asks(nn.Linear):
    """Gives nothing good where the mode is off."""

    def forward(self, x: Tensor) -> Tensor:
        on = torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" in os.environ
        return super().forward(x) * (1.0 if on else float("nan"))


class Puts(nn.Linear):
    """Uses an operation that adds up in any order, and that torch has no other algorithm for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).put(torch.tensor([0]), torch.zeros(1))


@pytest.mark.parametrize("launch", ["processes", "in_process"])
def test_every_process_computes_so(tmp_path, launch, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    settings = settings_to_train("1f1b", 2, 2, 4, 2, launch=launch, deterministic=True)
    build_model = partial(chain, [partial(Asks, 4, 4)] * 2)
    record = record_of(job_for(settings, build_model, partial(vector_data, 4)), tmp_path)
    assert len(record.of(StepMetrics)) == 2
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic_", [True, False])
def test_what_has_no_deterministic_algorithm_is_named(tmp_path, deterministic_):
    settings = settings_to_train("1f1b", 2, 2, 4, 1, launch="in_process", deterministic=deterministic_)
    job = job_for(settings, partial(chain, [partial(nn.Linear, 4, 4), partial(Puts, 4, 4)]), partial(vector_data, 4))
    if not deterministic_:
        record_of(job, tmp_path)
        return
    with pytest.raises(Exception, match=r"rank 1 failed in 1F0 .*put.* does not have a deterministic implementation"):
        record_of(job, tmp_path)


@pytest.mark.parametrize("precision", [None, BF16_TRUE])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_two_runs_are_equal_bit_for_bit(tmp_path, schedule, precision):
    more = {} if precision is None else {"precision": precision}
    settings = settings_to_train(schedule, 2, 4, 8, 4, launch="in_process", deterministic=True, **more)
    build_model = partial(gpt, layers=6, width=16, heads=2, context=8, vocabulary=32, dropout=0.1)
    runs = [record_of(job_for(settings, build_model), tmp_path).of(StepMetrics) for _ in range(2)]
    told = [[(step.loss, step.gradient_norm) for step in run] for run in runs]
    assert told[0] == told[1]


def test_the_mode_ends_as_it_began(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_compiled_kernels_are_chosen_without_timing_them():
    from torch._inductor import config

    with deterministic(True, compiled=True):
        assert config.deterministic
    assert not config.deterministic
