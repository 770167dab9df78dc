"""A model of the user's own, by dotted path: a sequence, a module that says which layers it runs, or a `Model`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from models.loss import CrossEntropy
from models.model import Loss, Model
from models.pieces import Piece, Pieces

INITIALIZATIONS = ("whole", "layers")


def custom(
    *,
    target: str,
    arguments: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    initialization: str = "whole",
    seed: int = 0,
) -> Model:
    """The model that `target` ("module:name") builds when it is called with `arguments`.

    It is called on the meta device and gives one of:

    - an `nn.Sequential`: a layer begins at each child with parameters, and those without join the one before;
    - a module with `layers`, an attribute or a method: a sequence, `ModuleList`, `ModuleDict` or list of modules or
      (name, module) pairs, which run in this order, each on the output of the one before. A module with an attribute
      gives=("skip",) returns (output, skip), and a later one with takes=("skip",) is called with (input, skip);
    - such a list itself;
    - a `Model`, which is taken as it is (but for the loss, if one is given).

    Parameters that several layers share are tied.

    Args:
        loss: None: cross entropy, or the `Model`'s own.
        initialization: starting weights are those of the whole model built on the CPU after
            `torch.manual_seed(seed)` ("whole"), or those of each module's `reset_parameters` under a seed of its
            layer's name, without memory for other layers ("layers").

    Raises:
        ValueError: there is no such target, or what it gives can't be cut into layers.
    """
    if initialization not in INITIALIZATIONS:
        raise ValueError(f"model.initialization={initialization} is unknown: use {' or '.join(INITIALIZATIONS)}")
    recipe = _Recipe(target, dict(arguments or {}))
    with torch.device("meta"):
        built = recipe()
    if isinstance(built, Model):
        return built if loss is None else replace(built, loss=loss)
    pieces = Pieces(recipe.module, recipe.cut, seed, by_layer=initialization == "layers")
    layers = pieces.layers()
    for layer in layers:
        try:
            layer.build()
        except (TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"layer {layer.name} of model.target={target} can't be copied ({reason}): keep in it what can be"
            ) from error
    return Model(
        target.rpartition(":")[2],
        layers,
        CrossEntropy() if loss is None else loss,
        pieces.initialize,
        pieces.tied(),
        stochastic=True,
    )


def imported(field: str, path: str) -> Any:
    """What `path` ("module:name") is called in Python; its module may be in the current folder.

    Args:
        field: the setting that named it.

    Raises:
        ValueError: there is no such module, or no such name in it.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{field}={path} names nothing: use module:name, such as my.module:build")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{field}={path} can't be imported ({error}): use module:name, from the current folder or PYTHONPATH"
        ) from error
    return found


