"""What one layer costs: the measured times and bytes that cuts are weighed by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

_NOT_NUMBERS = ("name", "tied")
_OPTIONAL = (
    "backward",
    "recompute",
    "activation_bytes",
    "checkpoint_bytes",
    "rebuilt_bytes",
    "output_bytes",
    "kept_output_bytes",
)


@dataclass(frozen=True)
class LayerCosts:
    """One layer's times in seconds and bytes, for one microbatch. ValueError for one that is negative or not finite.

    Bytes of activations are those of the layer as a stage of its own, or None where they are not known.
    """

    name: str
    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: float | None
    """Kept from the layer's forward to the end of its backward, its input included."""
    boundary_bytes: float
    """What a cut after the layer sends: its output, and the named values that live on."""
    parameter_bytes: float
    """Weights, their gradients and optimizer state."""
    tied: tuple[str, ...] = ()
    """The other layers that share a parameter with it."""
    backward: float | None = None
    """Of a full backward. None: `backward_input` and `backward_weight` together."""
    recompute: float | None = None
    """None: as the forward."""
    checkpoint_bytes: float | None = None
    """What a recomputed microbatch keeps between its forward and its recomputation, the input included."""
    rebuilt_bytes: float | None = None
    """What it takes from its recomputation to the end of its backward. None: as `activation_bytes`."""
    output_bytes: float | None = None
    """What the next layer takes in, where it is sent in another dtype. None: as `boundary_bytes`."""
    kept_output_bytes: float | None = None
    """The part of `activation_bytes` that is its output: the next layer's input is the same memory."""

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if field.name in _NOT_NUMBERS or (number is None and field.name in _OPTIONAL):
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number) or number < 0:
                raise ValueError(f"{field.name} of layer {self.name} is {number!r}: use a finite number of 0 or more")

    @property
    def full_backward(self) -> float:
        """Seconds of a backward in one part."""
        return self.backward_input + self.backward_weight if self.backward is None else self.backward

    @property
    def handed_on(self) -> float:
        """Bytes that the next layer takes in."""
        return self.boundary_bytes if self.output_bytes is None else self.output_bytes

    @property
    def again(self) -> float:
        """Seconds of a recomputation."""
        return self.forward if self.recompute is None else self.recompute

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.full_backward

    def to_json(self) -> dict[str, object]:
        """What `json.dumps` takes and `from_json` reads back without loss."""
        return asdict(self) | {"tied": list(self.tied)}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> LayerCosts:
        """Read what `to_json` wrote; ValueError for a missing or unknown field, or a number that can't be."""
        names = [field.name for field in fields(cls)]
        missing, unknown = set(names) - written.keys(), written.keys() - set(names)
        if missing or unknown:
            raise ValueError(
                f"a layer's costs lack {sorted(missing) or 'nothing'} and have {sorted(unknown) or 'nothing'} unknown: "
                f"use {', '.join(names)}"
            )
        name, tied = written["name"], written["tied"]
        if not isinstance(name, str):
            raise ValueError(f"a layer's name is {name!r}: use text")
        if not isinstance(tied, list | tuple) or not all(isinstance(other, str) for other in tied):
            raise ValueError(f"tied of layer {name} is {tied!r}: use a list of layers' names")
        return cls(**{**written, "tied": tuple(tied)})
