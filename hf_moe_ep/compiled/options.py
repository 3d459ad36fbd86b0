"""Check the keyword arguments of `compile_layers` before anything is compiled."""

from __future__ import annotations

from typing import Any

import torch

from hf_moe_ep.config import suggest_name
from hf_moe_ep.upstream.compiler import list_compile_arguments

# A kind of layer needs further graphs for calls without gradients, without a mask, with a batch of
# one row, and with an input without a gradient (the first layer under LoRA). By default
# torch.compile gives up after eight graphs, and the layer would run uncompiled.
_RECOMPILE_LIMIT = 64
_DEFAULT_BACKEND = "inductor"
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def how_to_raise_recompile_limit() -> str:
    """Return the code that raises the limit, by an argument of torch.compile if there is one."""
    if "recompile_limit" in list_compile_arguments():
        return "compile_layers={'recompile_limit': ...}"
    return "torch._dynamo.config.recompile_limit = ..."


def check_compile_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for torch.compile, with the defaults that we use.

    Raises:
        ValueError: there is no such argument, backend, mode or option, or the argument cannot be
            used here.
    """
    allowed = [name for name in list_compile_arguments() if name != "disable"]
    unknown = sorted(set(kwargs) - set(allowed))
    if unknown:
        raise ValueError(
            f"compile_layers has no argument {unknown[0]!r}; the arguments of torch.compile are: "
            f"{', '.join(allowed)}"
        )
    backend = kwargs.get("backend") or _DEFAULT_BACKEND
    backends = torch.compiler.list_backends(exclude_tags=())  # also debugging backends
    if isinstance(backend, str) and backend not in backends:
        raise ValueError(
            f"torch.compile has no backend {backend!r}{suggest_name(backend, backends)}; "
            f"try {', '.join(torch.compiler.list_backends())}"
        )
    if kwargs.get("fullgraph"):
        raise ValueError(
            "fullgraph=True: the dispatch of tokens cannot be traced, so the graph of a layer ends "
            "at its MoE block; leave fullgraph out"
        )
    options = kwargs.get("options") or {}
    uses_cuda_graphs = [
        f"mode={kwargs.get('mode')!r}" if kwargs.get("mode") in _CUDA_GRAPH_MODES else "",
        "backend='cudagraphs'" if backend == "cudagraphs" else "",
        "options={'triton.cudagraphs': True}" if options.get("triton.cudagraphs") else "",
    ]
    if any(uses_cuda_graphs):
        raise ValueError(
            f"{next(filter(None, uses_cuda_graphs))} records CUDA graphs, which read parameters at "
            f"fixed addresses, but FSDP2 gathers the parameters of a layer at a new address each "
            f"time; use mode='default' or mode='max-autotune-no-cudagraphs'"
        )
    chosen: dict[str, Any] = {"backend": _DEFAULT_BACKEND, "dynamic": True}
    if "recompile_limit" in allowed:  # not in every version of torch
        chosen["recompile_limit"] = _RECOMPILE_LIMIT
    chosen |= {name: value for name, value in kwargs.items() if value is not None}
    try:
        torch.compile(lambda: None, **chosen)
    except RuntimeError as error:
        raise ValueError(f"torch.compile refuses these arguments: {error}") from error
    return chosen
