"""Keeping what is costly to compute from F to R: R computes the rest around it.

F runs under `CostlyOutputs.keeping`, R under `handing_back`; both must run the very same operations. The idea is that
of torch's selective checkpointing (torch.utils.checkpoint), whose recomputation starts inside the backward: no action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.engine.seeding import generator_state, set_generator_state

aten = torch.ops.aten

COSTLY = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten.convolution,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    }
)
"""Matrix products, convolutions and attention. Everything else is bound by memory traffic: cheaper to do again."""


@dataclass
class _Output:
    operation: Any
    value: Any
    """A tensor, or a tuple with tensors in it."""
    generator: tuple[torch.device, Tensor] | None
    """Of an operation that draws random numbers: the generator afterwards, for R doesn't draw them again."""
    held: list[object]


class CostlyOutputs:
    """What one microbatch keeps in one segment.

    Args:
        hold: called with each tensor that is kept, if somebody counts; what it returns lives as long as the tensor.
    """

    def __init__(self, hold: Callable[[Tensor], object] | None = None) -> None:
        self._hold = hold
        self._outputs: deque[_Output] = deque()

    def keeping(self) -> TorchDispatchMode:
        """While open, costly operations leave their outputs here."""
        return _Keeping(self)

    def handing_back(self) -> TorchDispatchMode:
        """While open, costly operations take their outputs from here, in the order in which they came."""
        return _HandingBack(self)

    def add(self, operation: Any, output: Any) -> None:
        """Keep an operation's output, without its place in a graph."""
        value = tuple(map(_detached, output)) if isinstance(output, Sequence) else _detached(output)
        first = next(_tensors(output))
        draws = torch.Tag.nondeterministic_seeded in operation.tags
        generator = (first.device, generator_state(first.device)) if draws else None
        self._outputs.append(_Output(operation, value, generator, self._held(value)))

    def take(self, operation: Any) -> Any:
        """The output of the next costly operation, which must be `operation`."""
        if not self._outputs or self._outputs[0].operation is not operation:
            found = self._outputs[0].operation if self._outputs else "none"
            raise RuntimeError(
                f"the recomputation computes {operation} where the forward computed {found}: a layer must do the same "
                "both times to keep its costly outputs"
            )
        output = self._outputs.popleft()
        if output.generator is not None:
            set_generator_state(*output.generator)
        return output.value

    def part_from(self, overwritten: Tensor) -> None:
        """Keep a copy of what shares memory with `overwritten`, which is about to change."""
        memory = overwritten.untyped_storage()._cdata
        for output in self._outputs:
            if any(tensor.untyped_storage()._cdata == memory for tensor in _tensors(output.value)):
                value = output.value
                output.value = tuple(map(_copy, value)) if isinstance(value, tuple) else _copy(value)
                output.held = self._held(output.value)

    def _held(self, value: Any) -> list[object]:
        return [] if self._hold is None else [self._hold(tensor) for tensor in _tensors(value)]


class _Keeping(TorchDispatchMode):
    def __init__(self, outputs: CostlyOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in _overwritten(func, args, kwargs):
                self._outputs.part_from(tensor)
        output = func(*args, **kwargs)
        if func.overloadpacket in COSTLY:
            self._outputs.add(func, output)
        return output


class _HandingBack(TorchDispatchMode):
    def __init__(self, outputs: CostlyOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in COSTLY:
            return self._outputs.take(func)
        return func(*args, **(kwargs or {}))


def _overwritten(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    for entry in value if isinstance(value, Sequence) else (value,):
        if isinstance(entry, Tensor):
            yield entry


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
