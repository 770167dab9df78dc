"""A pipeline from Python: any modules in a row, a loss, and a step that leaves the gradients of the whole batch."""

from __future__ import annotations

import atexit
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.engine.boundary import SpecNest, in_words, specs_of
from pipeline.engine.nest import Microbatched, Nest, flat, rebuilt
from pipeline.engine.seeding import generator_state, set_generator_state
from pipeline.engine.transport import InProcessTransport, Transport
from pipeline.schedule.library import options_of
from pipeline.schedule.schedule import Schedule
from pipeline.training import rendezvous
from pipeline.training.batch_checks import check_batch, check_inputs
from pipeline.training.connection import connect, own_device
from pipeline.training.devices import choose_devices
from pipeline.training.group import Group, LocalGroup
from pipeline.training.inference import Inference, Read, chunks
from pipeline.training.losses import as_sum
from pipeline.training.module_layers import ModuleLayer, Modules, device_of, dtype_of, let_go, of_modules, own_module
from pipeline.training.placement import place
from pipeline.training.plan import Plan, draft_plan, for_batch, for_inference, samples
from pipeline.training.rank import Rank
from pipeline.training.ranks import Ranks
from pipeline.training.settings import (
    ActivationCheckpointSettings,
    PartitionSettings,
    PrecisionSettings,
    ScheduleSettings,
    Settings,
)

__all__ = ["Microbatched", "Pipeline"]

_KEPT_PLANS = 128
"""Shapes of batches that are planned once: more are planned again when they come back."""


