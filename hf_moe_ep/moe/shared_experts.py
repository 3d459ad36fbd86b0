"""Compute the shared experts of a MoE block while the routed experts' results are sent back.

Shared experts compute every token, so they need nothing from other ranks. Stock code calls them
before or after the routed experts, and adds up both results. If tokens are sent to other ranks
(ep_size or etp_size > 1), both orders become

    dispatch  >  routed experts  >  start to send results  >  shared experts  >  wait for results

and in backward, the shared experts' gradients are computed while the gradients of the results are
sent. The stock forward of the block still runs:

    stock calls the shared experts first    The call returns a `Deferred`, which computes its value
                                            when the layer asks for it, or when it is first read.
    stock calls the routed experts first    The layer computes the shared experts on the block's
                                            input. The later stock call returns this result if the
                                            input is its argument, and computes otherwise.

If the block or its shared experts have full backward hooks, the shared experts run where stock runs
them, because the autograd nodes of inputs and outputs call such hooks in stock's order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_moe_ep.plan import ModelPlan, matches
from hf_moe_ep.state import STATE, ModelState, MoELayer, PackageHook
from hf_moe_ep.upstream.code import takes_one_argument
from hf_moe_ep.upstream.dispatch_modes import get_storage_id, make_tensor_without_memory, replace_in
from hf_moe_ep.upstream.module_names import get_stock_name
from hf_moe_ep.upstream.modules import has_backward_hooks
from hf_moe_ep.upstream.replaced_forwards import iterate_forward_functions
from hf_moe_ep.upstream.sharded_models import count_writes

# The names of shared experts in transformers begin with this prefix.
_PREFIX = "shared_expert"

# The autograd nodes of `view` and `reshape`, by which blocks flatten their input.
_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}


class Deferred(Tensor):
    """A tensor whose values `compute` computes when the tensor is read, or `value` is called."""

    @staticmethod
    def __new__(cls, compute: Callable[[], Tensor]) -> Deferred:
        return make_tensor_without_memory(cls)

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        super().__init__()
        self._compute: Callable[[], Tensor] | None = compute
        self._computed: Tensor | None = None

    def value(self) -> Tensor:
        """Return the computed tensor."""
        if self._computed is None:
            assert self._compute is not None
            self._computed, self._compute = self._compute(), None
        return self._computed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = replace_in((args, kwargs or {}), Deferred, Deferred.value)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, *_: Any, **__: Any
    ) -> Any:
        raise AssertionError(f"{func} got a {cls.__name__} without its __torch_function__")


class SharedExperts:
    """Replaces the forward of the shared experts of one MoE block, and decides when it runs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The function with which another library, such as Liger, has replaced the forward.
        self._replaced = getattr(vars(module).get("forward"), "__func__", None)
        # The block's input, until its routed experts run; and the `Deferred` that stock got.
        self._input: Tensor | None = None
        self._deferred: Deferred | None = None
        # An input, how often it had been written in place, and the shared experts' result for it.
        self._computed: tuple[Tensor, tuple[int, ...], Tensor] | None = None

    @property
    def num_values(self) -> int:
        """The number of values in all parameters."""
        return sum(parameter.numel() for parameter in self._module.parameters())

    def is_called_by(self, block: nn.Module) -> bool:
        """Return True if the block calls `forward` of this object.

        Liger may set its own forward on shared experts, and PEFT's `modules_to_save` trains a copy
        of them.
        """
        is_child = any(child is self._module for child in block.children())
        return is_child and SharedExperts.forward in iterate_forward_functions(self._module)

    def have_backward_hooks(self, block: nn.Module) -> bool:
        """Return True if backward calls hooks of the shared experts or of their block."""
        return has_backward_hooks(self._module) or has_backward_hooks(block)

    def begin(self, block_input: Tensor | None) -> None:
        """Begin a forward of the block. With None, shared experts run where stock runs them.

        Under `torch.inference_mode` they always run there, because its tensors do not count how
        often they are written.
        """
        if block_input is not None and block_input.is_inference():
            block_input = None
        self._input, self._deferred, self._computed = block_input, None, None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result if it is computed already, otherwise a `Deferred` where possible."""
        if args or kwargs or torch.compiler.is_compiling():
            return self._run(x, *args, **kwargs)
        if self._computed is not None:
            return self._take_result(x)
        if self._input is None or self._deferred is not None:
            return self._run(x)
        self._deferred = Deferred(lambda: self._run(x))
        return self._deferred

    def run(self) -> None:
        """Compute the shared experts. The layer calls this while results are sent back."""
        x, deferred = self._input, self._deferred
        self._input = self._deferred = None
        if deferred is not None:
            deferred.value()
        elif x is not None:
            self._computed = x, count_writes(x), self._run(x)

    def _take_result(self, x: Tensor) -> Tensor:
        """Return the result for the stock call's argument `x`; compute it if `x` is not the input.

        The stored result is dropped, because it would keep the autograd graph of the layer alive.
        """
        assert self._computed is not None
        (known, version, out), self._computed = self._computed, None
        is_input = _same_values(x, known) and _passes_gradient(x, known)
        if is_input and count_writes(known) == version:
            return out.view(x.shape)
        warnings.warn(
            f"{type(self._module).__name__} was computed twice, because its block gives it another "
            f"tensor than its own input; the results are right, but slow. Please report this model",
            stacklevel=2,
        )
        return self._run(x)

    def _run(self, *args: Any, **kwargs: Any) -> Tensor:
        # `compile_layers` changes the class after `__init__`.
        forward = self._replaced or type(self._module).forward
        return forward(self._module, *args, **kwargs)


class BeginBlock(PackageHook):
    """Pre-forward hook of a MoE block: passes the block's input to its shared experts."""

    def __init__(self, shared: SharedExperts) -> None:
        self._shared = shared

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        x = args[0] if args else kwargs.get("hidden_states")
        takes_part = self._shared.is_called_by(block) and not self._shared.have_backward_hooks(
            block
        )
        self._shared.begin(x if takes_part and isinstance(x, Tensor) else None)


