"""A compiled layer's backward, a graph of operators, cut in two: what I computes, and what is left for W.

    backward(saved, tangents) -> gradients of inputs and of weights
    I(saved, tangents)        -> gradients of inputs, and the values that W takes over
    W(saved, tangents, taken) -> gradients of weights

Every operator is in one part; but views, and elementwise operators on saved tensors alone, are repeated in W: cheaper
than keeping their results.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload


@dataclass(frozen=True)
class Cut:
    """Both parts of a backward graph and how their values connect."""

    for_input: fx.GraphModule
    """Takes the backward's inputs number `used`; gives the gradients of inputs, then what W takes over."""
    for_weight: fx.GraphModule
    """Takes the backward's inputs number `kept`, then what I handed over; gives the weights' gradients."""
    used: tuple[int, ...]
    kept: tuple[int, ...]
    outputs: int
    """How many the backward has."""
    inputs: tuple[int, ...]
    """Which of them `for_input` gives."""
    weights: tuple[int, ...]
    """Which of them `for_weight` gives."""


def cut_backward(backward: fx.GraphModule, of_weight: Sequence[bool]) -> Cut | None:
    """Cut a functional backward graph in two; None where it can't be or needn't.

    It can't if an operator has effects or draws random numbers, it needn't without gradients of weights.

    Args:
        backward: its outputs are gradients, one an input of the forward.
        of_weight: which of the outputs W shall give.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    outputs = cast("Sequence[fx.Node | None]", backward.graph.output_node().args[0])
    if not _is_functional(backward.graph) or len(outputs) != len(of_weight):
        return None
    inputs, weights = (
        {number: node for number, node in enumerate(outputs) if node is not None and of_weight[number] == wanted}
        for wanted in (False, True)
    )
    if not weights:
        return None
    part = _ForWeight(backward.graph, _needed_for(inputs.values()))
    gradients = part.outputs(list(weights.values()))
    first, used = _copied(placeholders, backward, [*inputs.values(), *part.taken])
    second = _finished(backward, part.graph, gradients)
    kept = tuple(placeholders.index(node) for node in part.kept)
    return Cut(first, second, used, kept, len(outputs), tuple(inputs), tuple(weights))


def _needed_for(results: Iterable[fx.Node]) -> set[fx.Node]:
    """The operators that `results` come from, with all the items that an operator among them gives."""
    found: set[fx.Node] = set()
    pending = [node for node in results if node.op != "placeholder"]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [other for other in node.all_input_nodes if other.op != "placeholder"]
            pending += [user for user in node.users if user.target is operator.getitem]
    return found


class _ForWeight:
    """W's graph as it grows: an operator is copied, repeated, or its value is taken over from I."""

    def __init__(self, whole: fx.Graph, for_input: set[fx.Node]) -> None:
        self.graph = fx.Graph()
        self._whole = whole
        self.kept: list[fx.Node] = []
        self.taken: list[fx.Node] = []
        self._for_input = for_input
        self._free: dict[fx.Node, bool] = dict.fromkeys(whole.find_nodes(op="placeholder"), True)
        self._copies: dict[fx.Node, fx.Node] = {}

    def outputs(self, gradients: Sequence[fx.Node]) -> list[fx.Node]:
        """The gradients' copies, each with memory of its own: it becomes a parameter's `.grad`."""
        order = self._order(gradients)
        for node in (node for node in order if node.op == "placeholder"):
            self._take(node, self.kept)
        for node in (node for node in order if node.op != "placeholder" and self._is_taken(node)):
            self._take(node, self.taken)
        for node in order:
            if node not in self._copies:
                self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        owned: set[fx.Node] = set()
        results = []
        for node in gradients:
            source = _source(self._copies[node])
            results.append(self._copies[node])
            if source.op == "placeholder" or source in owned:
                results[-1] = self._cloned(node)
            owned.add(source)
        return results

    def _order(self, gradients: Sequence[fx.Node]) -> list[fx.Node]:
        """All that W computes or is given, in the backward's order."""
        found: set[fx.Node] = set()
        pending = list(gradients)
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += [] if self._is_taken(node) else node.all_input_nodes
        return [node for node in self._whole.nodes if node in found]

    def _is_taken(self, node: fx.Node) -> bool:
        return node in self._for_input and not _is_view(node) and not self._is_free(node)

    def _is_free(self, node: fx.Node) -> bool:
        """Whether a value follows from saved tensors and constants by views and elementwise operators."""
        if node not in self._free:
            cheap = node.op == "get_attr" or _is_view(node) or _is_elementwise(node)
            self._free[node] = cheap and all(self._is_free(other) for other in node.all_input_nodes)
        return self._free[node]

    def _take(self, node: fx.Node, given: list[fx.Node]) -> None:
        given.append(node)
        self._copies[node] = self.graph.placeholder(node.name)
        self._copies[node].meta = dict(node.meta)

    def _cloned(self, node: fx.Node) -> fx.Node:
        clone = self.graph.call_function(torch.ops.aten.clone.default, (self._copies[node],))
        clone.meta["val"] = node.meta["val"].clone()
        return clone


def _copied(
    placeholders: Sequence[fx.Node], backward: fx.GraphModule, results: Sequence[fx.Node]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The part of the graph that `results` come from, and the numbers of the inputs it takes."""
    needed, graph, copies = _needed_for(results), fx.Graph(), dict[fx.Node, fx.Node]()
    taken = {other for node in needed for other in node.all_input_nodes} | set(results)
    used = tuple(number for number, node in enumerate(placeholders) if node in taken)
    for node in backward.graph.nodes:
        if node in needed or (node.op == "placeholder" and node in taken):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return _finished(backward, graph, [copies[node] for node in results]), used


def _finished(backward: fx.GraphModule, graph: fx.Graph, results: Sequence[fx.Node]) -> fx.GraphModule:
    output = graph.output(tuple(results))
    # inductor may otherwise give a result another layout than the one that its taker is compiled for
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    return fx.GraphModule(backward, graph)


def _is_functional(graph: fx.Graph) -> bool:
    for node in graph.nodes:
        if node.op == "placeholder":
            if not isinstance(node.meta.get("val"), torch.Tensor):
                return False
        elif node.op == "call_function":
            known = isinstance(node.target, OpOverload) or node.target is operator.getitem
            if not known or node.is_impure() or torch.Tag.nondeterministic_seeded in _tags(node):
                return False
        elif node.op not in ("get_attr", "output"):
            return False
    return True


def _tags(node: fx.Node) -> Sequence[torch.Tag]:
    return node.target.tags if isinstance(node.target, OpOverload) else ()


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in _tags(node)


def _source(node: fx.Node) -> fx.Node:
    """The value whose memory a view shows."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node
