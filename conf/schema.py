"""The typed shape of the config: what Hydra checks the YAML files and the command line against.

The settings of training itself stand beside their owner (pipeline/training/settings.py); here are those of the models
and data sets, and how a composed config becomes plain objects.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf

from conf.help import fields_help, groups_help, options
from pipeline.training.settings import Settings, described, is_profiled


@dataclass
class Target:
    """Something built by a function of models/ or data/: the fields are its arguments."""

    function: ClassVar[str]
    kind: ClassVar[str]
    """"text" or "images": what a model takes and what a data set gives; of a model also "any"."""

    def builder(self, **more: Any) -> Callable[[], Any]:
        """The function with its arguments, picklable. Imported only now, so that help and composing stay quick."""
        module, _, name = self.function.partition(":")
        return partial(getattr(importlib.import_module(module), name), **self.keywords(), **more)

    def keywords(self) -> dict[str, Any]:
        """The fields that the function takes; a path is relative to where the command was given."""
        fields = asdict(self)
        return {name: to_absolute_path(value) if name == "path" else value for name, value in fields.items()}


@dataclass
class DataTarget(Target):
    """What all data sets share."""

    validation_batches: int = described(8, "held-out batches that a validation averages over")

    def keywords(self) -> dict[str, Any]:
        """Without what the trainer reads."""
        return {name: value for name, value in super().keywords().items() if name != "validation_batches"}


@dataclass
class ModelTarget(Target):
    """What all models share."""

    weights: str | None = described(None, "a state dict to start from: .safetensors, .pt or .pth")
    fresh: list[str] = described([], "layers or parameters that start without it, as fc of another number of classes")

    def keywords(self) -> dict[str, Any]:
        """Without what is done to the model that was built."""
        return {name: value for name, value in super().keywords().items() if name not in ("weights", "fresh")}

    def builder(self, **more: Any) -> Callable[[], Any]:
        """As of any target, with the weights."""
        build = super().builder(**more)
        if self.weights is None and self.fresh:
            raise ValueError(f"model.fresh={self.fresh} goes with a file of weights: give one, model.weights=path")
        if self.weights is None:
            return build
        from models.weights import with_weights  # imports torch

        return partial(with_weights, build, to_absolute_path(self.weights), tuple(self.fresh))


@dataclass
class Gpt(ModelTarget):
    """A GPT-2: models/gpt.py."""

    function: ClassVar[str] = "models.gpt:gpt"
    kind: ClassVar[str] = "text"
    layers: int = described(4, "transformer blocks")
    width: int = described(128, "features of a token")
    heads: int = described(4, "attention heads; width must be a multiple")
    context: int = described(128, "tokens in a sample")
    vocabulary: int = described("${oc.select:data.vocabulary,256}", "different tokens; the default is the data's")
    dropout: float = described(0.0, "share of activations dropped in training")
    tie_embeddings: bool = described(True, "the output projection is the input embedding, as in GPT-2")


@dataclass
class ResNet(ModelTarget):
    """A ResNet: models/resnet.py."""

    function: ClassVar[str] = "models.resnet:resnet"
    kind: ClassVar[str] = "images"
    depth: int = described(152, "18, 34, 50, 101 or 152")
    classes: int = described("${oc.select:data.classes,1000}", "image classes; the default is the data's")


@dataclass
class TorchvisionModel(ModelTarget):
    """A VGG, vision transformer, ConvNeXt or wide ResNet: models/torchvision_models.py."""

    function: ClassVar[str] = "models.torchvision_models:torchvision_model"
    kind: ClassVar[str] = "images"
    architecture: str = described("vgg16", "torchvision's name: vgg*, vit_*, convnext_*, resnext* or wide_resnet*")
    classes: int = described("${oc.select:data.classes,1000}", "image classes; the default is the data's")
    image_size: int = described(
        "${oc.select:data.size,224}", "pixels a side that vit_* takes; the default is the data's"
    )
    seed: int = described("${oc.select:seed,0}", "decides the starting weights; the default is the run's")


@dataclass
class Custom(ModelTarget):
    """A model of the user's own: models/custom.py."""

    function: ClassVar[str] = "conf.custom_model:build"
    kind: ClassVar[str] = "any"
    target: str = described("???", "module:name of what builds it: an nn.Sequential, a module with layers, or a Model")
    arguments: dict[str, Any] = described({}, "what it is called with, model.arguments.depth=3")
    loss: str | None = described(None, "module:name, as torch.nn:MSELoss; null: cross entropy over the last dimension")
    initialization: str = described(
        "whole", "starting weights: whole (built on each rank's CPU, then cut) or layers (each by reset_parameters)"
    )
    seed: int = described("${oc.select:seed,0}", "decides the starting weights; the default is the run's")


