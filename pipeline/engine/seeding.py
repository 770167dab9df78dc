"""Random numbers by name and number, never by stream: the same whatever the schedule, the partition and `pp`."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def name_seed(seed: int, name: str) -> int:
    """A 63-bit number from (seed, name), the same on every machine and Python."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the starting value of what is called `name`."""
    return torch.Generator().manual_seed(name_seed(seed, name))


def mixed_seed(layer_seed: int, step: int, microbatch: int) -> int:
    """A 63-bit number for one layer's random numbers in one microbatch of one step (splitmix64's finalizer, twice)."""
    return _mix(_mix(layer_seed ^ (step * 0x9E3779B97F4A7C15)) ^ (microbatch * 0xD1B54A32D192ED03)) >> 1


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def seed_layer(value: int, device: torch.device) -> None:
    """Seed the default generator that dropout on `device` draws from."""
    _default_generator(device).manual_seed(value)


def generator_state(device: torch.device) -> Tensor:
    """The state of the default generator of `device`."""
    return _default_generator(device).get_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Let the default generator of `device` go on from `state`."""
    _default_generator(device).set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    chosen: torch.Generator = torch.cuda.default_generators[index]
    return chosen
