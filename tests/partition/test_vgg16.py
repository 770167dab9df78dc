"""PipeDream's profile of VGG16 on its own objective: the slower of a stage's computing and a cut's messages.

Source: github.com/msr-fiddle/pipedream at 11c40c0, profiler/image_classification/profiles/vgg16/graph.txt, nodes 2 to
41 in order (the input node left out, as its optimizer does). A line: milliseconds forward and backward, and the bytes
of the output. After node 32 (a pooling) the profile has a size and a view of it; a cut between them carries both.
"""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest

from pipeline.partition import bottleneck

PROFILE = """
22.307 24.613 1644167168  4.446 5.553 1644167168
46.201 113.330 1644167168  4.455 5.311 1644167168  3.795 5.579 411041792
15.155 39.648 822083584  2.359 2.738 822083584  22.062 53.379 822083584  2.513 2.620 822083584  2.211 2.788 205520896
10.814 18.335 411041792  1.377 1.380 411041792  17.458 27.023 411041792  1.640 1.463 411041792  14.245 33.888 411041792
1.549 1.321 411041792  1.169 1.513 102760448  9.249 14.574 205520896  1.026 0.696 205520896  15.359 21.900 205520896
0.848 0.679 205520896  11.775 28.670 205520896  0.881 0.642 205520896  0.802 0.781 51380224  5.608 7.381 51380224
0.784 0.266 51380224  4.070 7.396 51380224  0.463 0.190 51380224  4.042 8.648 51380224  0.455 0.175 51380224
0.553 0.234 12845056  0 0 12845060  0 0 12845056  2.475 4.575 2097152  0.377 0.030 2097152
0 0 2097152  0.709 0.734 2097152  0.277 0.032 2097152  0 0 2097152  0.393 0.548 512000
"""
NUMBERS = [float(word) for word in PROFILE.split()]
SECONDS = [(forward + backward) / 1e3 for forward, backward in zip(NUMBERS[::3], NUMBERS[1::3], strict=True)]
TRANSFERS = [2 * size / 1e9 for size in NUMBERS[2::3]]
"""Activation and gradient over 1 GB/s."""


def period(splits):
    edges = (0, *splits, len(SECONDS))
    return max(*(sum(SECONDS[i:j]) for i, j in pairwise(edges)), *(TRANSFERS[i - 1] for i in splits))


def test_the_profile_is_the_published_one():
    assert len(SECONDS) == 40
    assert sum(NUMBERS[::3]) == pytest.approx(251.9 - 17.972, abs=0.05)
    assert sum(NUMBERS[1::3]) == pytest.approx(438.6, abs=0.05)


def test_pipedreams_straight_pipeline_is_bound_by_its_messages():
    splits = tuple(accumulate(bottleneck(SECONDS, 4, TRANSFERS)))[:-1]
    assert period(splits) == pytest.approx(0.41104, abs=5e-6)
    # PipeDream's program prints 10, 31, 35. Every best cut is bound by the same messages.
    assert period((10, 31, 35)) == period(splits) == TRANSFERS[9]
    assert min(map(period, combinations(range(1, 40), 3))) == period(splits)


def test_without_a_slow_network_the_same_layers_are_cut_elsewhere():
    splits = tuple(accumulate(bottleneck(SECONDS, 4)))[:-1]
    assert max(sum(SECONDS[i:j]) for i, j in pairwise((0, *splits, 40))) < 0.22
    assert period(splits) > 0.41104
