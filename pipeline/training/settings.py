"""The settings of a training run: what the command line's fields become. No torch here, so that help is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


def described(default: Any, text: str) -> Any:
    """A field with a default value and the one line that `--help` shows for it."""
    metadata = {"help": text}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ScheduleSettings:
    """Which schedule writes the program."""

    name: str = described("1f1b", "the schedule's name in pipeline/schedule/library")
    stages_per_rank: int = described(1, "stages that each rank holds, where the schedule leaves the choice")
    path: str | None = described(None, "file: a schedule's text, or a CSV as torch and torchtitan write it")
    target: str | None = described(None, "custom: module:function of (pp, microbatches, stages_per_rank)")
    release: str = described("end", "overlapped pairs hand on both outputs at their end, or each when it is there")
    objective: str = described("makespan", "zb_auto: make the makespan short, or the longest span of a rank")
    placement: str = described("line", "zb_auto: line (a stage a rank) or v (two, there and back)")
    memory_cap: Any = described(None, "zb_auto: microbatches x stages in flight, a number or one a rank; null: any")


@dataclass
class PartitionSettings:
    """How the layers are cut into stages."""

    name: str = described(
        "uniform",
        "uniform (equal layers), parameters, time or memory (smallest largest stage), auto (shortest step) or manual",
    )
    layers: list[Any] = described([], "manual: how many layers each stage holds, in order, or its first layer's name")
    search_seconds: float = described(10.0, "memory, auto: then the best cut found is taken, unless there are few")
    memory_limit: Any = described(
        None, "auto: bytes that a rank may hold (parameters with gradients and state, activations), such as 2GiB"
    )

    def check(self) -> None:
        """Refuse a number out of range, or an option where it has no meaning.

        Raises:
            ValueError: what is wrong, its value, and the cure.
        """
        for option, owner in (("layers", "manual"), ("memory_limit", "auto")):
            value = getattr(self, option)
            if value not in (None, []) and self.name != owner:
                raise ValueError(
                    f"partition.{option}={value} is for partition={owner}, not {self.name}: drop one of them"
                )
        if not 0 <= self.search_seconds < math.inf:
            raise ValueError(
                f"partition.search_seconds={self.search_seconds:g} is out of range: use 0 or more, such as 10"
            )


@dataclass
class PrecisionSettings:
    """Which floating-point formats are computed in."""

    name: str = described("fp32", "for tables and tags")
    parameters: str = described("float32", "dtype of parameters, gradients and optimizer state")
    autocast: str | None = described(None, "dtype that autocast computes in; null: no autocast")
    loss_scale: float = described(1.0, "starting loss scale; above 1 it is dynamic (fp16)")
    boundary: str | None = described(None, "dtype of activations and gradients sent to another rank; null: their own")
    masters: str | None = described(
        None, "dtype of gradients, optimizer state and the exact parameters where parameters are rounded; null: none"
    )

    def check(self) -> None:
        """Refuse numbers out of range, and copies that would copy nothing.

        Raises:
            ValueError: what is wrong, its value, and the cure.
        """
        if not 1 <= self.loss_scale < math.inf:
            raise ValueError(
                f"precision.loss_scale={self.loss_scale:g} is out of range: use 1 (no scaling) or more, such as 65536"
            )
        if self.masters is not None and self.parameters != "bfloat16":
            raise ValueError(
                f"precision.masters={self.masters} is for precision.parameters=bfloat16, not {self.parameters}: use "
                "precision=bf16_true, or drop it"
            )


@dataclass
class ActivationCheckpointSettings:
    """Which microbatches drop their activations and recompute them, and which part of them."""

    name: str = described(
        "never", "never, except_last (all microbatches but the last), always, selective (a part) or window (as needed)"
    )
    every: int | None = described(
        None, "selective, window: recompute a stage's first and every so many-th layer; null: all"
    )
    keep: str | None = described(
        None, "selective, window: costly (keep outputs of matrix products, convolutions, attention) or null (nothing)"
    )
    keep_microbatches: Any = described(
        None, "window: microbatches x stages that a rank may hold in full, a number or one a rank"
    )
    memory_limit: Any = described(None, "window: bytes of activations that a rank may hold, such as 2GiB")

    @property
    def keeps_costly(self) -> bool:
        """Whether a recomputation is handed the outputs of costly operations; what `selective` does unless told."""
        return self.keep == "costly" or (self.name == "selective" and self.every is None)

    def check(self) -> None:
        """Refuse a part or a limit out of range, or where it has no meaning.

        Raises:
            ValueError: what is wrong, its value, and the cure.
        """
        for name, users in _CHECKPOINT_USERS.items():
            value = getattr(self, name)
            if value is not None and self.name not in users:
                raise ValueError(
                    f"activation_checkpoint.{name}={value} is for activation_checkpoint={' or '.join(users)}, not "
                    f"{self.name}: drop one of them"
                )
        if self.every is not None and self.every < 1:
            raise ValueError(
                f"activation_checkpoint.every={self.every} is too small: use 2 for every second layer, or more"
            )
        if self.name == "window" and (self.keep_microbatches is None) == (self.memory_limit is None):
            given = "none" if self.keep_microbatches is None else "two"
            raise ValueError(
                f"activation_checkpoint=window takes one limit and has {given}: use "
                "activation_checkpoint.keep_microbatches=4 or activation_checkpoint.memory_limit=2GiB"
            )


_CHECKPOINT_USERS = {
    "every": ("selective", "window"),
    "keep": ("selective", "window"),
    "keep_microbatches": ("window",),
    "memory_limit": ("window",),
}


@dataclass
class OptimizerSettings:
    """The optimizer and its learning rate."""

    name: str = described("adamw", "adamw or sgd")
    learning_rate: float = described(2e-3, "the highest learning rate, reached after the warmup")
    warmup_steps: int = described(20, "steps over which the learning rate rises linearly")
    decay: str = described("cosine", "after the warmup: cosine (down to final_ratio) or constant")
    final_ratio: float = described(0.1, "the last learning rate as a share of the highest")
    weight_decay: float = described(0.1, "on parameters with two or more dimensions")
    momentum: float = described(0.9, "sgd's momentum")
    betas: list[float] = described([0.9, 0.95], "adamw's averaging rates")


@dataclass
class CostsSettings:
    """What task=plan and zb_auto reckon with: a number for every stage, or a list with an entry a stage."""

    source: str = described("stated", "stated (the numbers below) or profile (time the model's stages here)")
    per: str = described("stage", "stage, or rank (the numbers are a rank's, divided by the stages it holds)")
    forward: Any = described(1, "F")
    backward_input: Any = described(1, "I")
    backward_weight: Any = described(1, "W")
    backward: Any = described(None, "B; null: I + W")
    recompute: Any = described(None, "R; null: F")
    overlap: Any = described(None, "an overlapped pair; null: F + B")
    transfer: Any = described(0, "latency of a message between ranks")
    bandwidth: float | None = described(None, "bytes a unit of time on top of the latency; null: any number")
    boundary_bytes: Any = described(0, "bytes of a stage's output")
    activation_bytes: Any = described(None, "bytes a microbatch holds in a stage; null: not reckoned")


@dataclass
class LoggerSettings:
    """Where metrics go besides the run directory."""

    name: str = described("wandb", "wandb or none")
    project: str = described("stagecraft", "the W&B project")
    mode: str = described("auto", "auto (online with a key, else offline), online, offline or disabled")
    group: str | None = described(None, "the W&B group; null: the sweep")
    tags: list[str] = described([], "tags besides schedule and model")


@dataclass
class Settings:
    """Everything a run needs besides its model and its data."""

    task: str = described(
        "train",
        "train, evaluate (held-out data), generate (a text), plan (a schedule, untrained), profile (time the layers), "
        "export (weights)",
    )
    launch: str = described("processes", "processes (a process a rank) or in_process (all ranks in one, for debugging)")
    device: str = described("auto", "auto (GPUs if there is one a rank), cpu or cuda")
    share_gpu: bool = described(False, "let several ranks use one GPU; messages then go through the host")
    transport: str = described("auto", "auto (shared memory on one host's CPUs, NCCL between GPUs, else gloo) or gloo")
    seed: int = described(0, "decides starting weights, data order and dropout, whatever the pipeline")
    pp: int = described(2, "pipeline ranks")
    dp: int = described(1, "replicas of the pipeline, each of pp ranks, that share every batch")
    microbatches: int = described(8, "pieces that a batch, or a replica's part of it, is cut into")
    batch_size: int = described(32, "samples a step")
    steps: int = described(300, "training steps")
    batch_norm: str = described(
        "microbatch", "microbatch, deferred (BatchNorm's averages move once a step) or sync (over replicas)"
    )
    prefetch: int = described(2, "receives that are posted ahead of their use")
    compile: bool = described(False, "fuse every layer's operators with torch.compile, before the first step")
    timeout: float = described(300.0, "seconds that a message may take before the job ends with an error")
    deterministic: bool = described(False, "the same numbers bit for bit, run after run; what can't is an error")
    gradient_clip: float | None = described(1.0, "largest norm of the whole model's gradient; null: not clipped")
    on_nonfinite: str = described(
        "stop", "a loss or gradient that is not finite: stop, or skip the step (100 in a row)"
    )
    log_every: int = described(10, "steps between log entries")
    validate_every: int = described(100, "steps between validations; one always follows the last step; 0: none at all")
    save_every: int = described(0, "steps between checkpoints on disk; one always follows the last step; 0: none")
    keep_checkpoints: int = described(2, "how many of a run's checkpoints stay: the last ones")
    resume: str | None = described(None, "a run directory, or one of its checkpoints: go on from there")
    export: str | None = described(
        None, "task=export: the file, .safetensors, .pt or .pth, with its source's names; a GPT's are Hugging Face's"
    )
    prompt: str = described("def ", "task=generate: what the text begins with")
    max_new_tokens: int = described(200, "task=generate: how many tokens follow")
    temperature: float = described(
        0.8, "task=generate: below 1 likely tokens are likelier still; 0: only the likeliest"
    )
    top_k: int | None = described(None, "task=generate: choose among so many of the likeliest; null: among all")
    schedule: ScheduleSettings = described(ScheduleSettings, "schedule")
    partition: PartitionSettings = described(PartitionSettings, "partition")
    precision: PrecisionSettings = described(PrecisionSettings, "precision")
    activation_checkpoint: ActivationCheckpointSettings = described(ActivationCheckpointSettings, "checkpointing")
    optimizer: OptimizerSettings = described(OptimizerSettings, "optimizer")
    logger: LoggerSettings = described(LoggerSettings, "logger")
    costs: CostsSettings = described(CostsSettings, "costs")
    peak_tflops: float | None = described(
        None, "dense TFLOP/s of a rank's device, for mfu; null: as known of common GPUs in 16 bits"
    )
    profile: str | None = described(None, "a profile.json of task=profile; null: measured here where it is needed")

    @property
    def profiled(self) -> bool:
        """Whether costs come from a profile of the model's layers, and not from what `costs` states."""
        return is_profiled(self)

    @property
    def ranks(self) -> int:
        """Of all replicas together: rank r is pipeline rank r % pp of replica r // pp."""
        return self.dp * self.pp

    def check(self) -> None:
        """Refuse numbers and words out of range.

        Raises:
            ValueError: what is wrong, its value, and the cure.
        """
        for name, lowest in _LOWEST.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name}={getattr(self, name)} is too small: use {lowest} or more")
        if (self.task == "export") != (self.export is not None):
            raise ValueError(
                "task=export needs a file: give one, export=weights.safetensors"
                if self.export is None
                else f"export={self.export} is for task=export, not {self.task}: use task=export resume=run_directory"
            )
        if self.task != "plan" or self.profiled:
            self._check_batch()
        if self.deterministic and self.costs.source == "profile" and self.profile is None:
            raise ValueError(
                "deterministic=true with costs.source=profile: costs measured anew may choose another schedule or cut. "
                "Measure once, with task=profile, and give what it leaves: profile=profile.json"
            )
        if not 0 < self.timeout <= _LONGEST_TIMEOUT:
            raise ValueError(
                f"timeout={self.timeout:g} is out of range: give the seconds that a message may take, such as 300"
            )
        if self.gradient_clip is not None and not self.gradient_clip > 0:
            raise ValueError(f"gradient_clip={self.gradient_clip:g} is not positive: use a positive norm, or null")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise ValueError(f"peak_tflops={self.peak_tflops:g} is no speed: use one such as 312, or null")
        for name, words in _WORDS.items():
            self._check_word(name, words)
        self._check_sync()
        self.precision.check()
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature:g} is out of range: use 0 (the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} is too small: use 1 or more, or null for all tokens")
        self._check_optimizer()
        self.partition.check()
        self.activation_checkpoint.check()
        if self.compile and self.activation_checkpoint.keeps_costly:
            raise ValueError(
                "compile=true fuses the operations whose outputs activation_checkpoint.keep=costly keeps: use "
                "activation_checkpoint.every=2, or compile=false"
            )

    def _check_batch(self) -> None:
        if self.microbatches * self.dp <= self.batch_size:
            return
        fewer = f"microbatches={self.batch_size // self.dp} or fewer" if self.dp <= self.batch_size else "a smaller dp"
        replicas = f" in each of dp={self.dp} replicas" if self.dp > 1 else ""
        raise ValueError(
            f"microbatches={self.microbatches}{replicas} is more than batch_size={self.batch_size}: every microbatch "
            f"needs a sample, so use {fewer}, or a larger batch"
        )

    def _check_sync(self) -> None:
        """BatchNorm over replicas waits for them in the middle of an action."""
        if self.batch_norm != "sync":
            return
        if self.launch == "in_process" and self.dp > 1:
            raise ValueError(
                "batch_norm=sync lets replicas wait for each other in every layer, which ranks that take turns can't: "
                "use launch=processes, or batch_norm=microbatch"
            )
        if self.compile:
            raise ValueError(
                "batch_norm=sync exchanges statistics in the middle of a layer, which compile=true fuses: use one "
                "of them"
            )

    def _check_word(self, path: str, words: tuple[str | None, ...]) -> None:
        value: Any = self
        for part in path.split("."):
            value = getattr(value, part)
        if value not in words:
            *others, last = ("null" if word is None else word for word in words)
            raise ValueError(f"{path}={value} is unknown: use {', '.join(others)} or {last}")

    def _check_optimizer(self) -> None:
        chosen = self.optimizer
        if not 0 < chosen.learning_rate < math.inf:
            raise ValueError(
                f"optimizer.learning_rate={chosen.learning_rate:g} is not a positive number: use one such as 1e-3"
            )
        if chosen.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps={chosen.warmup_steps} is negative: use 0 or more")
        if len(chosen.betas) != 2 or not all(0 <= beta < 1 for beta in chosen.betas):
            raise ValueError(f"optimizer.betas={chosen.betas} must be two numbers in [0, 1): use [0.9,0.95]")
        for name in ("weight_decay", "momentum", "final_ratio"):
            if not 0 <= getattr(chosen, name) < math.inf:
                raise ValueError(f"optimizer.{name}={getattr(chosen, name):g} is out of range: use 0 or more")


