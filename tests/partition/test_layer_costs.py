from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.partition.layer_costs import LayerCosts

HEAD = LayerCosts("head", 0.25, 0.125, 1e-9, 4096, 512, 10**12, tied=("embedding",))


def test_costs_survive_json():
    assert LayerCosts.from_json(json.loads(json.dumps(HEAD.to_json()))) == HEAD
    whole = replace(HEAD, backward=0.5, recompute=0.2, checkpoint_bytes=512, kept_output_bytes=0, activation_bytes=None)
    assert LayerCosts.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_seconds_are_forward_and_both_halves_of_the_backward():
    assert HEAD.seconds == 0.25 + HEAD.full_backward == 0.25 + (0.125 + 1e-9)
    assert HEAD.again == 0.25


def test_a_full_backward_and_a_recomputation_may_take_their_own_time():
    whole = replace(HEAD, backward=0.5, recompute=0.2)
    assert (whole.seconds, whole.full_backward, whole.again) == (0.75, 0.5, 0.2)
    assert HEAD.handed_on == HEAD.boundary_bytes == 512
    assert replace(HEAD, output_bytes=1024).handed_on == 1024


@pytest.mark.parametrize("number", [-1e-9, float("nan"), float("inf"), "1", None, True])
@pytest.mark.parametrize("field", ["forward", "boundary_bytes", "parameter_bytes"])
def test_costs_refuse_what_no_layer_takes(field, number):
    with pytest.raises(ValueError, match=f"{field} of layer head is .*: use a finite number of 0 or more"):
        LayerCosts.from_json(HEAD.to_json() | {field: number})


@pytest.mark.parametrize("number", [-1, float("nan"), "1", True])
@pytest.mark.parametrize("field", ["activation_bytes", "backward", "recompute", "kept_output_bytes"])
def test_what_need_not_be_known_is_no_other_thing_either(field, number):
    with pytest.raises(ValueError, match=f"{field} of layer head is .*: use a finite number of 0 or more"):
        replace(HEAD, **{field: number})


def test_json_refuses_other_fields():
    written = HEAD.to_json()
    del written["forward"]
    with pytest.raises(ValueError, match=r"lack \['forward'\] and have \['fwd'\] unknown: use name, forward"):
        LayerCosts.from_json(written | {"fwd": 1.0})


@pytest.mark.parametrize(("change", "words"), [({"name": 3}, "name is 3: use text"), ({"tied": "x"}, "tied of layer")])
def test_json_refuses_names_that_are_not_text(change, words):
    with pytest.raises(ValueError, match=words):
        LayerCosts.from_json(HEAD.to_json() | change)
