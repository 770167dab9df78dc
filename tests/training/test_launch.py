from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from pipeline.training import launch as launch_module
from pipeline.training import rendezvous
from pipeline.training.failures import RankFailure
from pipeline.training.launch import launch
from pipeline.training.rank_process import lost_peer
from tests.training import launch_targets as targets

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]


class Parent:
    """A launch whose messages, process ids and duration are kept."""

    def __init__(self):
        self.messages, self.pids, self.seconds = [], (), 0.0

    def launch(self, target, payload=None, ranks=2, **options):
        start = time.monotonic()
        options.setdefault("on_message", self.messages.append)
        try:
            launch(target, payload, ranks, on_start=lambda pids: setattr(self, "pids", pids), **options)
        finally:
            self.seconds = time.monotonic() - start


@pytest.fixture
def parent():
    parent = Parent()
    yield parent
    assert alive(parent.pids) == set()


def processes():
    """(state, parent) of every process by its id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, above = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(folder.name)] = (state, int(above))
    return found


def alive(pids):
    """Those of `pids` that still run five seconds later; a zombie doesn't."""
    deadline = time.monotonic() + 5
    while True:
        now = processes()
        left = {pid for pid in pids if now.get(pid, ("Z", 0))[0] not in "ZX"}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def descendants(root):
    children = defaultdict(set)
    for pid, (_, above) in processes().items():
        children[above].add(pid)
    found, stack = set(), [root]
    while stack:
        new = children[stack.pop()] - found
        found |= new
        stack += new
    return found


def test_ranks_join_and_their_messages_arrive(parent):
    parent.launch(targets.ring, {"steps": 3}, ranks=3)
    assert sorted(parent.messages) == [(rank, {"steps": 3}, 6.0) for rank in range(3)]


def test_later_launches_use_the_same_server_and_leave_no_descriptor(parent):
    parent.launch(targets.environment, [])
    server, descriptors = forkserver._forkserver._forkserver_pid, os.listdir("/proc/self/fd")
    parent.launch(targets.environment, [])
    assert forkserver._forkserver._forkserver_pid == server
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_rank_has_the_environment_of_now_and_its_share_of_the_cores(parent, monkeypatch):
    parent.launch(targets.environment, [], ranks=1)  # the server runs from here on at the latest
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ["SET_LATER", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    parent.launch(targets.environment, names)
    ours = {"SET_LATER": "yes", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = [ours | {"RANK": str(rank), "LOCAL_RANK": str(rank), "threads": threads} for rank in range(2)]
    assert sorted(parent.messages[1:], key=lambda message: message["RANK"]) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    parent.launch(targets.environment, [], ranks=1)
    assert parent.messages[-1] == {"threads": 3}


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("raise", "raised KeyError: 'labels'"),
        ("exit", "exited with code 3 before its work was done"),
        ("leave", "exited with code 0 before its work was done"),
        ("quit", "raised SystemExit: no more"),
        ("kill", "was killed by SIGKILL"),
    ],
)
@pytest.mark.parametrize("target", [targets.fail_while_peer_receives, targets.fail_after_peer])
def test_the_first_cause_ends_all_ranks(parent, target, ending, reason):
    with pytest.raises(RankFailure) as caught:
        parent.launch(target, ending)
    assert str(caught.value).startswith(f"rank 0 {reason}")
    assert parent.seconds < 10
    if target is targets.fail_while_peer_receives:
        assert parent.messages == ["last words"]


def test_the_first_sign_of_a_failure_is_told_while_the_others_are_there(parent):
    seen = []

    def look():
        running = processes()
        seen.append([running.get(pid, ("Z", 0))[0] not in "ZX" for pid in parent.pids])

    with pytest.raises(RankFailure):
        parent.launch(targets.fail_while_peer_waits, "kill", on_failure=look)
    assert len(seen) == 1
    assert seen[0][1], "rank 1 still waits"


def test_an_exception_shows_its_traceback(parent):
    with pytest.raises(RankFailure) as caught:
        parent.launch(targets.fail_while_peer_receives, "raise")
    assert caught.value.rank == 0
    assert 'bad_batch["labels"]' in str(caught.value)
    assert "in end_badly" in str(caught.value)
    assert "rank_process.py" not in str(caught.value)
    assert "Connection closed" not in str(caught.value)


