"""What users write with `Pipeline`, run by test_pipeline.py in one process and by torchrun: the same lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import Pipeline
from pipeline.engine.executor import ActionError

MICROBATCHES = 4
WORDS = 20


class Embedding(nn.Embedding):
    """Vectors of words, averaged over the sample."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words).mean(1)


class Breaks(nn.Linear):
    """Fails on demand, where it is."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken and type(x) is Tensor:
            raise OverflowError("this layer breaks")
        return super().forward(x)


def model(seed: int = 5) -> dict[str, nn.Module]:
    """A tied pair at both ends, dropout, a frozen layer."""
    torch.manual_seed(seed)
    first, last = Embedding(WORDS, 8), Breaks(8, WORDS)
    last.weight = first.weight
    middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)).requires_grad_(False)
    layers = {"words": first, "middle": middle, "hidden": nn.Linear(8, 8), "last": last}
    return {name: layer.double() for name, layer in layers.items()}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Of other sizes and lengths each; in the third nothing but padding in two microbatches."""
    torch.manual_seed(6)
    for samples, length in ((8, 3), (7, 3), (9, 9000), (4, 2), (8, 3)):
        targets = torch.randint(WORDS, (samples,))
        targets[: samples // 2] = -100
        yield torch.randint(WORDS, (samples, length)), targets


def train(pp: int = 2, dp: int = 1) -> tuple[Pipeline, dict[str, Any]]:
    """The pipeline, and what came of it."""
    pipe = Pipeline(
        model(), F.cross_entropy, schedule="1f1b", pp=pp, dp=dp, microbatches=MICROBATCHES // dp, timeout=60
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    losses, norms = [], []
    for inputs, targets in batches():
        losses.append(pipe.step(inputs, targets))
        norms.append(pipe.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    found = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    found["evaluated"] = pipe.evaluate(inputs[:7], targets[:7])
    found["predicted"] = pipe.predict(inputs[:3])
    return pipe, found | {"state": {name: tensor.clone() for name, tensor in pipe.state_dict().items()}}


def main(directory: Path) -> None:
    """Train; then in two replicas; then be given other weights or another batch than the other process; then break."""
    pipe, found = train()
    rank = torch.distributed.get_rank()
    found["replicas"] = train(pp=1, dp=2)[1]
    try:
        Pipeline(model(seed=rank), F.cross_entropy)
    except ValueError as error:
        found["other weights"] = str(error)
    found["elsewhere"] = {p.device.type for layer in pipe._model.layers for p in layer.module.parameters()}
    inputs, targets = next(batches())
    try:
        pipe.step(inputs[: len(inputs) - rank], targets[: len(targets) - rank])
    except ValueError as error:
        found["other batch"] = str(error)
    torch.save(found, directory / f"rank {rank}.pt")
    for part in (part for layer in pipe._model.layers for part in layer.module.modules()):
        if isinstance(part, Breaks):
            part.broken = True
    try:
        pipe.step(inputs, targets)
    except ActionError as error:
        (directory / f"error of rank {rank}").write_text(str(error))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