@dataclass
class Text(DataTarget):
    """What the text sets share."""

    kind: ClassVar[str] = "text"
    context: int = described("${oc.select:model.context,128}", "tokens in a sample; the default is the model's")


@dataclass
class PythonText(Text):
    """Python source as bytes."""

    function: ClassVar[str] = "data.text:python_text"


@dataclass
class TextFile(Text):
    """Your own text as bytes."""

    function: ClassVar[str] = "data.text:text_file"
    path: str = described("???", "a file, or a folder of files")
    validation_fraction: float = described(0.1, "the last part of the text that is held out")
    pattern: str = described("*", "which files of a folder")


@dataclass
class Tokens(Text):
    """nanoGPT's token files."""

    function: ClassVar[str] = "data.tokens:tokens"
    path: str = described("???", "a folder with train.bin and val.bin (uint16)")
    vocabulary: int = described(50257, "different tokens")


@dataclass
class SyntheticText(Text):
    """Random tokens, for speed runs."""

    function: ClassVar[str] = "data.synthetic:synthetic_text"
    vocabulary: int = described(256, "different tokens")
    fixed: bool = described(True, "the same batch every step")


@dataclass
class Glyphs(DataTarget):
    """Characters drawn in many fonts."""

    function: ClassVar[str] = "data.glyphs:glyphs"
    kind: ClassVar[str] = "images"
    size: int = described(64, "pixels a side")
    classes: int = described(36, "0-9 and A-Z")


@dataclass
class Cifar10(DataTarget):
    """CIFAR-10 in its Python format."""

    function: ClassVar[str] = "data.cifar:cifar10"
    kind: ClassVar[str] = "images"
    path: str = described("???", "the folder that holds cifar-10-batches-py")
    classes: int = described(10, "10")


@dataclass
class ImageFolder(DataTarget):
    """ImageNet's layout."""

    function: ClassVar[str] = "data.image_folder:image_folder"
    kind: ClassVar[str] = "images"
    path: str = described("???", "a folder with train/<class>/ and val/<class>/")
    classes: int = described(1000, "class folders")
    size: int = described(224, "pixels a side")
    workers: int = described(4, "threads that decode")


@dataclass
class SyntheticImages(DataTarget):
    """Random images, for speed runs."""

    function: ClassVar[str] = "data.synthetic:synthetic_images"
    kind: ClassVar[str] = "images"
    classes: int = described(1000, "image classes")
    size: int = described(224, "pixels a side")
    fixed: bool = described(True, "the same batch every step")


