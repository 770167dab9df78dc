"""The command line as users meet it: what a run prints and leaves, what is refused before it, and how it can end.

Every run of a real process costs seconds, so the tests share them: one fixture a run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from pipeline.engine.executor import ActionError
from pipeline.training import job as job_module
from pipeline.training import rendezvous
from pipeline.training.failures import RankFailure
from pipeline.training.preparation import prepare
from pipeline.training.recorder import Recorder, RunFacts
from tests import command
from tests.broken_model import failing_gpt
from tests.command import Ended, Ran
from tests.conf.compose import configured

FOLDER = pytest.TempPathFactory
SUMMARY = [
    *("status", "schedule", "model", "pp", "microbatches", "batch_size", "steps", "train_loss", "validation_loss"),
    "dp",
    *(
        "samples_per_second",
        "step_seconds",
        "step_quartiles",
        "bubble_predicted",
        "bubble_measured",
        "bubble_source",
        "parameters",
        "partition",
        "layers",
        "ranks",
        "step_seconds_predicted",
        "bubble_span_predicted",
        "bubble_span_measured",
        "idle",
        "profiled",
        "model_flops_per_step",
        "tflops_per_second",
        "mfu",
    ),
]
MEASURED = {
    *("samples_per_second", "step_seconds", "step_seconds_predicted", "bubble_measured", "ranks", "idle", "profiled"),
    *("bubble_span_measured", "bubble_span_predicted", "tflops_per_second", "step_quartiles"),
}
"""What no two runs have in common."""
PNG = b"\x89PNG\r\n\x1a\n"
TRACEBACK = "Traceback (most recent call last)"


# A run as it comes: W&B without a key, data given relative to where the command is


DEFAULT = ["schedule=1f1b", "data=text_file", "data.path=text.txt", "data.validation_fraction=0.3"]


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 40)


@pytest.fixture(scope="module")
def default(tmp_path_factory: FOLDER) -> Ran:
    return command.shared(tmp_path_factory, "default", *DEFAULT, prepare=write_text)


def test_a_run_prints_plan_progress_and_summary_in_80_columns(default: Ran) -> None:
    assert default.status == 0, default.err
    lines = default.out.splitlines()
    assert lines[0] == "gpt: 34,176 parameters in 4 layers, 13.4 MFLOP a step"
    assert "1f1b: 2 ranks, 4 microbatches (warmup | steady | cooldown)" in lines
    assert "rank 0   F0|F1       B0--- F2 B1--- F3 B2---   |B3---" in lines
    assert "predicted bubbles: makespan 20.0 %, span 20.0 %" in lines
    assert "in flight at most, by rank: 2, 1 microbatches" in lines
    assert any(re.fullmatch(r"step 3/3 \| loss \d\.\d{4} \| \S+ samples/s \| \S+ tokens/s", line) for line in lines)
    assert any(re.search(r"makespan bubble .* % measured, 20\.0 % predicted", line) for line in lines)
    assert lines[-1] == f"run directory: {default.directory}"
    assert max(map(len, lines[:-1])) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


def test_without_a_key_one_line_says_that_wandb_is_offline(default: Ran) -> None:
    (line,) = default.errors
    (run,) = (default.directory / "wandb").glob("*run-*")
    assert run.name.startswith("offline-run-")
    assert line == f"INFO: W&B: no API key, so an offline run in {run} (wandb sync uploads it)"


def test_the_run_is_in_wandb(default: Ran) -> None:
    stored = command.wandb_summary(default.directory)
    assert (stored["state"], stored["exit_code"]) == ("finished", 0)
    assert stored["summary"]["validation_loss"] == default.summary["validation_loss"]


def test_the_run_directory_is_complete(default: Ran) -> None:
    names = {path.name for path in default.directory.iterdir()}
    expected = {".hydra", "train.log", "metrics.jsonl", "summary.json", "timeline.json", "timeline.png", "status.json"}
    assert names == expected | {"wandb"}
    assert {path.name for path in default.file(".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert {path.name for path in default.directory.parent.iterdir()} - {".wandb", ".lock", ".ran"} == {
        "text.txt",
        "run",
    }
    status = json.loads(default.file("status.json").read_text())
    assert (status["status"], status["error"]) == ("finished", None)
    assert "schedule=1f1b" in status["overrides"]


def test_every_line_of_the_log_says_whose_it_is(default: Ran) -> None:
    lines = default.file("train.log").read_text().splitlines()
    assert all(re.match(r"\[(launcher|rank \d)\]\[", line) for line in lines)
    assert {line[: line.index("]") + 1] for line in lines} == {"[launcher]", "[rank 0]", "[rank 1]"}


def test_the_summary_has_every_field_with_a_sensible_value(default: Ran) -> None:
    summary = default.summary
    assert set(SUMMARY) <= set(summary)
    assert [summary[name] for name in ("status", "schedule", "model")] == ["finished", "1f1b", "gpt"]
    assert [summary[name] for name in ("pp", "microbatches", "batch_size", "steps")] == [2, 4, 4, 3]
    assert 2 < summary["train_loss"] < 6
    assert 2 < summary["validation_loss"] < 6
    assert summary["bubble_predicted"] == pytest.approx(1 / 5)
    assert 0 < summary["bubble_measured"] < 1
    assert summary["bubble_source"] == "measured"
    assert 0 < summary["bubble_span_measured"] < 1
    assert 0 < summary["bubble_span_predicted"] < 1
    assert summary["step_seconds_predicted"] > 0
    assert summary["profiled"]["steps"] == [3]
    for row in summary["idle"]:
        assert sum(row["measured"].values()) > 0
        assert sum(row["predicted"].values()) > 0
    assert summary["samples_per_second"] == pytest.approx(4 / summary["step_seconds"])
    assert [(rank["rank"], rank["stages"]) for rank in summary["ranks"]] == [(0, [0]), (1, [1])]
    tied = 256 * 32
    assert sum(rank["parameters"] for rank in summary["ranks"]) == summary["parameters"] + tied
    for rank in summary["ranks"]:
        assert 1_000 < rank["peak_activation_bytes"] < 10_000_000
        assert rank["peak_activation_bytes_predicted"] == rank["peak_activation_bytes"]
        assert rank["peak_memory_bytes"] > 50_000_000


def test_metrics_have_a_line_for_every_logged_step(default: Ran) -> None:
    rows = [json.loads(line) for line in default.file("metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["gradient_norm"] > 0
        assert row["learning_rate"] > 0
        assert row["tokens_per_second"] == pytest.approx(16 * row["samples_per_second"])
        assert 0 < row["bubble_measured"] < 1
    assert steps[-1]["loss"] == default.summary["train_loss"]


def test_the_timeline_opens_as_a_chrome_trace(default: Ran) -> None:
    events = json.loads(default.file("timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    measured = {event["name"] for event in spans}
    assert len(spans) >= 16
    assert any(name.endswith("F0") for name in measured)
    assert all(event["dur"] >= 0 and isinstance(event["pid"], int) for event in spans)
    assert default.file("timeline.png").read_bytes().startswith(PNG)


def test_torchrun_gives_the_same_run_in_one_directory(default: Ran, tmp_path: Path) -> None:
    """Its ranks compose one by one, and agree on the directory that rank 0's clock names."""
    write_text(tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    ran = command.train(tmp_path, *DEFAULT, "logger=none", launcher=torchrun, named=False)
    assert ran.status == 0, ran.err
    (directory,) = (tmp_path / "outputs").glob("*/*")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\d{6}", str(directory.relative_to(tmp_path / "outputs")))
    ran = dataclasses.replace(ran, directory=directory)
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "outputs"}
    same = [name for name in SUMMARY if name not in MEASURED]
    assert {name: ran.summary[name] for name in same} == {name: default.summary[name] for name in same}
    log = ran.file("train.log").read_text()
    assert "[rank 0][" in log
    assert "[rank 1][" in log
    assert ran.out.count("run directory:") == 1


