"""Weights from a state dict file into a model and back out: torchvision's, GPT-2's, a custom model's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Generator, Tensor

from models.model import Model
from models.names import Shapes, Source

SUFFIXES = (".safetensors", ".pt", ".pth")


def to_source(model: Model, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's state dict under the source's names and in its layout; tied parameters once, by their owner."""
    written = {}
    for name, tensor in state.items():
        if name not in model.tied:
            source = model.names.sources(name)[0]
            written[source.name] = tensor.detach().t().contiguous() if source.transposed else tensor.detach()
    return written


def from_source(model: Model, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published state dict under the model's own names; tied parameters under each of theirs.

    Raises:
        ValueError: a tensor is missing, of another shape, or none of the model's.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
    found = matched(model, shapes, "the state dict")
    state = {name: _ours(source[one.name], one) for name, one in found.items()}
    return state | {alias: state[owner] for alias, owner in model.tied.items()}


def write_weights(model: Model, state: Mapping[str, Tensor], path: Path) -> int:
    """Write the model's state dict as its source would: .safetensors, or .pt and .pth as torch saves.

    Returns the number of tensors in the file.

    Raises:
        ValueError: another suffix.
    """
    check_suffix("export", path)
    written = {name: tensor.cpu().contiguous() for name, tensor in to_source(model, state).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    if path.suffix == ".safetensors":
        save_file(written, draft, metadata={"format": "pt"})  # transformers asks for it
    else:
        torch.save(written, draft)
    draft.replace(path)
    return len(written)


def with_weights(build: Callable[[], Model], path: str, fresh: Sequence[str] = ()) -> Model:
    """The model that `build` makes, starting from the state dict in `path`, of which only what is asked for is read.

    Args:
        path: .safetensors, .pt or .pth.
        fresh: names of layers or parameters that start as they would without the file, such as "fc".

    Raises:
        ValueError: the file can't be read, or isn't this model's.
    """
    model = build()
    file = WeightsFile(Path(path))
    model.names.check(file.path)
    found = matched(model, file.shapes(), str(file), fresh)
    _check_tied(model, file)
    return replace(model, initialize=_FromFile(model, file, found))


def matched(model: Model, shapes: Shapes, what: str, fresh: Sequence[str] = ()) -> dict[str, Source]:
    """For each of the model's tensors (tied ones by their owner) where it is in a source of these shapes.

    Args:
        what: the source, in messages.
        fresh: names of layers or parameters that aren't looked for.

    Raises:
        ValueError: a tensor is missing, of another shape, or none of the model's; or nothing is called as in `fresh`.
    """
    expected = _expected(model)
    for name in fresh:
        if not any(_within(known, name) for known in expected):
            raise ValueError(f"model.fresh={name} is no part of {model.name}: use one such as {next(iter(expected))}")
    found, missing = {}, []
    left = {name for name in shapes if not model.names.ignores(name)}
    for name, shape in expected.items():
        sources = model.names.sources(name)
        source = next((one for one in sources if one.name in shapes), None)
        left -= {one.name for one in sources}
        if name in model.tied or any(_within(name, part) for part in fresh):
            continue
        if source is None:
            missing += [] if model.names.optional(name) else [name]
            continue
        theirs = shapes[source.name][::-1] if source.transposed else shapes[source.name]
        if theirs != shape:
            raise ValueError(
                f"{what} has {source.name} of {_size(shapes[source.name])} and {model.name} needs "
                f"{_size(shape[::-1] if source.transposed else shape)}: {model.names.cure(shapes)}"
            )
        found[name] = source
    for names, says in ((missing, "lacks"), (sorted(left), f"is not of {model.name}, it also has")):
        if names:
            raise ValueError(f"{what} {says} {_some(names)}: {model.names.cure(shapes)}")
    return found


def _expected(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of every entry of the model's state dict."""
    shapes = {}
    for layer in model.layers:
        with torch.device("meta"):
            state = layer.build().state_dict(prefix=layer.prefix)
        shapes.update({name: tuple(tensor.shape) for name, tensor in state.items()})
    return shapes


def _check_tied(model: Model, file: WeightsFile) -> None:
    """Refuse a source in which what the model ties is not equal."""
    shapes = file.shapes()
    for alias, owner in model.tied.items():
        names = [
            next((one.name for one in model.names.sources(name) if one.name in shapes), None) for name in (alias, owner)
        ]
        if None not in names and names[0] != names[1] and not torch.equal(*map(file.read, map(str, names))):
            raise ValueError(
                f"{file} has a {names[0]} that differs from {names[1]}, and {model.name} ties both: use "
                "model.tie_embeddings=false"
            )


class WeightsFile:
    """A state dict on disk; tensors are read one by one, when they are asked for.

    Raises:
        ValueError: it can't be read, or holds anything but tensors by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_suffix("model.weights", path)
        try:
            self.shapes()
        except (OSError, RuntimeError, SafetensorError, UnpicklingError, EOFError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self} can't be read ({reason}): give a state dict of tensors alone") from error

    def __str__(self) -> str:
        return f"model.weights={self.path}"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by its name."""
        if self.path.suffix == ".safetensors":
            names: list[str] = self._safetensors.keys()
            return {name: tuple(self._safetensors.get_slice(name).get_shape()) for name in names}
        return {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        tensor: Tensor
        tensor = self._safetensors.get_tensor(name) if self.path.suffix == ".safetensors" else self._pickled[name]
        return tensor

    @cached_property
    def _safetensors(self) -> Any:
        return safe_open(self.path, framework="pt")

    @cached_property
    def _pickled(self) -> Mapping[str, Tensor]:
        try:
            held = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 can't be mapped into memory
            held = torch.load(self.path, map_location="cpu", weights_only=True)
        if not isinstance(held, Mapping) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
            raise ValueError(f"{self} holds no tensors by name: give what torch.save(model.state_dict(), ...) wrote")
        return held


@dataclass(frozen=True)
class _FromFile:
    """The rule for starting weights: those of the file, and the model's own for what isn't found there."""

    model: Model
    file: WeightsFile
    found: Mapping[str, Source]

    def __call__(self, name: str, tensor: Tensor, generator: Generator) -> None:
        source = self.found.get(name)
        if source is None:
            self.model.initialize(name, tensor, generator)
        else:
            tensor.detach().copy_(_ours(self.file.read(source.name), source))


def check_suffix(field: str, path: Path) -> None:
    """Refuse a file that is of no known kind.

    Raises:
        ValueError: its name ends otherwise.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{field}={path} is of no known kind: use a name that ends in {', '.join(SUFFIXES)}")


def _ours(tensor: Tensor, source: Source) -> Tensor:
    return tensor.t().contiguous() if source.transposed else tensor


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
