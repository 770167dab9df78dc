"""What ranks tell each other at a bad end, through the rendezvous store: where they stand, and which failure it was.

For ranks without a parent that could look (torchrun, several hosts). Each answers from a thread of its own, also while
its main thread waits for a message.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from datetime import timedelta

# torch.distributed has this name too, but mypy finds no type by that way.
from torch._C._distributed_c10d import Store

from pipeline.engine.standing import Activity, Board, Standing
from pipeline.training import rendezvous
from pipeline.training.failures import Cause, RankFailure

_ANSWER_SECONDS = 2.0  # a rank that is alive answers in milliseconds
_TELLING_SECONDS = 10.0  # between another rank's claim and what it tells
_FOREVER = timedelta(days=1000)
_CALL, _CLAIM, _TOLD, _INTERRUPTED = (f"roll_call/{word}" for word in ("call", "claim", "told", "interrupted"))


class RollCall:
    """One rank's side. Where the store has ended with the job, calls raise RuntimeError.

    Args:
        store: the job's.
        rank: this rank.
        size: ranks in all.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self._size = size

    def standings(self) -> list[Standing | None]:
        """Where each rank says it stands; None for those who don't say it in time."""
        keys = [_answer_key(rank) for rank in range(self._size)]
        self._store.set(_CALL, "")
        self._wait(keys, _ANSWER_SECONDS)
        return [_read(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def claim(self) -> bool:
        """Whether this rank is the one that tells what happened: the first that asks is."""
        mine = str(self.rank)
        return self._store.compare_set(_CLAIM, "", mine).decode() == mine

    def is_claimed(self, seconds: float = 0.01) -> bool:
        """Whether a rank claims to tell, now or within that time."""
        return self._wait([_CLAIM], seconds)

    def tell(self, failure: RankFailure) -> None:
        """Let the others know the failure's first line."""
        self._store.set(_TOLD, json.dumps([failure.rank, failure.reason.splitlines()[0], failure.cause]))

    def told(self) -> RankFailure:
        """What the claiming rank tells."""
        if self._wait([_TOLD], _TELLING_SECONDS):
            rank, reason, cause = json.loads(self._store.get(_TOLD))
            failure = RankFailure(rank, reason, cause=Cause(cause))
        else:
            failure = RankFailure(int(self._store.get(_CLAIM)), "failed")
        failure.told = True
        return failure

    def interrupt(self) -> None:
        """Let the others know that this rank was interrupted, not lost."""
        self._store.set(_INTERRUPTED, "")

    def is_interrupted(self) -> bool:
        """Whether any rank was."""
        return self._store.check([_INTERRUPTED])

    def _wait(self, keys: list[str], seconds: float) -> bool:
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True


def answer_from_a_thread(board: Board) -> None:
    """Answer a roll call, should there be one, with the board's first standing, which is this rank's."""
    arguments = (rendezvous.new_store(), rendezvous.rank(), board)
    threading.Thread(target=_answer, args=arguments, name="roll call", daemon=True).start()


def _answer(store: Store, rank: int, board: Board) -> None:
    try:
        store.wait([_CALL], _FOREVER)
        store.set(_answer_key(rank), json.dumps(dataclasses.astuple(board.standing(0))))
    except RuntimeError:
        return  # the store has ended with the job


def _answer_key(rank: int) -> str:
    return f"roll_call/answer/{rank}"


def _read(answer: bytes) -> Standing:
    activity, *rest = json.loads(answer)
    return Standing(Activity(activity), *rest)
