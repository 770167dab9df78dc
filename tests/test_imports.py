"""Imports run one way: what every module imports, read from its source, against the house's plan."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {
    "schedule": set(),
    "partition": {"schedule"},
    "engine": {"schedule", "partition"},
    "report": {"schedule"},
    "training": {"schedule", "partition", "engine", "report"},
}
"""Each folder of `pipeline` and those it may import besides itself."""
WANDB = "pipeline/training/wandb_logger.py"


def sources(*names: str) -> list[Path]:
    found = [path for name in names for path in sorted((ROOT / name).rglob("*.py"))]
    assert found, f"no module under {names}"
    return found


def imports(path: Path) -> set[str]:
    """The dotted names that a module imports anywhere in its source, at its top or in a function."""
    return imported_names(path.read_text(), path.relative_to(ROOT).parts[:-1])


def imported_names(source: str, package: tuple[str, ...]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            # `from pipeline import engine` imports pipeline.engine
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def case_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources("pipeline"), ids=case_id)
def test_pipeline_imports_only_lower_floors(path):
    floor = path.relative_to(ROOT / "pipeline").parts[0]
    if floor == "__init__.py":
        found = {name for name in imports(path) if name.startswith("pipeline")}
        assert {name.removesuffix(".pipeline") for name in found} <= {
            "pipeline.training",
            "pipeline.training.pipeline.Microbatched",
            "pipeline.training.pipeline.Pipeline",
        }
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("pipeline.")}
    assert used <= FLOORS[floor] | {floor}


@pytest.mark.parametrize("path", sources("pipeline"), ids=case_id)
def test_pipeline_knows_no_models_no_data_and_no_hydra(path):
    assert not tops(path) & {"hydra", "omegaconf", "models", "data", "conf", "train"}


def test_pipeline_itself_and_schedules_need_no_torch():
    """`from pipeline import Pipeline` does, when it is asked for."""
    code = "import sys, pipeline, pipeline.schedule.library, pipeline.partition; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("path", sources("pipeline/schedule"), ids=case_id)
def test_schedule_uses_the_standard_library_alone(path):
    outside = {name for name in tops(path) if name not in sys.stdlib_module_names}
    assert outside <= {"pipeline"}


@pytest.mark.parametrize("path", sources("models", "data"), ids=case_id)
def test_models_and_data_know_nothing_of_pipelines(path):
    assert not tops(path) & {"pipeline", "conf", "hydra", "omegaconf", "train"}
    other = "data" if path.is_relative_to(ROOT / "models") else "models"
    assert other not in tops(path)


def test_only_one_file_knows_wandb():
    users = {case_id(path) for path in sources("pipeline", "models", "data", "conf") if "wandb" in tops(path)}
    assert users == {WANDB}
    assert "wandb" not in tops(ROOT / "train.py")


def test_only_the_command_line_knows_hydra():
    users = {path for path in sources("pipeline", "models", "data", "conf") if tops(path) & {"hydra", "omegaconf"}}
    assert {path.relative_to(ROOT).parts[0] for path in users} == {"conf"}


def test_the_command_line_is_short():
    assert len((ROOT / "train.py").read_text().splitlines()) < 100


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import wandb.sdk as w", "wandb.sdk"),
        ("def f():\n    from pipeline import training", "pipeline.training"),
        ("from . import stage", "pipeline.engine.stage"),
        ("from ..training import rank", "pipeline.training.rank"),
        ("import importlib\nimportlib.import_module('hydra')", "hydra"),
    ],
)
def test_no_form_of_import_goes_unseen(source, name):
    assert name in imported_names(source, ("pipeline", "engine"))
