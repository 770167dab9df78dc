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

    def __init__(self, word: str) -> None:
        self.is_compute = len(word) == 1
        self.is_backward = word in ("B", "I")
        self.is_send = word.startswith("SEND")
        self.is_receive = word.startswith("RECV")

    # Members are singletons; Enum's own hash runs in Python and would dominate every table keyed by action.
    __hash__ = object.__hash__


_WORD = re.compile(r"(0|[1-9][0-9]*)((?:SEND|RECV)_[FB]|[FBIWR])(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's row. `str(action)` is its word, `Action.parse(word)` the way back."""

    stage: int
    type: ActionType
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.type.value}{self.microbatch}"

    @classmethod
    def parse(cls, word: str) -> Action:
        """Read one word; ValueError unless the whole of it is one action."""
        match = _WORD.fullmatch(word)
        if match is None:
            known = " ".join(member.value for member in ActionType)
            raise ValueError(
                f"{word!r} is not an action: use stage, type and microbatch as in '2F5' or '2SEND_F5' (types: {known})"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), ActionType(kind), int(microbatch))
