"""`compile_layers`: compile every decoder layer, and call its MoE block without tracing it.

torch.compile traces a function into graphs, and its backend turns each graph into fewer and larger
kernels. The sizes of a dispatch are known only at run time, so a MoE block with expert parallelism
cannot be traced. It is left out of the graphs as a whole, with its router:

    decoder layer   norm -> attention -> add -> norm -> MoE block -> add
                    \\__________ graph 1 __________/    not traced    graph 2

    module                          how it runs in training
    decoder layer                   compiled
    block of a vision tower         compiled, without its attention
    MoE block                       not traced; with ep_size 1 traced, if nothing prevents it
    shared experts in such a block  compiled by themselves
    mixers (delta nets, Mamba)      not traced
    cross-entropy of a fused loss   compiled, without the head (`loss/chunks.py`)
    the rest of the model           not compiled

Layers of one kind share their graphs: their classes are the same, and the classes of their children
are the same. The length of sequences is a variable of the graphs (`dynamic=True`). In evaluation,
or if a layer is given a KV cache, layers run without torch.compile.

A compiled module gets a subclass of its class, whose forward calls the compiled function.
Transformers checkpoints this forward like any other, so a recompute in backward calls the compiled
function as well, and the hooks of FSDP2 stay outside.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_moe_ep.architectures import find_parts
from hf_moe_ep.compiled.function import CompiledFunction
from hf_moe_ep.compiled.options import check_compile_kwargs
from hf_moe_ep.compiled.subclasses import (
    check_class_forward,
    exclude_from_tracing,
    get_inner_forward,
    get_stock_class,
    override_forward,
)
from hf_moe_ep.loss.chunks import sum_cross_entropy
from hf_moe_ep.moe.counting import reserve_counts
from hf_moe_ep.moe.recompute import CheckpointedRouting
from hf_moe_ep.moe.stacked import StackedExperts
from hf_moe_ep.mtp_head import find_head
from hf_moe_ep.plan import as_pattern, matches
from hf_moe_ep.state import (
    STATE,
    ModelState,
    MoELayer,
    PackageHook,
    get_computing_device,
    patched_state,
)
from hf_moe_ep.upstream.adapters import wraps_for_adapters
from hf_moe_ep.upstream.captured_outputs import (
    list_collected_outputs,
    with_collector,
    without_collector,
)
from hf_moe_ep.upstream.code import takes_argument
from hf_moe_ep.upstream.models import CACHE_NAMES, find_base_model_prefix
from hf_moe_ep.upstream.module_names import get_stock_name
from hf_moe_ep.upstream.modules import list_forward_hooks

_logger = logging.getLogger("hf_moe_ep")

# The attribute of a compiled module that holds the result of torch.compile.
COMPILED = "_hf_moe_ep_compiled"
# The attribute of a MoE block that holds the state of its MoE layer.
MOE_LAYER = "_hf_moe_ep_layer"
# Outputs that transformers collects by hooks on decoder layers and on routers. If router logits are
# collected, MoE blocks are not traced, so all these hooks run outside of traced code.
_ROUTER_LOGITS = "router_logits"
_COLLECTED_OUTSIDE = {"hidden_states", _ROUTER_LOGITS}
# The arguments of a decoder layer that take a KV cache.
_CACHES = (*CACHE_NAMES, "past_key_value", "layer_past")


def compile_layers(model: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the layers of a patched model in place, and return the model.

        patch(model)
        ...                                          # shard the model
        compile_layers(model, mode="max-autotune-no-cudagraphs")

    `patch(model, compile_layers=True)` and `apply_ep_fsdp2(model, compile_layers=True)` call this
    function themselves. With `ep_size=1` they also put the experts into the FSDP2 units of their
    layers, so that a layer becomes a single graph.

    Args:
        model: a patched model, sharded or not.
        compile_kwargs: keyword arguments of `torch.compile`. `dynamic` is True by default.

    A second call replaces the arguments of the first one.

    Raises:
        ValueError: the model is not patched; an argument, backend or mode is unknown; the backend
            uses CUDA graphs; another library has replaced the forward of a layer; the model's plan
            has a forward for its MoE blocks.
    """
    state = patched_state(model)
    options = check_compile_kwargs(compile_kwargs)
    root = next(m for m in model.modules() if isinstance(vars(m).get(STATE), ModelState))
    return compile_parts(root, state, options)


def compile_model(model: nn.Module, **compile_kwargs: Any) -> None:
    """Compile a patched model. This function replaces the method `compile` of the model.

    In one process the stock method compiles the whole model. The hooks of a sharded model would
    break its graph into pieces, so only the layers of such a model are compiled.
    """
    state = patched_state(model)
    if state.meshes is None and not state.config.needs_sharding:
        nn.Module.compile(model, **compile_kwargs)
    else:
        compile_layers(model, **compile_kwargs)


