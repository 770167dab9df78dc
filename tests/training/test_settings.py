from __future__ import annotations

from typing import Any

import pytest

from pipeline.training.settings import ActivationCheckpointSettings, CostsSettings, Settings, described


def changed(path: str, value: Any) -> Settings:
    settings = Settings()
    *parents, name = path.split(".")
    owner: Any = settings
    for parent in parents:
        owner = getattr(owner, parent)
    assert hasattr(owner, name)
    setattr(owner, name, value)
    return settings


def test_costs_measured_anew_are_not_deterministic():
    settings = Settings(deterministic=True, costs=CostsSettings(source="profile"))
    with pytest.raises(ValueError, match=r"deterministic=true with costs.source=profile: .* profile=profile.json"):
        settings.check()
    settings.profile = "profile.json"
    settings.check()


def test_the_defaults_pass():
    Settings().check()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", -1, "seed=-1 is too small: use 0 or more"),
        ("batch_norm", "shared", "batch_norm=shared is unknown: use microbatch, deferred or sync"),
        ("pp", 0, "pp=0 is too small: use 1 or more"),
        ("dp", 0, "dp=0 is too small: use 1 or more"),
        ("dp", 5, "microbatches=8 in each of dp=5 replicas is more than batch_size=32: .* use microbatches=6 or fewer"),
        ("dp", 33, "microbatches=8 in each of dp=33 replicas is more than batch_size=32: .* use a smaller dp, or"),
        ("microbatches", 0, "microbatches=0 is too small"),
        ("batch_size", 0, "batch_size=0 is too small"),
        ("steps", 0, "steps=0 is too small"),
        ("prefetch", -1, "prefetch=-1 is too small: use 0 or more"),
        ("log_every", 0, "log_every=0 is too small"),
        ("validate_every", -1, "validate_every=-1 is too small"),
        ("save_every", -1, "save_every=-1 is too small: use 0 or more"),
        ("keep_checkpoints", 0, "keep_checkpoints=0 is too small: use 1 or more"),
        ("max_new_tokens", 0, "max_new_tokens=0 is too small: use 1 or more"),
        ("temperature", -0.1, r"temperature=-0.1 is out of range: use 0 \(the likeliest token\) or more"),
        ("temperature", float("nan"), "temperature=nan is out of range"),
        ("top_k", 0, "top_k=0 is too small: use 1 or more, or null for all tokens"),
        ("microbatches", 33, "microbatches=33 is more than batch_size=32: .* use microbatches=32 or fewer"),
        ("timeout", 0.0, "timeout=0 is out of range"),
        ("timeout", float("nan"), "timeout=nan is out of range"),
        ("gradient_clip", 0.0, "gradient_clip=0 is not positive: use a positive norm, or null"),
        ("gradient_clip", float("nan"), "gradient_clip=nan is not positive"),
        ("precision.loss_scale", 0.5, "precision.loss_scale=0.5 is out of range"),
        ("precision.masters", "float32", "precision.masters=float32 is for precision.parameters=bfloat16, not float32"),
        ("precision.boundary", "int8", "precision.boundary=int8 is unknown: use null, float32, bfloat16 or float16"),
        ("precision.masters", "float64", "precision.masters=float64 is unknown: use null or float32"),
        ("task", "tune", "task=tune is unknown: use train, evaluate, generate, plan, "),
        ("launch", "threads", "launch=threads is unknown: use processes or in_process"),
        ("device", "tpu", "device=tpu is unknown: use auto, cpu or cuda"),
        ("partition.name", "best", "partition.name=best is unknown: use uniform, parameters, time, memory, auto or ma"),
        (
            "partition.layers",
            [1, 1],
            r"partition.layers=\[1, 1\] is for partition=manual, not uniform: drop",
        ),
        (
            "partition.memory_limit",
            "2GiB",
            "partition.memory_limit=2GiB is for partition=auto, not uniform: drop",
        ),
        ("partition.search_seconds", -1.0, "partition.search_seconds=-1 is out of range: use 0 or more, such as 10"),
        ("partition.search_seconds", float("nan"), "partition.search_seconds=nan is out of range"),
        ("activation_checkpoint.name", "some", "activation_checkpoint.name=some is unknown: use never, except_last,"),
        ("activation_checkpoint.keep", "some", "activation_checkpoint.keep=some is unknown: use costly or null"),
        ("activation_checkpoint.every", 2, "activation_checkpoint.every=2 is for activation_checkpoint=selective or "),
        ("activation_checkpoint.keep_microbatches", 2, "is for activation_checkpoint=window, not never: drop one of"),
        ("activation_checkpoint.name", "window", "activation_checkpoint=window takes one limit and has none: use act"),
        ("optimizer.name", "lion", "optimizer.name=lion is unknown: use adamw or sgd"),
        ("optimizer.decay", "linear", "optimizer.decay=linear is unknown: use cosine or constant"),
        ("logger.name", "csv", "logger.name=csv is unknown: use wandb or none"),
        ("logger.mode", "loud", "logger.mode=loud is unknown: use auto, online, offline or disabled"),
        ("optimizer.learning_rate", 0.0, "optimizer.learning_rate=0 is not a positive number"),
        ("optimizer.learning_rate", float("inf"), "optimizer.learning_rate=inf is not a positive number"),
        ("optimizer.warmup_steps", -1, "optimizer.warmup_steps=-1 is negative"),
        ("optimizer.betas", [0.9], r"optimizer.betas=\[0.9\] must be two numbers in \[0, 1\)"),
        ("optimizer.betas", [0.9, 1.0], "must be two numbers"),
        ("optimizer.weight_decay", -0.1, "optimizer.weight_decay=-0.1 is out of range"),
        ("optimizer.momentum", float("nan"), "optimizer.momentum=nan is out of range"),
        ("optimizer.final_ratio", -1.0, "optimizer.final_ratio=-1 is out of range"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_line(path, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        changed(path, value).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("selective", 0), "activation_checkpoint.every=0 is too small: use 2 for every second layer, or more"),
        (
            ("always", None, "costly"),
            "activation_checkpoint.keep=costly is for activation_checkpoint=selective or wind",
        ),
        (("window", None, None, 3, "2GiB"), "activation_checkpoint=window takes one limit and has two: use"),
        (
            ("selective", None, None, None, "2GiB"),
            "activation_checkpoint.memory_limit=2GiB is for activation_checkpoin",
        ),
    ],
)
def test_checkpointing_that_can_not_be(chosen, message):
    with pytest.raises(ValueError, match=message):
        Settings(activation_checkpoint=ActivationCheckpointSettings(*chosen)).check()


