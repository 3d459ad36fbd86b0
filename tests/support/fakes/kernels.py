"""Stand-ins for flash-linear-attention, causal-conv1d and mamba-ssm, which need a GPU (`install`).

Transformers looks for the packages when it imports a model's file. So `install` must run in a
process that has imported none of these files. Each stand-in has the parameters of the real kernel,
records its arguments in `calls`, and computes the result by the function that Transformers runs
without the package.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor, nn

# (package, kernel) -> the parameters of the kernel, and the function of the model's file.
_KERNELS = {
    ("causal_conv1d", "causal_conv1d_fn"): (
        "x weight bias seq_idx initial_states return_final_states final_states_out activation",
        "causal_conv1d_fn",
    ),
    ("fla", "chunk_gated_delta_rule"): (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens",
        "torch_chunk_gated_delta_rule",
    ),
    ("fla", "chunk_kda"): (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
        "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound "
        "disable_recompute return_intermediate_states state_v_first cu_seqlens",
        "chunk_kimi_delta_attention",
    ),
    ("mamba_ssm", "mamba_chunk_scan_combined"): (
        "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus dt_limit "
        "return_final_states return_varlen_states",
        "mamba2_chunk_scan",
    ),
    ("mamba_ssm", "mamba_split_conv1d_scan_combined"): (
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states seq_idx dt_limit "
        "return_final_states activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias "
        "headdim ngroups norm_before_gate",
        "mamba2_split_conv1d_scan_combined",
    ),
    ("mamba_ssm", "selective_scan_fn"): (
        "u delta A B C D z delta_bias delta_softplus return_last_state",
        "mamba_selective_scan",
    ),
}
# kernel -> the arguments of its calls by name; a tensor is recorded as its shape.
calls: dict[str, list[dict[str, Any]]] = {}


def install() -> None:
    """Put the packages into sys.modules."""
    for (package, kernel), (parameters, function) in _KERNELS.items():
        module = sys.modules.setdefault(package, ModuleType(package))
        setattr(module, kernel, _stand_in(kernel, parameters.split(), function))


def file_of(model: Any) -> ModuleType:
    """Return the module of Transformers that defines a model, which has found the stand-ins."""
    return sys.modules[type(model).__module__]


class HubFunction(nn.Module):
    """What a function of a model's file becomes if the package `kernels` is installed.

    `kernelize` replaces the forward of such a module by a kernel of the hub.
    """

    def __init__(self, stock: Callable[..., Any]) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.stock(*args, **kwargs)


def wrap_functions(file: ModuleType, names: Iterable[str]) -> Any:
    """Return a context in which modules are in place of functions of a model's file."""
    wrapped = {name: HubFunction(getattr(file, name)) for name in names}
    return mock.patch.multiple(file, **wrapped)


def kernelize(file: ModuleType) -> None:
    """Replace the forwards of the modules by kernels, which record their arguments."""
    for name, module in vars(file).items():
        if isinstance(module, HubFunction):
            parameters = [*inspect.signature(module.stock).parameters]
            module.forward = _record(name, parameters, inspect.unwrap(module.stock))


# The file whose function computes the results.
current: list[ModuleType] = []


def _stand_in(kernel: str, parameters: list[str], function: str) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        return inspect.unwrap(getattr(current[-1], function))(*args, **kwargs)

    call = _record(kernel, parameters, compute)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
    setattr(call, "__signature__", signature)  # noqa: B010
    return call


def _record(kernel: str, parameters: list[str], compute: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(parameters, args, strict=False)) | kwargs
        shapes = {n: x.shape if isinstance(x, Tensor) else x for n, x in named.items()}
        calls.setdefault(kernel, []).append(shapes)
        return compute(*args, **kwargs)

    return call
