"""Runs in which a rank stops, dies, raises or sends what nobody expects: one message, and nobody left."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from models.model import Model
from pipeline.training import job as job_module
from pipeline.training.failures import Cause, RankFailure
from pipeline.training.preparation import prepare
from pipeline.training.recorder import Recorder, RunFacts
from tests import broken_model, command
from tests.conf.compose import configured
from tests.training.test_launch import alive

pytestmark = pytest.mark.timeout(200)
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


def breaking_job(build_model: Callable[[], Model], *overrides: str) -> job_module.Job:
    given = {"model.tie_embeddings": "false", "device": "cpu", "timeout": "3", **dict(o.split("=") for o in overrides)}
    config = configured(*command.TINY, *(f"{name}={value}" for name, value in given.items()))
    return dataclasses.replace(prepare(config, config.builders(), 1), build_model=build_model)


def recorder(directory: Path) -> Recorder:
    return Recorder(directory, RunFacts("1f1b", "gpt", 2, 4, 4, 3, 42, 0.2))


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended, and which of its ranks are left."""

    failure: RankFailure
    summary: dict[str, Any]
    seconds: float
    left: set[int]

    @property
    def lines(self) -> list[str]:
        return str(self.failure).splitlines()


def ended(directory: Path, build_model: Callable[..., Model], *overrides: str) -> Ended:
    pids = directory / "pids"
    pids.mkdir()
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        job_module.run_job(
            breaking_job(partial(build_model, pids=str(pids)), *overrides), recorder(directory), directory / "train.log"
        )
    seconds = time.monotonic() - began
    ranks = {int(file.name) for file in pids.iterdir()}
    assert len(ranks) == 2
    return Ended(caught.value, json.loads((directory / "summary.json").read_text()), seconds, alive(ranks))


def assert_told(ran: Ended, line: str) -> None:
    """One message whose first line is the summary's; nobody left."""
    assert re.fullmatch(line, ran.lines[0])
    assert ran.summary["status"] == "failed"
    assert ran.summary["error"] == f"RankFailure: {ran.lines[0]}"
    assert ran.summary["steps_done"] == 1
    assert ran.left == set()


def test_a_stopped_rank_is_named_with_its_action_and_who_waits_for_it(tmp_path: Path) -> None:
    ran = ended(tmp_path, partial(broken_model.breaking_gpt, broken_model.stop))
    assert_told(ran, r"rank 1 is stopped \(SIGSTOP\); it has been at 1F1 of step 2 for \d\.\d s")
    assert ran.failure.cause is Cause.LOST_PEER
    text = str(ran.failure)
    assert re.search(
        r"^rank 0  at 0B1 of step 2 for \d\.\d s: waits for the gradient of stage 1, microbatch 1, from rank 1, "
        r"which has not sent it \(it is at 1F1 of step 2\)$",
        text,
        flags=re.MULTILINE,
    )
    assert re.search(r"^rank 0 .*>B1<.*\nrank 1 .*>F1<", text, flags=re.MULTILINE)
    assert "Traceback" not in text
    assert "Traceback" in (tmp_path / "train.log").read_text(), "the log has all"
    assert ran.seconds < 60


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("sum_tied_gradients", "summing the tied gradients of step 1"),
        ("global_norm", "taking the gradient's norm of step 1"),
    ],
)
def test_a_rank_that_stops_outside_its_program_is_named_too(name: str, place: str, tmp_path: Path) -> None:
    """Then the others wait in a collective."""
    build_model = partial(broken_model.gpt_beside_a_rank_that_stops_in, name)
    ran = ended(tmp_path, build_model, "model.tie_embeddings=true")
    assert re.fullmatch(rf"rank 1 is stopped \(SIGSTOP\); it has been {place} for \d\.\d s", ran.lines[0])
    assert ran.lines[1].startswith("rank 0 raised PeerError: a peer was lost while rank 0 ")
    assert re.fullmatch(rf"rank 0  {place} for \d\.\d s: waits for the other ranks", ran.lines[2])
    assert re.fullmatch(rf"rank 1  {place} for \d\.\d s: waits for no message; is stopped \(SIGSTOP\)", ran.lines[3])
    assert (ran.summary["status"], ran.summary["steps_done"], ran.left) == ("failed", 0, set())
    assert ran.seconds < 60


