"""What one layer costs: the measured times and bytes that cuts are weighed by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite

_NUMBERS = (
    "forward",
    "backward_input",
    "backward_weight",
    "activation_bytes",
    "boundary_bytes",
    "parameter_bytes",
)


@dataclass(frozen=True)
class LayerCosts:
    """One layer's times in seconds and bytes, for one microbatch. ValueError for one that is negative or not finite."""

    name: str
    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: float
    """Kept from the layer's forward to the end of its backward."""
    boundary_bytes: float
    """What a cut after the layer carries: its output, and the named values that live on."""
    parameter_bytes: float
    """Weights, their gradients and optimizer state."""
    tied: tuple[str, ...] = ()
    """The other layers that share a parameter with it."""

    def __post_init__(self) -> None:
        for field in _NUMBERS:
            number = getattr(self, field)
            if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number) or number < 0:
                raise ValueError(f"{field} of layer {self.name} is {number!r}: use a finite number of 0 or more")

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward_input + self.backward_weight

    def to_json(self) -> dict[str, object]:
        """What `json.dumps` takes and `from_json` reads back without loss."""
        return asdict(self) | {"tied": list(self.tied)}

    @classmethod
    def from_json(cls, written: Mapping[str, object]) -> LayerCosts:
        """Read what `to_json` wrote; ValueError for a missing or unknown field, or a number that can't be."""
        wanted = {"name", "tied", *_NUMBERS}
        missing, unknown = wanted - {"tied"} - written.keys(), written.keys() - wanted
        if missing or unknown:
            raise ValueError(
                f"a layer's costs lack {sorted(missing) or 'nothing'} and have {sorted(unknown) or 'nothing'} unknown: "
                f"use {', '.join(('name', *_NUMBERS, 'tied'))}"
            )
        name, tied = written["name"], written.get("tied", ())
        if not isinstance(name, str):
            raise ValueError(f"a layer's name is {name!r}: use text")
        if not isinstance(tied, list | tuple) or not all(isinstance(other, str) for other in tied):
            raise ValueError(f"tied of layer {name} is {tied!r}: use a list of layers' names")
        numbers = {field: written[field] for field in _NUMBERS}
        return cls(name=name, tied=tuple(tied), **numbers)  # type: ignore[arg-type]
