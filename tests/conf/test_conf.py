"""The real config: every option composes and passes the checks, and what can't be meant is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import HydraException

from conf import command_line, schema
from models.loss import CrossEntropy
from tests.conf.compose import CONF, choices, compose, configured, groups, options

TOP_LEVEL = [
    *("task", "launch", "device", "share_gpu", "transport", "seed", "pp", "dp", "microbatches", "batch_size", "steps"),
    *("prefetch", "compile", "timeout", "gradient_clip", "on_nonfinite", "log_every", "validate_every", "costs"),
    *("batch_norm", "deterministic", "save_every", "keep_checkpoints", "resume", "profile", "export"),
    *("peak_tflops", "prompt", "max_new_tokens", "temperature", "top_k"),
]
SINGLE = ["schedule", "model", "partition", "data", "precision", "activation_checkpoint", "optimizer", "logger"]
GLOBAL = ["experiment", "debug"]


def chosen(group: str, option: str) -> list[str]:
    """The override, with what the option can't be without."""
    words = [f"{group}={option}"]
    if group == "data" and option not in ("python_text", "text_file", "tokens", "synthetic_text"):
        words.append("model=resnet18")
    if (group, option) == ("experiment", "resnet152_imagenet") or (
        group == "data" and "path" in {field.name for field in dataclasses.fields(schema.SCHEMAS["data"][option])}
    ):
        words.append("data.path=somewhere")
    if (group, option) in (("schedule", "file"), ("schedule", "custom")):
        words.append({"file": "schedule.path=somewhere", "custom": "schedule.target=some:where"}[option])
    if (group, option) == ("model", "custom"):
        words.append("model.target=some:where")
    if (group, option) == ("activation_checkpoint", "window"):
        words.append("activation_checkpoint.keep_microbatches=4")
    return words


CASES = [(group, option) for group in groups() for option in options(group)]


@pytest.mark.parametrize(("group", "option"), CASES, ids=["=".join(case) for case in CASES])
def test_every_option_composes_and_passes_the_checks(group: str, option: str) -> None:
    overrides = chosen(group, option)
    config = configured(*overrides)
    found = choices(*overrides)
    assert found[group] == option
    schema.check_choices(found)
    named = getattr(config, group, None)
    assert getattr(named, "name", option) == option
    config.model.keywords()
    config.data.keywords()


@pytest.mark.parametrize("schedule", options("schedule"))
@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_schedule_goes_with_experiments_and_debugging(schedule: str, experiment: str) -> None:
    debug = options("debug")[options("schedule").index(schedule) % len(options("debug"))]
    config = configured(*chosen("experiment", experiment), f"schedule={schedule}", f"debug={debug}")
    assert (config.schedule.name, config.launch, config.logger.name) == (schedule, "in_process", "none")


def test_the_fields_are_those_and_no_others() -> None:
    names = [field.name for field in dataclasses.fields(schema.Config)]
    assert sorted(names) == sorted(TOP_LEVEL + SINGLE)
    assert groups() == sorted(SINGLE + GLOBAL)
    assert set(schema.GROUPS) == set(SINGLE)
    for field in dataclasses.fields(schema.Config):
        assert "\n" not in field.metadata["help"]
        assert field.metadata["help"]


def test_defaults() -> None:
    config = configured()
    assert (config.schedule.name, config.pp, config.logger.name) == ("1f1b", 2, "wandb")
    assert isinstance(config.model, schema.Gpt)
    assert isinstance(config.data, schema.PythonText)
    assert config.model.vocabulary == 256
    assert config.data.context == config.model.context


@pytest.mark.parametrize(
    ("overrides", "data"),
    [
        (["model=resnet152"], schema.Glyphs),
        (["model=resnet152", "data=cifar10", "data.path=x"], schema.Cifar10),
        (["data=cifar10", "model=resnet152", "data.path=x"], schema.Cifar10),
        (["experiment=resnet152_imagenet", "data.path=x"], schema.ImageFolder),
        (["experiment=resnet152_imagenet", "data=synthetic_images"], schema.SyntheticImages),
        (["experiment=resnet18_glyphs"], schema.Glyphs),
        (["experiment=resnet18_glyphs", "model=gpt", "data=python_text"], schema.PythonText),
    ],
)
def test_who_decides_the_data(overrides: list[str], data: type) -> None:
    config = configured(*overrides)
    assert type(config.data) is data
    if isinstance(config.model, schema.ResNet):
        assert config.model.classes == config.data.classes


def test_an_experiment_of_the_users_may_choose_what_begins_with_a_digit(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /model: resnet50\n  - override /data: synthetic_images\n  - override /schedule: 1f1b\n"
        "pp: 3\n"
    )
    overrides = [f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]
    config = configured(*overrides)
    assert choices(*overrides)["schedule"] == "1f1b"
    assert (config.schedule.name, config.pp) == ("1f1b", 3)
    assert isinstance(config.data, schema.SyntheticImages)
    assert configured(*overrides, "schedule=gpipe").schedule.name == "gpipe"


def test_the_experiments_set_what_they_say() -> None:
    config = configured("experiment=gpt2_interleaved")
    assert (config.schedule.name, config.schedule.stages_per_rank, config.pp) == ("interleaved_1f1b", 2, 4)
    assert (config.model.layers, config.model.width, config.precision.autocast) == (12, 768, "bfloat16")
    config = configured("debug=fp64")
    assert (config.launch, config.precision.parameters, config.logger.name) == ("in_process", "float64", "none")


