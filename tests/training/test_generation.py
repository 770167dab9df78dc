"""`task=generate`: the text depends on weights, prompt and seed alone, not on the pipeline."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from models.gpt import gpt
from models.resnet import resnet
from pipeline.training.generation import choose
from pipeline.training.preparation import prepare_generation
from pipeline.training.saving import Saving
from tests.training.harness import FP64, settings_to_train, train
from tests.training.held_out import picture_builders, result_of, text_builders, texts

GPT = partial(gpt, layers=4, width=16, heads=2, context=8, vocabulary=32, dropout=0.1)
PROMPT = "(3, 4)"


def prepared(schedule, pp, builders=None, **more):
    options = {"prompt": PROMPT, "max_new_tokens": 12, "launch": "in_process", "device": "cpu", "seed": 5, **more}
    settings = settings_to_train(schedule, pp, 4, 8, 4, precision=FP64, task="generate", **options)
    return prepare_generation(settings, builders or text_builders(GPT, 8, 8))


def generated(tmp_path, schedule="1f1b", pp=2, **more):
    job, codec = prepared(schedule, pp, **more)
    return codec.decode(result_of(job, tmp_path).tokens)


def test_the_text_is_the_same_through_any_pipeline(tmp_path):
    run = tmp_path / "run"
    settings = settings_to_train("1f1b", 2, 2, 8, 3, precision=FP64)
    train(settings, GPT(), texts(8, 8), saved=Saving(run / "checkpoints", 3, 1))
    found = {
        generated(tmp_path, schedule, pp, resume=str(run))
        for schedule, pp in (("1f1b", 1), ("1f1b", 3), ("interleaved_1f1b", 2), ("dualpipe_v", 2))
    }
    assert len(found) == 1
    assert len(found.pop()) == 12
    assert generated(tmp_path, resume=str(run), launch="processes") == generated(tmp_path, resume=str(run))


def test_the_likeliest_tokens_are_those_of_the_whole_model_on_the_window(tmp_path):
    """Computed anew without anything to fill a window: it grows to the context's 8 tokens, and then moves."""
    run = tmp_path / "run"
    settings = settings_to_train("1f1b", 2, 2, 8, 3, precision=FP64)
    done = train(settings, GPT(), texts(8, 8), saved=Saving(run / "checkpoints", 3, 1))
    modules = [module.eval() for rank in done.ranks for stage in rank.stages.values() for module in stage.modules]
    model, tokens = torch.nn.Sequential(*modules), texts(8, 8).codec.encode(PROMPT)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens[-8:]]))[0, -1].argmax()))
    expected = texts(8, 8).codec.decode(tokens[len(PROMPT) :])
    assert generated(tmp_path, temperature=0.0, resume=str(run)) == expected
    assert generated(tmp_path, top_k=1, resume=str(run)) == expected


def test_another_seed_is_another_text_and_fresh_weights_do(tmp_path):
    found = [generated(tmp_path, seed=seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


# Choosing


def test_tokens_are_drawn_as_often_as_they_are_likely():
    shares = torch.tensor([0.5, 0.2, 0.3, 0.0])
    drawn = torch.tensor([choose(shares.log(), 1.0, None, 0, number) for number in range(4000)])
    found = torch.bincount(drawn, minlength=4) / 4000
    assert torch.allclose(found, shares, atol=0.03)
    assert found[3] == 0


def test_temperature_and_top_k():
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0], dtype=torch.bfloat16)
    assert {choose(logits, 0.0, None, seed, 0) for seed in range(20)} == {1}
    assert {choose(logits, 1.0, 2, seed, 0) for seed in range(60)} == {1, 2}
    assert {choose(logits, 1e-3, None, seed, 0) for seed in range(60)} == {1}
    assert {choose(logits, 100.0, 9, seed, 0) for seed in range(60)} == {0, 1, 2, 3}


# What can't be


def test_images_are_no_text():
    with pytest.raises(
        ValueError, match="goes on with a text, and this data is images: use model=gpt data=python_text"
    ):
        prepared("1f1b", 2, picture_builders(partial(resnet, depth=18, classes=10), 8, 8))


def test_tokens_that_stand_for_nothing():
    data = replace(texts(8, 8), codec=None)
    with pytest.raises(
        ValueError, match="this data is tokens of an unknown vocabulary: use model=gpt data=python_text"
    ):
        prepared("1f1b", 2, (GPT, lambda: data))


def test_an_empty_prompt():
    with pytest.raises(ValueError, match='prompt is empty: give what the text begins with, such as prompt="def "'):
        prepared("1f1b", 2, prompt="")


def test_several_replicas():
    with pytest.raises(ValueError, match="task=generate takes one pipeline, and dp=2 makes several: use dp=1"):
        prepared("1f1b", 2, dp=2)
