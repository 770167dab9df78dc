"""Whether what was given is a batch."""

from __future__ import annotations

from torch import Tensor

from pipeline.engine.nest import Microbatched, Nest, flat
from pipeline.training.plan import samples


def check_inputs(inputs: Nest) -> int:
    """How many samples these inputs are.

    Raises:
        ValueError: they are no tensors, disagree on the number of samples, hold none or require a gradient.
    """
    found = _count("inputs", inputs)
    if found == 0:
        raise ValueError("the batch is empty: give one sample or more")
    if any(tensor.requires_grad for tensor in flat(inputs)):
        raise ValueError("the inputs require a gradient, which nobody gives them: detach them")
    return found


def check_batch(inputs: Nest, targets: Nest) -> int:
    """How many samples this batch has.

    Raises:
        ValueError: as for `check_inputs`, there are more or fewer targets, or they are cut into other microbatches.
    """
    found, told = check_inputs(inputs), _count("targets", targets)
    if told != found:
        raise ValueError(f"the batch has {found} inputs and {told} targets: give a target for each sample")
    cuts = [list(map(samples, batch)) if isinstance(batch, Microbatched) else "whole" for batch in (inputs, targets)]
    if cuts[0] != cuts[1]:
        raise ValueError(f"of microbatches inputs are cut as {cuts[0]} and targets as {cuts[1]}: cut both alike")
    return found


def _count(name: str, batch: Nest) -> int:
    strange = [type(leaf).__name__ for leaf in flat(batch) if not isinstance(leaf, Tensor)]
    if strange or batch is None:
        raise ValueError(f"{name} are no batch ({(*strange, 'None')[0]}): give a tensor, or tensors in a tuple or dict")
    return samples(batch)