def compile_parts(root: nn.Module, state: ModelState, options: dict[str, Any]) -> nn.Module:
    """Compile the layers below `root` with arguments that `check_compile_kwargs` has returned."""
    modules = _find_modules(root)
    plan, vision = state.plan, state.plan.vision
    layers = _select(modules, plan.layers) | _select(modules, plan.tied_layers)
    towers = {} if vision is None else _select(modules, vision.blocks)
    attention = {} if vision is None else _select(modules, vision.attention)
    blocks, shared = _find_blocks(modules, layers, state)
    refuse_plan_forwards(modules.values(), plan.model_type)
    for name, module in (layers | towers | attention | shared).items():
        check_class_forward(name, module)
    for name, (module, _) in blocks.items():
        check_class_forward(name, module)
    kinds: dict[Any, _Kind] = {}
    moe_layers = dict(blocks.values())
    for name, module in (layers | towers | shared).items():
        inside = [moe_layers[child] for child in module.modules() if child in moe_layers]
        by_tracing = []
        for is_traced in (False, True):
            children = [type(child) for child in module.children()]
            key = (type(module), *children, is_traced and bool(inside))
            if key not in kinds:
                kinds[key] = _Kind(get_stock_class(type(module)), options)
            by_tracing.append(kinds[key])
        call = partial(_call_compiled, by_tracing, inside, state, name)
        state.replace(module, COMPILED, call)
    if state.compile_options is None:
        _leave_out_mixers(root)
        override_forward((layers | towers | shared).values(), _run_layer)
        override_forward(attention.values(), _call_untraced)
        for module, layer in blocks.values():
            state.replace(module, MOE_LAYER, layer)
        override_forward((module for module, _ in blocks.values()), _run_block)
        state.is_counted = torch.tensor(False, device="cpu")
        for caller in _find_callers(root):
            begin = BeginForward(state, caller, list(blocks.values()))
            caller.register_forward_pre_hook(begin, with_kwargs=True)
    state.compile_options = options
    state.compiled_cross_entropy = CompiledFunction(sum_cross_entropy, options)
    return root


def _find_callers(root: nn.Module) -> list[nn.Module]:
    """Return the root and its decoder, which some trainers call without the root.

    TRL's distillation trainers call only the decoder (trl/trainer/distillation_trainer.py,
    `_get_last_hidden_state`).
    """
    prefix = find_base_model_prefix(root)
    return [root, getattr(root, prefix)] if prefix else [root]


def refuse_plan_forwards(modules: Iterable[nn.Module], model_type: str) -> None:
    """Raise ValueError if the forward of an MoE block is part of a plan (`MoEBlock.forward`)."""
    for module in modules:
        if isinstance(module, StackedExperts) and module.description.forward is not None:
            raise ValueError(
                f"compile_layers cannot compile {model_type}: its plan has a forward for its MoE "
                f"blocks ({type(module.block).__name__}) that is not the forward of their class; "
                f"leave out compile_layers"
            )


class _Kind(CompiledFunction):
    """The compiled forward of a stock class of layers, which all layers of one kind share.

    Layers whose MoE blocks are traced and layers whose blocks are not traced are different kinds,
    so they never share graphs. torch.compile itself does not notice that a block must not be traced
    before it calls the block.
    """

    def __init__(self, layer_class: type, options: dict[str, Any]) -> None:
        super().__init__(get_inner_forward(layer_class), options)
        self._layer_class = layer_class

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kind, (self._layer_class, self.options)


def _leave_out_mixers(root: nn.Module) -> None:
    """Let torch.compile call mixers without tracing them.

    A mixer runs kernels that torch.compile cannot trace, or a loop over the blocks of a sequence,
    which would make new graphs for each length.
    """
    mixers: dict[nn.Module, str] = {}
    for mixers_of_layer in find_parts(root).mixers:
        mixers |= {module: name for name, module in mixers_of_layer.items()}
    exclude_from_tracing(mixers)
    if mixers:
        kinds = {f"{as_pattern(name)} ({type(module).__name__})" for module, name in mixers.items()}
        _logger.info(
            "compiled layers call %s without tracing, because torch.compile cannot trace the "
            "kernels of a mixer, and would compile its loop over a sequence for each length",
            ", ".join(sorted(kinds)),
        )


