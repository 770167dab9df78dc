from __future__ import annotations

import pytest

from pipeline.engine.segments import Recomputed, Segment, whole


def cut(layers: int, every: int, keeps_costly: bool = False) -> list[str]:
    """Layers of each segment, in words: R recomputed, K kept, C recomputed around costly outputs."""
    words = {(False, False): "K", (True, False): "R", (True, True): "C"}
    return [
        f"{words[segment.recomputed, segment.keeps_costly]}{segment.layers.start}-{segment.layers.stop - 1}"
        for segment in Recomputed(every, keeps_costly).segments(layers)
    ]


def test_without_a_part_everything_is_recomputed_in_one_piece():
    assert cut(5, 1) == ["R0-4"]
    assert whole(5) == (Segment(slice(0, 5), False),)


def test_every_second_layer_leaves_the_others():
    assert cut(5, 2) == ["R0-0", "K1-1", "R2-2", "K3-3", "R4-4"]
    assert cut(6, 3) == ["R0-0", "K1-2", "R3-3", "K4-5"]
    assert cut(2, 8) == ["R0-0", "K1-1"]


def test_a_stage_of_one_layer_is_recomputed():
    assert cut(1, 4) == ["R0-0"]


def test_costly_outputs_are_kept_of_recomputed_layers_alone():
    assert cut(5, 1, True) == ["C0-4"]
    assert cut(5, 3, True) == ["C0-0", "K1-2", "C3-3", "K4-4"]


def test_fewer_than_every_layer_is_refused():
    with pytest.raises(ValueError, match="every is 0: use 1"):
        Recomputed(0)
