"""W&B: what is in the run, and that no lack of key, network or package holds training up.

Runs are written by processes of their own, as wandb leaves a service behind, and read back by wandb's own command line.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.schedule.idle import Idle
from pipeline.training import wandb_logger
from pipeline.training.messages import StepMetrics, ValidationMetrics
from pipeline.training.recorder import RunFacts
from pipeline.training.wandb_logger import WandbLogger

ROOT = Path(__file__).parents[2]
KEY = "a" * 40
FACTS = RunFacts("1f1b", "gpt", 2, 4, 32, 4, 1000, 0.2)

JOBS = """
import logging, sys, time
from pathlib import Path

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)

from pipeline.schedule.library import write
from pipeline.schedule.simulate import nominal_costs, simulate
from pipeline.training.messages import Finished, RankReport, StepMetrics, ValidationMetrics
from pipeline.training.recorder import Recorder, RunFacts
from pipeline.training.speed import Speed
from pipeline.training.wandb_logger import WandbLogger


def job(schedule, status, mode="auto", **options):
    events = simulate(write(schedule, 2, 4), nominal_costs(1)).events
    config = {"pp": 2, "schedule": {"name": schedule}, "model": {"name": "gpt", "layers": 4}}
    facts = RunFacts(schedule, "gpt", 2, 4, 32, 4, 1000, 0.2, "tokens", events, config, speed=Speed(10**12, 8.0))
    recorder = Recorder(Path(f"{schedule}-{status}"), facts, [WandbLogger(mode=mode, **options)])
    before = time.monotonic()
    recorder.start()
    (recorder.directory / "start_seconds").write_text(str(time.monotonic() - before))
    (recorder.directory / "train.log").write_text("what was logged")
    for step in range(1, 5):
        recorder(StepMetrics(step, 4.0 / step, 1.5, 1e-3 * step, 0.5, 64.0, 8192.0, 0.25))
        if step == 2:
            recorder(ValidationMetrics(step, 2.5))
    if status == "finished":
        ranks = tuple(RankReport(rank, (rank,), 500, 100 + rank, 1000 + rank) for rank in range(2))
        recorder(Finished(1.0, 2.0, 64.0, 0.5, 0.25, "measured", ranks, events, 2.0))
        recorder.finish("finished")
    else:
        recorder.finish(status, "rank 1: killed by SIGKILL")


