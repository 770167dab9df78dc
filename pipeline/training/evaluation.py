"""`task=evaluate`: every held-out sample once, and what the whole of them say."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeline.engine.model import Loss
from pipeline.engine.nest import Nest
from pipeline.engine.standing import Activity
from pipeline.training import saving
from pipeline.training.inference import Inference
from pipeline.training.job import Team
from pipeline.training.messages import Evaluated, Evaluating
from pipeline.training.plan import first

_TOP = (1, 5)
"""Of images: whether the right class is the first, or among the first five."""

_TOLD_EVERY = 5.0
"""Seconds between two signs of life."""


@dataclass(frozen=True)
class Evaluate:
    """What the ranks do.

    Args:
        kind: of the data, "text" or "images".
        samples: that are evaluated.
        batch_size: that the data gives at a time.
        largest: samples in a microbatch, at most.
    """

    kind: str
    samples: int
    batch_size: int
    largest: int

    def __call__(self, team: Team) -> None:
        """Take every batch through the pipeline, the last one as short as it is, and report the means."""
        began = told = time.perf_counter()
        saving.load_weights(team.job.resumed, team.ranks)
        data = team.open_data()
        inference = Inference(team.ranks, self.largest, partial(_sums, team.model.loss, self.kind))
        total = torch.zeros(2 + len(_TOP), dtype=torch.float64)
        for index, start in enumerate(range(0, self.samples, self.batch_size)):
            size = min(self.batch_size, self.samples - start)
            if 0 in team.group.local and time.perf_counter() - told >= _TOLD_EVERY:
                told = time.perf_counter()
                team.report(Evaluating(start, self.samples))
            team.ranks.enter(Activity.LOADING, index)
            inputs = data.validation.inputs(index) if data is not None and team.ranks.holds_first else None
            targets = data.validation.targets(index) if data is not None and team.ranks.holds_last else None
            for sums in inference.run(size, *first((inputs, targets), size)):
                total += sums.cpu()
        team.ranks.enter(Activity.REPORTING)
        (found,) = [sums for sums in team.group.gather(_shares(team, total)) if sums is not None]
        if 0 in team.group.local:
            team.report(Evaluated(self.samples, means(found, self.kind), time.perf_counter() - began))
        team.ranks.enter(Activity.DONE)


def means(sums: list[float], kind: str) -> Mapping[str, float]:
    """The metrics, by their names in summary.json."""
    loss, weight, *hits = sums
    mean, *shares = (each / weight for each in (loss, *hits)) if weight else [math.nan] * (1 + len(hits))
    if kind == "text":
        return {"loss": mean, "perplexity": math.inf if mean > 700 else math.exp(mean)}
    return {"loss": mean, **{f"top{top}_accuracy": share for top, share in zip(_TOP, shares, strict=True)}}


def _shares(team: Team, total: Tensor) -> list[list[float] | None]:
    return [total.tolist() if rank.holds_last else None for rank in team.ranks]


def _sums(loss: Loss, kind: str, outputs: Nest, targets: Nest) -> Tensor:
    """The summed loss, its weight, and of images how often the class was among the first: float64 (4,)."""
    hits = [0.0] * len(_TOP)
    if kind == "images" and isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        ranked = outputs.topk(min(max(_TOP), outputs.shape[-1]), dim=-1).indices == targets.unsqueeze(-1)
        hits = [float(ranked[..., :top].any(-1).sum()) for top in _TOP]
    return torch.tensor([float(loss(outputs, targets)), float(loss.weight(targets)), *hits], dtype=torch.float64)
