"""What the simulator is told of a profile: sums over a stage's layers."""

from __future__ import annotations

import pytest

from pipeline.engine.profile import LayerProfile
from pipeline.engine.segments import Recomputed
from pipeline.training.measured_costs import to_costs
from pipeline.training.settings import CostsSettings, Settings

SETTINGS = Settings(costs=CostsSettings(transfer=0.5, bandwidth=1e9))
LAYERS = [LayerProfile(str(n), 1.0 * n, 2.0 * n, 3.0 * n, 4.0 * n, 0.5 * n, 10 * n) for n in (1, 2, 3, 4, 5)]


def test_a_stage_takes_what_its_layers_take():
    costs = to_costs(LAYERS, (3, 2), Recomputed(), SETTINGS)
    assert (costs.forward, costs.backward) == ((6.0, 9.0), (12.0, 18.0))
    assert (costs.backward_input, costs.backward_weight) == ((18.0, 27.0), (24.0, 36.0))
    assert costs.recompute == (3.0, 4.5)
    assert costs.boundary_bytes == (30.0, 50.0)
    assert (costs.transfer, costs.bandwidth) == (0.5, 1e9)


@pytest.mark.parametrize(("counts", "recompute"), [((3, 2), (2.0, 2.0)), ((5,), (4.5,)), ((1, 4), (0.5, 3.0))])
def test_a_recomputation_takes_what_its_layers_take(counts, recompute):
    """Of each stage its first layer and every second one after it."""
    assert to_costs(LAYERS, counts, Recomputed(2), SETTINGS).recompute == recompute
