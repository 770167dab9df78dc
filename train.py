"""The command line: compose, check, run. `python train.py --help` lists every group and field."""

from __future__ import annotations

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
    from pipeline.training.tasks import Order

schema.register()


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(composed: DictConfig) -> None:
    """One job: a single run, or one of a sweep. How it ends is conf/callbacks.py's to turn into an exit status."""
    # not at the top: torch takes seconds to import, and --help and --cfg need none of it
    from pipeline.training.tasks import TASKS

    try:
        schema.check_choices(HydraConfig.get().runtime.choices)
        order = make_order(composed)
        run = TASKS[order.settings.task](order)
    except (ValueError, OSError, MemoryError, OmegaConfBaseException) as error:
        # a schedule's grid, below its first line, has no place in a message of one line
        text = str(error).splitlines()[0] if isinstance(error, ScheduleError) else " ".join(str(error).split())
        raise BadInput(text) from error
    run()


def make_order(composed: DictConfig) -> Order:
    """The composed config as plain objects, and what Hydra knows of the job."""
    from pipeline.training.tasks import Order

    config, context = schema.to_config(composed), HydraConfig.get()
    choices = {group: chosen for group, chosen in context.runtime.choices.items() if not group.startswith("hydra/")}
    return Order(
        settings=config,
        builders=config.builders,
        directory=Path(context.runtime.output_dir),
        records=schema.is_recording_rank(),
        model=choices["model"],
        validation_batches=config.data.validation_batches if config.data else 0,
        config=lambda: {**schema.plain(composed), "choices": choices},
        writer=config.writer,
        sweep=Path(context.sweep.dir).name if context.mode is RunMode.MULTIRUN else None,
    )


if __name__ == "__main__":
    command_line.run(main)
