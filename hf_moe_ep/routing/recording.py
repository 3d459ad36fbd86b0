"""Record the choices of routers as small integers, and copy them to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.moe.recompute import CheckpointedRouting
from hf_moe_ep.ranks.mesh import Stages
from hf_moe_ep.ranks.neighbours import broadcast_tensor
from hf_moe_ep.routing.layers import RoutedLayer, RoutedLayers
from hf_moe_ep.routing.routes import Routes
from hf_moe_ep.routing.sessions import Forward, Session
from hf_moe_ep.sequence.slices import gather_slices
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.autograd_modes import backward_is_running


class Recording(Session):
    """An open `record` block, which replaces the ids of `routes` at the end of each forward."""

    def __init__(self, state: ModelState, layers: RoutedLayers) -> None:
        self._state, self._layers = state, layers
        self._dtype = torch.uint8 if layers.num_experts <= 256 else torch.int16
        self.routes = Routes(
            torch.empty(0, 0, len(layers.keys), layers.top_k, dtype=self._dtype),
            layers.keys,
            num_experts=layers.num_experts,
        )
        self._forward: Forward | None = None
        # The ids of the current forward, by decoder layer.
        self._chosen: dict[int, Tensor] = {}
        # With pipeline stages: the ids of the micro-batches of the current call.
        self._micro_batches: list[Tensor] = []
        # The CUDA event of the last copy to the host, and the number of forwards that have ended.
        self._copied: Any = None
        self._num_forwards = 0

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        # Ranks that share a sequence compare these tensors. If only some of these ranks record, the
        # tensors differ, and every rank raises an error.
        return {"recorded routes": torch.ones(1, dtype=torch.int64, device=device)}

    def begin(self, forward: Forward) -> None:
        self._forward, self._chosen = forward, {}

    def receive_choice(self, layer: RoutedLayer, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        checkpointed: CheckpointedRouting | None = self._state.checkpointed_routing
        key = layer.decoder_layer
        if backward_is_running() or (checkpointed is not None and checkpointed.is_recompute):
            return weights_TK
        if checkpointed is not None and not self._state.exchanges_rows:
            checkpointed.keep(layer.index, ids_TK.detach(), None)
        if self._forward is None:
            raise ValueError(
                f"{layer.name} ran outside of a forward of the whole model; "
                f"call the model itself inside of record()"
            )
        if key in self._chosen:
            raise ValueError(
                f"cannot record {layer.name}: its experts ran twice in one forward; recording "
                f"needs one choice per token"
            )
        if ids_TK.shape[0] != self._forward.rows:
            raise ValueError(
                f"cannot record {layer.name}: its experts got {ids_TK.shape[0]} tokens, but the "
                f"batch has {self._forward.rows}; recording needs one choice per token"
            )
        self._chosen[key] = ids_TK.detach().to(self._dtype)
        return weights_TK

    def end(self, completed: bool) -> None:
        """Gather the slices of the ranks that share a sequence, and start the copy to the host."""
        forward, self._forward = self._forward, None
        if forward is None or not completed:
            return
        keys = self._layers.own_keys
        missing = [key for key in keys if key not in self._chosen]
        if missing:
            raise ValueError(f"decoder layers {missing} did not run in the recorded forward")
        no_layers_T0K = torch.empty(
            forward.rows, 0, self._layers.top_k, dtype=self._dtype, device=forward.device
        )
        chosen = [self._chosen.pop(key).unsqueeze(1) for key in keys]
        # A pipeline stage may have no MoE layer, and torch.cat needs at least one tensor.
        ids_TLK = torch.cat([no_layers_T0K, *chosen], dim=1)
        ids = ids_TLK.unflatten(0, (forward.batch, forward.tokens))
        if forward.part is not None:
            with torch.no_grad():
                # The ids are gathered as bytes, because NCCL has no int16.
                as_bytes = ids.view(torch.uint8)
                gathered = gather_slices(as_bytes.flatten(2), forward.part)
                ids = gathered.unflatten(2, as_bytes.shape[2:]).contiguous().view(self._dtype)
        if self._state.stage is not None:
            self._micro_batches.append(ids)
            return
        self._finish(ids)

    def begin_batch(self, num_rows: int, num_tokens: int) -> None:
        self._micro_batches = []

    def end_batch(self, stages: Stages, device: torch.device) -> None:
        """Send the ids of each stage's layers to the ranks of all stages."""
        own_ids = torch.cat(self._micro_batches)
        self._micro_batches = []
        group = stages.column.get_group()
        by_stage = []
        for stage in range(stages.size):
            # The ids are sent as bytes, because NCCL has no int16.
            as_bytes = own_ids.view(torch.uint8) if stage == stages.index else None
            received = broadcast_tensor(as_bytes, stages.find_rank_in(stage), group, device)
            by_stage.append(received.view(self._dtype))
        self._finish(torch.cat(by_stage, dim=2))

    def _finish(self, ids: Tensor) -> None:
        """Replace the recorded routes by the ids of a whole batch."""
        self.routes.ids = self._to_host(ids)
        self._num_forwards += 1

    def _to_host(self, ids: Tensor) -> Tensor:
        if not ids.is_cuda:
            return ids
        host = torch.empty(ids.shape, dtype=ids.dtype, device="cpu", pin_memory=True)
        host.copy_(ids, non_blocking=True)
        self._copied = torch.cuda.Event()
        # The copy runs on a stream of the ids' GPU, which may not be the current GPU.
        self._copied.record(torch.cuda.current_stream(ids.device))
        return host

    def close(self) -> None:
        """Wait for the last copy to the host.

        Raises:
            ValueError: no forward ended while the session was open.
        """
        if not self._num_forwards:
            raise ValueError(
                "nothing was recorded: no forward of the model ended inside of record()"
            )
        if self._copied is not None:
            self._copied.synchronize()
