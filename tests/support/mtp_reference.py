"""The loss of a head for multi-token prediction, written from its definition.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. For tokens t_0 .. t_{T-1}, depth k runs on the
positions 0 .. T-1-k alone:

    h'_i   = projection [norm_e(embedding(t_{i+k})); norm_h(h_i^{k-1})]
    h_i^k  = decoder layer(h')_i
    loss_k = sum over i of cross_entropy(output head(norm(h_i^k)), t_{i+k+1}) / divisor

Norms, shifts and losses are computed here; the decoder layer is stock's class.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.extra_files import (
    INDEX,
    LAYER_FIELDS,
    add_tensors,
    extra_of,
    read_files,
    write_with_extra,
)

# About 1 / sqrt(hidden size), so that layers keep the scale of their input.
_STD = 0.18


def write_base(folder: Path, model_type: str, *, layers: int = 1) -> dict[str, Tensor]:
    """Write a checkpoint in fp64 with a head of several layers; return the head by key.

    Heads are in bf16, as published ones are, so that reading them into fp64 is exact.
    """
    extra = write_with_extra(folder, model_type, dtype=torch.float64, in_fp8=False, std=_STD)
    if layers > 1:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        first = model.config.num_hidden_layers
        own = {key: t for key, t in read_files(folder).items() if key not in extra}
        more = extra_of(model_type, model, own, seed=18, in_fp8=False, std=_STD)
        renamed = {
            key.replace("mtp.layers.0.", "mtp.layers.1.").replace(
                f"model.layers.{first}.", f"model.layers.{first + 1}."
            ): tensor
            for key, tensor in more.items()
        }
        extra |= add_tensors(folder, {k: t for k, t in renamed.items() if k not in extra}, "second")
        config = json.loads((folder / "config.json").read_text())
        for field in LAYER_FIELDS[model_type]:
            config[config_field(model, field)] = layers
        (folder / "config.json").write_text(json.dumps(config))
    assert (folder / INDEX).is_file()
    return extra


def config_field(model: Any, field: str) -> str:
    """Return the name under which config.json has a field."""
    return str(model.config.attribute_map.get(field, field))


def load_stock(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Load a checkpoint with stock code, in training mode."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager"
    )
    return model.train()


class ReferenceHead:
    """The head of a checkpoint in plain tensors that require gradients, by their keys."""

    def __init__(self, stock: PreTrainedModel, folder: Path, layers: int = 1) -> None:
        self.stock: Any = stock
        self.text: Any = getattr(stock.model, "language_model", stock.model)
        self.config: Any = stock.config.get_text_config()
        self.first = self.config.num_hidden_layers
        self.is_shared = (folder / "config.json").read_text().count('"qwen3') > 0
        self.tensors = {
            key: tensor.double().requires_grad_()
            for key, tensor in read_files(folder).items()
            if key.startswith("mtp.") or self._is_layer(key)
        }
        self.blocks = [self._block(depth) for depth in range(layers)]

    def _is_layer(self, key: str) -> bool:
        return key.startswith("model.layers.") and int(key.split(".")[2]) >= self.first

    def prefix(self, depth: int) -> str:
        return f"mtp.layers.{depth}." if self.is_shared else f"model.layers.{self.first + depth}."

    def _block(self, depth: int) -> Any:
        """Make a stock decoder layer with the weights of a depth."""
        like = max(
            index
            for index, layer in enumerate(self.text.layers)
            if hasattr(layer, "self_attn") and hasattr(layer.mlp, "experts")
        )
        block = type(self.text.layers[like])(self.config, like).double()
        prefix, state = self.prefix(depth), {}
        for name, tensor in block.state_dict().items():
            if prefix + name in self.tensors:
                state[name] = self.tensors[prefix + name].detach()
                continue
            experts = name.rpartition(".")[0]
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            state[name] = torch.stack(
                [
                    torch.cat(
                        [self.tensors[f"{prefix}{experts}.{e}.{part}.weight"] for part in parts]
                    ).detach()
                    for e in range(len(tensor))
                ]
            )
        block.load_state_dict(state)
        return block.train()

    def norm(self, x: Tensor, key: str) -> Tensor:
        weight = self.tensors[key] + (1 if self.is_shared else 0)
        eps = self.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    def keys(self, depth: int) -> tuple[str, str, str, str]:
        """Return the keys of the projection, the two norms in front of it, and the last norm."""
        if self.is_shared:
            names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            return tuple(f"mtp.{name}.weight" for name in names)  # type: ignore[return-value]
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        prefix = self.prefix(depth)
        return tuple(f"{prefix}{name}.weight" for name in names)  # type: ignore[return-value]

    def logits(self, input_ids: Tensor, hidden: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Return the logits of each depth; depth k has T - k positions."""
        embeds = self.text.embed_tokens(input_ids)
        result = []
        for depth, block in enumerate(self.blocks, 1):
            projection, norm_e, norm_h, last = self.keys(depth - 1)
            length = input_ids.shape[1] - depth
            parts = self.norm(embeds[:, depth:], norm_e), self.norm(hidden[:, :length], norm_h)
            x = torch.cat(parts, -1) @ self.tensors[projection].T
            positions = torch.arange(length)[None]
            visible = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
            if mask is not None:
                visible = visible & mask[:, None, None, :length].bool()
            additive = torch.zeros(visible.shape, dtype=x.dtype).masked_fill(~visible, -1e30)
            h = block(
                x,
                position_embeddings=self.text.rotary_emb(x, positions),
                attention_mask=additive,
                position_ids=positions,
            )
            normed = self.norm(h, last)
            result.append(self.stock.lm_head(normed))
            hidden = normed if self.is_shared else h
        return result

    def losses(
        self, input_ids: Tensor, labels: Tensor, mask: Tensor | None = None, divisor: Any = None
    ) -> list[Tensor]:
        """Return the loss of each depth."""
        hidden = self.stock.model(input_ids, attention_mask=mask).last_hidden_state
        divisor = (labels[:, 1:] != -100).sum() if divisor is None else divisor
        losses = []
        for depth, logits in enumerate(self.logits(input_ids, hidden, mask), 1):
            targets = labels[:, depth + 1 :]
            if mask is not None:
                targets = targets.masked_fill(mask[:, : targets.shape[1]] == 0, -100)
            logits = logits[:, : targets.shape[1]].flatten(0, 1)
            # In fp64, whereas stock casts logits to fp32.
            total = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
            losses.append(total / divisor)
        return losses
