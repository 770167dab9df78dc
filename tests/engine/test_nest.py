from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import NamedTuple

import torch

from pipeline.engine.nest import flat, mapped, rebuilt


class Point(NamedTuple):
    x: object
    y: object


NEST = {"pair": (1, [2, None]), "point": Point(3, {"z": 4}), "empty": ()}


def test_leaves_come_in_order_and_go_back():
    assert flat(NEST) == (1, 2, 3, 4)
    assert rebuilt(NEST, "abcd") == {"pair": ("a", ["b", None]), "point": Point("c", {"z": "d"}), "empty": ()}
    assert type(rebuilt(NEST, "abcd")["point"]) is Point


def test_containers_keep_their_kind():
    ordered = OrderedDict(b=1, a=[2])
    doubled = mapped(lambda leaf: 2 * leaf, ordered)
    assert type(doubled) is OrderedDict
    assert list(doubled.items()) == [("b", 2), ("a", [4])]


def test_a_tensor_alone_is_a_leaf():
    tensor = torch.zeros(2)
    assert flat(tensor) == (tensor,)
    assert rebuilt(tensor, [3]) == 3
    assert flat(None) == ()
    assert pickle.loads(pickle.dumps(NEST)) == NEST
