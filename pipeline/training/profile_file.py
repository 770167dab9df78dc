"""profile.json: what a model's layers take on a machine, measured once (task=profile) and taken by profile=path."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pipeline.partition import LayerCosts

FORMAT = 1
_CURE = "make one with task=profile and the settings of this run"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conditions:
    """What was measured, and where."""

    model: str
    inputs: tuple[int, ...]
    """The shape of one microbatch, its size first; of several tensors one shape after the other."""
    parameters: tuple[int, ...]
    """Of each layer."""
    precision: str
    keeps_costly: bool
    compiled: bool
    device: str
    threads: int
    torch: str


@dataclass(frozen=True)
class ModelProfile:
    """The layers of a model, and the conditions they were measured under. Seconds and bytes."""

    conditions: Conditions
    layers: tuple[LayerCosts, ...]

    def write(self, path: Path) -> None:
        """As JSON, a layer a line."""
        head = {"format": FORMAT, "units": "seconds and bytes of one microbatch", **asdict(self.conditions)}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        layers = ",\n".join(f"    {json.dumps(layer.to_json())}" for layer in self.layers)
        path.write_text("\n".join(["{", *lines, '  "layers": [', layers, "  ]", "}", ""]), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ModelProfile:
        """What `write` wrote.

        Raises:
            ValueError: there is no such file, or it is no profile of this format.
        """
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"profile={path} can't be read ({error}): {_CURE}") from error
        found = written.get("format") if isinstance(written, dict) else None
        if found != FORMAT:
            raise ValueError(f"profile={path} has format {found}, not {FORMAT}: {_CURE}")
        try:
            missing = {field.name for field in fields(Conditions)} - written.keys()
            if missing:
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
            head = {field.name: written[field.name] for field in fields(Conditions)}
            shapes = {name: tuple(map(int, head[name])) for name in ("inputs", "parameters")}
            layers = tuple(LayerCosts.from_json(entry) for entry in written.get("layers", ()))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"profile={path} is damaged ({error}): {_CURE}") from error
        return cls(Conditions(**{**head, **shapes}), layers)

    def check(self, path: Path, wanted: Conditions, names: Sequence[str]) -> None:
        """Refuse a profile of another model, microbatch or precision; warn of another machine.

        Raises:
            ValueError: what differs, both values, and the cure.
        """
        if [layer.name for layer in self.layers] != list(names) or len(self.conditions.parameters) != len(names):
            raise ValueError(
                f"profile={path} is of {self.conditions.model} with {len(self.layers)} layers and the run's model, "
                f"{wanted.model}, has {len(names)}, or others: {_CURE}"
            )
        for name, ours, theirs in zip(names, self.conditions.parameters, wanted.parameters, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"profile={path} was measured with {ours} parameters in layer {name} and the run has {theirs}: "
                    f"{_CURE}"
                )
        found, expected = asdict(self.conditions), asdict(wanted)
        for name in ("inputs", "precision", "keeps_costly", "compiled"):
            if found[name] != expected[name]:
                raise ValueError(
                    f"profile={path} was measured with {name} {found[name]} and the run has {expected[name]}: {_CURE}"
                )
        for name in ("device", "threads", "torch"):
            if found[name] != expected[name]:
                _log.warning("the profile was measured with %s %s, here it is %s", name, found[name], expected[name])
