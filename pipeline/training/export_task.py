"""task=export: a model's weights, from a checkpoint or as it starts, as one file that other programs read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from pipeline.engine.materialize import materialize
from pipeline.engine.model import Model
from pipeline.training import rendezvous
from pipeline.training.precision import parameter_dtype
from pipeline.training.preparation import resume
from pipeline.training.settings import Settings

Writer = Callable[[Any, Mapping[str, Tensor], Path], int]
"""Writes a model's state dict into a file as the model's source would; the number of tensors there."""


def export(settings: Settings, build_model: Callable[[], Model], write: Writer) -> None:
    """Write the weights of the checkpoint at `resume`, or the starting ones, to `export`.

    Args:
        settings: checked.
        write: knows what the source calls its tensors.

    Raises:
        ValueError: a launcher started several processes, the checkpoint is of another model, or the file can't be.
        OSError: the disk is full or can't be written.
    """
    if rendezvous.is_launched():
        raise ValueError(
            f"task=export writes from one process and a launcher started {rendezvous.world_size()}: use plain python"
        )
    assert settings.export is not None, "Settings.check"
    model, path = build_model(), Path(settings.export)
    count = write(model, _state(settings, model), path)
    Console().print(f"{count} tensors of {model.name}: {path}", soft_wrap=True, highlight=False, markup=False)


def _state(settings: Settings, model: Model) -> dict[str, Tensor]:
    checkpoint = resume(settings, model)
    if checkpoint is not None:
        return dict(checkpoint.read("model", checkpoint.model))
    cpu, dtype = torch.device("cpu"), parameter_dtype(settings.precision)
    state: dict[str, Tensor] = {}
    for layer in model.layers:
        module = materialize(model, layer, device=cpu, dtype=dtype, seed=settings.seed)
        module.state_dict(destination=state, prefix=layer.prefix)
    return state
