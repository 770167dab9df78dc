"""Where every rank stood when a run ended, in words: at which action, for which message, and whose turn it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.engine.standing import Activity, Standing
from pipeline.schedule.actions import Action
from pipeline.schedule.errors import Place
from pipeline.schedule.grid import grid
from pipeline.schedule.schedule import Message, Row, Schedule, message, takes
from pipeline.training.failures import Cause, RankFailure

_WIDTH = 120

_WORDS = {
    Activity.STARTING: "starting",
    Activity.CONNECTING: "connecting to the other ranks",
    Activity.LOADING: "loading batch {number}",
    Activity.REDUCING: "summing over the replicas in step {number}",
    Activity.SUMMING_TIED: "summing the tied gradients of step {number}",
    Activity.TAKING_NORM: "taking the gradient's norm of step {number}",
    Activity.UPDATING: "updating the weights of step {number}",
    Activity.LOGGING: "gathering a loss",
    Activity.REPORTING: "gathering what was measured",
    Activity.SAVING: "saving a checkpoint after step {number}",
    Activity.DONE: "done",
}


@dataclass(frozen=True)
class HangReport:
    """All ranks at one moment.

    Args:
        programs: what the ranks of a replica run, by activity.
        standings: by rank, of all replicas; None for a rank that gave no sign of life.
        timeout: seconds that a message may take.
        ends: of ranks that are at an end or can't go on, how, to be read after "rank 1": "was killed by SIGKILL".
    """

    programs: Mapping[Activity, Schedule]
    standings: Sequence[Standing | None]
    timeout: float
    ends: Mapping[int, str] = field(default_factory=dict)

    def text(self) -> str:
        """A line a rank, and the grid of the program that the last of them is in, with their places marked.

        Of several replicas the one is drawn whose turn it was.
        """
        lines = [f"rank {rank:>{len(str(len(self.standings) - 1))}}  {line}" for rank, line in enumerate(self._lines())]
        drawn = self._grid()
        return "\n".join(lines if drawn is None else [*lines, drawn])

    def blamed(self) -> tuple[int, str]:
        """Whose turn it was, and a sentence about it that reads after "rank 1".

        In a chain of waiting ranks it is the one that waits for nobody: stopped, busy, or silent. Where all wait, it
        is the one whose message was sent, and so got lost or has another size than was expected.
        """
        silent = [rank for rank, standing in enumerate(self.standings) if standing is None]
        stopped = [rank for rank in sorted(self.ends) if rank not in silent]
        present = {rank: standing for rank, standing in enumerate(self.standings) if standing is not None}
        undone = [rank for rank, standing in present.items() if standing.activity is not Activity.DONE]
        longest = sorted(undone or present, key=lambda rank: -present[rank].seconds)
        busy = [rank for rank in longest if not present[rank].waiting]
        unserved = [rank for rank in longest if self._unserved(rank, present[rank])]
        # one is enough of those that move: at any moment several ranks compute
        turn = next(group for group in (silent, stopped, busy[:1], unserved[:1], longest[:1]) if group)
        first, *others = [self._sentence(rank) for rank in turn]
        more = [f"rank {rank} {sentence}" for rank, sentence in zip(turn[1:], others, strict=True)]
        return turn[0], "; ".join([first, *more])

    def under_way(self, rank: int) -> list[Message]:
        """The messages whose receive a rank has posted, that it has not used, and that were sent or being sent."""
        standing = self.standings[rank]
        if standing is None or not standing.activity.runs_program:
            return []
        program = self.programs[standing.activity]
        row = self._row(rank, program)[: standing.position]
        used = {takes(part, program.stages) for action in row for part in action.compute}
        posted = [message(action) for action in row if action.type.is_receive]
        return [moved for moved in posted if moved not in used and self._has_sent(moved, rank, sending=True)]

    def _sentence(self, rank: int) -> str:
        standing = self.standings[rank]
        if standing is None:
            return "gives no sign"
        been = f"has been {self._where(rank, standing)} for {_seconds(standing)}"
        if rank in self.ends:
            return f"{self.ends[rank]}; it {been}"
        unserved = self._unserved(rank, standing)
        if unserved:
            return f"{been}, waiting for {unserved[0]}: it got lost, or has another size than was expected"
        if standing.waiting:
            return f"{been} and {self._waits(rank, standing)}, as every rank does"
        return f"{been} and waits for no message: if it is only slow, use a timeout above {self.timeout:g}"

    def _lines(self) -> Iterator[str]:
        return (self._line(rank) for rank in range(len(self.standings)))

    def _line(self, rank: int) -> str:
        standing = self.standings[rank]
        if standing is None:
            return "gives no sign"
        line = f"{self._where(rank, standing)} for {_seconds(standing)}: {self._waits(rank, standing)}"
        return f"{line}; {self.ends[rank]}" if rank in self.ends else line

    def _where(self, rank: int, standing: Standing) -> str:
        """What reads after "has been"."""
        number = standing.step + 1
        if not standing.activity.runs_program:
            return _WORDS[standing.activity].format(number=number)
        what = f"step {number}" if standing.activity is Activity.TRAINING else f"validation batch {number}"
        action = self._action(rank, standing)
        return f"at the end of {what}" if action is None else f"at {action} of {what}"

    def _waits(self, rank: int, standing: Standing) -> str:
        if not standing.waiting:
            return "waits for no message"
        if not standing.activity.runs_program:
            return "waits for the other ranks"
        if self._action(rank, standing) is None:
            return "waits until what it sent is taken"
        messages = self._messages(rank, standing)
        return f"waits for {' and '.join(self._awaited(moved, rank) for moved in messages)}"

    def _awaited(self, moved: Message, receiver: int) -> str:
        sender, _ = self._sender(moved, receiver)
        standing = self.standings[sender]
        text = f"{moved}, from rank {sender}, which"
        if standing is None:
            return f"{text} gives no sign"
        if self._has_sent(moved, receiver):
            return f"{text} has sent it"
        return f"{text} has not sent it (it is {self._where(sender, standing)})"

    def _action(self, rank: int, standing: Standing) -> Action | None:
        """The action a rank is at; None outside its program's row."""
        if not standing.activity.runs_program:
            return None
        row = self._row(rank, self.programs[standing.activity])
        return row[standing.position] if standing.position < len(row) else None

    def _messages(self, rank: int, standing: Standing) -> list[Message]:
        """What the rank may be waiting for: of its action's messages those that come from other ranks."""
        action = self._action(rank, standing)
        if not standing.waiting or action is None:
            return []
        program = self.programs[standing.activity]
        taken = [takes(part, program.stages) for part in action.compute]
        return [moved for moved in taken if moved is not None and self._sender(moved, rank)[0] != rank]

    def _row(self, rank: int, program: Schedule) -> Row:
        return program.rows[rank % program.pp]

    def _sender(self, moved: Message, receiver: int) -> tuple[int, Standing]:
        """The rank of the receiver's replica that makes a message, and the receiver's own standing."""
        standing = self.standings[receiver]
        assert standing is not None, "it is known to wait for a message"
        program = self.programs[standing.activity]
        return receiver - receiver % program.pp + program.stage_to_rank[moved.source_stage], standing

    def _has_sent(self, moved: Message, receiver: int, *, sending: bool = False) -> bool:
        """Whether the sender is past the send; `sending`: or at it."""
        sender, waiting = self._sender(moved, receiver)
        standing, row = self.standings[sender], self._row(sender, self.programs[waiting.activity])
        at = next((i for i, action in enumerate(row) if action.type.is_send and message(action) == moved), None)
        if standing is None or at is None:
            return False
        return (standing.lap, standing.position + sending) > (waiting.lap, at)

    def _unserved(self, rank: int, standing: Standing) -> list[str]:
        """The messages that the rank waits for, if all of them have been sent."""
        messages = self._messages(rank, standing)
        if not all(self._has_sent(moved, rank) for moved in messages):
            return []
        return [self._awaited(moved, rank) for moved in messages]

    def _grid(self) -> str | None:
        inside = [(rank, s) for rank, s in enumerate(self.standings) if s is not None and s.activity.runs_program]
        if not inside:
            return None
        pp = next(iter(self.programs.values())).pp
        blamed, _ = self.blamed()
        shown = [(rank, s) for rank, s in inside if rank // pp == blamed // pp] or inside
        at, last = min(shown, key=lambda one: one[1].lap)
        first = at - at % pp
        program = self.programs[last.activity]
        same = [(rank - first, s) for rank, s in shown if 0 <= rank - first < pp and s.lap == last.lap]
        marks = {_drawn(program, row, standing.position) for row, standing in same}
        return grid(program, mark=marks - {None}, width=_WIDTH, first_rank=first)  # type: ignore[arg-type]


def explained(failure: RankFailure, report: HangReport) -> RankFailure:
    """The failure with where every rank stood; of a message that did not come, the rank whose turn it was."""
    if failure.cause is not Cause.LOST_PEER:
        reason = f"{failure.reason}{_abort_hint(failure, report)}"
        return RankFailure(failure.rank, reason, f"{_details(failure)}{report.text()}", failure.cause)
    rank, sentence = report.blamed()
    noticed = f"rank {failure.rank} {failure.reason.splitlines()[0]}"
    return RankFailure(rank, sentence, f"{noticed}\n{report.text()}", failure.cause)


def _abort_hint(failure: RankFailure, report: HangReport) -> str:
    """Of an aborted rank, what it was being sent: gloo aborts a process that gets more bytes than it expects."""
    moved = report.under_way(failure.rank) if failure.cause is Cause.DIED and "SIGABRT" in failure.reason else []
    verb = "was" if len(moved) == 1 else "were"
    return f" while {' and '.join(map(str, moved))} {verb} on the way to it: of another size, perhaps" if moved else ""


def _details(failure: RankFailure) -> str:
    """The traceback; of a grid in the message, which shows one rank's place, nothing: all are shown below."""
    _, _, shown = failure.reason.partition("\n")
    details = failure.details.rstrip()
    return f"{details.removesuffix(shown).rstrip()}\n" if details else ""


def _drawn(program: Schedule, rank: int, position: int) -> Place | None:
    """The place to mark: a grid shows compute actions alone, so a send or receive is shown by the next of them."""
    row = program.rows[rank]
    return next(((rank, at) for at in range(position, len(row)) if row[at].type.is_compute), None)


def _seconds(standing: Standing) -> str:
    return f"{standing.seconds:.0f} s" if standing.seconds >= 10 else f"{standing.seconds:.1f} s"
