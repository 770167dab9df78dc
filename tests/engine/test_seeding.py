from __future__ import annotations

import itertools

import torch

from pipeline.engine.seeding import generator, mixed_seed, name_seed, seed_layer


def test_a_name_gives_the_same_number_everywhere():
    # a value that changes here changes every run's starting weights
    assert name_seed(0, "block.0") == 6914281688031145209
    assert name_seed(1, "block.0") != name_seed(0, "block.0")
    assert name_seed(1, "1/x") != name_seed(1, "x")


def test_a_generator_is_private_and_repeats():
    before = torch.get_rng_state()
    first, second = (torch.rand(3, generator=generator(5, "w")) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_layer_step_and_microbatch_draws_its_own_numbers():
    layers = [name_seed(0, f"block.{index}") for index in range(8)]
    seeds = {mixed_seed(*case) for case in itertools.product(layers, range(40), range(40))}
    assert len(seeds) == 8 * 40 * 40
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_step_and_microbatch_do_not_swap():
    assert mixed_seed(1, 2, 3) != mixed_seed(1, 3, 2)


def test_seeding_a_layer_repeats_its_dropout():
    def mask():
        seed_layer(42, torch.device("cpu"))
        return torch.nn.functional.dropout(torch.ones(100))

    assert torch.equal(mask(), mask())
