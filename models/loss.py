"""Cross entropy as a sum, the loss of every model here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy in nats, summed; targets equal to `ignore_index` count neither in the sum nor in the weight."""

    ignore_index: int = -100
    classifies: ClassVar[bool] = True
    """Targets are positions in the outputs' last dimension."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum over all targets, 0-dim. Outputs (..., classes) are logits, targets (...) int64 classes."""
        # Sums over thousands of tokens overflow fp16 and round away in bf16.
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        logits = outputs.flatten(0, -2)
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=self.ignore_index, reduction="sum")

    def weight(self, targets: Tensor) -> int:
        """Number of targets other than `ignore_index`."""
        return int((targets != self.ignore_index).sum())
