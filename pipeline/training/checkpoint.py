"""Checkpoints on disk: whole-model names, a file or two a rank, and a manifest that makes them one.

    checkpoints/step-000300/
        manifest.json                             step, tensors with shapes and checksums, configuration; written last
        model-00001-of-00002.safetensors          the parameters and buffers of the first rank's layers
        optimizer-00001-of-00002.safetensors      "exp_avg/block.0.feed_forward.expansion.weight"

Names are those of the whole model, so a checkpoint doesn't know how the model was cut, and any run can read its part.
A tied parameter is there once, by its owner's name.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.training.failures import RunFailure
from pipeline.training.recorder import plain, write_json

FOLDER = "checkpoints"
_MANIFEST = "manifest.json"
_FORMAT = 1
Section = Literal["model", "optimizer"]


class DamagedCheckpointError(RunFailure):
    """A file doesn't hold what was written."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: where it is and what it must be."""

    file: str
    shape: tuple[int, ...]
    checksum: int
    """CRC-32 of its bytes."""


@dataclass(frozen=True)
class Shard:
    """What one rank has written: its files with their bytes, and their tensors by name."""

    files: Mapping[str, int]
    model: Mapping[str, Entry]
    optimizer: Mapping[str, Entry]


@dataclass(frozen=True)
class Progress:
    """What a run must know besides its tensors."""

    step: int
    """Training steps done."""
    optimizer: str
    """Its name in the configuration."""
    loss_scale: float
    good_steps: int
    """Steps since the loss scale moved."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. Picklable: only `read` opens files of tensors."""

    path: Path
    progress: Progress
    model: Mapping[str, Entry]
    """Parameters and buffers by whole-model name, tied ones under their owner's alone."""
    optimizer: Mapping[str, Entry]
    """By "slot/parameter"."""
    config: Mapping[str, object] = field(default_factory=dict)

    def read(self, section: Section, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, on the CPU, one after the other; no others are read.

        Raises:
            DamagedCheckpointError: a file is unreadable, or a tensor's bytes aren't those that were written.
        """
        entries = self.model if section == "model" else self.optimizer
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(entries[name].file, []).append(name)
        for file, held in by_file.items():
            try:
                with safe_open(self.path / file, framework="pt") as tensors:
                    for name in held:
                        yield name, _checked(tensors.get_tensor(name), entries[name], name, self.path)
            except (SafetensorError, OSError) as error:
                raise DamagedCheckpointError(f"{self.path / file} can't be read: {error}") from error


def write_shard(
    folder: Path, rank: int, ranks: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> Shard:
    """Write one rank's tensors into the folder of an unfinished checkpoint; they are on the disk when it returns.

    Raises:
        OSError: the disk is full, or can't be written.
    """
    files: dict[str, int] = {}
    entries: dict[str, dict[str, Entry]] = {}
    for section, tensors in (("model", model), ("optimizer", optimizer)):
        file = f"{section}-{rank + 1:05}-of-{ranks:05}.safetensors"
        held = _apart(tensors)
        if held:
            save_file(held, folder / file)
            _sync(folder / file)
            files[file] = (folder / file).stat().st_size
        entries[section] = {name: Entry(file, tuple(t.shape), _checksum(t)) for name, t in held.items()}
    return Shard(files, entries["model"], entries["optimizer"])


def draft_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is complete: a name that is never taken for one."""
    return folder.with_name(f".{folder.name}.unfinished")


def begin(folder: Path) -> None:
    """Make an empty draft of the checkpoint `folder`; what an interrupted one left goes."""
    draft = draft_of(folder)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def publish(folder: Path, progress: Progress, shards: Iterable[Shard], config: Mapping[str, object]) -> None:
    """Turn the draft, to which all ranks have written, into the checkpoint `folder`: all of it appears at once."""
    draft, written = draft_of(folder), list(shards)
    manifest = {
        "format": _FORMAT,
        "step": progress.step,
        "optimizer": progress.optimizer,
        "loss_scale": progress.loss_scale,
        "good_steps": progress.good_steps,
        "files": {file: size for shard in written for file, size in shard.files.items()},
        "tensors": {
            "model": {name: _as_json(entry) for shard in written for name, entry in shard.model.items()},
            "optimizer": {name: _as_json(entry) for shard in written for name, entry in shard.optimizer.items()},
        },
        "config": plain(config),
    }
    write_json(draft / _MANIFEST, manifest)
    for shard in written:
        for file in shard.files:  # safetensors makes files for their owner's eyes alone
            (draft / file).chmod((draft / _MANIFEST).stat().st_mode)
    _sync(draft)
    if folder.exists():  # the same step again, after resuming from an earlier one
        older = folder.with_name(f".{folder.name}.older")
        shutil.rmtree(older, ignore_errors=True)
        folder.rename(older)
        draft.rename(folder)
        shutil.rmtree(older)
    else:
        draft.rename(folder)
    _sync(folder.parent)


def keep_last(directory: Path, count: int) -> None:
    """Remove all but the `count` last checkpoints in `directory`."""
    for folder in _complete(directory)[:-count]:
        # renamed first: one that is removed halfway must not be found
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.older")))


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the last complete one of a run directory.

    Raises:
        ValueError: there is none, or a file of it is missing or cut off.
    """
    path = path.resolve()
    if not path.is_dir():
        raise ValueError(f"resume={path} is no directory: use a run directory or one of its checkpoints/step-*")
    if (path / _MANIFEST).is_file():
        return _open(path)
    directory = path if path.name == FOLDER else path / FOLDER
    complete = _complete(directory)
    if not complete:
        raise ValueError(
            f"resume={path} holds no complete checkpoint: use a run that had save_every=100 (or another number)"
        )
    return _open(complete[-1])


def _complete(directory: Path) -> list[Path]:
    """Checkpoints by rising step."""
    found = [manifest.parent for manifest in directory.glob(f"step-*/{_MANIFEST}")]
    return sorted((folder for folder in found if _number(folder).isdigit()), key=lambda folder: int(_number(folder)))


def _number(folder: Path) -> str:
    return folder.name.removeprefix("step-")


def _open(folder: Path) -> Checkpoint:
    file = folder / _MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format"]
        checkpoint = _parsed(folder, manifest) if version == _FORMAT else None
        sizes = dict(manifest["files"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}): use another checkpoint") from error
    if checkpoint is None:
        raise ValueError(f"{folder} has format {version}, and this version reads format {_FORMAT}: use one of that")
    for name, size in sizes.items():
        _check_file(folder / name, size)
    return checkpoint


def _parsed(folder: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    progress = Progress(manifest["step"], manifest["optimizer"], manifest["loss_scale"], manifest["good_steps"])
    model, optimizer = (
        {name: Entry(file, tuple(shape), checksum) for name, (file, shape, checksum) in tensors.items()}
        for tensors in (manifest["tensors"]["model"], manifest["tensors"]["optimizer"])
    )
    return Checkpoint(folder, progress, model, optimizer, dict(manifest["config"]))


def _check_file(file: Path, size: int) -> None:
    found = file.stat().st_size if file.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} bytes of {size}"
        raise ValueError(f"{file} {state}: use another checkpoint")


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, whole, and each with a memory of its own, as the format wants them."""
    held: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        held[name] = tensor.clone() if memory in memories else tensor
        memories.add(memory)
    return held


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _checked(tensor: Tensor, entry: Entry, name: str, path: Path) -> Tensor:
    if tuple(tensor.shape) != entry.shape or _checksum(tensor) != entry.checksum:
        raise DamagedCheckpointError(f"{path / entry.file} is damaged: {name} isn't what was written")
    return tensor


def _as_json(entry: Entry) -> list[object]:
    return [entry.file, list(entry.shape), entry.checksum]


def _sync(path: Path) -> None:
    """Have a file's contents, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
