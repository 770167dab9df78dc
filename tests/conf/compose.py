"""The real config, composed in this process as `python train.py` composes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from conf import schema

CONF = Path(__file__).parents[2] / "conf"
schema.register()


def compose(*overrides: str, hydra_config: bool = False) -> DictConfig:
    """The composed config; with `hydra_config` what Hydra knows of the job is under `.hydra`."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return hydra.compose("config", overrides=list(overrides), return_hydra_config=hydra_config)


def configured(*overrides: str) -> Any:
    """The checked config as plain objects."""
    return schema.to_config(compose(*overrides))


def choices(*overrides: str) -> dict[str, Any]:
    """What was chosen in each group."""
    return dict(compose(*overrides, hydra_config=True).hydra.runtime.choices)


def groups() -> list[str]:
    """Every config group."""
    return sorted(folder.name for folder in CONF.iterdir() if any(folder.glob("*.yaml")))


def options(group: str) -> list[str]:
    """Every option of a group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))
