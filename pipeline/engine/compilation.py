"""Layers fused by torch.compile: one piece of code for all layers of a kind, split backwards included.

A layer is compiled at a time, never a whole stage. Between two layers stands the seeding of what they draw, which no
graph may contain; and a layer's numbers don't depend on the cut, so runs stay the same whatever the pipeline. What is
drawn is what an uncompiled layer draws, for inductor is told to call the same generators.

AOTAutograd hands over each layer's backward as a graph of operators, which is cut in two for schedules that split it:
I computes the gradients of inputs and leaves to W what the weights' take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from pipeline.engine.backward_graph import Cut, cut_backward
from pipeline.engine.weight_gradient import Deferral, gradient_dtype

Backend = Literal["inductor", "aot_eager"]
Compiled = Callable[[list[Any]], Sequence[Any]]
"""What a graph becomes. It may empty the list that it is called with."""
CompileGraph = Callable[..., Compiled]
"""Of a graph, its inputs, and options of inductor's."""

COMPILATIONS = 64
"""Most versions of one kind of layer: an input's shape, training or not, with and without gradients."""


class CompilationError(RuntimeError):
    """A layer can't be compiled as it is."""


class Compiler:
    """Compiles the layers of all stages in this process. Layers of one kind share their code.

    Args:
        backend: "inductor" makes code; "aot_eager" takes every step but the last, for tests.
    """

    def __init__(self, backend: Backend = "inductor") -> None:
        import torch._dynamo.config  # takes seconds: only for those who compile

        self._backend = backend
        self._splits = False
        self._deferral = Deferral()
        self._runners: dict[tuple[type, str], Callable[..., Tensor]] = {}
        # torch would silently run a layer uncompiled when it has made too many versions of it
        torch._dynamo.config.recompile_limit = COMPILATIONS
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        # on a machine with CUDA's tools and no GPU inductor would warn of just that, from every rank
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What to call in the place of a layer's module, or of a loss. Compiled when it is called.

        Raises (when called):
            CompilationError: every call needs another version.
        """
        kind = (type(function), repr(function))
        if kind not in self._runners:
            runner = _with_code_of_its_own(f"{type(function).__name__}_{len(self._runners)}")
            self._runners[kind] = torch.compile(runner, backend=self._compile, dynamic=False)
        return partial(_call, self._runners[kind], function)

    def split_backward(self) -> Deferral:
        """From now on compile backwards in two parts. Says where I leaves what W takes: nowhere, unless `store` is set.

        A backward without a store runs both parts.
        """
        self._splits = True
        return self._deferral

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """torch.compile's backend. The backward of the graph follows when it is first asked for."""
        of_weight = [isinstance(value, nn.Parameter) for value in inputs] if self._splits else []
        backend = _BACKENDS[self._backend]
        with self._settings():
            return backend(graph, inputs, partial(self._compile_part, of_weight))

    def _compile_part(
        self,
        of_weight: Sequence[bool],
        compile_graph: CompileGraph,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        **options: Any,
    ) -> Compiled:
        """A forward's graph, or a backward's, whole or cut."""
        with self._settings():
            cut = cut_backward(graph, of_weight) if of_weight and options.get("is_backward") else None
            if cut is None:
                return compile_graph(graph, inputs, **options)
            options["static_input_idxs"] = ()  # they are the whole graph's
            taken = [node.meta["val"] for node in cut.for_weight.graph.find_nodes(op="placeholder")[len(cut.kept) :]]
            for_input = compile_graph(cut.for_input, [inputs[number] for number in cut.used], **options)
            for_weight = compile_graph(cut.for_weight, [*(inputs[number] for number in cut.kept), *taken], **options)
            return _in_two_parts(cut, for_input, for_weight, self._deferral)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Of torch's, while a graph is compiled."""
        from torch._functorch import config as aot
        from torch._inductor import config as inductor

        # a cut backward can't be stored on disk, and its first part mustn't write into what the second takes
        shared = {"donated_buffer": False, "enable_autograd_cache": False} if self._splits else {}
        with inductor.patch(fallback_random=True), aot.patch(shared):
            yield


def _run(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return function(*inputs)


def _with_code_of_its_own(name: str) -> Callable[..., Tensor]:
    """`_run` under another name: torch keeps all versions of one code object in one list, searched at each call."""
    return FunctionType(_run.__code__.replace(co_name=name), globals(), name)


def _call(runner: Callable[..., Tensor], function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    try:
        return runner(function, *inputs)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise CompilationError(
            f"{type(function).__name__} was compiled {COMPILATIONS} times and needs yet another version: its forward "
            "depends on Python values that change from call to call; use compile=false, or keep them in tensors"
        ) from error


def _in_two_parts(cut: Cut, for_input: Compiled, for_weight: Compiled, deferral: Deferral) -> Compiled:
    """The backward as AOTAutograd calls it: it returns what I gives, and leaves the weights' gradients to W."""

    def run(arguments: list[Any]) -> Sequence[Any]:
        edges: Any = torch._C._current_autograd_node().next_functions
        parameters = [edges[number][0].variable for number in cut.weights]
        kept = [arguments[number] for number in cut.kept]
        given = [arguments[number] for number in cut.used]
        arguments.clear()
        results = list(for_input(given))
        kept += results[len(cut.inputs) :]
        finish = partial(_add_gradients, for_weight, kept, parameters)
        if deferral.store is None:
            finish()
        else:
            deferral.store.defer(finish, *kept)
        gradients: list[Tensor | None] = [None] * cut.outputs
        for number, gradient in zip(cut.inputs, results, strict=False):
            gradients[number] = gradient
        return gradients

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _add_gradients(for_weight: Compiled, kept: list[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(parameters, for_weight(kept), strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient.stride() == parameter.stride():
                parameter.grad = gradient.to(gradient_dtype(parameter))
            else:  # as autograd lays them out
                parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter)).copy_(gradient)


def _inductor(graph: fx.GraphModule, inputs: Sequence[Any], part: Callable[..., Compiled]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: Any = partial(part, compile_fx_inner)
    compiled: Any = compile_fx(graph, inputs, inner_compile=inner)
    return cast("Callable[..., Any]", compiled)


def _aot_eager(graph: fx.GraphModule, inputs: Sequence[Any], part: Callable[..., Compiled]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def as_it_is(traced: fx.GraphModule, values: Sequence[Any], **options: Any) -> Compiled:
        return boxed_nop(traced, list(values))

    backend = aot_autograd(
        fw_compiler=partial(part, as_it_is),
        bw_compiler=partial(part, as_it_is, is_backward=True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return backend(graph, inputs)


_BACKENDS: Mapping[Backend, Callable[..., Callable[..., Any]]] = {"inductor": _inductor, "aot_eager": _aot_eager}
