"""`StackedExperts`: the experts of a block that does not use transformers' experts interface.

A plan describes such a block (`plan.MoEBlock`). `patch` first calls `stack_experts`, which puts a
`StackedExperts` module into each block of the model; `unstack_experts` restores the stock block.
The module has the flags of the interface and stacked weights, so all other code treats it like an
experts module of transformers.

If a parameter of the stock block already is a stacked weight, both modules share the parameter.
Otherwise the weight is stacked from the stock parameters (`plan.WeightSource`). The stock
parameters are then placeholders on the meta device, until `unstack_experts` computes them from the
stacked weight:

    DBRX, E = 4        stock                      stacked
                       experts.mlp.w1 [4F, H]     experts.gate_up_proj [4, 2F, H]
                       experts.mlp.v1 [4F, H]
                       experts.mlp.w2 [4F, H]     experts.down_proj    [4, H, F]

Hub checkpoints have the stock parameters. `make_stock_tensors` computes them from the stacked
weights by operations that `checkpoints/hub/traced.py` can trace, so the hub's layout is derived as
for every other model. The state dict of a model that is not sharded has the stock parameters, too.

Identity experts return their input, so no token is sent to them: the module adds the input, times
the routing weights of these experts, to the sum of the other experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_moe_ep.moe.layer import moe_forward
from hf_moe_ep.plan import MoEBlock, WeightSource, matches
from hf_moe_ep.upstream.adapters import without_adapters, wraps_for_adapters
from hf_moe_ep.upstream.module_names import get_stock_name, unwrap
from hf_moe_ep.upstream.modules import get_own_child, get_own_children, get_own_parameters

# The suffix of a parameter that `stack_experts` adds to a block. This parameter holds those experts
# of a stock parameter that no token can choose.
UNUSED = "_unused"

T = TypeVar("T")


class StackedExperts(nn.Module):
    """Experts with stacked weights, in a block whose stock experts do not use the interface.

    Attributes:
        description: the description of the block.
        changed: the names of the weights that are made from stock parameters. Each other weight is
            a stock parameter itself.
        stock_order: the names of the children of the stock block.
        num_experts: the number of experts with weights.
        num_identity_experts: the number of experts that return their input.
        weights_inputs: True if routing weights multiply the inputs of experts.
        is_transposed, has_bias, is_concatenated, has_gate, has_post_expert_norm: the flags of
            transformers' experts interface (`upstream/experts_interface.py`).
        stores_transposed: True if the weights are [E, in, out]; `is_transposed` is False
            nevertheless (see `hides_transposition`).
    """

    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, block: nn.Module, description: MoEBlock) -> None:
        super().__init__()
        self.description = description
        self.num_experts = int(_read_attribute(block, description.num_experts))
        self.num_identity_experts = int(_read_attribute(block, description.identity_experts) or 0)
        self.weights_inputs = description.weights_inputs
        self.is_transposed = False
        self.stores_transposed = description.transposed
        self.has_gate = "gate_up_proj" in description.weights
        self.has_bias = any(name.endswith("_bias") for name in description.weights)
        self.is_concatenated = True
        self.has_post_expert_norm = False
        self.act_fn = _read_attribute(block, description.activation)
        if description.gate:
            self.__dict__["_apply_gate"] = _read_attribute(block, description.gate)
            self._copy_numbers(_find_owner(block, description.gate))
        # The block and its stock modules are not registered as children of this module, because the
        # block contains this module, and the stock modules are no longer part of the model.
        self.__dict__["_block"] = [block]
        self.__dict__["_stock_parameters"] = _StockParameters()
        replaced = _list_replaced_children(description)
        self.__dict__["_stock"] = {name: _find_child(block, name) for name in replaced}
        self.stock_order = list(get_own_children(block))
        self.changed = tuple(_list_changed_weights(block, description))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, (T, H).

        Args:
            hidden_states: (T, H).
            top_k_index: (T, K), the experts of each token.
            top_k_weights: (T, K), their routing weights.
        """
        x_TH = hidden_states
        if unused := [p for _, p in self.unused_weights()]:
            x_TH = _WithZeroGrads.apply(x_TH, *unused)
        if not self.num_identity_experts:
            return moe_forward(self, x_TH, top_k_index, top_k_weights)
        is_identity_TK = top_k_index >= self.num_experts
        # The id `num_experts` means "no expert".
        expert_ids_TK = top_k_index.clamp(max=self.num_experts)
        out_TH = moe_forward(self, x_TH, expert_ids_TK, top_k_weights)
        # Rows in fp64 have fp32 weights if the router computes in fp32.
        weights_TK = top_k_weights.to(torch.promote_types(top_k_weights.dtype, x_TH.dtype))
        weights_T1 = weights_TK.masked_fill(~is_identity_TK, 0).sum(1, keepdim=True)
        return (out_TH + x_TH * weights_T1).to(out_TH.dtype)

    def unused_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (weight, parameter) of each parameter of the block that holds unused experts."""
        for weight in self.description.weights:
            parameter = get_own_parameters(self.block).get(weight + UNUSED)
            if parameter is not None:
                yield weight, parameter

    @property
    def block(self) -> nn.Module:
        return self.__dict__["_block"][0]

    def _apply_gate(self, pre_AG: Tensor) -> Tensor:
        gate_AF, up_AF = pre_AG.chunk(2, dim=-1)
        return self.act_fn(gate_AF) * up_AF

    def _copy_numbers(self, stock: nn.Module) -> None:
        """Copy attributes such as the limit of a clamped gate (`list_gate_constants`)."""
        for name, value in vars(stock).items():
            if isinstance(value, float) and name not in vars(self):
                setattr(self, name, value)


class _StockParameters(dict[str, weakref.ref[nn.Parameter]]):
    """The stock parameters by name, as long as other objects, such as an optimizer, hold them.

    In a copy of the model this dict is empty.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _StockParameters, ()

    def restore(self, name: str, value: Tensor, like: nn.Parameter) -> nn.Parameter:
        """Return a parameter with `value`: the stock parameter if it exists and fits."""
        known = self.get(name)
        parameter = None if known is None else known()
        if parameter is None or parameter.device != value.device:
            return _make_parameter(value, like)
        parameter.data = value
        parameter.requires_grad_(like.requires_grad)
        return parameter