def test_a_model_of_the_users_takes_any_data_and_arguments_of_its_own() -> None:
    words = ["model=custom", "model.target=my.module:build", "model.arguments.depth=3", "model.arguments.sizes=[1,2]"]
    for data in ("python_text", "glyphs"):
        config = configured(*words, f"data={data}", "seed=5")
        assert config.model.keywords() == {
            "target": "my.module:build",
            "arguments": {"depth": 3, "sizes": [1, 2]},
            "loss": None,
            "initialization": "whole",
            "seed": 5,
        }


def test_what_builds_a_model_of_the_users_is_looked_for() -> None:
    config = configured("model=custom", "model.target=no.module:build")
    build_model, _ = config.builders()
    with pytest.raises(ValueError, match="can't be imported"):
        build_model()


def test_the_loss_of_a_users_model_is_any() -> None:
    def loss(path: str | None) -> Any:
        words = ["model=custom", "model.target=tests.models.own:perceptron"]
        return configured(*words, *([] if path is None else [f"model.loss={path}"])).builders()[0]().loss

    outputs, targets = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, -100])
    assert loss(None) == CrossEntropy()
    for path in ("torch.nn.functional:cross_entropy", "torch.nn:CrossEntropyLoss"):
        found = loss(path)
        assert found.weight(targets) == 5
        torch.testing.assert_close(found(outputs, targets), CrossEntropy()(outputs, targets))
    assert loss("torch.nn:L1Loss").weight(targets) == 6
    for path, message in (
        ("torch.nn:Nothing", "model.loss=torch.nn:Nothing can't be imported"),
        ("torch.nn:Linear", r"model.loss=torch.nn:Linear can't be made without arguments \(.*missing"),
        ("torch:pi", r"loss=3.14.* can't be called"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(path)


def test_weights_are_looked_for_where_the_command_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["model=gpt2"], ["model=resnet18"], ["model=vgg16"]):
        build_model, _ = configured(*words, "model.weights=some.pt").builders()
        with pytest.raises(ValueError, match=rf"model.weights={tmp_path}/some.pt can't be read"):
            build_model()
    with pytest.raises(ValueError, match=r"model.fresh=\['fc'\] goes with a file of weights: give one"):
        configured("model=resnet18", "model.fresh=[fc]").builders()


# What is refused


@pytest.mark.parametrize(
    "override",
    ["schedule=nope", "nope=1", "model.nope=1", "microbatches=four", "pp=null", "model.depth=18", "share_gpu=perhaps"],
)
def test_hydra_refuses_what_it_can(override: str) -> None:
    with pytest.raises(HydraException):
        compose(override)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+foo=1", "nothing reads foo:"),
        ("+microbatchs=3", r"nothing reads microbatchs \(did you mean microbatches\?\)"),
        ("++optimizer.lr=1", r"nothing reads optimizer\.lr:"),
        ("+optimizer.warmup_step=1", r"optimizer\.warmup_step \(did you mean optimizer\.warmup_steps\?\)"),
        ("+schedule.foo=1", r"nothing reads schedule\.foo"),
        ("+model.foo=1", r"nothing reads model\.foo"),
        ("+data.foo={bar: 1}", r"nothing reads data\.foo"),
        ("data=tokens", r"data\.path has no value: give one"),
        ("model=custom", r"model\.target has no value: give one"),
        ("model.layers=${nope}", "nope"),
        ("data.validation_batches=0", r"data\.validation_batches=0 is too small: use 1 or more"),
        ("model=resnet18 data=python_text", "takes images and the data gives text: use data=glyphs or model=gpt"),
        ("data=glyphs", "takes text and the data gives images: use data=python_text or model=resnet18"),
    ],
)
def test_what_hydra_lets_pass_is_refused(override: str, named: str) -> None:
    with pytest.raises(Exception, match=named) as caught:
        configured(*(override.split(" ") if " data=" in override else [override]))
    assert type(caught.value).__module__.partition(".")[0] in ("builtins", "omegaconf")


@pytest.mark.parametrize("group", SINGLE)
def test_a_group_takes_exactly_one_option(group: str) -> None:
    first = options(group)[0]
    for override in (f"~{group}", f"{group}=[{first}]"):
        with pytest.raises(ValueError, match=rf"^{group} takes exactly one option.*{group}={first}"):
            schema.check_choices(choices(*(["model=resnet18"] if group == "data" else []), override))


def test_two_schedules_at_once_are_refused_and_two_experiments_not() -> None:
    with pytest.raises(ValueError, match="schedule takes exactly one option"):
        schema.check_choices(choices("schedule=[gpipe,1f1b]"))
    schema.check_choices(choices("experiment=[resnet18_glyphs]"))
    schema.check_choices(choices("debug=[in_process,fp64]"))


@pytest.mark.parametrize(
    ("argument", "group"),
    [
        ("logger=null", "logger"),
        ("experiment=null,resnet18_glyphs", "experiment"),
        ("model=null", "model"),
        ("gradient_clip=null", None),
        ("logger.group=null", None),
        ("=null", None),
        ("schedule=gpipe", None),
    ],
)
def test_groups_set_to_null_are_found(argument: str, group: str | None) -> None:
    assert command_line.null_group(["pp=2", argument]) == group


def test_the_stored_config_is_plain_and_resolved() -> None:
    values = schema.plain(compose("model=resnet18"))
    assert values["model"] == {"depth": 18, "classes": 36, "weights": None, "fresh": []}
    assert "${" not in str(values)
    assert "???" not in str(values)


def test_no_option_is_hidden() -> None:
    """`schema/...` holds the typed shapes and is no option of any group."""
    assert not (CONF / "schema").exists()
    assert "schema" not in groups()
