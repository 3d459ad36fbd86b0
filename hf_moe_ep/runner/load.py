"""Load one model for `hf-moe-ep run`: check it before reading weights, and read few weights.

    stock         every process reads the whole model into its memory or onto its GPU
    this package  every process reads all weights except the decoder layers; when the model is
                  sharded, each rank reads its shards of the layers (`checkpoints/hub/unread.py`)

Stock's from_pretrained still does the work: it builds the model, renames, converts, casts and ties
tensors, adds missing heads, and loads the embeddings and the head, which trainers may resize. Only
the tensors of the layers stay on the meta device. Stock reads all weights if `--stock-load` is set,
if there is a single process, or if this package could not read the layers' tensors later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hf_moe_ep.architectures import Parts, find_block
from hf_moe_ep.checkpoints.hub.extra import remember_files
from hf_moe_ep.checkpoints.hub.unread import Unread, find_unread, finish_loading
from hf_moe_ep.config import ParallelConfig, RunOptions
from hf_moe_ep.derive import has_experts
from hf_moe_ep.moe.stacked import changes_parameters
from hf_moe_ep.patch import check_loadable, patch
from hf_moe_ep.ranks.all_ranks import get_world_size_of_launch
from hf_moe_ep.state import ModelState, patched_state
from hf_moe_ep.upstream.loading import OnMeta, WeightFiles
from hf_moe_ep.upstream.modules import explain_moves


@dataclass
class Load:
    """One call of from_pretrained.

    Attributes:
        config, options: the settings of the run.
        files: the safetensors files of the weights; empty if the weights have another source.
        unread: the parameters that stay on the meta device; None if stock loads all parameters.
        why_stock: the reason why stock loads all parameters although there are several processes.
    """

    config: ParallelConfig
    options: RunOptions
    files: Sequence[Path] = ()
    unread: Unread | None = None
    why_stock: str = ""

    def patch(self, model: nn.Module) -> ModelState:
        """Patch the model that from_pretrained has returned. Returns the state of the model."""
        unread = None if self.unread is None else finish_loading(model, self.unread)
        if self.files:
            remember_files(model, self.files)
        patch(model, self.config)
        state = patched_state(model)
        state.adapts_experts = self.options.lora_experts
        state.is_reported = self.options.report
        if unread is not None:
            state.unread = unread
            explain_moves(model, state.replace, state.make_never_sharded_error)
        return state

    def choose(self, model: nn.Module, weights: WeightFiles) -> OnMeta | None:
        """Check the model that from_pretrained has built, and choose its unread parameters.

        Raises:
            ValueError: the model cannot be patched with these settings.
        """
        block = find_block(model)
        if not has_experts(model) and block is None:
            return None
        parts = check_loadable(model, self.config)
        self.files = weights.safetensors
        if get_world_size_of_launch() == 1:
            return None
        self.why_stock = "--stock-load" if self.options.stock_load else weights.problem
        if block is not None and changes_parameters(model, block):
            self.why_stock = self.why_stock or "its experts are stacked after they are loaded"
        if parts.tied_modules:
            self.why_stock = self.why_stock or "two lists of its layers share their parameters"
        if self.why_stock:
            return None
        module = _find_layer_list(model, parts)
        names = [name for name, _ in model.named_parameters() if name.startswith(f"{module}.")]
        try:
            self.unread = find_unread(model, weights.files, parts.plan, names)
        except ValueError as error:
            self.why_stock = str(error)
            return None
        tensors = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for key, tensor in self.unread.file_tensors.items()
        }
        return OnMeta(module, tensors)


def _find_layer_list(model: nn.Module, parts: Parts) -> str:
    """Return the name of the nn.ModuleList that contains the decoder layers."""
    first = next(name for name, module in model.named_modules() if module is parts.layers[0])
    return first.rpartition(".")[0]
