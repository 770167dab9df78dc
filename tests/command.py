"""`python train.py` as users start it: real processes, tiny sizes, nothing of the user's own W&B."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_launch import alive, descendants

ROOT = Path(__file__).parents[1]
TINY = [
    *("model.layers=2", "model.width=32", "model.heads=2", "model.context=16", "batch_size=4", "microbatches=4"),
    *("steps=3", "log_every=1", "data.validation_batches=1"),
]
LIMIT = 150  # seconds, on a machine with much else to do


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    status: int
    out: str
    err: str
    directory: Path

    def file(self, name: str) -> Path:
        return self.directory / name

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.file("summary.json").read_text())
        return loaded

    @property
    def errors(self) -> list[str]:
        return self.err.splitlines()


def environment(folder: Path) -> dict[str, str]:
    """This process's, without a W&B key or setting, and not inside any launcher."""
    dropped = ("WANDB", "NETRC", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "HYDRA")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    nobody = {"NETRC": str(folder / ".netrc"), "WANDB_CONFIG_DIR": str(folder / ".wandb")}
    return kept | nobody | {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}


def train(folder: Path, *arguments: str, launcher: Sequence[str] = (), named: bool = True) -> Ran:
    """Run the command in `folder` to its end; its run directory is `folder`/run, or its own choice if not `named`."""
    with started(folder, *arguments, launcher=launcher, named=named) as process:
        out, err = process.communicate(timeout=LIMIT)
    return Ran(process.returncode, out, err, folder / "run")


def shared(
    factory: pytest.TempPathFactory, name: str, *arguments: str, prepare: Callable[[Path], None] | None = None
) -> Ran:
    """A run that the tests share, also those in other processes of pytest-xdist: whoever comes first runs it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = folder / ".ran"
        if not kept.exists():
            if prepare is not None:
                prepare(folder)
            ran = train(folder, *arguments)
            kept.write_text(json.dumps([ran.status, ran.out, ran.err]))
        return Ran(*json.loads(kept.read_text()), folder / "run")


@contextmanager
def started(
    folder: Path, *arguments: str, launcher: Sequence[str] = (), named: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """The command, running; whatever is left of it at the end of the block is killed."""
    places = [f"hydra.run.dir={folder / 'run'}", f"hydra.sweep.dir={folder / 'run'}"]
    flags = [argument for argument in arguments if argument.startswith("-")]
    overrides = [*(places if named else ()), *TINY, *(argument for argument in arguments if argument not in flags)]
    with launched([*launcher, str(ROOT / "train.py"), *flags, *overrides], folder) as process:
        yield process


@contextmanager
def launched(arguments: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Python with these arguments, run as `started` does."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            left = {process.pid, *descendants(process.pid)}
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        process.wait()


def wait_for_steps(process: subprocess.Popen[str], directory: Path) -> None:
    """Until the run has logged a step."""
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + LIMIT
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step was logged"
        time.sleep(0.05)


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, by rank: forked in that order, each leads a group of its own."""
    found = []
    for pid in descendants(process.pid):
        folder = Path("/proc") / str(pid)
        if os.getpgid(pid) == pid and b"forkserver" in (folder / "cmdline").read_bytes():
            born = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
            found.append((born, pid))
    return [pid for _, pid in sorted(found)]


@dataclass(frozen=True)
class Ended(Ran):
    """A run that something from outside has ended."""

    seconds: float
    left: set[int]


def disturbed(folder: Path, disturb: Any, *arguments: str, launcher: Sequence[str] = ()) -> Ended:
    """Start an endless run, wait for a step, call `disturb(process)`, and see how the run ends."""
    with started(folder, "steps=1000000", *arguments, launcher=launcher) as process:
        wait_for_steps(process, folder / "run")
        everything = descendants(process.pid)
        began = time.monotonic()
        disturb(process)
        out, err = process.communicate(timeout=LIMIT)
        seconds = time.monotonic() - began
    return Ended(process.returncode, out, err, folder / "run", seconds, alive(everything))


def wandb_summary(directory: Path) -> dict[str, Any]:
    """The one W&B run of a run directory, read by wandb's own command line."""
    (run,) = (directory / "wandb").glob("*run-*-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded
