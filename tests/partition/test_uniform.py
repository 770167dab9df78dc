from __future__ import annotations

import pytest

from pipeline.partition import uniform


@pytest.mark.parametrize("layers", range(1, 14))
@pytest.mark.parametrize("stages", range(1, 14))
def test_uniform_gives_every_layer_to_one_stage(layers, stages):
    if stages > layers:
        with pytest.raises(ValueError, match=f"{stages} stages need at least {stages} layers, the model has {layers}"):
            uniform(layers, stages)
        return
    counts = uniform(layers, stages)
    assert len(counts) == stages
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1
    assert list(counts) == sorted(counts, reverse=True)