@dataclass
class Config(Settings):
    """The whole config."""

    model: Any = described(None, "the model")
    data: Any = described(None, "the data set")

    def builders(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """What makes the model, and what opens the data; picklable."""
        return self.model.builder(), self.data.builder(batch_size=self.batch_size, seed=self.seed)

    def writer(self) -> Callable[[Any, Any, Path], int]:
        """What writes a model's weights to `export`.

        Raises:
            ValueError: its name says no known kind of file.
        """
        from models.weights import check_suffix, write_weights  # imports torch

        check_suffix("export", Path(self.export or ""))
        return write_weights


GROUPS = ("schedule", "model", "data", "partition", "precision", "activation_checkpoint", "optimizer", "logger")
"""The groups that take exactly one option; `experiment` and `debug` change several of these, and may be combined."""

SCHEMAS: Mapping[str, Mapping[str, type[Target]]] = {
    "model": {"gpt": Gpt, "resnet": ResNet, "torchvision": TorchvisionModel, "custom": Custom},
    "data": {
        "python_text": PythonText,
        "text_file": TextFile,
        "tokens": Tokens,
        "synthetic_text": SyntheticText,
        "glyphs": Glyphs,
        "cifar10": Cifar10,
        "image_folder": ImageFolder,
        "synthetic_images": SyntheticImages,
    },
}


def register() -> None:
    """Tell Hydra the schema; conf/config.yaml and the options of `model` and `data` start from it."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, nodes in SCHEMAS.items():
        for name, node in nodes.items():
            store.store(group=f"schema/{group}", name=name, node=_open(node))
    OmegaConf.register_new_resolver("fields", lambda: fields_help(SCHEMAS), replace=True)
    OmegaConf.register_new_resolver("groups", groups_help, replace=True)
    OmegaConf.register_new_resolver("run_directory", _run_directory, replace=True)
    OmegaConf.register_new_resolver("output_subdirectory", _output_subdirectory, replace=True)
    OmegaConf.register_new_resolver("writer", _writer, replace=True)


def _open(shape: type[Target]) -> DictConfig:
    """The shape as Hydra takes it; a dictionary's keys are the user's, so that no + has to be put before them."""
    node = OmegaConf.structured(shape)
    for name in node:
        value = node._get_node(name)
        if OmegaConf.get_type(value) is dict:
            OmegaConf.set_struct(value, False)
    assert isinstance(node, DictConfig), "made of a dataclass"
    return node


def check_choices(choices: Mapping[str, Any]) -> None:
    """Refuse none or several options of a group: Hydra would take the code's defaults, or mix the options silently.

    Args:
        choices: what was chosen in each group (`HydraConfig.get().runtime.choices`, where lists of options are absent).

    Raises:
        ValueError: the first such group, and how to choose.
    """
    for group in GROUPS:
        if not isinstance(choices.get(group), str):
            example = options(group)[0]
            raise ValueError(
                f"{group} takes exactly one option, not none or a list: use {group}={example}, or sweep over several "
                f"with -m {group}={','.join(options(group)[:2])}"
            )


def to_config(composed: DictConfig) -> Config:
    """The composed config as plain objects, numbers and words checked.

    Raises:
        ValueError: a value is missing or unresolvable, a key that nothing reads was added, data and model don't fit, or
            a setting is out of range.
    """
    unread = sorted(_unread(composed, Config()))
    if unread:
        raise ValueError(f"nothing reads {', '.join(unread)}: drop the +, or see --help for the fields there are")
    if composed.task == "plan" and not is_profiled(composed):
        composed = composed.copy()
        composed.model = composed.data = None  # a plan with stated costs touches neither: nothing of them can be wrong
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ValueError(f"{missing[0]} has no value: give one on the command line, {missing[0]}=...")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config), "conf/config.yaml starts from the schema"
    config.check()
    if config.data is None:
        return config
    if config.data.validation_batches < 1:
        raise ValueError(f"data.validation_batches={config.data.validation_batches} is too small: use 1 or more")
    if config.model.kind not in ("any", config.data.kind):
        cures = {"text": "data=python_text or model=resnet18", "images": "data=glyphs or model=gpt"}
        raise ValueError(
            f"the model takes {config.model.kind} and the data gives {config.data.kind}: use {cures[config.model.kind]}"
        )
    return config


def plain(composed: DictConfig) -> dict[str, Any]:
    """The composed config, resolved, as nested dicts of plain values."""
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict), "the root of a config is a mapping"
    return {str(key): value for key, value in values.items()}


def _unread(node: DictConfig, shape: Any, path: str = "") -> Iterator[str]:
    """Keys that were added with + and have no field, each with the field that was perhaps meant."""
    names = {field.name for field in fields(shape)}
    for key in node:
        value = node._get_node(key)
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            yield f"{path}{key!s}" + (f" (did you mean {path}{near[0]}?)" if near else "")
        elif isinstance(value, DictConfig) and not value._is_none():
            inner = OmegaConf.get_type(value)
            if inner is not None and is_dataclass(inner):
                yield from _unread(value, inner, f"{path}{key!s}.")


def _run_directory(moment: str) -> str:
    """outputs/<date>/<time>; the ranks of an outer launcher, which compose one by one, all take rank 0's."""
    if not _launched():
        return f"outputs/{moment}"
    from pipeline.training import rendezvous  # imports torch

    return rendezvous.agree("run directory", lambda: f"outputs/{moment}")


def _output_subdirectory() -> str | None:
    """Where the composed config is written: by one rank alone."""
    return ".hydra" if is_recording_rank() else None


def is_recording_rank() -> bool:
    """Whether this process writes the run's files and says what all ranks would say: rank 0 of an outer launcher."""
    return not _launched() or os.environ["RANK"] == "0"


def _writer() -> str:
    """Who writes into the log from this process; the ranks that we start prefix their lines themselves."""
    return f"rank {os.environ['RANK']}" if _launched() else "launcher"


def _launched() -> bool:
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