class _WithZeroGrads(torch.autograd.Function):
    """Return the first tensor. In backward the other tensors get zeros as gradients, as in stock.

    Without a gradient, AdamW would not decay these tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *unused: Tensor) -> Tensor:
        ctx.save_for_backward(*unused)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)


def stack_experts(model: nn.Module, description: MoEBlock | None) -> None:
    """Put a `StackedExperts` module into every block of the model that fits the description.

    A block that already has such a module is not changed.

    Raises:
        ValueError: a block does not fit the description, or PEFT has adapted stock parameters from
            which a weight would be made. No block has been changed then.
    """
    if description is None:
        return
    blocks = list(_find_blocks(model, description))
    for name, block in blocks:
        _check_block(name, block, description)
    for _, block in blocks:
        _stack_block(block, description)


def unstack_experts(model: nn.Module) -> None:
    """Restore the stock experts of all blocks, with the present values of the weights."""
    for experts in [m for m in model.modules() if isinstance(m, StackedExperts)]:
        _unstack_block(experts)


def make_stock_tensors(model: nn.Module, tensors: Mapping[str, T]) -> dict[str, T]:
    """Replace the stacked weights among `tensors` by the parameters of the stock blocks.

    Args:
        model: patched; it may be sharded.
        tensors: tensors with the shapes of the parameters, by the parameters' names without the
            components of wrappers. Their type needs the methods `unbind`, `chunk`, `transpose` and
            `reshape`, and torch.cat must accept it.
    """
    result: dict[str, Any] = dict(tensors)
    for module_name, module in model.named_modules():
        if isinstance(module, StackedExperts):
            experts_name = get_stock_name(module_name)
            _replace_by_stock(result, module, experts_name, experts_name.rpartition(".")[0])
    return result


def make_stacked_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace the parameters of stock blocks among `tensors` by stacked weights.

    This is the inverse of `make_stock_tensors`. A stacked weight may have the name of a stock
    parameter of another shape, so `tensors` must have no stacked weights yet.
    """
    result = dict(tensors)
    for module_name, module in model.named_modules():
        if isinstance(module, StackedExperts):
            block_name = get_stock_name(module_name).rpartition(".")[0]
            _replace_by_stacked(result, module, f"{block_name}." if block_name else "")
    return result


def count_blocks(model: nn.Module, description: MoEBlock) -> tuple[int, int]:
    """Return the number of experts per block, and the number of blocks, of a stock model."""
    blocks = [block for _, block in _find_blocks(model, description)]
    counts = [int(_read_attribute(block, description.num_experts)) for block in blocks]
    return (counts[0] if counts else 0), len(counts)


def changes_parameters(model: nn.Module, description: MoEBlock) -> bool:
    """Return True if `stack_experts` would replace parameters of this stock model."""
    return any(
        _list_changed_weights(block, description) for _, block in _find_blocks(model, description)
    )


