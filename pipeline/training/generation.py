"""`task=generate`: a text that goes on, token by token, each from a forward pass through the whole pipeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.engine.nest import Nest
from pipeline.engine.seeding import generator
from pipeline.engine.standing import Activity
from pipeline.training import saving
from pipeline.training.inference import Inference
from pipeline.training.job import Team
from pipeline.training.messages import Generated


@dataclass(frozen=True)
class Generate:
    """What the ranks do.

    A pass takes the last `context` tokens; they stand at the window's beginning, and what fills its end changes nothing
    before it, for a causal model looks only back. So all passes have one shape. Nothing is kept from one pass to the
    next (there is no cache of keys and values).

    Args:
        prompt: tokens, one or more.
        new_tokens: how many come after them.
        context: tokens in the model's window.
        temperature: that logits are divided by; 0: the likeliest token.
        top_k: choose among so many of the likeliest; None: among all.
        seed: decides every choice, with the token's number.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    context: int
    temperature: float
    top_k: int | None
    seed: int

    def __call__(self, team: Team) -> None:
        """Make the tokens, the same in every process, and report them."""
        began = time.perf_counter()
        saving.load_weights(team.job.resumed, team.ranks)
        tokens = list(self.prompt)
        last = 0  # in the window, the token that is to be followed

        def read(outputs: Nest, targets: Nest) -> Tensor:
            assert isinstance(outputs, Tensor), "logits, as the check of the targets has found"
            return outputs[0, last]

        inference = Inference(team.ranks, 1, read)
        for number in range(self.new_tokens):
            window = tokens[-self.context :]
            last = len(window) - 1
            filled = torch.tensor([window + [0] * (self.context - len(window))])
            logits = list(inference.run(1, filled if team.ranks.holds_first else None, None))
            team.ranks.enter(Activity.LOGGING)
            tokens.append(self._agree(team, logits, number))
        team.ranks.enter(Activity.REPORTING)
        if 0 in team.group.local:
            team.report(Generated(tuple(tokens[len(self.prompt) :]), time.perf_counter() - began))
        team.ranks.enter(Activity.DONE)

    def _agree(self, team: Team, logits: Sequence[Tensor], number: int) -> int:
        """The next token, which the last stage's rank chooses, in every process."""
        chosen = [choose(each, self.temperature, self.top_k, self.seed, number) for each in logits]
        shares = [float(chosen[0]) if rank.holds_last else 0.0 for rank in team.ranks]
        return int(sum(team.group.gather_floats(shares)))


def choose(logits: Tensor, temperature: float, top_k: int | None, seed: int, number: int) -> int:
    """A token for `logits`, (vocabulary,): always the same for a seed and a token's number.

    Drawn in float64 on the CPU, so that every device draws alike.
    """
    logits = logits.to("cpu", torch.float64)
    if temperature == 0:
        return int(logits.argmax())
    likeliest = logits.topk(min(top_k or len(logits), len(logits)))
    shares = (likeliest.values / temperature).softmax(0)
    drawn = torch.rand((), dtype=torch.float64, generator=generator(seed, f"token {number}"))
    place = int((shares.cumsum(0) <= drawn).sum())
    return int(likeliest.indices[min(place, len(shares) - 1)])