def test_a_killed_rank_is_named_with_its_action(tmp_path: Path) -> None:
    ran = ended(tmp_path, partial(broken_model.breaking_gpt, broken_model.kill), "timeout=300")
    assert_told(ran, r"rank 1 was killed by SIGKILL \(perhaps by the kernel, for lack of memory\)")
    assert re.match(r"rank 0  at 0\w+ of step 2 for ", ran.lines[1])
    assert ran.lines[2].startswith("rank 1  at 1F1 of step 2 for ")
    assert "waits for no message; was killed by SIGKILL" in ran.lines[2]
    assert ">F1<" in ran.lines[-1]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_more_bytes_than_were_expected_are_told_with_their_message(transport: str, tmp_path: Path) -> None:
    """The sender's own check is passed by: shared memory refuses the message, gloo aborts the receiver."""
    ran = ended(tmp_path, broken_model.gpt_beside_a_doubling_transport, f"transport={transport}")
    assert_told(ran, r"rank 1 .*the activation of stage 0, microbatch 1\b.*")
    assert re.search(r"^rank 1  at 1\w+ of step 2", str(ran.failure), flags=re.MULTILINE)
    assert ran.failure.cause is not Cause.LOST_PEER


def stop_rank(rank: int, process: Any) -> None:
    os.kill(command.ranks(process)[rank], signal.SIGSTOP)


def test_the_command_line_shows_the_report_and_ends(tmp_path: Path) -> None:
    """Wherever rank 1 is stopped, waiting or not."""
    ran = command.disturbed(tmp_path, partial(stop_rank, 1), "timeout=3", "logger=none")
    assert (ran.status, ran.left) == (1, set())
    assert re.match(r"ERROR: rank 1 is stopped \(SIGSTOP\); it has been [\w' ]+ for \d\.\d s$", ran.errors[0])
    assert sum(line.startswith("ERROR") for line in ran.errors) == 1
    standings = [line for line in ran.errors if re.match(r"rank \d  \S", line)]  # a grid's rows are further in
    assert len(standings) == 2
    assert "Traceback" not in ran.err
    assert ran.summary["status"] == "failed"
    assert ran.summary["error"] == f"RankFailure: {ran.errors[0].removeprefix('ERROR: ')}"
    assert ran.seconds < 30
    assert json.loads(ran.file("status.json").read_text())["status"] == "failed"


# Ranks that an outer launcher has started


def kill_rank(rank: int, process: Any) -> None:
    os.kill(torchrun_rank(rank, process), signal.SIGKILL)


def torchrun_rank(rank: int, process: Any) -> int:
    (pid,) = [
        pid
        for pid in command.descendants(process.pid)
        if f"RANK={rank}".encode() in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    ]
    return pid


def test_torchrun_with_a_killed_rank_ends_as_failed(tmp_path: Path) -> None:
    ran = command.disturbed(tmp_path, partial(kill_rank, 1), "logger=none", launcher=TORCHRUN)
    assert ran.status != 0
    assert ran.left == set()
    assert ran.seconds < 30
    assert ran.summary["status"] == "failed"
    assert ran.summary["error"] == "RankFailure: rank 1 gives no sign"
    assert ran.summary["steps_done"] >= 1
    assert re.search(r"^.*ERROR.*rank 1 gives no sign\n(.*\n)?rank 0  .*\nrank 1  gives no sign$", ran.err, flags=re.M)


def interrupt(process: Any) -> None:
    """Ctrl-C: the terminal signals the whole foreground group."""
    os.killpg(process.pid, signal.SIGINT)


def test_ctrl_c_under_torchrun_is_recorded_as_one(tmp_path: Path) -> None:
    ran = command.disturbed(tmp_path, interrupt, "logger=none", launcher=TORCHRUN)
    assert ran.status != 0
    assert ran.left == set()
    assert ran.seconds < 30
    assert (ran.summary["status"], ran.summary["error"]) == ("interrupted", "Ctrl-C")


def test_torchrun_with_a_rank_that_raises_tells_it_once(tmp_path: Path) -> None:
    with command.launched([*TORCHRUN, str(Path(__file__)), str(tmp_path)], tmp_path) as process:
        _, err = process.communicate(timeout=command.LIMIT)
    assert process.returncode != 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps_done"]) == ("failed", 1)
    line = "rank 1 raised ActionError: rank 1 failed in 1F1 (microbatch 1) of step 2: the tests' own failure"
    assert summary["error"] == f"RankFailure: {line}"
    assert err.count(f"TOLD {line}") == 1
    assert re.search(r"^rank 1  at 1F1 of step 2 for .*; failed$", err, flags=re.MULTILINE)
    assert re.search(r"^rank 1 .*>F1<", err, flags=re.MULTILINE)


def torchrun_rank_main(directory: Path) -> None:
    """One rank of the job above."""
    job = breaking_job(broken_model.failing_gpt, "timeout=300")
    try:
        job_module.run_job(job, recorder(directory) if os.environ["RANK"] == "0" else None, directory / "train.log")
    except RankFailure as failure:
        if not failure.told:
            os.write(2, f"TOLD {failure}\n".encode())
        sys.exit(1)


if __name__ == "__main__":
    torchrun_rank_main(Path(sys.argv[1]))