def check_adapters(model: nn.Module, targets: Any) -> None:
    """Raise ValueError if PEFT would adapt weights that are made from stock parameters.

    `targets` are the `target_parameters` of an adapter's config, or None.
    """
    for module_name, module in model.named_modules():
        if not isinstance(module, StackedExperts):
            continue
        for weight in module.changed:
            name = f"{get_stock_name(module_name)}.{weight}"
            if any(name == target or name.endswith(f".{target}") for target in targets or ()):
                block_name = get_stock_name(module_name).rpartition(".")[0]
                raise _make_adapter_error(block_name, module.description, weight)


def _find_blocks(model: nn.Module, description: MoEBlock) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, block) of each block that has the first parameter of the description."""
    first = next(iter(description.weights.values())).parts[0].format(0)
    for name, module in without_adapters(unwrap(model)).named_modules():
        if matches(description.name, get_stock_name(name)) and not wraps_for_adapters(module):
            is_stacked = isinstance(_find_child(module, description.experts), StackedExperts)
            if not is_stacked and _find_parameter(module, first) is not None:
                yield get_stock_name(name), module


def _check_block(name: str, block: nn.Module, description: MoEBlock) -> None:
    """Raise ValueError if a block does not fit the description."""
    kind = f"the MoE block {name} ({type(block).__name__})"
    num_experts = _read_attribute(block, description.num_experts)
    if not isinstance(num_experts, int):
        raise ValueError(
            f"{kind} has no number '{description.num_experts}'; name the attribute that holds the "
            f"number of experts: MoEBlock(num_experts=...)"
        )
    named: set[int] = set()
    for weight, source in description.weights.items():
        kinds: set[tuple[torch.dtype, bool]] = set()
        for part in _list_parameters(source, num_experts):
            parameter = _find_parameter(block, part)
            if parameter is None:
                raise ValueError(
                    f"{kind} has no parameter '{part}' for {weight}; it has "
                    f"{', '.join(n for n, _ in block.named_parameters())}; correct "
                    f"MoEBlock(weights=...)"
                )
            named.add(id(parameter))
            kinds.add((parameter.dtype, parameter.requires_grad))
            rows = parameter.shape[0]
            fits = rows % num_experts == 0 if source.flat else rows >= num_experts
            if not source.is_per_expert and not fits:
                raise ValueError(
                    f"'{part}' of {kind} has {rows} rows, which cannot be {num_experts} experts; "
                    f"correct MoEBlock(weights=...) or MoEBlock(num_experts=...)"
                )
        if len(kinds) > 1:
            raise ValueError(
                f"the parameters of {weight} of {kind} cannot be stacked, because they differ in "
                f"dtype or requires_grad: {', '.join(sorted(map(str, kinds)))}; freeze or train "
                f"all experts of a block"
            )
    for child in _list_replaced_children(description):
        module = _find_child(block, child)
        tensors = [] if module is None else list(_named_tensors(module))
        others = [name for name, tensor in tensors if id(tensor) not in named]
        if others and not any(map(wraps_for_adapters, block.modules())):
            raise ValueError(
                f"'{child}' of {kind} also has {', '.join(others)}, which MoEBlock(weights=...) "
                f"does not name and which would be lost"
            )
    for weight in _list_changed_weights(block, description):
        parts = _list_parameters(description.weights[weight], num_experts)
        if any(_is_adapted(block, part) for part in parts):
            raise _make_adapter_error(name, description, weight)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _make_adapter_error(name: str, description: MoEBlock, weight: str) -> ValueError:
    sources = ", ".join(description.weights[weight].parts)
    return ValueError(
        f"the experts of {name} cannot have adapters: hf_moe_ep makes the stacked weight {weight} "
        f"of {sources}, which do not have the same name or the same number of experts, so PEFT's "
        f"adapters of the one would not fit the other. Adapt other modules, or train these experts "
        f"without adapters"
    )


def _list_changed_weights(block: nn.Module, description: MoEBlock) -> list[str]:
    """List the weights for which no stock parameter has the same name and the same experts."""
    changed = []
    num_experts = _read_attribute(block, description.num_experts)
    for weight, source in description.weights.items():
        has_same_name = source == WeightSource((f"{description.experts}.{weight}",))
        parameter = _find_parameter(block, source.parts[0])
        if not has_same_name or parameter is None or parameter.shape[0] > num_experts:
            changed.append(weight)
    return changed


def _stack_block(block: nn.Module, description: MoEBlock) -> None:
    experts = StackedExperts(block, description)
    for weight, source in description.weights.items():
        names = _list_parameters(source, experts.num_experts)
        parameters = [_find_parameter(block, name) for name in names]
        first = parameters[0]
        assert first is not None
        if weight not in experts.changed:
            experts.register_parameter(weight, first)
            continue
        values = [parameter.detach() for parameter in parameters if parameter is not None]
        stacked, unused = _stack_tensors(values, source, experts.num_experts)
        experts.register_parameter(weight, _make_parameter(stacked, first))
        if unused is not None:
            block.register_parameter(weight + UNUSED, _make_parameter(unused, first))
        for name, parameter in zip(names, parameters, strict=True):
            assert parameter is not None
            experts.__dict__["_stock_parameters"][name] = weakref.ref(parameter)
            placeholder = _make_parameter(torch.empty_like(parameter, device="meta"), parameter)
            _set_parameter(block, name, placeholder)
    experts.train(block.training)
    for child in _list_replaced_children(description):
        if child == description.experts:
            _replace_inside_wrappers(block, child, experts)
        else:
            delattr(block, child)
    if get_own_child(block, description.experts) is None:
        block.register_module(description.experts, experts)
    if experts.changed:
        save_hook = block.register_state_dict_post_hook(_save_stock_parameters)
        load_hook = block.register_load_state_dict_pre_hook(_load_stock_parameters)
        experts.__dict__["_hooks"] = [save_hook, load_hook]


def _unstack_block(experts: StackedExperts) -> None:
    block, description = experts.block, experts.description
    unused = dict(experts.unused_weights())
    new: dict[str, nn.Parameter] = {}
    for weight, source in description.weights.items():
        parameter = getattr(experts, weight)
        if weight not in experts.changed:
            new[source.parts[0]] = parameter
            continue
        rest = unused.get(weight)
        values = _unstack_tensor(
            parameter.detach(), None if rest is None else rest.detach(), source
        )
        restore = experts.__dict__["_stock_parameters"].restore
        new |= {name: restore(name, v.clone(), parameter) for name, v in values.items()}
    for weight in unused:
        delattr(block, weight + UNUSED)
    for hook in experts.__dict__.pop("_hooks", ()):
        hook.remove()
    stock: dict[str, nn.Module] = experts.__dict__["_stock"]
    for name, module in stock.items():
        if name == description.experts:
            _replace_inside_wrappers(block, name, module)
        else:
            block.register_module(name, module)
    if description.experts not in stock:
        delattr(block, description.experts)
    children = get_own_children(block)
    in_order = {name: children[name] for name in experts.stock_order if name in children}
    in_order |= children
    children.clear()
    children.update(in_order)
    for name, parameter in new.items():
        _set_parameter(block, name, parameter)


def _list_replaced_children(description: MoEBlock) -> list[str]:
    """Return the names of the block's children that hold the stock parameters."""
    parts = (part for source in description.weights.values() for part in source.parts)
    return list(dict.fromkeys(part.partition(".")[0] for part in parts))


