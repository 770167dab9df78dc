"""Train a model through a pipeline, from Python: in one process, or under torchrun with a process for each rank."""

import torch
import torch.nn.functional as F
from torch import nn

from pipeline import Pipeline

torch.manual_seed(0)
hidden = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.ReLU())]
model = nn.Sequential(*hidden, nn.Linear(64, 10))

pipe = Pipeline(model, loss=F.cross_entropy, schedule="1f1b", pp=2, microbatches=8, activation_checkpoint="except_last")
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)

for step in range(1, 61):
    inputs = torch.randn(50, 64)  # the whole batch, the same in every process; 50 samples make microbatches of 7 and 6
    targets = inputs[:, :10].argmax(1)
    loss = pipe.step(inputs, targets)  # its mean loss; the gradients are in .grad
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 and pipe.rank == 0:
        print(f"step {step} | loss {loss:.4f}")
