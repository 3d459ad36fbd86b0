"""Use our dispatch and experts in transformers' own expert parallelism.

    from transformers.distributed import DistributedConfig

    register_ep_implementation()
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="hf_moe_ep")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

Transformers shards, loads and saves the model, and divides the gradients of experts. This package
sends each token at most once to each rank, and `ops/expert_mlp.py` computes the experts and their
gradients. All other features of this package (LoRA on experts, sequence parallelism, checkpoints
for other layouts) need `patch`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.moe.experts import choose_compute
from hf_moe_ep.moe.layer import compute_and_combine
from hf_moe_ep.upstream.autograd_modes import backward_is_running

NAME = "hf_moe_ep"


def register_ep_implementation() -> None:
    """Register `ep_implementation="hf_moe_ep"` with transformers. A second call has no effect.

    Raises:
        ImportError: the installed transformers has no registry of such implementations.
    """
    import transformers

    try:
        from transformers.distributed.expert_parallel import (
            EPImplementation,
            EPImplementationInterface,
        )
    except ImportError as error:
        raise ImportError(
            f"transformers {transformers.__version__} has no registry of implementations of expert "
            f"parallelism (EPImplementationInterface); install transformers>=5.24, or use patch()"
        ) from error
    # Older versions of transformers lack EPImplementation, so our class is created here.
    implementation = type("HfMoeEp", (_Experts, EPImplementation), {})
    EPImplementationInterface.register(NAME, implementation)


class _Experts:
    """The experts of one layer. Transformers builds and calls objects of this class."""

    num_local_experts: int

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)  # type: ignore[call-arg]  # EPImplementation
        if tp_mesh.size() > 1:
            raise ValueError(
                f"ep_implementation={NAME!r} gives each rank its own batch, but tp_size="
                f"{tp_mesh.size()} ranks share a batch; use tp_size=1, or ep_implementation='auto'"
            )
        self._experts = experts
        self._compute = choose_compute(experts, "auto", recompute=False)
        num_experts = self.num_local_experts * ep_mesh.size()
        self._dispatcher = AllToAll(ep_mesh.get_group(), num_experts)
        self._first_expert = ep_mesh.get_local_rank() * self.num_local_experts
        self._num_calls = 0

    @torch.compiler.disable
    def __call__(self, x_TH: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return each token's weighted sum of expert outputs. Expert ids are global ids."""
        self._num_calls += 1
        tokens = Tokens(x_TH, weights_TK, expert_ids_TK)
        header = Header(
            forward=self._num_calls,
            layer=0,
            training=self._experts.training,
            grad=torch.is_grad_enabled(),
            checkpointed=False,
            recompute=backward_is_running(),
            top_k=expert_ids_TK.shape[1],
            itemsize=tokens.row_dtype.itemsize,
        )
        hidden_bytes = x_TH.shape[1] * tokens.row_dtype.itemsize
        planning = self._dispatcher.start_plan(expert_ids_TK, header, hidden_bytes=hidden_bytes)
        self._dispatcher.prepare(tokens)
        exchanges = planning.finish()
        return compute_and_combine(
            self._experts,
            self._compute,
            exchanges,
            tokens,
            first_expert=self._first_expert,
            grad_scale=1.0,  # transformers configures FSDP2 to divide the gradients of experts
        )
