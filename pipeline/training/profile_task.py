"""task=profile: what each layer of the model takes on this machine, as a table and as profile.json."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.engine.profile import REPEATS
from pipeline.training import rendezvous
from pipeline.training.devices import choose_devices
from pipeline.training.job import Builders
from pipeline.training.profile_file import ModelProfile
from pipeline.training.profiling import measure_profile
from pipeline.training.progress import bytes_text
from pipeline.training.settings import Settings


def profile(settings: Settings, directory: Path, builders: Builders, name: str) -> None:
    """Measure the model's layers, print them, and write profile.json into `directory`.

    Args:
        settings: checked.
        builders: make the model and the data.
        name: of the model, for the table.

    Raises:
        ValueError: a launcher started several processes, or the devices, the model or the data can't be.
    """
    if rendezvous.is_launched():
        raise ValueError(
            f"task=profile measures in one process and a launcher started {rendezvous.world_size()}: use plain python"
        )
    if settings.profile is not None:
        raise ValueError(f"task=profile measures anew and profile={settings.profile} is given: drop one of them")
    model, data, device = builders[0](), builders[1](), choose_devices(settings).of(0)
    found = measure_profile(settings, model, data.train.inputs(0), data.train.targets(0), device)
    path = directory / "profile.json"
    found.write(path)
    console = Console()
    _print(found, name, settings.optimizer.name, console)
    console.print(f"profile.json, for profile=: {path}", soft_wrap=True, highlight=False)


def _print(found: ModelProfile, name: str, optimizer: str, console: Console) -> None:
    conditions = found.conditions
    console.print(f"{name}: one microbatch of {' x '.join(map(str, conditions.inputs))}", highlight=False, markup=False)
    console.print(table(found))
    on = [conditions.device, f"{conditions.threads} thread{'s' * (conditions.threads > 1)}"]
    console.print(
        f"on {', '.join(on)}, torch {conditions.torch}{', compiled' * conditions.compiled}\n"
        f"times: {conditions.precision}, one layer at a time, medians of {REPEATS} passes\n"
        "activations: what stays from F to B, the layer's input included\n"
        f"parameters: with their gradients and the state of {optimizer}",
        highlight=False,
        markup=False,
    )


def table(found: ModelProfile) -> Table:
    """A row a layer, and their sums."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("layer", "F ms", "B ms", "I ms", "W ms", "activations", "output", "parameters"):
        grid.add_column(title, justify="left" if title == "layer" else "right", no_wrap=True)
    for layer in found.layers:
        times = (layer.forward, layer.full_backward, layer.backward_input, layer.backward_weight)
        held = "?" if layer.activation_bytes is None else bytes_text(int(layer.activation_bytes))
        sizes = held, bytes_text(int(layer.handed_on)), bytes_text(int(layer.parameter_bytes))
        grid.add_row(layer.name, *(f"{1e3 * time:.2f}" for time in times), *sizes)
    grid.add_section()
    totals = [sum(1e3 * getattr(layer, name) for layer in found.layers) for name in _TIMES]
    parameters = sum(layer.parameter_bytes for layer in found.layers)
    grid.add_row("all", *(f"{total:.2f}" for total in totals), "", "", bytes_text(int(parameters)))
    return grid


_TIMES = ("forward", "full_backward", "backward_input", "backward_weight")
