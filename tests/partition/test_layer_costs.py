from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.partition.layer_costs import LayerCosts

HEAD = LayerCosts("head", 0.25, 0.125, 1e-9, 4096, 512, 10**12, tied=("embedding",))


def test_costs_survive_json():
    assert LayerCosts.from_json(json.loads(json.dumps(HEAD.to_json()))) == HEAD
    assert replace(HEAD, tied=()) == LayerCosts.from_json({k: v for k, v in HEAD.to_json().items() if k != "tied"})


def test_seconds_are_forward_and_both_halves_of_the_backward():
    assert HEAD.seconds == 0.25 + 0.125 + 1e-9


@pytest.mark.parametrize("number", [-1e-9, float("nan"), float("inf"), "1", None, True])
@pytest.mark.parametrize("field", ["forward", "activation_bytes", "parameter_bytes"])
def test_costs_refuse_what_no_layer_takes(field, number):
    with pytest.raises(ValueError, match=f"{field} of layer head is .*: use a finite number of 0 or more"):
        LayerCosts.from_json(HEAD.to_json() | {field: number})


def test_json_refuses_other_fields():
    written = HEAD.to_json()
    del written["forward"]
    with pytest.raises(ValueError, match=r"lack \['forward'\] and have \['fwd'\] unknown: use name, forward"):
        LayerCosts.from_json(written | {"fwd": 1.0})


@pytest.mark.parametrize(("change", "words"), [({"name": 3}, "name is 3: use text"), ({"tied": "x"}, "tied of layer")])
def test_json_refuses_names_that_are_not_text(change, words):
    with pytest.raises(ValueError, match=words):
        LayerCosts.from_json(HEAD.to_json() | change)