class BeginForward(PackageHook):
    """Pre-forward hook of the root: decides whether the graphs of this forward include MoE blocks.

    A block is traced if this rank computes all experts, no module inside of the block is an FSDP2
    unit or has an adapter or a hook, and no `record` or `replay` is open.

    In training the hook also passes `use_cache=False`, unless the caller passes `use_cache` or a
    cache: a model whose config says `use_cache=True` would fill a KV cache that training never
    reads, and a layer that is given a cache is not compiled.

    The decoder has such a hook too, for forwards that do not begin at the root.
    """

    def __init__(
        self, state: ModelState, caller: nn.Module, blocks: list[tuple[nn.Module, MoELayer]]
    ) -> None:
        self.state, self._blocks = state, blocks
        self._takes_use_cache = takes_argument(caller, "use_cache")

    @torch.compiler.disable
    def __call__(
        self, caller: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        state = self.state
        self._choose_traced_blocks()
        assert state.is_counted is not None
        state.is_counted.fill_(torch.is_grad_enabled())
        if not caller.training:
            return None
        if state.blocks_are_traced:
            # Outside of `torch.inference_mode`, a tensor that was made in it cannot be changed.
            with torch.inference_mode(False):
                reserve_counts(state, get_computing_device(caller))
        given = any(kwargs.get(name) is not None for name in ("use_cache", *_CACHES))
        if given or not self._takes_use_cache:
            return None
        return args, kwargs | {"use_cache": False}

    def _choose_traced_blocks(self) -> None:
        state = self.state
        state.blocks_are_traced = state.routing is None and (
            state.meshes is None or state.experts_in_layer_units
        )
        for block, layer in self._blocks:
            layer.can_be_traced = layer.compute is not None and not any(
                list_forward_hooks(module) or wraps_for_adapters(module)
                for module in block.modules()
            )


def _find_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by stock name, without wrappers.

    A wrapper has the stock name of the module inside it, which `named_modules` lists later. The
    modules of a head for multi-token prediction are left out, because they are not compiled.
    """
    head_modules = set() if (head := find_head(root)) is None else set(head.modules())
    named = root.named_modules()
    return {get_stock_name(name): module for name, module in named if module not in head_modules}


def _select(modules: dict[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    return {name: m for name, m in modules.items() if pattern and matches(pattern, name)}


def _find_blocks(
    modules: dict[str, nn.Module], layers: dict[str, nn.Module], state: ModelState
) -> tuple[dict[str, tuple[nn.Module, MoELayer]], dict[str, nn.Module]]:
    """Return the MoE blocks by name, each with its MoE layer, and the shared experts by name.

    If a decoder layer itself calls its router and its experts, each of these is treated like a MoE
    block.
    """
    routers = _select(modules, state.plan.router)
    blocks: dict[str, tuple[nn.Module, MoELayer]] = {}
    shared: dict[str, nn.Module] = {}
    for name, module in modules.items():
        layer = vars(module).get(STATE)
        if not isinstance(layer, MoELayer):
            continue
        parent = name.rpartition(".")[0]
        if parent in layers:
            inside = [router for router in routers if router.startswith(f"{parent}.")]
            blocks |= {part: (modules[part], layer) for part in (*inside, name)}
            continue
        blocks.setdefault(parent, (modules[parent], layer))
        for child_name, child in modules.items():
            is_child = child_name.rpartition(".")[0] == parent
            is_routed = any(STATE in vars(m) for m in child.modules()) or child_name in routers
            if is_child and not is_routed and any(child.children()):
                shared[child_name] = child
    return blocks, shared


def _run_layer(stock: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module compiled in training, and by its stock forward otherwise.

    The stock forward also runs if transformers collects outputs of modules inside the layer.
    """
    if torch.compiler.is_compiling():
        return stock(module, *args, **kwargs)  # shared experts, in a layer that is traced
    has_cache = any(kwargs.get(name) is not None for name in _CACHES)
    if module.training and has_cache and torch.is_grad_enabled():
        warnings.warn(
            "a layer was given a KV cache in training, so it runs without torch.compile; call the "
            "model without use_cache=True and without a cache",
            stacklevel=2,
        )
    collects_inside = not list_collected_outputs() <= _COLLECTED_OUTSIDE
    if not module.training or has_cache or collects_inside:
        return stock(module, *args, **kwargs)
    return vars(module)[COMPILED](module, *args, **kwargs)


def _call_compiled(
    by_tracing: Sequence[_Kind],
    moe_layers: list[MoELayer],
    state: ModelState,
    name: str,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the function that torch.compile has made for the layers of this module's kind.

    `by_tracing` has two kinds: layers whose MoE blocks are not traced, and layers whose blocks are.
    """
    if state.blocks_are_traced and _ROUTER_LOGITS in list_collected_outputs():
        # transformers has registered its hooks in this forward, after `BeginForward`.
        state.blocks_are_traced = False
    kind = by_tracing[all(map(_is_traced, moe_layers))]
    with without_collector():
        return kind.run(f"{name} ({type(module).__name__})", module, *args, **kwargs)


@torch.compiler.disable
def _call_untraced(stock: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    return stock(module, *args, **kwargs)


def _run_block(stock: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a MoE block; torch.compile traces it only if `BeginForward` allows it."""
    layer: MoELayer = getattr(module, MOE_LAYER)
    if _is_traced(layer):
        return stock(module, *args, **kwargs)
    return _call_block_untraced(stock, module, *args, **kwargs)


def _is_traced(layer: MoELayer) -> bool:
    state = layer.model
    return state.blocks_are_traced and layer.can_be_traced and state.checkpointed_routing is None


@torch.compiler.disable
def _call_block_untraced(stock: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    checkpointed: CheckpointedRouting | None = getattr(module, MOE_LAYER).model.checkpointed_routing
    with (
        with_collector(),
        nullcontext() if checkpointed is None else checkpointed.repeating_choice(),
    ):
        return stock(module, *args, **kwargs)