def test_torchrun_with_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=1", "--standalone"]
    ran = command.train(tmp_path, "logger=none", launcher=torchrun)
    assert ran.status != 0
    said = [line for line in ran.errors if "ERROR:" in line]
    assert said == ["ERROR: the launcher started 1 processes and pp=2: use pp=1"]
    assert ran.out == ""


# All ranks in one process


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: FOLDER) -> Ran:
    arguments = ["debug=in_process", "schedule=interleaved_1f1b", "model.layers=6", "microbatches=3", "precision=bf16"]
    return command.shared(tmp_path_factory, "in_process", *arguments)


def test_in_process_bubbles_are_replayed_and_no_ranks_memory_is_told(in_process: Ran) -> None:
    assert in_process.status == 0, in_process.err
    summary = in_process.summary
    assert summary["bubble_source"] == "replayed"
    assert [rank["stages"] for rank in summary["ranks"]] == [[0, 2], [1, 3]]
    assert [rank["peak_memory_bytes"] for rank in summary["ranks"]] == [None, None]
    assert all(rank["peak_activation_bytes"] > 0 for rank in summary["ranks"])
    assert 0 < summary["bubble_measured"] < 1
    assert not in_process.file("wandb").exists()
    assert in_process.errors == ["INFO: this process holds stages 0, 1, 2, 3, on cpu"]


