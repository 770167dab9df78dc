"""Values of several tensors: tuples, lists and dicts of them, one in the other. A tensor alone is the usual one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import Tensor

Nest: TypeAlias = "Tensor | tuple[Nest, ...] | list[Nest] | dict[Any, Nest] | None"


class Microbatched(tuple[Any, ...]):
    """A batch that is cut already: a nest for each microbatch. They may differ in shape."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Microbatched{tuple(self)!r}"


def mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """`nest` with the result of `function` in the place of each of its leaves; None stays, for it is none."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, dict):
        return type(nest)((key, mapped(function, each)) for key, each in nest.items())
    if isinstance(nest, list | tuple):
        items = [mapped(function, each) for each in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)  # a named tuple is built otherwise
    return None if nest is None else function(nest)


def flat(nest: Any) -> tuple[Any, ...]:
    """The leaves of `nest` in order."""
    if isinstance(nest, Tensor):
        return (nest,)
    leaves: list[Any] = []
    mapped(leaves.append, nest)
    return tuple(leaves)


def rebuilt(like: Any, leaves: Iterable[Any]) -> Any:
    """`leaves`, as many as `like` has, in a nest as it is: what `flat` undoes."""
    remaining = iter(leaves)
    return mapped(lambda _: next(remaining), like)
