"""What published state dicts call a model's tensors, and how they lay them out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]


class Source(NamedTuple):
    """A tensor of a published state dict; `transposed` says that ours is its transpose."""

    name: str
    transposed: bool = False


@dataclass(frozen=True)
class Names:
    """The source's names are our own: a custom model's, torchvision's ResNets'."""

    def sources(self, name: str) -> tuple[Source, ...]:
        """What the tensor that we call `name` may be called: first what we write ourselves."""
        return (Source(name),)

    def ignores(self, name: str) -> bool:
        """Whether the source's tensor of this name says nothing of the model."""
        return False

    def optional(self, name: str) -> bool:
        """Whether the source may lack the tensor that we call `name`."""
        return name.endswith(".num_batches_tracked")  # torch before 0.4.1 did not count

    def check(self, path: Path) -> None:
        """Refuse a file of another model, as far as what lies beside it tells."""

    def cure(self, shapes: Shapes) -> str:
        """What to do about tensors of other names and shapes, given the source's."""
        return "use the model that it is of, or model.fresh=[name] for what shall start without it"


@dataclass(frozen=True)
class TorchvisionNames(Names):
    """torchvision's own, and what its vision transformers' files still call the two Linears of a block."""

    def sources(self, name: str) -> tuple[Source, ...]:
        """First what torchvision writes today."""
        older = re.sub(r"\.mlp\.(0|3)\.", lambda match: f".mlp.linear_{1 + int(match[1]) // 3}.", name)
        return (Source(name),) if older == name else (Source(name), Source(older))


@dataclass(frozen=True)
class Gpt2Names(Names):
    """Hugging Face's GPT-2: transformers' GPT2LMHeadModel, or GPT2Model, which has no prefix."""

    heads: int = 12

    def sources(self, name: str) -> tuple[Source, ...]:
        """With the prefix and without; what we call a Linear's weight is there (inputs, outputs)."""
        body, transposed = _hugging_face(name)
        known = [Source(f"transformer.{body}", transposed), Source(body, transposed)]
        if name == HEAD:  # a file without a head has the embedding for one
            known = [Source("lm_head.weight"), Source("transformer.wte.weight"), Source("wte.weight")]
        return tuple(known)

    def ignores(self, name: str) -> bool:
        """The causal masks that older files hold."""
        return re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)", name) is not None

    def optional(self, name: str) -> bool:
        """None is."""
        return False

    def check(self, path: Path) -> None:
        """By the config.json beside the file, where there is one: no tensor tells the number of heads.

        Raises:
            ValueError: it states another kind of GPT-2.
        """
        described = path.with_name("config.json")
        if not described.is_file():
            return
        stated = json.loads(described.read_text(encoding="utf-8"))
        for key, ours in {"n_head": self.heads, **KIND}.items():
            if stated.get(key, ours) != ours:
                cure = f"use model.heads={stated[key]}" if key == "n_head" else "another model's weights won't do"
                raise ValueError(f"{described} says {key}={stated[key]} and the model has {ours}: {cure}")

    def cure(self, shapes: Shapes) -> str:
        """The sizes that the source has."""
        bare = {name.removeprefix("transformer."): shape for name, shape in shapes.items()}
        blocks = {match[1] for name in bare if (match := re.match(r"h\.(\d+)\.", name))}
        try:
            (vocabulary, width), (context, _) = bare["wte.weight"], bare["wpe.weight"]
        except (KeyError, ValueError):
            return "use a GPT-2's, with Hugging Face's names"
        return (
            f"use model.layers={len(blocks)} model.width={width} model.context={context} model.vocabulary={vocabulary}"
        )


HEAD = "head.projection.weight"
KIND = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True}
_PARTS = {
    "embedding.tokens": "wte",
    "embedding.positions": "wpe",
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.expansion": "mlp.c_fc",
    "feed_forward.projection": "mlp.c_proj",
    "head.norm": "ln_f",
}


def _hugging_face(name: str) -> tuple[str, bool]:
    """A GPT's tensor as Hugging Face calls it, and whether it stands there transposed: Conv1D is (inputs, outputs)."""
    module, _, kind = name.rpartition(".")
    block = re.match(r"block\.(\d+)\.", module)
    part = module[block.end() :] if block else module
    own = _PARTS.get(part, part)
    return f"{f'h.{block[1]}.' if block else ''}{own}.{kind}", kind == "weight" and ".c_" in own