def _list_parameters(source: WeightSource, num_experts: int) -> list[str]:
    """List the names of a source's stock parameters, expert by expert if each has its own."""
    if not source.is_per_expert:
        return list(source.parts)
    return [part.format(expert) for expert in range(num_experts) for part in source.parts]


def _stack_tensors(
    values: list[Tensor], source: WeightSource, num_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Stack the values of a source's stock parameters; return the weight and the unused experts.

    The values are in the order of `_list_parameters`. Without unused experts, the second result is
    None.
    """
    if source.is_per_expert:
        num_parts = len(source.parts)
        values = [torch.stack(values[part::num_parts]) for part in range(num_parts)]
    elif source.flat:
        values = [value.reshape(num_experts, -1, *value.shape[1:]) for value in values]
    if source.transposed:
        values = [value.transpose(1, 2) for value in values]
    stacked = torch.cat(values, 1).contiguous()
    unused = stacked[num_experts:].clone() if len(stacked) > num_experts else None
    return (stacked if unused is None else stacked[:num_experts].clone()), unused


def _unstack_tensor(stacked: Any, unused: Any, source: WeightSource) -> dict[str, Any]:
    """Return the stock parameters of a source by name. This is the inverse of `_stack_tensors`."""
    num_experts = stacked.shape[0]
    if unused is not None:
        stacked = torch.cat([stacked, unused], 0)
    values = stacked.chunk(len(source.parts), 1)
    if source.transposed:
        values = [value.transpose(1, 2) for value in values]
    if source.is_per_expert:
        by_part = [value.unbind(0) for value in values]
        return {
            part.format(expert): part_values[expert]
            for expert in range(num_experts)
            for part, part_values in zip(source.parts, by_part, strict=True)
        }
    if source.flat:
        values = [v.reshape(v.shape[0] * v.shape[1], *v.shape[2:]) for v in values]
    return dict(zip(source.parts, values, strict=True))


def _replace_by_stock(
    tensors: dict[str, Any], experts: StackedExperts, experts_name: str, block_name: str
) -> None:
    """Replace the stacked weights of one experts module in `tensors` by stock parameters."""
    start = f"{block_name}." if block_name else ""
    for weight, source in experts.description.weights.items():
        unused = tensors.pop(f"{start}{weight}{UNUSED}", None)
        stacked = tensors.pop(f"{experts_name}.{weight}", None)
        if stacked is not None:
            stock = _unstack_tensor(stacked, unused, source)
            tensors.update({f"{start}{name}": value for name, value in stock.items()})


def _save_stock_parameters(
    block: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Hook of a block: replace its stacked weights in a state dict by the stock parameters.

    A state dict without plain tensors is not changed: the model is sharded, or keep_vars is True.
    """
    experts = next(m for m in block.modules() if isinstance(m, StackedExperts))
    experts_name = f"{prefix}{experts.description.experts}"
    values = [state_dict.get(f"{experts_name}.{name}") for name in experts.description.weights]
    if all(type(value) is Tensor for value in values):
        _replace_by_stock(state_dict, experts, experts_name, prefix.rstrip("."))


def _load_stock_parameters(
    block: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Hook of a block: replace the stock parameters in a state dict before it is loaded."""
    experts = next(m for m in block.modules() if isinstance(m, StackedExperts))
    _replace_by_stacked(state_dict, experts, prefix)


def _replace_by_stacked(tensors: dict[str, Any], experts: StackedExperts, prefix: str) -> None:
    """Replace the stock parameters of one block in `tensors` by stacked weights."""
    for weight, source in experts.description.weights.items():
        if weight not in experts.changed:
            continue
        names = [f"{prefix}{name}" for name in _list_parameters(source, experts.num_experts)]
        if not all(name in tensors for name in names):
            continue
        values = [tensors.pop(name) for name in names]
        stacked, unused = _stack_tensors(values, source, experts.num_experts)
        tensors[f"{prefix}{experts.description.experts}.{weight}"] = stacked
        if unused is not None:
            tensors[f"{prefix}{weight}{UNUSED}"] = unused


def _make_parameter(tensor: Tensor, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=like.requires_grad)


def _set_parameter(block: nn.Module, name: str, parameter: nn.Parameter) -> None:
    setattr(_find_owner(block, name), name.rpartition(".")[2], parameter)


def _remove_wrappers(module: nn.Module | None) -> nn.Module | None:
    """Return the module inside PEFT's wrappers."""
    while module is not None and wraps_for_adapters(module):
        module = get_own_child(module, "base_layer")
    return module


def _find_child(module: nn.Module, name: str) -> nn.Module | None:
    return _remove_wrappers(get_own_child(module, name))


def _replace_inside_wrappers(block: nn.Module, name: str, new: nn.Module | None) -> None:
    """Replace the child `name` of a block, inside PEFT's wrappers if there are any."""
    owner, key = block, name
    while (child := get_own_child(owner, key)) is not None and wraps_for_adapters(child):
        owner, key = child, "base_layer"
    get_own_children(owner)[key] = new


def _find_owner(block: nn.Module, name: str) -> nn.Module:
    """Return the module that owns an attribute of a block: experts.mlp for "experts.mlp.w1"."""
    owner = block
    for component in name.split(".")[:-1]:
        child = _find_child(owner, component)
        assert child is not None, f"{type(block).__name__} has no {name}"
        owner = child
    return owner


def _find_parameter(block: nn.Module, name: str) -> nn.Parameter | None:
    owner: nn.Module | None = block
    for component in name.split(".")[:-1]:
        owner = None if owner is None else _find_child(owner, component)
    return None if owner is None else get_own_parameters(owner).get(name.rpartition(".")[2])


def _read_attribute(block: nn.Module, name: str) -> Any:
    """Return the attribute `name` of a block, or None if it does not exist or `name` is empty."""
    value: Any = block if name else None
    for component in filter(None, name.split(".")):
        value = getattr(value, component, None)
        value = _remove_wrappers(value) if isinstance(value, nn.Module) else value
    return value


def _is_adapted(block: nn.Module, name: str) -> bool:
    """Return True if PEFT wraps the module that owns the parameter `name`."""
    owner = _find_owner(block, name)
    wrappers = (m for m in block.modules() if wraps_for_adapters(m))
    return any(_remove_wrappers(wrapper) is owner for wrapper in wrappers)
