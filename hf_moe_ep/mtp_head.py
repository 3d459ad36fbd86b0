"""Define the modules of a head for multi-token prediction (MTP), in two layouts of checkpoints.

Depth k of a head predicts the token that is k + 1 positions ahead. It joins the hidden state of a
position with the embedding of the token that is k positions ahead, and runs one decoder layer
(DeepSeek-V3, arXiv 2412.19437, section 2.2; `embed` is the embedding and `head` the output head of
the main model):

    x_i    = projection([norm_e(embed(t_{i+k})); norm_h(h_i^{k-1})])
    h_i^k  = layer_k(x_i)                     h_i^0 is the output of the model's final norm
    logits = head(norm(h_i^k))                of the token t_{i+k+1}

Checkpoints store heads in two layouts ({n} is the number of decoder layers of the main model):

    shared projection (Qwen3-Next, 3.5)  mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden,
                                         mtp.layers.0, mtp.norm; depth 2 gets norm(h_i^1)
    own projections (DeepSeek-V3, GLM)   model.layers.{n}, and in it eh_proj, enorm, hnorm and
                                         shared_head.norm; depth 2 gets h_i^1

In the second layout a checkpoint also has copies of embedding and output head (`MtpHead.copies`).
The head is the child `MTP_HEAD` of the causal language model:

    name of a parameter                               key in checkpoints
    mtp.layers.0.mlp.gate.weight                      mtp.layers.0.mlp.gate.weight
    mtp.model.layers.61.mtp_block.mlp.gate.weight     model.layers.61.mlp.gate.weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MakeNorm = Callable[[], nn.Module]


class MtpHead(nn.Module):
    """A head for multi-token prediction.

    Attributes:
        copies: checkpoints of some heads repeat weights of the main model. This dict maps the key
            of each repeated weight to the name of the weight in a stock model.
    """

    copies: Mapping[str, str]

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layer of each depth."""
        raise NotImplementedError

    def join(self, depth: int, embeds_BSH: Tensor, hidden_BSH: Tensor) -> Tensor:
        """Return the input of the decoder layer of a depth, where the first depth is 0."""
        raise NotImplementedError

    def finish(self, depth: int, hidden_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the output head, and the hidden states for the next depth.

        `hidden_BSH` is the output of the decoder layer of this depth.
        """
        raise NotImplementedError

    def forward(
        self,
        hidden_BSH: Tensor,
        embeds: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Tensor]:
        """Return for each depth the input of the output head, (B, S, H).

        Args:
            hidden_BSH: the output of the model's final norm.
            embeds: for each depth k, counted from 1, the embeddings of the tokens k positions
                ahead.
            args, kwargs: the other arguments of a decoder layer.
        """
        outputs = []
        for depth, embeds_BSH in enumerate(embeds):
            x = self.join(depth, embeds_BSH, hidden_BSH)
            output, hidden_BSH = self.finish(depth, self.blocks[depth](x, *args, **kwargs))
            outputs.append(output)
        return outputs


class SharedProjectionHead(MtpHead):
    """A head whose depths share the projection and the norms, as in Qwen3-Next and Qwen3.5."""

    def __init__(self, blocks: Iterable[nn.Module], hidden_size: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.copies = {}
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.pre_fc_norm_embedding = make_norm()
        self.pre_fc_norm_hidden = make_norm()
        self.layers = nn.ModuleList(blocks)
        self.norm = make_norm()

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def join(self, depth: int, embeds_BSH: Tensor, hidden_BSH: Tensor) -> Tensor:
        parts = self.pre_fc_norm_embedding(embeds_BSH), self.pre_fc_norm_hidden(hidden_BSH)
        return self.fc(torch.cat(parts, -1))

    def finish(self, depth: int, hidden_BSH: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden_BSH)
        return normed, normed


class OwnProjectionHead(MtpHead):
    """A head whose depths have projections and norms of their own, as in DeepSeek-V3 and GLM-4.5.

    Args:
        blocks: the decoder layers.
        first: the number of decoder layers of the main model.
        embedding, head: the names, in a stock model, of the weights of the embedding and the output
            head. Checkpoints repeat both weights in every layer of the MTP head.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        hidden_size: int,
        make_norm: MakeNorm,
        *,
        first: int,
        embedding: str,
        head: str,
    ) -> None:
        super().__init__()
        depths = [_Depth(block, hidden_size, make_norm) for block in blocks]
        layers = {str(first + index): depth for index, depth in enumerate(depths)}
        self.model = nn.ModuleDict({"layers": nn.ModuleDict(layers)})
        self.copies = {}
        for number in layers:
            self.copies[f"model.layers.{number}.embed_tokens.weight"] = embedding
            self.copies[f"model.layers.{number}.shared_head.head.weight"] = head

    @property
    def _depths(self) -> list[_Depth]:
        layers: Any = self.model["layers"]
        return list(layers.values())

    @property
    def blocks(self) -> list[nn.Module]:
        return [depth.mtp_block for depth in self._depths]

    def join(self, depth: int, embeds_BSH: Tensor, hidden_BSH: Tensor) -> Tensor:
        own = self._depths[depth]
        return own.eh_proj(torch.cat([own.enorm(embeds_BSH), own.hnorm(hidden_BSH)], -1))

    def finish(self, depth: int, hidden_BSH: Tensor) -> tuple[Tensor, Tensor]:
        return self._depths[depth].shared_head["norm"](hidden_BSH), hidden_BSH


class _Depth(nn.Module):
    """The modules of one depth of an `OwnProjectionHead`."""

    def __init__(self, block: nn.Module, hidden_size: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.enorm = make_norm()
        self.hnorm = make_norm()
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.mtp_block = block
        self.shared_head = nn.ModuleDict({"norm": make_norm()})


def find_head(model: nn.Module) -> MtpHead | None:
    """Return the head for multi-token prediction; None if the model, maybe wrapped, has none."""
    return next((module for module in model.modules() if isinstance(module, MtpHead)), None)