@dataclass(frozen=True)
class _Recipe:
    """Builds what the user's function builds; picklable."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> object:
        build = imported("model.target", self.target)
        if not callable(build) or isinstance(build, nn.Module):
            raise ValueError(f"{self} is a {type(build).__name__}: name a function or a class that builds the model")
        try:
            inspect.signature(build).bind(**self.arguments)
        except TypeError as error:
            raise ValueError(
                f"{self} can't be called ({error}): set its arguments, model.arguments.name=value"
            ) from error
        try:
            return build(**self.arguments)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{self} can't be built on the meta device ({reason}): build modules alone, without their numbers"
            ) from error

    def __str__(self) -> str:
        return f"model.target={self.target}"

    def module(self) -> nn.Module:
        """What is built as one module."""
        built = self()
        if isinstance(built, nn.Module):
            return built
        if isinstance(built, list | tuple | Mapping):
            return _Listed(self._named(built))
        raise ValueError(
            f"{self} returned {type(built).__name__}: return an nn.Sequential, a module with `layers`, or a Model"
        )

    def cut(self, whole: nn.Module) -> list[Piece]:
        """The layers of what `module` gave."""
        _refuse_loose_tensors(whole)
        pieces = list(_runs(whole) if isinstance(whole, nn.Sequential) else self._listed(whole))
        if not pieces:
            raise ValueError(f"{self} returned a model without layers: give it one or more")
        self._check(whole, pieces)
        return pieces

    def _listed(self, whole: nn.Module) -> Iterator[Piece]:
        layers = getattr(whole, "layers", None)
        if layers is None:
            raise ValueError(
                f"{self} returned {type(whole).__name__}, which has no `layers`: give it a list of the modules that it "
                "runs one after the other, or return an nn.Sequential"
            )
        listed = layers if isinstance(layers, nn.Module) or not callable(layers) else layers()
        paths = {id(module): path for path, module in whole.named_modules()}
        for name, module in self._named(listed):
            # a module in a second place, or one that isn't a part of the whole, goes by the name it has in the list
            path = paths.pop(id(module), name)
            yield Piece(name, f"{path}." if path else "", module)

    def _named(self, listed: object) -> list[tuple[str, nn.Module]]:
        """A list of layers as pairs."""
        pairs: Iterable[Any]
        if isinstance(listed, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            # named_children would leave out a module that stands in a second place
            pairs = listed._modules.items()
        elif isinstance(listed, Mapping):
            pairs = listed.items()
        elif isinstance(listed, Iterable) and not isinstance(listed, str):
            pairs = [entry if isinstance(entry, tuple) else (str(index), entry) for index, entry in enumerate(listed)]
        else:
            raise ValueError(f"{self} has {type(listed).__name__} for its layers: give a list of modules")
        named: dict[str, nn.Module] = {}
        for pair in pairs:
            name, module = pair if len(pair) == 2 else (str(pair), None)
            if not isinstance(name, str) or not isinstance(module, nn.Module):
                raise ValueError(f"{self} has a layer {name} that is no module: give modules, or (name, module) pairs")
            if name in named or not name.strip("."):
                raise ValueError(
                    f"{self} has a layer called {name!r}, a name that is empty or taken: give each its own"
                )
            named[name] = module
        return list(named.items())

    def _check(self, whole: nn.Module, pieces: Sequence[Piece]) -> None:
        held = {id(parameter) for piece in pieces for parameter in piece.module.parameters()}
        for name, parameter in whole.named_parameters():
            if id(parameter) not in held:
                raise ValueError(f"{self} has a parameter {name} that is in none of its layers: put it into one")
            if is_lazy(parameter):
                raise ValueError(f"{self} has a lazy parameter {name}: give its module the number of its inputs")
        names: set[str] = set()
        for piece in pieces:
            for name, _ in piece.tensors():
                if name in names:
                    raise ValueError(f"{self} has two tensors called {name}: give its layers other names")
                names.add(name)
        norms: dict[int, str] = {}
        for piece in pieces:
            for module in piece.module.modules():
                if isinstance(module, _NormBase) and norms.setdefault(id(module), piece.name) != piece.name:
                    raise ValueError(
                        f"{self} has one {type(module).__name__} in layers {norms[id(module)]} and {piece.name}: give "
                        "each its own, for running averages can't be in two places"
                    )


class _Listed(nn.Module):
    """Modules that came as a list."""

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.layers: Callable[[], object] = lambda: named
        self._modules.update(named)


def _runs(sequence: nn.Sequential) -> Iterator[Piece]:
    """A layer begins at each child with parameters: what follows may overwrite its input in place."""
    run: OrderedDict[str, nn.Module] = OrderedDict()
    for key, child in sequence._modules.items():
        assert child is not None, "nn.Sequential takes modules"
        if run and _apart(list(run.values()), child):
            yield _run(run)
            run = OrderedDict()
        run[key] = child
    if run:
        yield _run(run)


def _apart(run: Sequence[nn.Module], child: nn.Module) -> bool:
    """Whether `child` begins another layer: where named values come or go a module is one by itself."""
    if any(getattr(module, way, ()) for module in (*run, child) for way in ("takes", "gives")):
        return True
    return any(True for _ in child.parameters()) and any(True for part in run for _ in part.parameters())


def _run(run: Mapping[str, nn.Module]) -> Piece:
    first = next(iter(run))
    if len(run) == 1:
        return Piece(first, f"{first}.", run[first])
    return Piece(first, "", nn.Sequential(OrderedDict(run)))


def _refuse_loose_tensors(whole: nn.Module) -> None:
    """A tensor that is no parameter and no buffer would get no value and move to no device."""
    for path, module in whole.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                where = f"{path}.{name}" if path else name
                raise ValueError(
                    f"{where} of {type(module).__name__} is a plain tensor: register it, "
                    f"self.register_buffer({name!r}, ...)"
                )
