from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.engine.backward_graph import Cut, cut_backward


def traced(function, *inputs) -> fx.GraphModule:
    return make_fx(lambda *given: tuple(function(*given)), tracing_mode="fake")(*inputs)


def linear_then_tanh(inputs, weight, gradient):
    """The backward of tanh(inputs @ weight.t()) for (inputs, weight), which recomputes the product."""
    before = gradient * (1 - torch.tanh(inputs @ weight.t()) ** 2)
    return before @ weight, before.t() @ inputs, before.sum(0)


def run(cut: Cut, inputs) -> list[torch.Tensor | None]:
    """Both parts, the second after the first is gone."""
    found = list(cut.for_input(*(inputs[number] for number in cut.used)))
    results: list[torch.Tensor | None] = [None] * cut.outputs
    for number in cut.inputs:
        results[number] = found.pop(0)
    of_weights = cut.for_weight(*(inputs[number] for number in cut.kept), *found)
    for number, gradient in zip(cut.weights, of_weights, strict=True):
        results[number] = gradient
    return results


def operators(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.fixture
def numbers():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in ((5, 3), (4, 3), (5, 4))]


def test_both_parts_give_what_the_whole_gives(numbers):
    graph = traced(linear_then_tanh, *numbers)
    cut = cut_backward(graph, [False, True, True])
    assert (cut.inputs, cut.weights) == ((0,), (1, 2))
    for found, expected in zip(run(cut, numbers), graph(*numbers), strict=True):
        assert torch.equal(found, expected)


def test_no_product_is_computed_twice(numbers):
    graph = traced(linear_then_tanh, *numbers)
    cut = cut_backward(graph, [False, True, True])
    products = [operators(part).count("aten.mm.default") for part in (graph, cut.for_input, cut.for_weight)]
    assert products == [3, 2, 1]
    assert len(cut.for_input.graph.output_node().args[0]) == 2, "W takes over one value: the product's gradient"
    assert cut.kept == (0,), "of what was saved W needs the product's input"


def test_elementwise_operators_on_saved_tensors_are_repeated_rather_than_kept(numbers):
    def scaled(saved, scale, gradient):
        normal = (saved - 1) * scale.sum()
        return gradient * normal, (gradient * 2).sum() + normal.sum()

    graph = traced(scaled, numbers[0], numbers[1], numbers[0])
    cut = cut_backward(graph, [False, True])
    taken = len(cut.for_input.graph.output_node().args[0]) - 1
    assert taken == 1, "the sum, a number; not what follows from it and saved tensors element by element"
    given = [numbers[0], numbers[1], numbers[0]]
    for found, expected in zip(run(cut, given), graph(*given), strict=True):
        assert torch.equal(found, expected)


def test_without_an_input_that_needs_a_gradient_everything_is_left_to_w(numbers):
    graph = traced(lambda *given: linear_then_tanh(*given)[1:], *numbers)
    graph.graph.eliminate_dead_code()
    cut = cut_backward(graph, [True, True])
    assert cut.used == ()
    assert operators(cut.for_input) == []
    assert operators(cut.for_weight) == operators(graph)


def test_a_gradient_has_memory_of_its_own(numbers):
    """It becomes a parameter's .grad, which is added to in place."""
    graph = traced(
        lambda saved, gradient: (gradient, gradient, gradient.t(), gradient.view(-1)), numbers[0], numbers[0]
    )
    cut = cut_backward(graph, [False, True, True, True])
    _, *gradients = run(cut, [numbers[1], numbers[0]])
    addresses = {tensor.untyped_storage().data_ptr() for tensor in (numbers[0], *gradients)}
    assert len(addresses) == 4
    assert torch.equal(gradients[1], numbers[0].t())


@pytest.mark.parametrize(
    "function",
    [
        lambda saved, gradient: (gradient * torch.rand_like(saved), (gradient * saved).sum(0)),
        lambda saved, gradient: (saved.add_(gradient), gradient.sum(0)),
    ],
    ids=["draws", "writes"],
)
def test_what_cant_be_cut(function, numbers):
    assert cut_backward(traced(function, numbers[0], numbers[0]), [False, True]) is None


def test_a_graph_with_other_outputs_than_known_is_not_cut(numbers):
    assert cut_backward(traced(linear_then_tanh, *numbers), [False, True]) is None


def test_all_items_of_an_operator_stay_together(numbers):
    """An operator that gives several results runs once, in I; W takes the ones that it needs."""

    def several(saved, gradient):
        values, indices = torch.ops.aten.max.dim(gradient * saved, 1)
        return values * 2, indices + 1

    graph = traced(several, numbers[0], numbers[0])
    cut = cut_backward(graph, [False, True])
    assert "aten.max.dim" not in operators(cut.for_weight)
    for found, expected in zip(run(cut, [numbers[0]] * 2), graph(numbers[0], numbers[0]), strict=True):
        assert torch.equal(found, expected)
