"""The two lists of `python train.py --help`: the config groups with their options, and every field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pipeline.training.settings import Settings


def groups_help() -> str:
    """Every config group with its options."""
    groups = sorted(folder.name for folder in Path(__file__).parent.iterdir() if any(folder.glob("*.yaml")))
    width = max(map(len, groups))
    return "\n".join(f"  {group:{width}}  {', '.join(options(group))}" for group in groups)


def options(group: str) -> list[str]:
    """The names that a group can be set to."""
    return sorted(file.stem for file in (Path(__file__).parent / group).glob("*.yaml"))


def fields_help(schemas: Mapping[str, Mapping[str, type]]) -> str:
    """Every field with its default and its line; `schemas` are those of each group's options (conf/schema.py)."""
    rows = list(_field_rows(Settings(), ""))
    for group, shapes in schemas.items():
        owners: dict[tuple[str, str, str], list[str]] = {}
        for option, shape in shapes.items():
            for row in _field_rows(shape(), f"{group}."):
                owners.setdefault(row, []).append(option)
        for (name, default, text), having in owners.items():
            suffix = "" if len(having) == len(shapes) else f" ({', '.join(having)})"
            rows.append((name, default, text + suffix))
    width = max(len(f"{name}={default}") for name, default, _ in rows)
    return "\n".join(f"  {f'{name}={default}':{width}}  {text}" for name, default, text in rows)


def _field_rows(settings: Any, path: str) -> Iterator[tuple[str, str, str]]:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from _field_rows(value, f"{path}{field.name}.")
        elif "help" in field.metadata:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            # an interpolation would be resolved in the help text itself: show what it falls back to
            if shown.startswith("${"):
                shown = shown.removesuffix("}").rpartition(",")[2]
            yield f"{path}{field.name}", shown, field.metadata["help"]
