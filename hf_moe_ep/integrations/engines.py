"""Send the weights of a patched model from TRL to a generation engine.

Stock TRL gathers one parameter at a time and sends it under its name in transformers. Transformers
stacks the experts of a layer in one parameter, which vLLM's loaders of MoE models cannot read. With
PEFT, TRL first merges the adapters into the model, but a sharded model refuses to merge. The
wrappers send the tensors of `hub_tensors` instead, with the adapters merged into copies. The names
of these tensors are the keys of a checkpoint on the hub: each engine maps the keys to its own
parameters, as it does when it loads a checkpoint.

    class of TRL                      engine
    VLLMGeneration (GRPO, RLOO, ..)   vLLM in the same process, or in a server
    OnlineDPOTrainer                  vLLM in the same process, or in a server
    AsyncGRPOTrainer,                 any engine for which `weight_transfer` implements TRL's
    AsyncDistillationTrainer          WeightTransferProtocol; TRL's own class sends to a vLLM server
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.hub.tensors import HubTensors, TensorInfo, hub_tensors
from hf_moe_ep.state import find_state

# This attribute of an object of TRL is True after the object has sent the extra tensors.
_SENT = "_hf_moe_ep_sent"


def iter_named_params(original: Callable[..., Any], self: Any) -> Iterator[tuple[str, Tensor]]:
    """Wrap `VLLMGeneration._iter_named_params`: yield merged tensors under hub names."""
    if find_state(self.model) is None:
        return original(self)
    return _stream(self, self.model)


def _stream(sync: Any, model: Any) -> HubTensors:
    """Stream the weights of a model for `sync`, an object of TRL that sends weights.

    Extra tensors (checkpoints/hub/extra.py) do not change, so they are sent only once, unless the
    engine loses them.
    """
    extra_tensors = not getattr(sync, _SENT, False)
    return hub_tensors(model, merge_adapters=True, extra_tensors=extra_tensors)


def _format_dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def sync_weights(original: Callable[..., None], self: Any) -> None:
    """Wrap `VLLMGeneration.sync_weights`: raise on every rank if one rank fails."""
    if find_state(self.model) is None:
        original(self)
        return
    if self.mode == "colocate" and self.enable_sleep_mode:
        # TRL lets the engine sleep at level 2 after each generation, which discards all weights.
        setattr(self, _SENT, False)
    try:
        if self.mode == "server":
            # Stock would gather every tensor once only to learn its shape.
            self._weight_metadata = [
                (info.key, _format_dtype(info), list(info.shape))
                for info in _stream(self, self.model).metadata()
            ]
        original(self)
        setattr(self, _SENT, True)
    except Exception as error:
        # The iterator of hub_tensors makes the other ranks raise as soon as it is deleted. The
        # stack frames in the traceback keep the iterator alive, so they are cleared.
        for raised in _iterate_causes(error):
            traceback.clear_frames(raised.__traceback__)
        raise


def move_model(original: Callable[..., None], self: Any) -> None:
    """Wrap `OnlineDPOTrainer._move_model_to_vllm`: send merged tensors under hub names."""
    model = self.accelerator.unwrap_model(self.model)
    if find_state(model) is None:
        original(self)
        return
    is_server = self.vllm_mode == "server"
    client = self.vllm_client if is_server and self.accelerator.is_main_process else None
    if not is_server and self.args.vllm_enable_sleep_mode:
        setattr(self, _SENT, False)  # the engine has slept at level 2, which discards all weights
    # Closing the stream after an error makes the other ranks raise, too.
    with contextlib.closing(_stream(self, model)) as stream, _announced_update(client):
        for key, tensor in stream:
            if client is not None:
                client.update_named_param(key, tensor)
            elif not is_server:
                runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
                runner.model.load_weights([(key, tensor)])
    setattr(self, _SENT, True)
    if client is not None:
        client.reset_prefix_cache()
    elif not is_server:
        self.llm.reset_prefix_cache()


def _announced_update(client: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which TRL's server expects one update of the whole model."""
    announce = getattr(client, "weight_update", None)  # TRL before 1.16 has no such method
    return contextlib.nullcontext() if announce is None else announce()


def list_params(original: Callable[..., Any], model: Any) -> Iterator[tuple[str, Tensor]]:
    """Wrap `_iter_vllm_named_params`: list the hub names that a server will receive.

    The tensors are on the meta device. Only rank 0 calls this.
    """
    if find_state(model) is None:
        return original(model)
    infos = hub_tensors(model, merge_adapters=True).metadata_of_rank()
    return ((info.key, torch.empty(info.shape, dtype=info.dtype, device="meta")) for info in infos)


def sync_merged(original: Callable[..., Any], self: Any, t0: float) -> tuple[float, float, float]:
    """Wrap `_sync_weight_merged`: send merged tensors under hub names.

    Returns, as stock does, the times at which the engine was paused, all ranks had arrived, and the
    weights had been sent.
    """
    model = self.accelerator.unwrap_model(self.model)
    if find_state(model) is None:
        return original(self, t0)
    transfer = self.weight_transfer if self.accelerator.is_main_process else None
    if transfer:
        transfer.pause()
    paused = time.time()
    self.accelerator.wait_for_everyone()
    arrived = time.time()
    # Closing the stream after an error makes the other ranks raise, too.
    with contextlib.closing(_stream(self, model)) as stream:
        infos = stream.metadata()
        if transfer:
            _update_tensor_list(transfer, infos)
            transfer.send_weights(stream)
        else:
            for _ in stream:
                pass
    setattr(self, _SENT, True)
    sent = time.time()
    self.accelerator.wait_for_everyone()
    if self.accelerator.is_main_process:
        if transfer:
            transfer.resume()
        self.model_version += 1
        if self.rollout_worker:
            self.rollout_worker.update_model_version(self.model_version)
    return paused, arrived, sent


def _update_tensor_list(transfer: Any, infos: list[TensorInfo]) -> None:
    """Replace the list of tensors that TRL's own client has stored in its first sync."""
    stored = getattr(transfer, "_weight_update_info", None)
    if isinstance(stored, dict):
        stored["names"] = [info.key for info in infos]
        stored["dtype_names"] = [_format_dtype(info) for info in infos]
        stored["shapes"] = [list(info.shape) for info in infos]


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes and contexts, and the members of exception groups among them."""
    pending: list[BaseException | None] = [error]
    visited: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
