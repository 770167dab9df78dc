"""What a run does with its checkpoints: every rank writes its own layers' state, and reads it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.engine.model import Model
from pipeline.engine.standing import Activity
from pipeline.training import checkpoint as disk
from pipeline.training.checkpoint import Checkpoint, Progress
from pipeline.training.group import Group
from pipeline.training.optimizer import load_state, named_state
from pipeline.training.rank import Rank
from pipeline.training.recorder import plain
from pipeline.training.settings import Settings

_DECISIVE = (
    *("seed", "batch_size", "steps", "gradient_clip", "batch_norm", "on_nonfinite"),
    *("model", "data", "optimizer", "precision"),
)


@dataclass(frozen=True)
class Saving:
    """Where a run's checkpoints go and how many of them stay. Picklable."""

    directory: Path
    """Absolute: ranks may run elsewhere."""
    every: int
    """Steps between checkpoints; one follows the last step."""
    keep: int
    config: Mapping[str, object] = field(default_factory=dict)
    """The run's configuration, for whoever reads the checkpoint."""

    def is_due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint follows step `step` (from 1) of `steps`."""
        return step == steps or step % self.every == 0

    def save(self, progress: Progress, ranks: Sequence[Rank], group: Group) -> None:
        """Write a checkpoint, and remove those that are too many. Every process must call it with its ranks.

        Raises:
            OSError: the disk is full or can't be written; what was there before stays.
        """
        for rank in ranks:
            rank.marker.enter(Activity.SAVING, progress.step - 1)
        folder = self.directory / f"step-{progress.step:06}"
        leads = 0 in group.local
        if leads:
            disk.begin(folder)
        group.meet()
        draft = disk.draft_of(folder)
        shards = [disk.write_shard(draft, rank.rank, rank.plan.schedule.pp, *_state(rank)) for rank in ranks]
        group.meet()  # the others may write for longer than a collective waits
        written = group.gather(shards)
        if leads:
            disk.publish(folder, progress, written, self.config)
            disk.keep_last(self.directory, self.keep)


def load(checkpoint: Checkpoint, rank: Rank, *, optimizer: bool) -> None:
    """Give a rank the checkpoint's values: weights, buffers and, if asked for, its optimizer's state.

    Raises:
        DamagedCheckpointError: a file isn't what was written.
    """
    # tied parameters of one rank are one
    places = {_owner(rank, name): tensor for name, tensor in rank.state_dict().items()}
    with torch.no_grad():
        for name, value in checkpoint.read("model", places):
            places[name].copy_(value)
    rank.masters.round()
    if optimizer and rank.optimizer is not None:
        parameters = _trained(rank)
        names = [name for name in checkpoint.optimizer if name.partition("/")[2] in parameters]
        load_state(rank.optimizer, parameters, dict(checkpoint.read("optimizer", names)))


def load_weights(checkpoint: Checkpoint | None, ranks: Iterable[Rank]) -> None:
    """Give ranks a checkpoint's weights and buffers; without one they stay as they were drawn."""
    if checkpoint is not None:
        for rank in ranks:
            load(checkpoint, rank, optimizer=False)


def check_fits(checkpoint: Checkpoint, model: Model) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        ValueError: what differs first, and how the checkpoint's model was asked for.
    """
    expected = dict(_shapes(model))
    for name in [*expected, *checkpoint.model]:
        theirs = checkpoint.model[name].shape if name in checkpoint.model else None
        if theirs != expected.get(name):
            raise ValueError(
                f"{checkpoint.path} holds another model: {name} is {_shape_text(theirs)} there and "
                f"{_shape_text(expected.get(name))} here; {_asked_for(checkpoint)}"
            )


def check_continues(checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuse to train on from a checkpoint that leaves nothing to do, or whose optimizer state is of no use.

    Raises:
        ValueError: what is wrong, and the cure.
    """
    step, optimizer = checkpoint.progress.step, checkpoint.progress.optimizer
    if step >= settings.steps:
        raise ValueError(
            f"{checkpoint.path} is at step {step}, and steps={settings.steps} leaves nothing to train: use "
            f"steps={2 * step} (or another number above {step})"
        )
    if optimizer != settings.optimizer.name:
        raise ValueError(
            f"{checkpoint.path} holds the state of optimizer={optimizer}, of no use to {settings.optimizer.name}: use "
            f"optimizer={optimizer}"
        )


def other_settings(checkpoint: Checkpoint, config: Mapping[str, object]) -> list[str]:
    """The settings that make a continued run another one than the checkpoint's would have been, with both values."""
    theirs, ours = (dict(_decisive(plain(each))) for each in (checkpoint.config, config))
    return [
        f"{name}={ours[name]} (was {value})" for name, value in theirs.items() if name in ours and ours[name] != value
    ]


def _decisive(config: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The values that decide a run's numbers by their dotted names: not the pipeline's, for it changes none."""
    assert isinstance(config, Mapping), "a configuration or a group of it"
    for name, value in config.items():
        if path or name in _DECISIVE:
            yield from _decisive(value, f"{path}{name}.") if isinstance(value, Mapping) else [(f"{path}{name}", value)]


def _state(rank: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a rank writes: its part of the model, tied parameters where their owner is, and its optimizer's state.

    Replicas of the pipeline are alike: those after the first have nothing to add.
    """
    if rank.rank >= rank.plan.schedule.pp:
        return {}, {}
    model = {name: tensor for name, tensor in rank.state_dict().items() if name not in rank.plan.tied}
    if rank.optimizer is None:
        return model, {}
    written = {name: parameter for name, parameter in _trained(rank).items() if name in model}
    return model, named_state(rank.optimizer, written)


def _trained(rank: Rank) -> dict[str, nn.Parameter]:
    """The rank's parameters by the names that a checkpoint has for them."""
    return {_owner(rank, name): parameter for name, parameter in rank.trained.items()}


def _owner(rank: Rank, name: str) -> str:
    return rank.plan.tied.get(name, name)


def _shapes(model: Model) -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...]]] = []
    for layer in model.layers:
        with torch.device("meta"):
            state = layer.build().state_dict(prefix=layer.prefix)
        found += [(name, tuple(tensor.shape)) for name, tensor in state.items() if name not in model.tied]
    return found


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


def _word(value: object) -> str:
    """As the command line takes it."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _asked_for(checkpoint: Checkpoint) -> str:
    """The words of the command line that made the checkpoint's model."""
    model, choices = checkpoint.config.get("model"), checkpoint.config.get("choices")
    if not isinstance(model, Mapping) or not isinstance(choices, Mapping):
        return "use the model that it was saved with"
    fields = [f"model.{name}={_word(value)}" for name, value in model.items() if value not in (None, [], "")]
    return " ".join(["use", f"model={choices.get('model')}", *fields])