def is_profiled(settings: Any) -> bool:
    """`Settings.profiled`, also of settings that are no `Settings` yet.

    A plan with partition=memory is too: it has no model to cut otherwise.
    """
    partition = settings.partition.name
    measured = ("time", "auto", "memory") if settings.task == "plan" else ("time", "auto")
    return settings.costs.source == "profile" or settings.profile is not None or partition in measured


_LONGEST_TIMEOUT = 1e9
"""In seconds; torch keeps time limits as whole nanoseconds in 64 bits."""

_LOWEST = {
    "seed": 0,
    "pp": 1,
    "dp": 1,
    "microbatches": 1,
    "batch_size": 1,
    "steps": 1,
    "prefetch": 0,
    "log_every": 1,
    "validate_every": 0,
    "save_every": 0,
    "keep_checkpoints": 1,
    "max_new_tokens": 1,
}

_WORDS: dict[str, tuple[str | None, ...]] = {
    "task": ("train", "evaluate", "generate", "plan", "profile", "export"),
    "launch": ("processes", "in_process"),
    "device": ("auto", "cpu", "cuda"),
    "transport": ("auto", "gloo"),
    "batch_norm": ("microbatch", "deferred", "sync"),
    "on_nonfinite": ("stop", "skip"),
    "schedule.release": ("end", "each"),
    "schedule.objective": ("makespan", "span"),
    "schedule.placement": ("line", "v"),
    "costs.source": ("stated", "profile"),
    "costs.per": ("stage", "rank"),
    "precision.parameters": ("float64", "float32", "bfloat16"),
    "precision.masters": (None, "float32"),
    "precision.boundary": (None, "float32", "bfloat16", "float16"),
    "precision.autocast": (None, "bfloat16", "float16"),
    "partition.name": ("uniform", "parameters", "time", "memory", "auto", "manual"),
    "activation_checkpoint.name": ("never", "except_last", "always", "selective", "window"),
    "activation_checkpoint.keep": ("costly", None),
    "optimizer.name": ("adamw", "sgd"),
    "optimizer.decay": ("cosine", "constant"),
    "logger.name": ("wandb", "none"),
    "logger.mode": ("auto", "online", "offline", "disabled"),
}