class Pipeline:
    """A model cut into stages that train together, in one process or in as many as a launcher such as torchrun started.

    In one process the ranks take turns, and the modules given are the ones that are trained. Under a launcher every
    process makes the same model and passes the same batches; it keeps and trains the modules of its own stages, and
    those of others lose their memory (they are on the meta device then).

    Args:
        model: an `nn.Sequential` (a layer begins at each child with parameters, those without join the one before), or
            a list or dict of modules, or pairs (name, module), each a layer; run in order, each on what the one before
            returns: a tensor, or tensors in tuples, lists and dicts. Parameters that several layers share are one.
            Values may go past layers by name: a module with an attribute gives=("skip",) returns (value, skip), and one
            with takes=("skip",), any number of layers later, is called with (value, skip).
        loss: of (outputs, targets); `losses.as_sum` says how it becomes the mean over the whole batch.
        schedule: a name of `pipeline.schedule.library`, or a schedule of your own.
        pp: pipeline ranks; under a launcher the number of its processes, if there is one replica.
        microbatches: pieces that a batch is cut into, for each replica; their sizes differ by at most one.
        activation_checkpoint: never, except_last, always or selective; or the settings of any.
        partition: uniform (equal layers), parameters (the largest stage as small as can be), or how many layers each
            stage holds, or the names of their first layers.
        dp: replicas of the pipeline, each on pp processes of a launcher, that share every batch.
        stages_per_rank: where the schedule leaves the choice; None: two there.
        autocast: the dtype that forward passes compute in, torch.bfloat16; None: the parameters'.
        batch_norm: microbatch or deferred: when BatchNorm's averages move, at each microbatch or once a step; or sync,
            over the samples of all replicas.
        device: auto, cpu or cuda. Auto leaves the model where it is; under a launcher it takes a GPU for each process,
            if there are as many.
        seed: with the number of the step decides what dropout draws.
        prefetch: receives that are posted ahead of their use.
        timeout: seconds that a message may take.

    Raises:
        ValueError: something of it can't be, with the value and the cure.
    """

    def __init__(
        self,
        model: Modules,
        loss: Callable[..., Tensor],
        *,
        schedule: str | Schedule = "1f1b",
        pp: int = 2,
        microbatches: int = 8,
        activation_checkpoint: str | ActivationCheckpointSettings = "never",
        partition: str | Sequence[int] | Sequence[str] = "uniform",
        dp: int = 1,
        stages_per_rank: int | None = None,
        autocast: torch.dtype | None = None,
        batch_norm: str = "microbatch",
        device: str | torch.device = "auto",
        seed: int = 0,
        prefetch: int = 2,
        timeout: float = 300.0,
    ) -> None:
        _check_types(
            schedule, activation_checkpoint, pp=pp, microbatches=microbatches, dp=dp, seed=seed, prefetch=prefetch
        )
        self._model = of_modules(model, as_sum(loss))
        self._dtype = dtype_of(self._model.layers)
        if autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast={autocast} would need a loss scale or do nothing: use torch.bfloat16, or None")
        by_count = [] if isinstance(partition, str) else list(partition)
        written = schedule if isinstance(schedule, Schedule) else None
        if written and (written.pp, written.microbatches) != (pp, microbatches):
            raise ValueError(
                f"the schedule has {written.pp} ranks and {written.microbatches} microbatches, the pipeline pp={pp} "
                f"and microbatches={microbatches}: use pp={written.pp}, microbatches={written.microbatches}"
            )
        self._settings = Settings(
            launch="processes" if rendezvous.is_launched() else "in_process",
            device=str(device),
            seed=seed,
            pp=pp,
            microbatches=microbatches,
            dp=dp,
            batch_size=dp * microbatches,
            batch_norm=batch_norm,
            prefetch=prefetch,
            timeout=timeout,
            schedule=_chosen(schedule, stages_per_rank),
            partition=PartitionSettings(partition if isinstance(partition, str) else "manual", by_count),
            precision=PrecisionSettings(parameters=_word(self._dtype), autocast=_word(autocast)),
            activation_checkpoint=ActivationCheckpointSettings(activation_checkpoint)
            if isinstance(activation_checkpoint, str)
            else activation_checkpoint,
        )
        self._settings.check()
        self._draft = draft_plan(self._settings, self._model, schedule=written)
        self._plans: dict[object, Plan] = {}
        self._group, self._device, self._transport = self._join()
        if isinstance(loss, nn.Module):
            loss.to(self._device)
        self._own = self._own_layers()
        self._check_copies()
        self._ranks: Ranks | None = self._open()
        self.steps = 0
        """Steps done. With the seed they decide what dropout draws: set it when training goes on from a checkpoint."""

    @property
    def schedule(self) -> Schedule:
        """What every rank does, and in which order."""
        return self._draft.schedule

    @property
    def rank(self) -> int:
        """This process's rank, counted over all replicas; 0 where all ranks are in one process."""
        return self._group.local[0]

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, a shared one once: all in one process, its own stages' under a launcher."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """`parameters` with their names in the whole model."""
        seen = set[nn.Parameter]()
        for layer in self._own:
            for name, parameter in layer.module.named_parameters(layer.prefix.rstrip(".")):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's in one process, under a launcher this process's part of it, with the whole's names."""
        state: dict[str, Tensor] = {}
        for layer in self._own:
            layer.module.state_dict(destination=state, prefix=layer.prefix)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what this process holds from a state dict of the whole model, or of this part of it.

        Raises:
            ValueError: a name is missing or unknown, or its tensor has another shape.
        """
        known = {name for layer in self._model.layers for name in layer.module.state_dict(prefix=layer.prefix)}
        own = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        wrong = [name for name, shape in own.items() if name not in state or tuple(state[name].shape) != shape]
        wrong += [name for name in state if name not in known]
        if wrong:
            raise ValueError(f"the state dict is another model's: {wrong[0]} is missing, unknown or of another shape")
        for layer in self._own:
            names = layer.module.state_dict(prefix=layer.prefix)
            layer.module.load_state_dict({name.removeprefix(layer.prefix): state[name] for name in names})

    def zero_grad(self) -> None:
        """Drop the gradients, which steps add up until then."""
        for parameter in self.parameters():
            parameter.grad = None

    def step(self, inputs: Nest, targets: Nest) -> Tensor:
        """Forward and backward of a whole batch: adds the gradients of its mean loss to `.grad`.

        Layers compute in the mode they are in. PyTorch's random numbers go on as if there had been no step.

        Args:
            inputs, targets: the batch, a tensor (samples, ...) or such tensors in tuples, lists and dicts; the same in
                every process. Or each cut already, `Microbatched([...])` of as many as the pipeline has microbatches,
                whose shapes may differ: sentences padded to the longest of a microbatch. A batch may be short: of fewer
                samples than microbatches the last ones are empty and cost nothing.

        Returns:
            The mean loss over the whole batch, 0-dim, in every process.

        Raises:
            ValueError: the batch is empty, a layer refuses it, or processes have others.
            ActionError: an action of the schedule failed. Gradients are then of no use; in one process the next step
                finds everything else in order.
        """
        check_batch(inputs, targets)
        with self._running("step", inputs, targets, self._plan) as ranks:
            own = ranks.own(inputs)
            loss = ranks.mean_loss(ranks.train(ranks.cut(self.steps, own, targets)))
        self.steps += 1
        return self._scalar(loss)

    def evaluate(self, inputs: Nest, targets: Nest) -> Tensor:
        """The mean loss over any number of samples with the layers in evaluation mode, 0-dim, in every process.

        Raises:
            As `step` does.
        """
        check_batch(inputs, targets)
        loss = self._model.loss
        pieces = [(inputs, targets)]
        if isinstance(inputs, Microbatched) and isinstance(targets, Microbatched):
            pieces = [piece for piece in zip(inputs, targets, strict=True) if samples(piece)]
        sums = [each for piece in pieces for each in self._forward("evaluate", *piece, loss)]
        total = float(torch.stack(sums).sum()) if sums else 0.0  # the whole of it, in every replica
        ranks = self._in_order()
        shares = self._group.gather_floats([total if rank.holds_last else 0.0 for rank in ranks])
        return self._scalar(sum(shares[: self._settings.pp]) / (sum(loss.weight(piece[1]) for piece in pieces) or 1.0))

    def predict(self, inputs: Nest) -> Nest:
        """What the last layer gives for any number of samples, in evaluation mode and without a graph.

        Returns:
            A tensor, or such tensors as the last layer gives, the samples first; None in processes without the last
            stage. Of a batch that is `Microbatched` that of each microbatch.

        Raises:
            As `step` does.
        """
        check_inputs(inputs)
        if isinstance(inputs, Microbatched):
            return Microbatched(map(self.predict, inputs))
        outputs: list[Nest] = []

        def read(given: Nest, _: Nest) -> Tensor:
            outputs.append(given)
            return torch.zeros(())

        # where there are fewer samples than microbatches, the last of these has been read several times
        parts = outputs[: len(self._forward("predict", inputs, None, read))]
        if not parts:
            return None
        joined: Nest = rebuilt(parts[0], [torch.cat(pieces) for pieces in zip(*map(flat, parts), strict=True)])
        return joined

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to this norm over the whole model, whoever holds it.

        Returns:
            The norm before, 0-dim, in every process.
        """
        ranks = self._in_order()
        norm = ranks.gradient_norm()
        ranks.scale_gradients(min(1.0, max_norm / (norm + 1e-6)))
        return self._scalar(norm)

    # How it comes to run

    def _join(self) -> tuple[Group, torch.device, Transport | None]:
        """The ranks' group, this process's device, and what carries messages; None where they stay in this process."""
        settings = self._settings
        if not rendezvous.is_launched():
            if settings.dp > 1:
                raise ValueError(
                    f"dp={settings.dp} replicas in one process would only take turns: use dp=1, or torchrun"
                )
            device = device_of(self._model.layers) if settings.device == "auto" else choose_devices(settings).of(0)
            return LocalGroup(settings.pp), device, None
        started = rendezvous.world_size()
        if started != settings.ranks:
            raise ValueError(
                f"the launcher started {started} processes, and pp={settings.pp} with dp={settings.dp} takes "
                f"{settings.ranks}: let it start as many, or use pp={started}"
            )
        devices = choose_devices(settings)
        device = own_device(devices)
        if not dist.is_initialized():
            rendezvous.join(settings.timeout)
            atexit.register(rendezvous.leave)
        group, transport = connect(settings, self._draft, device, devices.backend)
        return group, device, transport

    def _own_layers(self) -> list[ModuleLayer]:
        plan = self._draft
        stages = sorted(stage for rank in self._group.local for stage in plan.stages_of(rank))
        indices = [index for stage in stages for index in plan.layers_of(stage)]
        own = [self._model.layers[index] for index in indices]
        let_go([layer for index, layer in enumerate(self._model.layers) if index not in indices], own)
        return own

    def _check_copies(self) -> None:
        """Refuse copies of a parameter that begin with different values, which would never become one."""
        if len(self._group.local) == self._group.size:
            return
        tied = self._draft.tied
        shared = {*tied.values()} if self._settings.dp == 1 else {tied.get(name, name) for name in self.state_dict()}
        mine = {tied.get(name, name): tensor for name, tensor in self.state_dict().items()}
        found = self._group.gather([{name: _checksum(mine[name]) for name in sorted(shared & mine.keys())}])
        for rank, checksums in enumerate(found):
            for name, checksum in checksums.items():
                first = next(others[name] for others in found if name in others)
                if checksum != first:
                    raise ValueError(
                        f"{name} has other values on rank {rank} than on another rank that holds it: build the same "
                        "model in every process, after torch.manual_seed(0), say"
                    )

    def _open(self) -> Ranks:
        where = place(self._settings, self._device)
        transport = self._transport or InProcessTransport()
        ranks = [
            Rank(
                number,
                self._draft,
                self._model,
                where,
                transport,
                None,
                make_layer=own_module,
                add=partial(self._group.add, number),
            )
            for number in self._group.local
        ]
        for rank in ranks:
            rank.trainer.clock = None  # nobody asks what an action took
        return Ranks(self._draft, ranks, self._model.loss, self._group)

    # A step

    def _forward(self, what: str, inputs: Nest, targets: Nest, read: Read) -> list[Tensor]:
        """What `read` makes of each microbatch's outputs; nothing where the last stage is elsewhere."""
        count, microbatches = samples(inputs), self._settings.microbatches
        largest = -(-count // microbatches)
        sizes = {size for run in chunks(count, largest, microbatches) for size in run}

        def plan(specs: SpecNest) -> Plan:
            arguments = self._draft, self._settings, self._model, specs, self._device
            return for_inference(*arguments, microbatches=microbatches, sizes=sizes)

        with self._running(what, inputs, targets, plan) as ranks:
            return list(Inference(ranks, largest, read).run(count, inputs, targets))

    @contextmanager
    def _running(self, what: str, inputs: Nest, targets: Nest, plan: Callable[[SpecNest], Plan]) -> Iterator[Ranks]:
        """The ranks, ready for such a batch; put in order, or out of use, should the batch fail."""
        ranks = self._in_order()
        if torch.is_autocast_enabled(self._device.type):
            raise ValueError(
                "a step inside torch.autocast would send other dtypes than planned: leave the context, and use "
                "Pipeline(..., autocast=torch.bfloat16)"
            )
        with torch.inference_mode(False), torch.enable_grad():
            ranks.expect(self._planned(what, inputs, targets, plan))
            random = generator_state(self._device)
            try:
                yield ranks
            except BaseException:
                self._ranks = None
                raise
            finally:
                set_generator_state(self._device, random)

    def _in_order(self) -> Ranks:
        if self._ranks is None:
            if rendezvous.is_launched():
                raise RuntimeError(
                    "a step of this pipeline has failed, and its processes are no longer together: end it"
                )
            self._ranks = self._open()
        return self._ranks

    def _plan(self, specs: SpecNest) -> Plan:
        return for_batch(self._draft, self._settings, self._model, specs, self._device)

    def _planned(self, what: str, inputs: Nest, targets: Nest, plan: Callable[[SpecNest], Plan]) -> Plan:
        """For batches of this shape, the same in every process."""
        specs = specs_of(inputs)
        trained = tuple(p.requires_grad for layer in self._model.layers for p in layer.module.parameters())
        told = f"{in_words(specs)} and {in_words(specs_of(targets))}, {sum(trained)} parameters to train"
        self._agree(f"{what} of {told}")
        key = what == "step", repr(specs), trained
        if key not in self._plans:
            if len(self._plans) == _KEPT_PLANS:
                self._plans.clear()
            self._plans[key] = plan(specs)
        return self._plans[key]

    def _agree(self, what: str) -> None:
        """Have processes that were given different batches say so, instead of waiting for each other."""
        if len(self._group.local) == self._group.size:
            return
        marks = self._group.gather_floats([float(zlib.crc32(what.encode()))] * len(self._group.local))
        if len(set(marks)) > 1:
            each = self._group.gather([what] * len(self._group.local))
            found = "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(each))
            raise ValueError(f"the processes were not given the same ({found}): pass the same batch in all of them")

    def _scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self._dtype, device=self._device)


def _check_types(schedule: object, activation_checkpoint: object, **numbers: object) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name}={value!r} is no whole number: use one such as 2")
    if not isinstance(schedule, str | Schedule):
        raise ValueError(f"schedule={schedule!r} is no schedule: use a name such as '1f1b', or a Schedule")
    if not isinstance(activation_checkpoint, str | ActivationCheckpointSettings):
        raise ValueError(f"activation_checkpoint={activation_checkpoint!r} is unknown: use a name such as 'never'")


def _chosen(schedule: str | Schedule, stages_per_rank: int | None) -> ScheduleSettings:
    if isinstance(schedule, Schedule):
        return ScheduleSettings(schedule.name)
    default = 2 if "stages_per_rank" in options_of(schedule) else 1
    return ScheduleSettings(schedule, default if stages_per_rank is None else stages_per_rank)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _word(dtype: torch.dtype | None) -> Any:
    """As settings have it."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
