"""Which samples a step takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.dataset import require_positive
from data.order import Order
from data.randomness import generator


@given(samples=st.integers(1, 40), batch_size=st.integers(1, 60), seed=st.integers(0, 3))
def test_each_epoch_takes_every_sample_once(samples: int, batch_size: int, seed: int) -> None:
    order = Order(samples, batch_size, seed)
    row = np.concatenate([order.indices(step) for step in range(-(-3 * samples // batch_size))])
    for epoch in range(3):
        assert sorted(row[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_epochs_and_seeds_have_different_orders() -> None:
    order = Order(50, 50, 0)
    assert list(order.indices(0)) != list(order.indices(1))
    assert list(order.indices(0)) != list(Order(50, 50, 1).indices(0))
    assert list(order.epochs(1)) == [1] * 50


def test_fixed_order_repeats_and_is_shuffled() -> None:
    order = Order.fixed(50, 25)
    first = [order.indices(0), order.indices(1)]
    assert [list(each) for each in first] == [list(order.indices(2)), list(order.indices(3))]
    assert sorted(np.concatenate(first)) == list(range(50))
    assert list(first[0]) != sorted(first[0])


def test_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="steps count up from 0, got -1"):
        Order(5, 2, 0).indices(-1)


def test_generator_depends_on_seed_and_words_alone() -> None:
    # Written out, so that another machine or version that draws otherwise shows.
    assert generator(0, "epoch", 1).integers(1000, size=4).tolist() == [142, 164, 43, 276]
    draws = {int(generator(*words).integers(2**62)) for words in [(0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1)]}
    assert len(draws) == 4


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive context, got 0: use context=1 or more"):
        require_positive(batch_size=1, context=0)
