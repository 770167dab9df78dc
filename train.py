"""The command line: compose, check, launch, train. `python train.py --help` lists every group and field."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf import command_line, schema
from conf.callbacks import BadInput
from pipeline.schedule.errors import ScheduleError

if TYPE_CHECKING:
    from pipeline.training.job import Job
    from pipeline.training.recorder import Recorder

schema.register()


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(composed: DictConfig) -> None:
    """One job: a single run, or one of a sweep. How it ends is conf/callbacks.py's to turn into an exit status."""
    # not at the top: torch takes seconds to import, and --help and --cfg need none of it
    from pipeline.training.job import train
    from pipeline.training.planning import plan

    directory = Path(HydraConfig.get().runtime.output_dir)
    try:
        schema.check_choices(HydraConfig.get().runtime.choices)
        config = schema.to_config(composed)
        if config.task == "plan":
            return plan(config, directory, config.builders() if config.costs.source == "profile" else None)
        job = prepare(config)
    except (ValueError, OSError, MemoryError, OmegaConfBaseException) as error:
        # a schedule's grid, below its first line, has no place in a message of one line
        text = str(error).splitlines()[0] if isinstance(error, ScheduleError) else " ".join(str(error).split())
        raise BadInput(text) from error
    recorder = make_recorder(config, job, schema.plain(composed), directory) if schema.is_recording_rank() else None
    try:
        train(job, recorder, directory / "train.log")
    except (KeyboardInterrupt, SystemExit) as stop:  # Ctrl-C or SIGTERM: no error of the job, and it ends a sweep
        print(f"interrupted; what was recorded is in {directory}", file=sys.stderr)
        raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None


def prepare(config: schema.Config) -> Job:
    """Build model and data once, here, so that whatever is wrong with them is said before any process starts."""
    from pipeline.engine.boundary import TensorSpec
    from pipeline.training.devices import choose_devices, warn_of_slow_choices
    from pipeline.training.job import Job, check_launch
    from pipeline.training.measured_costs import measure
    from pipeline.training.plan import make_plan
    from pipeline.training.predicted_bytes import footprint_for_a_limit, with_predicted_bytes
    from pipeline.training.schedule_choice import write_schedule

    check_launch(config)
    build_model, build_data = config.builders()
    model, data, devices = build_model(), build_data(), choose_devices(config)
    device, stages = devices.of(0), write_schedule(config).stages
    inputs, targets = data.train.inputs(0), data.train.targets(0)
    costs, footprint = None, footprint_for_a_limit(config, model, inputs, targets, device, stages)
    if config.costs.source == "profile":
        costs, footprint = measure(config, model, data, devices, stages)
    plan = make_plan(config, model, TensorSpec.of(inputs), device, costs, footprint)
    plan.check_targets(data.classes)
    plan = with_predicted_bytes(plan, config, model, inputs, targets, device)
    if schema.is_recording_rank():
        warn_of_slow_choices(config, devices)
    return Job(config, plan, devices, build_model, build_data, config.data.validation_batches)


def make_recorder(config: schema.Config, job: Job, values: dict[str, object], directory: Path) -> Recorder:
    """Print the plan, and make what writes the run down: the run directory, the progress line, W&B."""
    from rich.console import Console

    from pipeline.training.plan_text import print_plan
    from pipeline.training.progress import ProgressLine
    from pipeline.training.recorder import Recorder, Sink
    from pipeline.training.wandb_logger import WandbLogger

    hydra_config = HydraConfig.get()
    choices = dict(hydra_config.runtime.choices)
    values["choices"] = {group: option for group, option in choices.items() if not group.startswith("hydra/")}
    sinks: list[Sink] = [ProgressLine()]
    if (logger := config.logger).name == "wandb":
        group = logger.group or (Path(hydra_config.sweep.dir).name if hydra_config.mode is RunMode.MULTIRUN else None)
        sinks.append(WandbLogger(project=logger.project, mode=logger.mode, group=group, tags=logger.tags))
    print_plan(job.plan, choices["model"], Console())
    return Recorder(directory, job.facts(choices["model"], values, tokens=config.data.kind == "text"), sinks)


if __name__ == "__main__":
    command_line.run(main)
