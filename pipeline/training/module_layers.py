"""A model of PyTorch modules as the engine sees it: named layers, and which of their parameters are one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import is_lazy

from pipeline.engine.materialize import MakeLayer
from pipeline.engine.model import Layer, Loss, Model
from pipeline.engine.split_modules import whole_again

Modules = nn.Sequential | nn.ModuleList | nn.ModuleDict | Mapping[str, nn.Module] | Sequence[object]
"""Modules in the order in which they run; a sequence may hold pairs (name, module)."""


@dataclass(frozen=True)
class ModuleLayer:
    """A module that has its values already."""

    name: str
    module: nn.Module
    prefix: str
    """Of its parameters' names."""

    @property
    def build(self) -> Callable[[], nn.Module]:
        """Copies the module without its memory."""
        return partial(_without_memory, self.module)

    @property
    def takes(self) -> tuple[str, ...]:
        """What the module's attribute `takes` names, if it has one."""
        return getattr(self.module, "takes", ())

    @property
    def gives(self) -> tuple[str, ...]:
        """What the module's attribute `gives` names, if it has one."""
        return getattr(self.module, "gives", ())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers by whole-model name."""
        yield from self.module.named_parameters(self.prefix.rstrip("."))
        yield from self.module.named_buffers(self.prefix.rstrip("."))


@dataclass(frozen=True)
class ModuleModel:
    """Modules in a row, and a loss. Random numbers are drawn by (step, microbatch, layer), as for any model."""

    layers: tuple[ModuleLayer, ...]
    loss: Loss
    tied: Mapping[str, str]
    name: str = "model"
    stochastic: bool = True

    @property
    def initialize(self) -> Callable[[str, Tensor, Generator], None]:
        """Never called: the modules have their values."""
        raise AttributeError("modules come with their values")


def of_modules(modules: Modules, loss: Loss) -> ModuleModel:
    """The model that these modules are, in this order.

    In an `nn.Sequential` a layer begins at each child with parameters, and those without join the one before: a cut
    then never comes before an activation, which may overwrite its input. Otherwise each module is a layer. A parameter
    that several layers share is one.

    Raises:
        ValueError: there is no module, something is none, names clash, or a module has not run yet that must (lazy).
    """
    layers = tuple(_sequence(modules) if isinstance(modules, nn.Sequential) else _listed(modules))
    if not layers:
        raise ValueError("the model has no layers: give an nn.Sequential with modules, or a list of modules")
    for layer in layers:
        for name, tensor in layer.tensors():
            if is_lazy(tensor):
                raise ValueError(f"{name} is lazy, it has no shape yet: run the model once before it is cut")
    return ModuleModel(layers, loss, _tied(layers))


def own_module(model: Model, layer: Layer, *, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    """The layer's own module, on `device`; its parameters stay the same objects."""
    assert isinstance(layer, ModuleLayer)
    whole_again(layer.module)  # another pipeline may have had it
    return layer.module.to(device)


_: MakeLayer = own_module


def dtype_of(layers: Sequence[ModuleLayer]) -> torch.dtype:
    """That of the model's parameters.

    Raises:
        ValueError: they have several, or one that no gradients are added up in.
    """
    found = {p.dtype for layer in layers for p in layer.module.parameters() if p.is_floating_point()}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise ValueError(f"the model's parameters are of several types ({names}): convert it, model.to(torch.float32)")
    dtype = found.pop() if found else torch.get_default_dtype()
    if dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"the model's parameters are {dtype}: convert it, model.to(torch.float32)")
    return dtype


def device_of(layers: Sequence[ModuleLayer]) -> torch.device:
    """Where the model is.

    Raises:
        ValueError: on several devices, or without memory.
    """
    found = {tensor.device for layer in layers for _, tensor in layer.tensors()}
    if len(found) > 1 or torch.device("meta") in found:
        names = ", ".join(sorted(map(str, found)))
        raise ValueError(f"the model is on {names}: move all of it to one device, such as model.to('cpu')")
    return found.pop() if found else torch.get_default_device()


def let_go(layers: Iterable[ModuleLayer], kept: Iterable[ModuleLayer]) -> None:
    """Give back the memory of `layers`, whose parameters become meta tensors, but for what they share with `kept`."""
    own = {id(part) for layer in kept for part in layer.module.modules()}
    parts = [part for layer in layers for part in layer.module.modules() if id(part) not in own]
    empty = {id(tensor): _like(tensor) for part in parts for tensor in (*part.parameters(False), *part.buffers(False))}
    for part in parts:
        held: list[dict[str, Any]] = [part._parameters, part._buffers]
        for tensors in held:
            tensors.update({key: empty[id(tensor)] for key, tensor in tensors.items() if tensor is not None})