# Sweeps


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: FOLDER) -> Ran:
    arguments = ["-m", "schedule=gpipe,1f1b,interleaved_1f1b", "data=synthetic_text", "logger=none"]
    return command.shared(tmp_path_factory, "sweep", *arguments)


def test_a_sweep_runs_them_all(sweep: Ran) -> None:
    assert sweep.status == 0, sweep.err
    assert f"3 of 3 jobs finished: {sweep.directory}" in sweep.out
    summaries = [json.loads(sweep.file(f"{number}/summary.json").read_text()) for number in range(3)]
    assert [summary["schedule"] for summary in summaries] == ["gpipe", "1f1b", "interleaved_1f1b"]
    assert [summary["status"] for summary in summaries] == ["finished"] * 3
    # one data set, one seed: the schedule changes nothing
    losses = [summary["train_loss"] for summary in summaries]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert [json.loads(sweep.file(f"{n}/status.json").read_text())["job"] for n in range(3)] == [0, 1, 2]


def test_a_sweep_ends_with_a_comparison(sweep: Ran) -> None:
    assert "1  gpipe" in sweep.out
    table = sweep.file("comparison.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in table] == ["name", "gpipe", "1f1b", "interleaved_1f1b"]
    assert "| 3 | interleaved\\_1f1b |" in sweep.file("comparison.md").read_text()


@pytest.fixture(scope="module")
def failing_sweep(tmp_path_factory: FOLDER) -> Ran:
    arguments = [
        *("-m", "microbatches=9,4", "optimizer.learning_rate=1e30,1e-3", "optimizer.warmup_steps=0"),
        *("gradient_clip=null", "data=synthetic_text", "logger=none"),
    ]
    return command.shared(tmp_path_factory, "failing_sweep", *arguments)


NOT_FINITE = r"the (?:loss|gradient's norm) is (?:nan|inf) at step \d, first [^\n]*layer [^\n]*: lower optimizer"


def test_failing_jobs_do_not_stop_a_sweep_and_are_named(failing_sweep: Ran) -> None:
    assert failing_sweep.status == 1
    lines = failing_sweep.out.splitlines()
    end = lines.index(f"1 of 4 jobs finished: {failing_sweep.directory}")
    assert [line.partition(")")[0] for line in lines[end + 1 :]] == [
        "job 0 (microbatches=9 optimizer.learning_rate=1e+30",
        "job 1 (microbatches=9 optimizer.learning_rate=0.001",
        "job 2 (microbatches=4 optimizer.learning_rate=1e+30",
    ]
    assert "failed: microbatches=9 is more than batch_size=4" in lines[end + 1]
    assert re.search(rf"failed: {NOT_FINITE}", lines[end + 3])
    status = [json.loads(failing_sweep.file(f"{n}/status.json").read_text())["status"] for n in range(4)]
    assert status == ["failed", "failed", "failed", "finished"]
    ends = {n: failing_sweep.file(f"{n}/summary.json") for n in range(4)}
    assert [n for n, file in ends.items() if file.exists()] == [2, 3]
    assert json.loads(ends[2].read_text())["status"] == "failed"


def test_what_is_not_a_number_is_one_line_for_all_ranks(failing_sweep: Ran) -> None:
    assert TRACEBACK not in failing_sweep.err
    assert len(re.findall(NOT_FINITE, failing_sweep.err)) == 1
    assert re.search(rf"^ERROR: {NOT_FINITE}", failing_sweep.err, flags=re.M)
    log = failing_sweep.file("2/train.log").read_text()
    assert re.search(r"\[rank \d\]Traceback", log)


# What is refused before anything starts


def assert_refused(ran: Ran, line: str) -> None:
    assert (ran.status, ran.errors, ran.out) == (2, [line], "")
    assert {path.name for path in ran.directory.iterdir()} <= {".hydra", "train.log", "status.json"}
    assert json.loads(ran.file("status.json").read_text())["error"] == line.removeprefix("ERROR: ")


def test_a_number_that_cannot_be_is_one_line_and_status_2(tmp_path: Path) -> None:
    line = (
        "ERROR: microbatches=5 is more than batch_size=4: every microbatch needs a sample, so use microbatches=4 or "
        "fewer, or a larger batch"
    )
    assert_refused(command.train(tmp_path, "microbatches=5"), line)


def test_several_schedules_at_once_are_one_line_and_status_2(tmp_path: Path) -> None:
    ran = command.train(tmp_path, "schedule=[gpipe,1f1b]")
    assert_refused(ran, ran.errors[0])
    assert ran.errors[0].startswith("ERROR: schedule takes exactly one option, not none or a list: use schedule=1f1b")


def test_warnings_come_after_the_checks(tmp_path: Path) -> None:
    """99 ranks on this machine are worth a warning, but not before it is known that they can't be."""
    line = (
        "ERROR: 99 stages need at least 99 layers, the model has 4: "
        "use fewer stages (pp x schedule.stages_per_rank) or a deeper model"
    )
    assert_refused(command.train(tmp_path, "pp=99"), line)


def test_what_hydra_refuses_keeps_its_form(tmp_path: Path) -> None:
    ran = command.train(tmp_path, "schedule=nope")
    assert (ran.status, ran.out) == (1, "")
    assert "Could not find 'schedule/nope'" in ran.err
    assert TRACEBACK not in ran.err
    assert not ran.directory.exists()


def test_a_group_set_to_null_is_one_line_and_status_2(tmp_path: Path) -> None:
    ran = command.train(tmp_path, "logger=null")
    assert (ran.status, ran.out) == (2, "")
    assert ran.errors == ["ERROR: logger=null names no option: name one of its options (see --help)"]


TINY = command.TINY
IMAGES = ["model=resnet18", "batch_size=4", "microbatches=4"]


def prepared(config: Any) -> job_module.Job:
    return prepare(config, config.builders(), config.data.validation_batches)


def refuse(match: str, *overrides: str, base: Sequence[str] = TINY) -> None:
    """The overrides compose with those of `base`, and then are a ValueError in one line."""
    with pytest.raises(ValueError, match=match) as caught:
        prepared(configured(*base, *overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        *((f"{name}=0", rf"^{name}=0 is too small: use 1 or more$") for name in ("pp", "batch_size", "steps")),
        *((f"{name}=0", rf"^{name}=0 is too small: use 1 or more$") for name in ("microbatches", "log_every")),
        *((f"{name}=-1", rf"^{name}=-1 is too small: use 0 or more$") for name in ("seed", "prefetch")),
        ("validate_every=-1", "^validate_every=-1 is too small: use 0 or more$"),
        ("microbatches=5", "microbatches=5 is more than batch_size=4: .* use microbatches=4 or fewer"),
        ("pp=5", "5 stages need at least 5 layers, the model has 4: use fewer stages"),
        ("schedule=interleaved_1f1b pp=3", "6 stages need at least 6 layers, the model has 4"),
        ("timeout=0", "timeout=0 is out of range: give the seconds"),
        ("timeout=inf", "timeout=inf is out of range: give the seconds"),
        ("gradient_clip=-1", "gradient_clip=-1 is not positive: use a positive norm, or null"),
        ("gradient_clip=nan", "gradient_clip=nan is not positive"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate=0 is not a positive number: use one such as 1e-3"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate=inf is not a positive number"),
        ("optimizer.warmup_steps=-1", "optimizer.warmup_steps=-1 is negative: use 0 or more"),
        ("optimizer.betas=[0.9]", r"optimizer.betas=\[0.9\] must be two numbers in \[0, 1\): use \[0.9,0.95\]"),
        ("optimizer.betas=[0.9,1.0]", "must be two numbers"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1 is out of range: use 0 or more"),
        ("optimizer.momentum=nan", "optimizer.momentum=nan is out of range: use 0 or more"),
        ("precision.loss_scale=0.5", r"precision.loss_scale=0.5 is out of range: use 1 \(no scaling\) or more"),
        ("precision.parameters=int8", "precision.parameters=int8 is unknown: use float64"),
        ("precision.autocast=half", "precision.autocast=half is unknown"),
        ("task=test", "task=test is unknown: use train, evaluate, generate, plan, profile or export$"),
        ("launch=threads", "launch=threads is unknown: use processes or in_process"),
        ("device=tpu", "device=tpu is unknown: use auto, cpu or cuda"),
        ("schedule.name=1f1c", "1f1b"),
        ("schedule.stages_per_rank=2", "stages_per_rank"),
        ("partition.layers=[2,2]", r"partition.layers=\[2, 2\] is for partition=manual, not uniform"),
        ("partition=manual partition.layers=[1,2]", "adds up to 3, the model has 4 layers"),
        ("partition=manual partition.layers=[4,0]", "leaves an end empty"),
        ("partition=manual", "names 0 stages, the schedule has 2"),
        ("logger.mode=shouting", "logger.mode=shouting is unknown: use auto, online, offline or disabled"),
        ("model.heads=3", "width"),
        ("model.vocabulary=99", "the model tells 99 classes apart and the data has 256: use model.vocabulary=256"),
        ("data.context=17", "context"),
        ("data=text_file data.path=nowhere.txt", "finds nothing at .*nowhere.txt: use the path of an existing file"),
        ("data=tokens data.path=nowhere", r"finds no file .*train\.bin: use a folder with train.bin and val.bin"),
    ],
)
def test_refused_of_a_gpt(override: str, match: str) -> None:
    refuse(match, *override.split(" "))


@pytest.mark.parametrize(
    ("override", "match"),
    [
        (
            "data.size=32",
            "a normalization in layer4.* would see one value a channel .*: use a larger batch_size or fewer",
        ),
        ("data.size=32 batch_size=7", "a normalization in layer4"),  # one microbatch of a single sample is enough
        ("data.size=8", "8 pixels"),
        ("model.depth=19", "19"),
        ("data.classes=10", "glyphs have 36 classes, not 10: use classes=36"),
        ("model.classes=10", "tells 10 classes apart and the data has 36: .* model.classes=36"),
        ("data=cifar10 data.path=nowhere", "finds no folder .*nowhere/cifar-10-batches-py: use the folder where"),
        ("data=image_folder data.path=nowhere", "finds no folder .*nowhere/train: use a path that holds"),
    ],
)
def test_refused_of_a_resnet(override: str, match: str) -> None:
    refuse(match, *override.split(" "), base=IMAGES)


def test_a_resnet_with_two_samples_a_microbatch_is_accepted() -> None:
    prepared(configured("model=resnet18", "batch_size=8", "microbatches=4", "data.size=32", "device=cpu"))


def test_broken_data_is_refused(tmp_path: Path) -> None:
    tokens = np.arange(400, dtype=np.uint16) % 250
    for name in ("train.bin", "val.bin"):
        tokens.tofile(tmp_path / name)
    given = ["data=tokens", f"data.path={tmp_path}", "data.vocabulary=256"]
    assert prepared(configured(*TINY, *given, "device=cpu")).plan.parameters == 34176
    (tmp_path / "train.bin").write_bytes(tokens.tobytes()[:-1])
    refuse("has 799 bytes, no whole number of uint16", *given)
    tokens[:10].tofile(tmp_path / "train.bin")
    refuse(r"train\.bin", *given)
    (tmp_path / "short.txt").write_text("too short")
    refuse("short.txt", "data=text_file", f"data.path={tmp_path / 'short.txt'}")


def test_a_file_that_may_not_be_read_is_refused_like_a_missing_one(tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever the system says of a file is for the user, not a failure of ours."""
    import train

    def unreadable(*given: object) -> None:
        raise PermissionError(13, "Permission denied", "train.bin")

    monkeypatch.setattr("pipeline.training.tasks.prepare", unreadable)
    monkeypatch.setattr(train.HydraConfig, "get", lambda: configured_choices())
    with pytest.raises(train.BadInput, match=r"Permission denied: 'train\.bin'"):
        train.main.__wrapped__(composed())


def composed() -> Any:
    from tests.conf.compose import compose

    return compose(*TINY)


def configured_choices() -> Any:
    from tests.conf.compose import compose

    hydra = compose(hydra_config=True).hydra
    OmegaConf.set_readonly(hydra, False)
    hydra.runtime.output_dir = "outputs"
    return hydra


# Machines that this one is not


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that torch sees so many GPUs, with or without bf16."""

    def pretend(count: int, bf16: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old GPU")
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation
        )

    return pretend


def test_no_gpu_is_refused(gpus: Callable[..., None]) -> None:
    gpus(0)
    refuse("^device=cuda needs 2 GPUs and this machine has none: use device=cpu$", "device=cuda")


def test_fewer_gpus_than_ranks_are_refused_with_the_cure(gpus: Callable[..., None]) -> None:
    gpus(1)
    refuse(
        "^device=cuda needs a GPU for each of 2 ranks and this machine has 1: "
        "use share_gpu=true or launch=in_process, or pp=1$",
        "device=cuda",
    )


def test_a_precision_that_the_gpu_only_emulates_is_refused(gpus: Callable[..., None]) -> None:
    gpus(2, bf16=False)
    refuse(
        r"^precision=bf16 is not supported by this GPU \(Old GPU\): use precision=fp16 or fp32$",
        *("device=cuda", "precision=bf16"),
    )


def test_slow_choices_are_one_warning_each(gpus: Callable[..., None], caplog: Any, monkeypatch: Any) -> None:
    gpus(1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    prepared(configured(*TINY, "precision=fp16"))
    assert [record.getMessage() for record in caplog.records] == [
        "1 GPU for 2 ranks: using the CPU; share_gpu=true lets the ranks share GPUs",
        "2 ranks share 1 CPU cores: times and bubbles are those of a crowded machine",
        "fp16 is emulated on a CPU and many times slower than fp32: use precision=bf16 or fp32 for speed",
    ]


@pytest.mark.parametrize(
    ("world", "overrides", "match"),
    [
        ("3", [], "the launcher started 3 processes and pp=2: use pp=3"),
        ("2", ["launch=in_process"], "launch=in_process under a launcher that started 2 processes: use plain python"),
    ],
)
def test_ranks_of_an_outer_launcher_must_fit(
    world: str, overrides: list[str], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    refuse(match, *overrides)


def test_a_variable_of_a_launcher_that_is_not_there_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    assert not rendezvous.is_launched()
    prepared(configured(*TINY, "device=cpu"))


# Ends that nobody planned


def interrupt(process: Any) -> None:
    """Ctrl-C: the terminal signals the whole foreground group."""
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: Any) -> None:
    process.send_signal(signal.SIGTERM)


def kill_rank(rank: int, process: Any) -> None:
    os.kill(command.ranks(process)[rank], signal.SIGKILL)


def assert_ended(ran: Ended, status: int, line: str, recorded: str) -> None:
    assert (ran.status, ran.left) == (status, set())
    assert [each for each in ran.errors if each.startswith(("ERROR", "interrupted"))] == [line]
    assert ran.seconds < 10
    assert ran.summary["status"] == recorded
    assert ran.summary["steps_done"] >= 1
    assert TRACEBACK not in ran.out + ran.err


def test_ctrl_c_ends_a_run(tmp_path: Path) -> None:
    ran = command.disturbed(tmp_path, interrupt)
    assert_ended(ran, 130, f"interrupted; what was recorded is in {ran.directory}", "interrupted")
    assert ran.summary["error"] == "Ctrl-C"
    stored = command.wandb_summary(ran.directory)
    assert stored["exit_code"] == 255
    assert stored["summary"]["status"] == "interrupted"


@pytest.mark.parametrize("launch", ["processes", "in_process"])
def test_sigterm_ends_a_run(launch: str, tmp_path: Path) -> None:
    ran = command.disturbed(tmp_path, terminate, f"launch={launch}", "logger=none")
    assert_ended(ran, 143, f"interrupted; what was recorded is in {ran.directory}", "interrupted")
    assert ran.summary["error"] == "SIGTERM"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_job(rank: int, tmp_path: Path) -> None:
    ran = command.disturbed(tmp_path, partial(kill_rank, rank))
    error = f"rank {rank} was killed by SIGKILL (perhaps by the kernel, for lack of memory)"
    assert_ended(ran, 1, f"ERROR: {error}", "failed")
    assert error in ran.summary["error"]
    stored = command.wandb_summary(ran.directory)
    assert (stored["state"], stored["exit_code"]) == ("failed", 1)
    assert error in json.loads(ran.file("status.json").read_text())["error"]


def test_ctrl_c_ends_the_whole_sweep(tmp_path: Path) -> None:
    arguments = ["-m", "schedule=gpipe,1f1b", "steps=1000000", "launch=in_process", "logger=none"]
    with command.started(tmp_path, *arguments) as process:
        command.wait_for_steps(process, tmp_path / "run" / "0")
        interrupt(process)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert TRACEBACK not in err
    assert not (tmp_path / "run" / "1").exists()


def failing_job(*overrides: str) -> job_module.Job:
    """A job whose second stage raises in microbatch 1 of the second step."""
    config = configured(*TINY, "model.tie_embeddings=false", "device=cpu", *overrides)
    return dataclasses.replace(prepared(config), build_model=failing_gpt)


def recorder(directory: Path) -> Recorder:
    return Recorder(directory, RunFacts("1f1b", "gpt", 2, 4, 4, 3, 42, 0.2))


def assert_names_the_place(text: str) -> None:
    assert re.search(r"rank 1 failed in 1F1 \(microbatch 1\) of step \d: the tests' own failure", text)
    assert re.search(r"^rank 1 .*>F1<", text, flags=re.MULTILINE)
    assert re.search(r"^rank 0 ", text, flags=re.MULTILINE)


@pytest.mark.timeout(120)
def test_a_rank_that_raises_in_an_action_names_it_once(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        job_module.run_job(failing_job(), recorder(tmp_path), tmp_path / "train.log")
    assert caught.value.rank == 1
    text = str(caught.value)
    assert_names_the_place(text)
    assert text.count("ArithmeticError: the tests' own failure") == 1
    assert text.count(">F1<") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps_done"]) == ("failed", 1)
    assert "rank 1" in summary["error"]


def test_in_one_process_a_rank_that_raises_names_the_same(tmp_path: Path) -> None:
    with pytest.raises(ActionError) as caught:
        job_module.run_job(failing_job("launch=in_process"), recorder(tmp_path), tmp_path / "train.log")
    assert_names_the_place(str(caught.value))
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_broken_start_still_leaves_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C while W&B looks for its server comes before the first rank."""
    made = recorder(tmp_path)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job_module.run_job(failing_job("launch=in_process"), made, tmp_path / "train.log")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("interrupted", "Ctrl-C")
