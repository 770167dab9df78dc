"""From settings to a prepared run: each kind of cut, of a model that is really profiled or whose profile is read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from torch import nn

from models.resnet import resnet
from pipeline.partition.problem import runs
from pipeline.schedule.memory import peak_activation_bytes
from pipeline.training.checkpointing import lowered
from pipeline.training.cutting import decide_cut
from pipeline.training.partitioning import problem_of
from pipeline.training.predicted_bytes import predict_footprint
from pipeline.training.profiling import measure_profile, predict_layer_bytes
from pipeline.training.schedule_choice import write_schedule
from pipeline.training.settings import ActivationCheckpointSettings, CostsSettings, PartitionSettings
from tests.engine.harness import CPU
from tests.engine.samples import chain, images, pixels, sentences, small_gpt, text, translator, unet, vectors
from tests.engine.test_executor import LINEAR
from tests.training.harness import settings_to_train
from tests.training.test_predicted_bytes import Scalar


def settings_with(name, schedule="1f1b", pp=2, **more):
    return settings_to_train(schedule, pp, 4, 4, 1, partition=PartitionSettings(name), **more)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("uniform", "interleaved_1f1b"),
        ("parameters", "1f1b"),
        ("memory", "zbv"),
        ("time", "interleaved_1f1b"),
        ("auto", "1f1b"),
        ("auto", "zbv"),
        ("auto", "zb_auto"),
    ],
)
def test_every_kind_of_cut(name, schedule):
    settings = settings_with(name, schedule)
    cut, costs = decide_cut(settings, small_gpt(), *text(4), CPU)
    assert sum(cut.counts) == 8
    assert min(cut.counts) >= 1
    assert len(cut.counts) == write_schedule(settings).stages
    assert cut.why.startswith(f"{name}: {'+'.join(map(str, cut.counts))} layers")
    assert (costs is None) == (name in ("uniform", "parameters", "memory"))


def test_a_profile_that_is_given_is_not_made_again(tmp_path, monkeypatch):
    settings = settings_with("auto", pp=3)
    model, batch = small_gpt(), text(4)
    measure_profile(settings, model, *batch, CPU).write(tmp_path / "profile.json")
    settings.profile = str(tmp_path / "profile.json")
    monkeypatch.setattr("pipeline.training.profiling.profile_layers", None)
    cuts = [decide_cut(settings, model, *batch, CPU) for _ in range(2)]
    assert cuts[0] == cuts[1]
    settings.partition = PartitionSettings("memory")
    _, costs = decide_cut(settings, model, *batch, CPU)
    assert costs is not None, "a searched schedule would reckon with them"


def test_memory_needs_no_clock(monkeypatch):
    """Rank 0 holds four microbatches of its layers and rank 3 one."""
    monkeypatch.setattr("pipeline.training.profiling.profile_layers", None)
    counts = decide_cut(settings_with("memory", pp=4), chain([LINEAR, *[nn.Tanh] * 23]), *vectors(4), CPU).cut.counts
    assert list(counts) == sorted(counts)
    assert 2 * counts[1] <= counts[-1]


@pytest.mark.parametrize(
    ("partition", "pp", "words"),
    [
        (PartitionSettings("auto"), 9, "9 stages need at least 9 layers, the model has 8"),
        (PartitionSettings("auto", memory_limit="much"), 2, "partition.memory_limit=much is not a size: use one such"),
        (PartitionSettings("parameters"), 9, "9 stages need at least 9 layers, the model has 8"),
    ],
)
def test_what_can_not_be_is_said_before_anything_is_timed(partition, pp, words, monkeypatch):
    monkeypatch.setattr("pipeline.training.profiling.profile_layers", None)
    settings = settings_with("time", pp=pp, costs=CostsSettings(source="profile"))
    settings.partition = partition
    with pytest.raises(ValueError, match=words):
        decide_cut(settings, small_gpt(), *text(4), CPU)


def test_what_runs_on_no_fake_tensors_is_cut_by_time_alone():
    model, batch = chain([LINEAR] * 4, loss=Scalar()), vectors(4)
    assert sum(decide_cut(settings_with("auto"), model, *batch, CPU).cut.counts) == 4
    with pytest.raises(ValueError, match="partition=memory: what the layers hold is not known"):
        decide_cut(settings_with("memory"), model, *batch, CPU)


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last", "every second", "costly"])
@pytest.mark.parametrize(
    ("build", "batch"),
    [(small_gpt, text), (partial(resnet, depth=18, classes=10), images), (unet, pixels), (translator, sentences)],
    ids=["gpt", "resnet", "unet", "translator"],
)
def test_what_the_search_reckons_a_rank_to_hold_is_what_its_stages_hold(build, batch, checkpoint):
    """To the byte where nothing is recomputed or all of it; else more, and never less.

    The translator's layers all hold the memory and the mask that they hand on, which a stage holds once.
    """
    settings = settings_with("memory", "interleaved_1f1b")
    settings.activation_checkpoint = {
        "every second": ActivationCheckpointSettings("selective", every=2),
        "costly": ActivationCheckpointSettings("selective"),
    }.get(checkpoint, ActivationCheckpointSettings(checkpoint))
    model, samples = build(), batch(4)
    schedule = write_schedule(settings)
    layers = predict_layer_bytes(settings, model, *samples, CPU)
    problem = problem_of(settings, [replace(layer, parameter_bytes=0) for layer in layers], schedule)
    counts = (2, len(layers) - 5, 2, 1)
    footprint = predict_footprint(settings, model, *samples, CPU, counts)
    exactly = zip(
        message_buffers(layers, counts, schedule),
        peak_activation_bytes(lowered(schedule, settings), footprint),
        strict=True,
    )
    parts = checkpoint in ("every second", "costly")
    room = 1.0 if build is translator or (parts and build is unet) else 0.1 if parts else 0.0
    for found, (buffers, held) in zip(problem.all_bytes(counts), exactly, strict=True):
        assert 0 <= found - buffers - held <= room * held


def message_buffers(layers, counts, schedule):
    """Two of each boundary to another rank, on both."""
    found = [0.0] * schedule.pp
    for stage, (_, end) in enumerate(list(runs(counts))[:-1]):
        pair = schedule.stage_to_rank[stage : stage + 2]
        for rank in set(pair) if len(set(pair)) == 2 else ():
            found[rank] += 2 * layers[end - 1].boundary_bytes
    return found
