"""Whole jobs: in processes and in one process they are the same run."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
from torch import nn

from models.gpt import gpt
from pipeline.engine.boundary import TensorSpec
from pipeline.training.devices import Devices
from pipeline.training.failures import NonFiniteError, RankFailure
from pipeline.training.job import Job, check_launch, run_job
from pipeline.training.messages import Finished, StepMetrics, ValidationMetrics
from pipeline.training.plan import make_plan
from pipeline.training.settings import CostsSettings
from tests.engine.distributed_targets import BreaksOnRank1
from tests.engine.harness import CPU
from tests.engine.samples import Explodes, chain
from tests.training.harness import FP16, FP64, settings_to_train, text_data, vector_data

pytestmark = pytest.mark.timeout(120)

SMALL = partial(gpt, layers=4, width=16, heads=2, context=8, vocabulary=32, dropout=0.1)
TWO_LINEARS = [partial(nn.Linear, 4, 4)] * 2


class Record:
    """Stands for a Recorder."""

    def __init__(self) -> None:
        self.messages, self.calls = [], []

    def start(self) -> None:
        self.calls.append("start")

    def __call__(self, message) -> None:
        self.messages.append(message)

    def finish(self, status, error=None, *, steps_done) -> None:
        self.calls.append((status, error))
        self.steps_done = steps_done

    def of(self, kind):
        return [message for message in self.messages if type(message) is kind]


def job_for(settings, build_model=SMALL, build_data=None):
    build_data = build_data or partial(text_data, settings.batch_size)
    plan = make_plan(settings, build_model(), TensorSpec.of(build_data().train.inputs(0)), CPU)
    in_process = settings.launch == "in_process"
    return Job(settings, plan, Devices("cpu", in_process, "gloo"), build_model, build_data, 2, tokens=True)


def record_of(job, tmp_path):
    record = Record()
    run_job(job, record, tmp_path / "train.log")
    return record


def test_processes_and_one_process_are_the_same_run(tmp_path):
    settings = settings_to_train("interleaved_1f1b", 2, 3, 6, 5, precision=FP64, validate_every=2, launch="processes")
    processes = record_of(job_for(settings), tmp_path)
    single = record_of(job_for(dataclasses.replace(settings, launch="in_process")), tmp_path)
    for kind, field in ((StepMetrics, "loss"), (StepMetrics, "gradient_norm"), (ValidationMetrics, "loss")):
        values = [[getattr(message, field) for message in record.of(kind)] for record in (processes, single)]
        assert values[0] == pytest.approx(values[1], rel=1e-12)
        assert len(values[0]) == (5 if kind is StepMetrics else 3)
    assert processes.calls == single.calls == ["start", ("finished", None)]
    assert processes.steps_done == single.steps_done == 5
    (there,), (here,) = processes.of(Finished), single.of(Finished)
    assert (there.bubble_source, here.bubble_source) == ("measured", "replayed")
    assert [report.parameters for report in there.ranks] == [report.parameters for report in here.ranks]
    peaks = [[report.peak_activation_bytes for report in each.ranks] for each in (there, here)]
    assert peaks[0] == peaks[1]
    assert all(report.peak_memory_bytes > 0 for report in there.ranks)
    assert "this process holds stages 0, 2, on cpu" in (tmp_path / "train.log").read_text()


def test_an_overflow_is_one_verdict_in_all_processes(tmp_path):
    """Did the ranks disagree, the copies of the tied weight would drift or the collectives hang."""
    precision = dataclasses.replace(FP16, loss_scale=2.0**34)
    settings = settings_to_train("1f1b", 2, 3, 6, 20, precision=precision)
    processes = record_of(job_for(settings), tmp_path)
    single = record_of(job_for(dataclasses.replace(settings, launch="in_process")), tmp_path)
    skipped = [[message.skipped for message in record.of(StepMetrics)] for record in (processes, single)]
    assert skipped[0] == skipped[1]
    assert skipped[0][0]
    assert not skipped[0][-1]
    losses = [[message.loss for message in record.of(StepMetrics)] for record in (processes, single)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("launch", ["processes", "in_process"])
def test_what_is_not_a_number_ends_every_rank_with_one_error(tmp_path, launch):
    build_model = partial(chain, [TWO_LINEARS[0], partial(Explodes, 4, 4)])
    settings = settings_to_train("1f1b", 2, 2, 4, 3, launch=launch)
    record = Record()
    with pytest.raises(
        NonFiniteError, match=r"^the loss is nan at step 1, first the output of layer 1 \(stage 1, [^\n]*$"
    ):
        run_job(job_for(settings, build_model, partial(vector_data, 4)), record, tmp_path / "train.log")
    (_, (status, error)) = record.calls
    assert record.steps_done == 0
    assert status == "failed"
    assert "NonFiniteError" in error


def test_a_failing_action_is_recorded(tmp_path):
    build_model = partial(chain, [TWO_LINEARS[0], partial(BreaksOnRank1, 4, 4)])
    record = Record()
    with pytest.raises(RankFailure, match=r"rank 1 failed in 1F0 \(microbatch 0\) of step 2: the third forward breaks"):
        run_job(
            job_for(settings_to_train("1f1b", 2, 2, 4, 3), build_model, partial(vector_data, 4)),
            record,
            tmp_path / "train.log",
        )
    assert record.calls[1][0] == "failed"
    assert len(record.of(StepMetrics)) == 1, "what was reported before stays"
    assert record.steps_done == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit(143)])
def test_an_interruption_is_recorded_as_one(tmp_path, interruption, monkeypatch):
    def interrupt(*_, **__):
        raise interruption

    monkeypatch.setattr("pipeline.training.job.launch", interrupt)
    record = Record()
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        run_job(SimpleNamespace(settings=SimpleNamespace(launch="processes", ranks=2)), record, tmp_path / "train.log")
    assert isinstance(caught.value, KeyboardInterrupt | SystemExit)
    assert record.calls[1][0] == "interrupted"


def test_a_rank_that_does_not_record_trains_too(tmp_path):
    settings = settings_to_train("1f1b", 2, 2, 4, 1, launch="in_process")
    run_job(job_for(settings, partial(chain, TWO_LINEARS), partial(vector_data, 4)), None, tmp_path / "train.log")


@pytest.fixture
def torchrun(monkeypatch):
    """The environment of one rank of four."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def test_an_outer_launcher_must_start_pp_ranks(torchrun):
    check_launch(settings_to_train("1f1b", 4, 4, 4, 1))
    with pytest.raises(ValueError, match="the launcher started 4 processes and pp=2: use pp=4"):
        check_launch(settings_to_train("1f1b", 2, 2, 4, 1))
    check_launch(settings_to_train("1f1b", 2, 2, 4, 1, dp=2))
    with pytest.raises(
        ValueError, match="the launcher started 4 processes and pp=2 in dp=3 replicas makes 6: let it start 6"
    ):
        check_launch(settings_to_train("1f1b", 2, 2, 6, 1, dp=3))
    with pytest.raises(
        ValueError, match="launch=in_process under a launcher that started 4 processes: use plain python"
    ):
        check_launch(settings_to_train("1f1b", 4, 4, 4, 1, launch="in_process"))
    with pytest.raises(ValueError, match=r"costs\.source=profile under a launcher: every process would measure other"):
        check_launch(settings_to_train("1f1b", 4, 4, 4, 1, costs=CostsSettings(source="profile")))
    check_launch(settings_to_train("1f1b", 4, 4, 4, 1, costs=CostsSettings(source="profile"), profile="profile.json"))


def test_without_a_launcher_any_pp_will_do(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    check_launch(settings_to_train("1f1b", 2, 2, 4, 1, launch="in_process"))
