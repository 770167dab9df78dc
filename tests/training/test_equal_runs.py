"""Twenty steps of a GPT with dropout, optimizer and clipping on: the same run whatever the pipeline."""

from __future__ import annotations

import functools

import pytest
import torch

from pipeline.training.settings import OptimizerSettings
from tests.engine.samples import small_gpt
from tests.training.harness import FP32, FP64, Run, prepare, relative_error, settings_to_train, text_data, train

TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12}
# six samples in four microbatches: 2, 2, 1 and 1
SHAPE = {"microbatches": 4, "batch_size": 6, "steps": 20}


@functools.cache
def run_of(schedule: str, pp: int, precision: str, checkpoint: str = "never", optimizer: str = "adamw") -> Run:
    chosen = OptimizerSettings(optimizer, learning_rate=3e-3, warmup_steps=3, weight_decay=0.1)
    settings = settings_to_train(
        schedule,
        pp,
        **SHAPE,
        checkpoint=checkpoint,
        precision={"fp32": FP32, "fp64": FP64}[precision],
        optimizer=chosen,
        seed=3,
    )
    return train(settings, small_gpt(dropout=0.1), text_data(6))


def assert_same_run(found: Run, expected: Run, tolerance: float) -> None:
    assert len(found.losses) == 20
    assert found.losses[0] == expected.losses[0], "the first step is equal bit for bit"
    assert relative_error(found.losses, expected.losses) <= tolerance
    norms = [[message.gradient_norm for message in run.messages[:20]] for run in (found, expected)]
    assert relative_error(*norms) <= 100 * tolerance


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_the_pipeline_does_not_change_the_run(schedule, pp, precision):
    assert_same_run(run_of(schedule, pp, precision), run_of("1f1b", 1, precision), TOLERANCE[precision])


@pytest.mark.parametrize(
    ("schedule", "pp", "checkpoint"), [("1f1b", 3, "always"), ("gpipe", 2, "except_last"), ("1f1b", 2, "selective")]
)
def test_checkpointing_does_not_change_the_run(schedule, pp, checkpoint):
    assert run_of(schedule, pp, "fp32", checkpoint).losses == run_of(schedule, pp, "fp32").losses


def test_sgd_too():
    assert_same_run(run_of("1f1b", 3, "fp64", optimizer="sgd"), run_of("1f1b", 1, "fp64", optimizer="sgd"), 1e-12)


def test_the_run_is_one_in_which_all_of_this_matters():
    run = run_of("1f1b", 1, "fp32")
    norms = [message.gradient_norm for message in run.messages[:20]]
    assert min(norms) > run.trainer.settings.gradient_clip, "every step is clipped"
    plain = prepare(settings_to_train("1f1b", 1, **SHAPE, seed=3), small_gpt(), text_data(6))
    before, after = plain.state(), run.state()
    assert all((after[name] - before[name]).abs().max() > 1e-3 for name in after), "the optimizer moves every weight"
    plain.trainer.train()
    assert plain.losses[0] != run.losses[0], "dropout is on"


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_tied_copies_stay_equal_bit_for_bit(schedule, pp):
    """Weight decay, clipping and twenty steps later."""
    run = run_of(schedule, pp, "fp32")
    state = run.state()
    copies = [state[name] for name in ("embedding.tokens.weight", "head.projection.weight")]
    assert {rank.rank for rank in run.ranks if "head.projection.weight" in rank.parameters} == {pp - 1}
    assert torch.equal(*copies)


def test_weights_end_up_the_same():
    expected = run_of("1f1b", 1, "fp64").state()
    for schedule, pp in (("gpipe", 4), ("interleaved_1f1b", 2)):
        found = run_of(schedule, pp, "fp64").state()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            # Adam divides by the square root of a gradient's square: where that is rounding noise, so is the step
            assert (found[name] - tensor).abs().max() < 1e-9, name


def test_a_second_run_of_the_same_is_equal_bit_for_bit():
    again = run_of.__wrapped__("1f1b", 2, "fp32")
    assert again.losses == run_of("1f1b", 2, "fp32").losses
