"""One action of one rank, and its one-word text: stage, type, microbatch, as in `2F5` or `2SEND_F5`."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class ActionType(enum.Enum):
    """What an action does. The letters are torch.pipelining's, so that CSV files interchange."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: the gradients of the stage's input and of its weights."""
    I = "I"  # noqa: E741
    """Backward for the input only."""
    W = "W"
    """Backward for the weights only, after the `I` of the same microbatch."""
    R = "R"
    """Recompute the forward of a checkpointed microbatch, before its backward."""
    SEND_F = "SEND_F"
    """Send the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Post the receive of the stage's input from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Post the receive of the gradient of the stage's output from the next stage."""
    OVERLAP_F_B = "OVERLAP_F_B"
    """A forward and a full backward of another microbatch, overlapped: one action with two parts."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduce the stage's gradients over its data-parallel replicas, once all its backwards ran. Names no microbatch."""

    def __init__(self, word: str) -> None:
        self.is_compute = len(word) == 1 or word == "OVERLAP_F_B"
        self.is_backward = word in ("B", "I")
        self.is_send = word.startswith("SEND")
        self.is_receive = word.startswith("RECV")
        self.is_communication = self.is_send or self.is_receive

    # Members are singletons; Enum's own hash runs in Python and would dominate every table keyed by action.
    __hash__ = object.__hash__


NO_MICROBATCH = -1
"""The microbatch of an action that has none: REDUCE_GRAD."""

_WORD = re.compile(r"(0|[1-9][0-9]*)((?:SEND|RECV)_[FB]|[FBIWR])(0|[1-9][0-9]*)")
_REDUCTION = re.compile(r"(0|[1-9][0-9]*)REDUCE_GRAD")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's row. `str(action)` is its word, `Action.parse(word)` the way back."""

    stage: int
    type: ActionType
    microbatch: int
    parts: tuple[Action, ...] = ()
    """Of an overlapped pair its forward and its backward; stage and microbatch are then the forward's."""

    @property
    def compute(self) -> tuple[Action, ...]:
        """The actions it stands for: an overlapped pair's two parts, or the action itself."""
        return self.parts or (self,)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.type.value}"
        if self.type is ActionType.REDUCE_GRAD:
            return f"{self.stage}{self.type.value}"
        return f"{self.stage}{self.type.value}{self.microbatch}"

    @classmethod
    def overlap(cls, forward: Action, backward: Action) -> Action:
        """The overlapped pair of an F and a B; ValueError for other types."""
        if forward.type is not ActionType.F or backward.type is not ActionType.B:
            raise ValueError(f"{forward} and {backward} don't overlap: use an F and a B, as in '(0F3;3B1)OVERLAP_F_B'")
        return cls(forward.stage, ActionType.OVERLAP_F_B, forward.microbatch, (forward, backward))

    @classmethod
    def parse(cls, word: str) -> Action:
        """Read one word; ValueError unless the whole of it is one action."""
        if match := _WORD.fullmatch(word):
            stage, kind, microbatch = match.groups()
            return cls(int(stage), ActionType(kind), int(microbatch))
        if match := _PAIR.fullmatch(word):
            return cls.overlap(*map(cls.parse, match.groups()))
        if match := _REDUCTION.fullmatch(word):
            return cls(int(match[1]), ActionType.REDUCE_GRAD, NO_MICROBATCH)
        known = " ".join(member.value for member in ActionType)
        raise ValueError(
            f"{word!r} is not an action: use stage, type and microbatch as in '2F5' or '2SEND_F5', "
            f"'2REDUCE_GRAD' or '(0F3;3B1)OVERLAP_F_B' (types: {known})"
        )
