"""What the ranks of test_launch.py run, importable so that it can be pickled by name.

Run as a program, it is the parent that a signal hits, or one rank of a torchrun job.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.training import rendezvous
from pipeline.training.launch import launch

log = logging.getLogger("tests.launch_targets")


class Unreadable:
    """Pickles in a rank; unpickling calls int("x") in the parent."""

    def __reduce__(self):
        return int, ("x",)


def ring(payload, send):
    rendezvous.join(timeout=30)
    total = torch.tensor(float(rendezvous.rank() + 1))
    dist.all_reduce(total)
    send((rendezvous.rank(), payload, total.item()))
    rendezvous.leave()


def environment(names, send):
    send({name: os.environ.get(name) for name in names} | {"threads": torch.get_num_threads()})


def fail_while_peer_receives(ending, send):
    """Rank 0 ends badly once rank 1 is about to block in a gloo receive that nothing will answer."""
    rendezvous.join(timeout=60)
    if rendezvous.rank() == 1:
        rendezvous.shared_store().set("receiving", "yes")
        dist.recv(torch.empty(1), src=0)
    rendezvous.shared_store().get("receiving")
    send("last words")
    end_badly(ending)


def fail_while_peer_waits(ending, send):
    """Rank 0 ends badly while rank 1 waits on the launcher's store, which no rank's death closes."""
    store = rendezvous.shared_store()
    if rendezvous.rank() == 1:
        store.set("waiting", "yes")
        store.get("never")
    store.get("waiting")
    end_badly(ending)


def fail_after_peer(ending, send):
    """Rank 1 loses its peer first; rank 0 ends badly afterwards and is the cause all the same."""
    store = rendezvous.shared_store()
    if rendezvous.rank() == 1:
        store.set("failing", "yes")
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    store.get("failing")
    end_badly(ending)


def lose_peers(_, send):
    """Rank 1 loses its peer, then rank 0 does."""
    store = rendezvous.shared_store()
    if rendezvous.rank() == 1:
        store.set("failing", "yes")
    store.get("failing")
    if rendezvous.rank() == 0:
        store.get("never set")  # ends with the job, or by the store's own time limit
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")


def end_badly(ending):
    if ending == "raise":
        bad_batch = {"tokens": 3}
        bad_batch["labels"]
    elif ending == "exit":
        os._exit(3)
    elif ending == "leave":
        os._exit(0)
    elif ending == "quit":
        sys.exit("no more")
    os.kill(os.getpid(), signal.SIGKILL)


def many_messages_then_exit(count, send):
    for number in range(count):
        send(number)
    os._exit(3)


def large_messages(flag, send):
    """More than a pipe holds; the flag says that the last one was sent."""
    for _ in range(3):
        send(torch.ones(10_000_000, dtype=torch.uint8))
    Path(flag).touch()


def send_lambda(_, send):
    send(lambda: None)


def send_unreadable(_, send):
    send(Unreadable())


def block(_, send):
    """Rank 0 sits in a C++ receive, the others in matrix products of half a second; none ever ends."""
    rendezvous.join(timeout=600)
    send(os.getpid())
    if rendezvous.rank() == 0:
        dist.recv(torch.empty(1), src=1)
    matrix = torch.ones(2000, 2000)
    while True:
        matrix @ matrix


def never_exits(_, send):
    threading.Thread(target=time.sleep, args=(600,)).start()
    send(os.getpid())


def raise_with_child(_, send):
    send(subprocess.Popen(["sleep", "600"]).pid)
    raise RuntimeError("left a child")


def interrupt_itself(_, send):
    os.kill(os.getpid(), signal.SIGINT)
    send("still here")


def write_log(_, send):
    log.info("a line")
    log.warning("two\nlines")
    warnings.warn("a Python warning", stacklevel=1)
    if rendezvous.rank() == 1:
        raise RuntimeError("the end")


def hit_by_signals():
    """Be a parent whose launches a signal ends, four times; after each say what came out and which handlers stand."""
    for _ in range(4):
        ready = []

        def on_message(pid, ready=ready):
            ready.append(pid)
            if len(ready) == 2:
                print("ready", flush=True)

        try:
            launch(block, None, 2, on_message=on_message)
        except BaseException as error:
            restored = (
                signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
                and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            )
            print(type(error).__name__, *error.args, restored, flush=True)


def under_torchrun(fail_first):
    """One rank of a torchrun job: agree on a name, join, say both; the first attempt may fail, to be restarted."""
    name = rendezvous.agree("name", lambda: f"{time.time_ns()}-{os.getpid()}")
    rendezvous.join(timeout=60)
    total = torch.ones(1)
    dist.all_reduce(total)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"NAME {attempt} {os.environ['TORCHELASTIC_RUN_ID']} {name} {total.item()}\n".encode())
    if fail_first and attempt == "0":
        os._exit(1)
    rendezvous.leave()


if __name__ == "__main__":
    if sys.argv[1] == "parent":
        hit_by_signals()
    else:
        under_torchrun(sys.argv[1] == "restart")