class EndBlock(PackageHook):
    """Forward hook of a MoE block, also after an error: drops the tensors of the forward."""

    def __init__(self, shared: SharedExperts) -> None:
        self._shared = shared

    def __call__(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._shared.begin(None)


def attach_shared_experts(root: nn.Module, state: ModelState) -> None:
    """Let the shared experts of every MoE block run while results are sent back.

    Results are sent back if ep_size or etp_size is more than 1.
    """
    if (state.config.ep_size or 1) * (state.config.etp_size or 1) == 1:
        return
    modules = {get_stock_name(name): module for name, module in root.named_modules()}
    for name, module in modules.items():
        layer = vars(module).get(STATE)
        block = name.rpartition(".")[0]
        if isinstance(layer, MoELayer) and not matches(state.plan.layers, block):
            shared = _find_shared(modules, block, state.plan)
            if shared is not None:
                layer.shared = SharedExperts(shared)
                state.replace(shared, "forward", layer.shared.forward)
                modules[block].register_forward_pre_hook(BeginBlock(layer.shared), with_kwargs=True)
                modules[block].register_forward_hook(EndBlock(layer.shared), always_call=True)


def _find_shared(modules: dict[str, nn.Module], block: str, plan: ModelPlan) -> nn.Module | None:
    """Return the shared experts of a block if hidden states are their only argument, or None."""
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        is_shared = parent == block and child.startswith(_PREFIX) and any(module.children())
        if is_shared and takes_one_argument(module) and not matches(plan.router, name):
            return module
    return None


def _same_values(x: Tensor, known: Tensor) -> bool:
    """Return True if both tensors are contiguous and share the same memory in the same dtype."""
    return (
        get_storage_id(x.untyped_storage()) == get_storage_id(known.untyped_storage())
        and x.storage_offset() == known.storage_offset()
        and x.numel() == known.numel()
        and x.dtype == known.dtype
        and x.shape[-1:] == known.shape[-1:]
        and x.is_contiguous()
        and known.is_contiguous()
    )


def _passes_gradient(x: Tensor, known: Tensor) -> bool:
    """Return True if `x` is `known` or its view, so that the gradient of `x` reaches `known`.

    The same memory would not prove this: an autograd function may return its input, but change the
    gradient.
    """
    if x is known or not torch.is_grad_enabled():
        return True
    if not (x.requires_grad and known.requires_grad):
        return x.requires_grad == known.requires_grad
    edge: tuple[Any, int] = get_gradient_edge(x)[:2]
    known_edge = get_gradient_edge(known)[:2]
    while edge != known_edge and edge[0].name() in _VIEWS:
        edge = edge[0].next_functions[0]
    return edge == known_edge
