"""Values that go by a name, past other layers, from the layer that gives them to those that take them.

A layer is called with its input and the values it `takes`; one that `gives` returns its output and those values.
Between two layers there is the output of the one before, and the named values that a layer after it still takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.engine.model import Layer
from pipeline.engine.nest import Nest


class Carried(NamedTuple):
    """What crosses where named values are alive; where none are, it is the value itself."""

    value: Nest
    named: dict[str, Nest]


def alive(layers: Sequence[Layer]) -> tuple[tuple[str, ...], ...]:
    """The names alive before each layer, and last after all of them, where there are none: one entry more than layers.

    Args:
        layers: the whole model's, in order.

    Raises:
        ValueError: a layer takes a name that no layer before it gives, two give the same one, or names are none.
    """
    _check_names(layers)
    given = _givers(layers)
    last_taker: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for name in layer.takes:
            if name not in given:
                raise ValueError(
                    f"layer {layer.name} takes {name!r}, which no layer gives: let one before it give it "
                    f"(gives=({name!r},)), or drop it"
                )
            if given[name] >= index:
                raise ValueError(
                    f"layer {layer.name} takes {name!r}, and layer {layers[given[name]].name}, which gives it, is not "
                    "before it: change their order, or take it in a later layer"
                )
            last_taker[name] = index
    return tuple(
        tuple(name for name, giver in given.items() if giver < index <= last_taker.get(name, -1))
        for index in range(len(layers) + 1)
    )


def taken(layer: Layer, named: Mapping[str, Nest]) -> list[Nest]:
    """What a layer is called with after its input."""
    return [named[name] for name in layer.takes]


def passed_on(
    layer: Layer, output: Any, named: Mapping[str, Nest], names: Sequence[str]
) -> tuple[Nest, dict[str, Nest]]:
    """A layer's value, and the named values, of those there were and those it gives, that are alive after it.

    Args:
        output: what it returned.
        named: what was alive before it.
        names: those that are alive after it.

    Raises:
        ValueError: a layer that gives returned something else than its value and what it gives.
    """
    if not layer.gives:
        return output, {name: named[name] for name in names}
    if not isinstance(output, tuple | list) or len(output) != 1 + len(layer.gives):
        kind = "tensor" if isinstance(output, Tensor) else type(output).__name__
        size = f" of {len(output)}" if isinstance(output, tuple | list) else ""
        raise ValueError(
            f"layer {layer.name} gives {', '.join(layer.gives)} and returns a {kind}{size}: let it "
            f"return (value, {', '.join(layer.gives)})"
        )
    value, *given = output
    both = {**named, **dict(zip(layer.gives, given, strict=True))}
    return value, {name: both[name] for name in names}


def carried(value: Nest, named: dict[str, Nest]) -> Nest:
    """What crosses: the value, with the named ones if there are any."""
    return Carried(value, named) if named else value


def opened(inputs: Any, names: Sequence[str]) -> tuple[Nest, dict[str, Nest]]:
    """The value and the named ones that crossed where `names` are alive: what `carried` undoes."""
    return (inputs.value, inputs.named) if names else (inputs, {})


def _check_names(layers: Sequence[Layer]) -> None:
    for layer in layers:
        given: dict[str, Any] = {"takes": layer.takes, "gives": layer.gives}  # a module's attributes may be anything
        for word, names in given.items():
            if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"layer {layer.name} {word} {names!r}: use a tuple of names, as in {word}=('skip',)")


def _givers(layers: Sequence[Layer]) -> dict[str, int]:
    """The position of the layer that gives each name."""
    given: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for name in layer.gives:
            if name in given:
                raise ValueError(
                    f"layers {layers[given[name]].name} and {layer.name} both give {name!r}: give each value a name of "
                    "its own"
                )
            given[name] = index
    return given