def _sequence(sequence: nn.Sequential) -> Iterator[ModuleLayer]:
    if type(sequence).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{type(sequence).__name__} has a forward of its own, so its modules don't run one after the other: give a "
            "list of the modules that do"
        )
    run: OrderedDict[str, nn.Module] = OrderedDict()
    # named_children would leave out a module that stands in a second place
    for name, module in _named(sequence._modules.items()):
        if run and ((_learns(module) and any(map(_learns, run.values()))) or _by_name(module, *run.values())):
            yield _joined(run)
            run = OrderedDict()
        run[name] = module
    if run:
        yield _joined(run)


def _joined(run: Mapping[str, nn.Module]) -> ModuleLayer:
    name, module = next(iter(run.items()))
    if len(run) == 1:
        return ModuleLayer(name, module, f"{name}.")
    return ModuleLayer(name, nn.Sequential(OrderedDict(run)), "")


def _by_name(*modules: nn.Module) -> bool:
    """Whether one takes or gives values by name: such a module is a layer of its own."""
    return any(getattr(module, way, ()) for module in modules for way in ("takes", "gives"))


def _learns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _listed(modules: object) -> Iterator[ModuleLayer]:
    pairs: Iterable[tuple[object, object]]
    if isinstance(modules, nn.ModuleList | nn.ModuleDict):
        pairs = modules._modules.items()
    elif isinstance(modules, Mapping):
        pairs = modules.items()
    elif isinstance(modules, Sequence) and not isinstance(modules, str):
        pairs = [
            entry if isinstance(entry, tuple) and len(entry) == 2 else (str(index), entry)
            for index, entry in enumerate(modules)
        ]
    else:
        raise ValueError(
            f"the model is a {type(modules).__name__}, which doesn't say in which order its modules run: give an "
            "nn.Sequential, or a list of the modules"
        )
    for name, module in _named(pairs):
        yield ModuleLayer(name, module, f"{name}.")


def _named(pairs: Iterable[tuple[object, object]]) -> Iterator[tuple[str, nn.Module]]:
    names = set[str]()
    for name, module in pairs:
        if not isinstance(module, nn.Module):
            raise ValueError(f"layer {name} is a {type(module).__name__}: every layer must be an nn.Module")
        if not isinstance(name, str) or not name.strip(".") or name in names:
            raise ValueError(f"{name!r} can't be a layer's name, or is another's too: give each a name of its own")
        names.add(name)
        yield name, module


def _tied(layers: Sequence[ModuleLayer]) -> dict[str, str]:
    owners: dict[int, str] = {}
    tied = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(layer.prefix.rstrip(".")):
            owner = owners.setdefault(id(parameter), name)
            if owner != name:
                tied[name] = owner
    return tied


# Copies without memory


def _without_memory(module: nn.Module) -> nn.Module:
    """For shapes alone. The user's hooks stay behind: they are to see training, not a rehearsal of it."""
    memo: dict[int, object] = {}
    for part in module.modules():
        memo |= {id(tensor): _like(tensor) for tensor in (*part.parameters(False), *part.buffers(False))}
        memo |= {id(value): _like(value) for value in vars(part).values() if isinstance(value, Tensor)}
        memo |= {id(hooks): _of_torch(hooks) for hooks in (part._forward_pre_hooks, part._forward_hooks)}
        memo |= {id(hooks): OrderedDict() for hooks in (part._backward_pre_hooks, part._backward_hooks)}
    try:
        copied = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"a {type(module).__name__} can't be copied ({error}): keep in its modules what can be"
        ) from error
    whole_again(copied)
    for part in copied.modules():
        for name in [name for name, value in vars(part).items() if isinstance(value, Tensor)]:
            tensor = vars(part).pop(name)
            part.register_buffer(name, tensor, persistent=False)  # so that it is given memory as those are
    return copied


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _of_torch(hooks: Mapping[int, object]) -> OrderedDict[int, object]:
    """Those that make weights out of others, such as weight_norm's."""
    return OrderedDict((key, hook) for key, hook in hooks.items() if type(hook).__module__.startswith("torch."))