@pytest.mark.parametrize("chosen", [("selective",), ("selective", 2, "costly"), ("window", 2, "costly", 3)])
def test_checkpointing_that_can_be(chosen):
    Settings(activation_checkpoint=ActivationCheckpointSettings(*chosen)).check()


@pytest.mark.parametrize(("path", "value"), [("gradient_clip", None), ("validate_every", 0), ("microbatches", 32)])
def test_the_edges_pass(path, value):
    changed(path, value).check()


def test_runs_share_no_settings():
    first, second = Settings(), Settings()
    first.optimizer.betas.append(1.0)
    first.partition.layers.append(1)
    assert second.optimizer.betas == [0.9, 0.95]
    assert second.partition.layers == []
    assert described(1, "one").metadata == {"help": "one"}


def test_compiled_layers_keep_no_outputs_of_operations_inside_them():
    chosen = ActivationCheckpointSettings("selective")
    with pytest.raises(
        ValueError, match=r"compile=true fuses the operations whose outputs activation_checkpoint.keep="
    ):
        Settings(compile=True, activation_checkpoint=chosen).check()
    Settings(compile=True, activation_checkpoint=ActivationCheckpointSettings("selective", 2)).check()


def test_what_batch_norm_over_replicas_cannot_go_with():
    Settings(batch_norm="sync", dp=2).check()
    Settings(batch_norm="sync", launch="in_process").check()
    with pytest.raises(ValueError, match=r"batch_norm=sync lets replicas wait for each other .* use launch=processes"):
        Settings(batch_norm="sync", launch="in_process", dp=2).check()
    with pytest.raises(ValueError, match=r"batch_norm=sync .* compile=true fuses: use one of them"):
        Settings(batch_norm="sync", compile=True).check()