def test_a_lost_peer_is_shown_when_there_is_no_other_cause(parent):
    with pytest.raises(RankFailure, match=r"rank 1 raised RuntimeError: .*Connection closed by peer"):
        parent.launch(targets.lose_peers)


def test_messages_before_a_death_arrive_in_order(parent):
    with pytest.raises(RankFailure, match="code 3"):
        parent.launch(targets.many_messages_then_exit, 2000, ranks=1)
    assert parent.messages == list(range(2000))


def test_a_rank_never_waits_for_a_slow_parent(parent, tmp_path):
    flag, received = tmp_path / "sent", []

    def on_message(message):
        deadline = time.monotonic() + 10
        while not flag.exists():
            assert time.monotonic() < deadline, "the rank is stuck in send"
            time.sleep(0.01)
        received.append(message)

    parent.launch(targets.large_messages, str(flag), ranks=1, on_message=on_message)
    assert [message.numel() for message in received] == [10_000_000] * 3
    assert all(torch.equal(message, torch.ones_like(message)) for message in received)


def test_a_message_that_cannot_be_pickled_is_named(parent):
    with pytest.raises(RankFailure, match=r"rank 0 raised ValueError: a message \(function\) cannot be pickled"):
        parent.launch(targets.send_lambda, ranks=1)


def test_a_message_that_cannot_be_read_is_named(parent):
    with pytest.raises(RankFailure, match="rank 0 sent a message that cannot be read here: ValueError"):
        parent.launch(targets.send_unreadable, ranks=1)


def test_an_error_in_on_message_ends_the_ranks(parent):
    def on_message(message):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        parent.launch(targets.block, on_message=on_message)
    assert len(parent.pids) == 2


@pytest.mark.parametrize(("target", "payload"), [(lambda payload, send: None, 1), (targets.ring, lambda: None)])
def test_work_that_cannot_be_pickled_is_refused(target, payload):
    with pytest.raises(ValueError, match="the ranks' work cannot be pickled"):
        launch(target, payload, 1, on_message=print)


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match=r"ranks \(0\) must be at least 1"):
        launch(targets.ring, None, 0, on_message=print)


def test_a_rank_that_is_done_but_does_not_exit_is_ended(parent, monkeypatch, caplog):
    monkeypatch.setattr(launch_module, "_EXIT_SECONDS", 0.3)
    parent.launch(targets.never_exits)
    assert len(parent.messages) == 2
    assert "ranks [0, 1] were done but didn't exit" in caplog.text


def test_what_a_failed_rank_started_ends_with_it(parent):
    with pytest.raises(RankFailure, match="left a child"):
        parent.launch(targets.raise_with_child, ranks=1)
    assert alive(parent.messages) == set()


def test_a_rank_leaves_ctrl_c_to_the_parent(parent):
    parent.launch(targets.interrupt_itself)
    assert parent.messages == ["still here"] * 2


def test_eight_launches_at_once_in_threads():
    results, failures = defaultdict(list), []

    def one(number):
        try:
            launch(targets.ring, number, 2, on_message=results[number].append)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert {number: sorted(got) for number, got in results.items()} == {
        number: [(rank, number, 3.0) for rank in range(2)] for number in range(8)
    }


def test_a_start_method_of_joblib_does_not_reach_the_ranks(parent, monkeypatch):
    class LokyContext(multiprocessing.context.BaseContext):
        _name = "loky"

    monkeypatch.setitem(multiprocessing.context._concrete_contexts, "loky", LokyContext())
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("loky", force=True)
    try:
        parent.launch(targets.ring)
        assert multiprocessing.get_start_method() == "loky"
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert len(parent.messages) == 2


def test_every_line_of_the_log_names_its_rank(parent, tmp_path):
    with pytest.raises(RankFailure):
        parent.launch(targets.write_log, log_file=tmp_path / "train.log")
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert all(line.startswith(("[rank 0]", "[rank 1]")) for line in lines)
    text = "\n".join(line for line in lines if line.startswith("[rank 1]"))
    assert "[tests.launch_targets][INFO] - a line" in text
    assert "[WARNING] - two\n[rank 1]lines" in text
    assert "a Python warning" in text
    assert "[rank 1]RuntimeError: the end" in text


def test_a_failure_survives_pickling():
    failure = pickle.loads(pickle.dumps(RankFailure(1, "raised ValueError: x", "Traceback")))
    assert (failure.rank, str(failure)) == (1, "rank 1 raised ValueError: x\nTraceback")