"""


@dataclass(frozen=True)
class Ran:
    folder: Path
    output: str
    seconds: float

    def lines(self, word: str = "W&B") -> list[str]:
        return [line for line in self.output.splitlines() if word in line]

    def runs(self, job: str) -> list[Path]:
        return sorted((self.folder / job / "wandb").glob("*run-*-*"))

    def summary(self, job: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(_inspect(self.runs(job)[0], "--summary", "--json"))
        return loaded

    def records(self, job: str, kind: str) -> list[dict[str, Any]]:
        lines = _inspect(self.runs(job)[0], "--json").splitlines()
        return [record[kind] for record in map(json.loads, lines) if record["type"] == kind]

    def history(self, job: str, name: str) -> dict[int, Any]:
        items = [record["item"] for record in self.records(job, "history")]
        return {item["_step"]: item[name] for item in items if name in item}


@functools.cache  # only asked of runs that have ended
def _inspect(run: Path, *options: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, str(run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def run_jobs(folder: Path, calls: str, **environment: str) -> Ran:
    """Run `calls` in a process without keys, settings or a home of the user's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB") and name != "NETRC"}
    environment = {**inherited, "HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", JOBS + calls],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    return Ran(folder, done.stdout, time.monotonic() - started)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Three jobs of one process, as in a sweep, with neither key nor network."""
    calls = (
        "job('1f1b', 'finished', group='sweep', tags=('wide', 'gpt'))\n"
        "job('gpipe', 'failed', group='sweep')\n"
        "job('1f1b', 'interrupted', name='mine')\n"
    )
    return run_jobs(tmp_path_factory.mktemp("sweep"), calls)


def test_without_a_key_each_job_is_one_offline_run_announced_in_one_line(sweep: Ran) -> None:
    for job in ("1f1b-finished", "gpipe-failed", "1f1b-interrupted"):
        (run,) = sweep.runs(job)
        assert run.name.startswith("offline-run-")
        assert [line for line in sweep.lines() if run.name in line] == [
            f"INFO W&B: no API key, so an offline run in {job}/wandb/{run.name} (wandb sync uploads it)"
        ]
    assert len(sweep.output.splitlines()) == 3


def test_every_step_is_in_the_history(sweep: Ran) -> None:
    job = "1f1b-finished"
    assert sweep.history(job, "loss") == {1: 4.0, 2: 2.0, 3: 4 / 3, 4: 1.0}
    assert sweep.history(job, "validation_loss") == {2: 2.5}
    assert sweep.history(job, "learning_rate") == {step: pytest.approx(1e-3 * step) for step in range(1, 5)}
    constants = {"gradient_norm": 1.5, "samples_per_second": 64, "tokens_per_second": 8192, "bubble_measured": 0.25}
    for name, value in {
        **constants,
        "bubble_predicted": 0.2,
        "step_seconds": 0.5,
        "tflops_per_second": 2,
        "mfu": 0.25,
    }.items():
        assert sweep.history(job, name) == dict.fromkeys(range(1, 5), value)
    assert {"glob_name": "*", "step_metric": "step"}.items() <= sweep.records(job, "metric")[-1].items()


def test_config_names_and_groups(sweep: Ran) -> None:
    summary = sweep.summary("1f1b-finished")
    assert summary["config"]["schedule"] == {"name": "1f1b"}
    assert summary["config"]["model"] == {"name": "gpt", "layers": 4}
    assert (summary["config"]["pp"], summary["config"]["bubble_predicted"]) == (2, 0.2)
    assert summary["tags"] == ["1f1b", "gpt", "wide"]
    assert (summary["project"], summary["name"]) == ("stagecraft", "1f1b-gpt-pp2")
    run = sweep.records("gpipe-failed", "run")[0]
    assert (run["run_group"], run["job_type"], run["tags"]) == ("sweep", "gpipe", ["gpipe", "gpt"])
    assert sweep.summary("1f1b-interrupted")["name"] == "mine"


def test_summary_memory_and_picture(sweep: Ran) -> None:
    summary = sweep.summary("1f1b-finished")["summary"]
    assert (summary["status"], summary["train_loss"], summary["validation_loss"]) == ("finished", 1, 2)
    assert summary["peak_memory_bytes/rank 1"] == summary["peak_memory_bytes/max"] == 1001
    assert summary["peak_activation_bytes/rank 0"] == 100
    (run,) = sweep.runs("1f1b-finished")
    picture = run / "files" / summary["timeline"]["path"]
    assert picture.read_bytes() == (sweep.folder / "1f1b-finished" / "timeline.png").read_bytes()
    assert (run / "files" / "train.log").read_text() == "what was logged"


def test_the_end_of_a_run_is_told_as_it_was(sweep: Ran) -> None:
    ends = {job: sweep.summary(job) for job in ("1f1b-finished", "gpipe-failed", "1f1b-interrupted")}
    assert {job: (end["state"], end["exit_code"]) for job, end in ends.items()} == {
        "1f1b-finished": ("finished", 0),
        "gpipe-failed": ("failed", 1),
        "1f1b-interrupted": (ends["1f1b-interrupted"]["state"], 255),
    }
    assert ends["1f1b-interrupted"]["state"] != "finished"
    failed = ends["gpipe-failed"]["summary"]
    assert (failed["status"], failed["error"]) == ("failed", "rank 1: killed by SIGKILL")
    assert sweep.history("gpipe-failed", "loss")[4] == 1.0


def test_an_unreachable_server_falls_back_to_an_offline_run_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ran = run_jobs(tmp_path, "job('1f1b', 'failed')", WANDB_API_KEY=KEY, WANDB_BASE_URL=url)
    assert float((tmp_path / "1f1b-failed" / "start_seconds").read_text()) < 15
    assert ran.seconds < 30  # and nothing hangs on at the end
    (run,) = ran.runs("1f1b-failed")  # and nothing of the run that could not start
    assert run.name.startswith("offline-run-")
    (line,) = ran.output.splitlines()
    assert line.startswith("WARNING W&B: no connection (Timed out")
    assert "://" not in line
    assert line.endswith(f"), so an offline run in 1f1b-failed/wandb/{run.name} (wandb sync uploads it)")
    assert ran.history("1f1b-failed", "loss")[4] == 1.0
    assert ran.summary("1f1b-failed")["exit_code"] == 1


@pytest.mark.parametrize(
    "how",
    [
        {"calls": "job('1f1b', 'finished')", "WANDB_MODE": "disabled"},
        {"calls": "job('1f1b', 'finished', mode='disabled')", "WANDB_MODE": "online"},
    ],
)
def test_disabled_writes_nothing_and_never_imports_wandb(tmp_path: Path, how: dict[str, str]) -> None:
    calls = how.pop("calls")
    ran = run_jobs(tmp_path, calls + "\nassert 'wandb' not in sys.modules", **how)
    assert not (tmp_path / "1f1b-finished" / "wandb").exists()
    assert (tmp_path / "1f1b-finished" / "summary.json").exists()
    assert ran.output == ""


def test_offline_is_offline_even_with_a_key_and_online_needs_one(tmp_path: Path) -> None:
    calls = "job('1f1b', 'finished'); job('gpipe', 'finished', mode='offline')"
    offline = run_jobs(tmp_path, calls, WANDB_API_KEY=KEY, WANDB_MODE="offline", WANDB_BASE_URL="http://127.0.0.1:9")
    assert [line.split(" in ")[0] for line in offline.lines()] == ["INFO W&B: offline run"] * 2
    online = run_jobs(tmp_path, "job('1f1b', 'failed', mode='online')")
    assert [line.split(",")[0] for line in online.lines()] == ["INFO W&B: no API key"]


def test_a_missing_package_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger = WandbLogger(mode="offline")
    logger.start(FACTS, tmp_path)
    logger.log_validation(ValidationMetrics(1, 2.0))
    logger.finish({}, None, failed=False)
    (record,) = caplog.records
    assert "wandb is not installed (use pip install wandb, or logger=none)" in record.getMessage()


class BrokenRun:
    """A run whose service died: everything raises."""

    def log(self, values: Mapping[str, object], step: int) -> None:
        raise ConnectionError("Connection lost\nand much more")

    def finish(self, exit_code: int) -> None:
        raise BrokenPipeError("broken pipe")


def test_errors_during_the_run_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = WandbLogger(mode="offline")
    logger._run = BrokenRun()  # type: ignore[assignment]
    logger.log_step(StepMetrics(1, 2.0, 1.0, 1e-3, 0.5, 64.0))
    logger.log_step(StepMetrics(2, 2.0, 1.0, 1e-3, 0.5, 64.0))
    logger.finish({}, None, failed=True)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["W&B: Connection lost; training goes on, metrics.jsonl has every metric"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ValueError"),
        ("Connection lost: broken pipe\nand much more", "Connection lost: broken pipe"),
        (
            'Timed out: Post "https://api.wandb.ai/graphql": dial tcp: lookup api.wandb.ai on 10.0.0.1: no such host',
            "Timed out ... no such host",
        ),
        ("x" * 200, "x" * 76 + " ..."),
        (f"timed out: {'x' * 200}", f"timed out ... {'x' * 62} ..."),
    ],
)
def test_reasons_are_one_short_line(text: str, reason: str) -> None:
    assert wandb_logger._reason(ValueError(text)) == reason


@pytest.mark.parametrize(
    ("netrc", "environment", "found"),
    [
        ("", {}, False),
        ("machine api.wandb.ai login user password KEY", {}, True),
        ("machine my.server login user password KEY", {}, False),
        ("machine my.server login user password KEY", {"WANDB_BASE_URL": "https://my.server"}, True),
        ("machine api.wandb.ai login user password KEY", {"WANDB_BASE_URL": "https://my.server"}, False),
        ("default login anonymous password me", {}, False),
        ("not a netrc", {}, False),
        ("", {"WANDB_API_KEY": "KEY"}, True),
    ],
)
def test_where_a_key_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, netrc: str, environment: dict[str, str], found: bool
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text(netrc)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    settings = SimpleNamespace(api_key=None, base_url=environment.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    assert wandb_logger._has_credentials(settings) is found


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logger.mode=onlin is unknown: use auto, online, offline or disabled"):
        WandbLogger(mode="onlin")


def test_idle_times_have_a_name_for_each_cause_and_rank() -> None:
    measured, predicted = {"warmup": 0.5, "tail": 0.25}, {"warmup": 0.4, "tail": 0.2}
    rows = [
        {"rank": 0, "measured": measured, "predicted": None},
        {"rank": 1, "measured": measured, "predicted": predicted},
    ]
    assert wandb_logger._idle(rows) == {
        "idle/warmup/rank_0": 0.5,
        "idle/tail/rank_0": 0.25,
        "idle/warmup/rank_1": 0.5,
        "idle/tail/rank_1": 0.25,
        "idle_predicted/warmup/rank_1": 0.4,
        "idle_predicted/tail/rank_1": 0.2,
    }


def test_a_step_logs_its_idle_times_and_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, object] = {}
    logger = WandbLogger(mode="disabled")
    monkeypatch.setattr(logger, "_log", lambda step, values: logged.update(values))
    more = {"bubble_span_measured": 0.2, "step_seconds_predicted": 0.6, "bubble_span_predicted": 0.1}
    logger.log_step(StepMetrics(1, 2.0, 1.0, 1e-3, 0.5, 64.0, idle=(Idle(tail=0.125),), **more))
    assert {name: logged[name] for name in more} == more
    assert logged["idle/tail/rank_0"] == 0.125
    assert logged["idle/communication/rank_0"] == 0.0


def test_a_run_of_replicas_is_named_so() -> None:
    assert wandb_logger._name(FACTS) == "1f1b-gpt-pp2"
    assert wandb_logger._name(replace(FACTS, dp=4)) == "1f1b-gpt-pp2-dp4"