def test_no_signal_to_the_parent_leaves_a_process():
    """One parent, four launches: Ctrl-C to the group, SIGINT to the parent, SIGTERM, SIGKILL."""
    program = [sys.executable, str(ROOT / "tests/training/launch_targets.py"), "parent"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment, start_new_session=True) as process:
        try:
            endings = [
                (os.killpg, signal.SIGINT, "KeyboardInterrupt True"),
                (os.kill, signal.SIGINT, "KeyboardInterrupt True"),
                (os.kill, signal.SIGTERM, "SystemExit 143 True"),
            ]
            for kill, number, outcome in endings:
                assert read_line(process) == "ready"
                ranks = {pid for pid in descendants(process.pid) if os.getpgid(pid) == pid}
                assert len(ranks) == 2
                kill(process.pid, number)
                assert read_line(process) == outcome
                assert alive(ranks) == set()
            assert read_line(process) == "ready"
            everything = descendants(process.pid)
            assert len(everything) >= 3
        finally:
            process.kill()
        assert alive(everything) == set()


def read_line(process):
    assert select.select([process.stdout], [], [], 30)[0], "the parent says nothing"
    return process.stdout.readline().decode().strip()


def test_torchrun_ranks_agree_on_a_new_name_in_each_run_and_each_attempt():
    """Two runs with the run id "none": one over c10d, one static whose first attempt fails and is restarted."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    runs = {
        "once": ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        "restart": ["--max-restarts=1", f"--master-port={port}", "--monitor-interval=0.1"],
    }
    names = set()
    for text in torchrun(runs):
        words = [line.split()[1:] for line in text.splitlines() if line.startswith("NAME")]
        attempts = {attempt: {name for number, _, name, _ in words if number == attempt} for attempt, *_ in words}
        assert all(run_id == "none" and total == "2.0" for _, run_id, _, total in words)
        assert all(len(agreed) == 1 for agreed in attempts.values())
        assert len(words) == 2 * len(attempts)
        names |= set().union(*attempts.values())
    assert len(names) == 3


def torchrun(runs):
    started = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for mode, options in runs.items():
        program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options]
        program += [str(ROOT / "tests/training/launch_targets.py"), mode]
        started.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment))
    outputs = [process.communicate(timeout=50)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return outputs


@pytest.fixture
def launched(monkeypatch):
    """The four variables of a launcher, set to a job of one rank."""
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    rendezvous.shared_store.cache_clear()
    yield values
    rendezvous.shared_store.cache_clear()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_process_is_launched_when_all_four_variables_are_set(launched, monkeypatch, missing):
    assert rendezvous.is_launched()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rendezvous.world_size() == 4
    monkeypatch.delenv(missing)
    assert not rendezvous.is_launched()
    assert (rendezvous.rank(), rendezvous.world_size()) == (0, 1)


def test_without_a_launcher_the_own_choice_holds(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(rendezvous, "_agreed", {})
    assert rendezvous.agree("directory", lambda: "outputs/1") == "outputs/1"
    assert rendezvous.agree("directory", lambda: "outputs/2") == "outputs/1"


def test_a_busy_master_port_is_reported(launched, monkeypatch):
    with socket.create_server(("0.0.0.0", 0)) as busy:
        monkeypatch.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        with pytest.raises(ValueError, match=r"MASTER_PORT \(\d+\): it is in use, use another port"):
            rendezvous.shared_store()


def test_a_variable_that_is_no_number_is_reported(launched, monkeypatch):
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match=r"RANK \('first'\) in the environment must be a whole number"):
        rendezvous.rank()


def test_ranks_that_do_not_all_come_are_a_lost_peer(launched, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rendezvous, "_START_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(RuntimeError) as caught:
        rendezvous.join(timeout=0.1)
    assert lost_peer(caught.value)


def test_a_timeout_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"timeout \(0\) must be above 0 seconds"):
        rendezvous.join(timeout=0)


def wrapped(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError("gone"), True),
        (TimeoutError("late"), True),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), True),
        (wrapped(RuntimeError("2F5: no activation from rank 0"), RuntimeError("Connection closed by peer")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed"), False),
    ],
)
def test_a_lost_peer_is_told_from_an_error_of_our_own(error, expected):
    assert lost_peer(error) is expected
