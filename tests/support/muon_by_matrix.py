"""The reference of `hf_moe_ep.Muon`: torch.optim.Muon on every matrix by itself, and torch's AdamW.

`ByMatrix` trains a stock model. It copies each matrix of a parameter into a parameter of its own,
which torch.optim.Muon trains, and copies the matrices back. Parameters that are frozen when it is
created are never trained, and a step does not change parameters without gradients. Which parameters
are matrices, and how gate and up are stored, is written down here per model and not asked of the
package.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Names of parameters that AdamW trains although they have two or more dims.
_OF_ADAMW = (
    "embed_tokens",
    "lm_head",
    ".gate.weight",
    "router",
    "pos_embed",
    "patch_embed",
    "_bias",
)
_STACKED = ("experts.gate_up_proj", "experts.down_proj")


def matrices_of(name: str, parameter: Tensor, kind: str) -> list[Tensor]:
    """Return views [out, in] of the matrices of a parameter; [] if AdamW trains the parameter.

    `kind` says how experts are stored: "halves", or "gpt_oss" for [E, in, out] and interleaved.
    """
    if parameter.ndim < 2 or any(part in name for part in _OF_ADAMW):
        return []
    if not name.endswith(_STACKED):
        return [parameter]
    of_experts = list(parameter.mT if kind == "gpt_oss" else parameter)
    if name.endswith("down_proj"):
        return of_experts
    if kind == "gpt_oss":
        return [half for x in of_experts for half in (x[0::2], x[1::2])]
    return [half for x in of_experts for half in x.chunk(2)]


class ByMatrix(torch.optim.Optimizer):
    """Train a stock model by torch.optim.Muon on every matrix, and by torch's AdamW otherwise.

    A scheduler changes the learning rate of both.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        kind: str = "halves",
        weight_decay: float = 0.1,
        split: Callable[[str, Tensor], list[Tensor]] = lambda name, matrix: [matrix],
        **muon: Any,
    ) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self._views: list[tuple[Tensor, Callable[[], Tensor | None]]] = []
        self._copies: list[nn.Parameter] = []
        rest = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            views = matrices_of(name, parameter.detach(), kind)
            views = [part for view in views for part in split(name, view)]
            if not views:
                rest.append(parameter)
            for number, view in enumerate(views):

                def grad(name=name, parameter=parameter, number=number) -> Tensor | None:
                    if parameter.grad is None:
                        return None
                    grads = matrices_of(name, parameter.grad, kind)
                    return [part for view in grads for part in split(name, view)][number]

                self._views.append((view, grad))
                self._copies.append(nn.Parameter(view.clone()))
        self.muon = torch.optim.Muon(self._copies, lr, weight_decay=weight_decay, **muon)
        self.adamw = torch.optim.AdamW(
            rest, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, foreach=False
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in (*self.muon.param_groups, *self.adamw.param_groups):
            group["lr"] = self.param_groups[0]["lr"]
        for copy, (_, grad) in zip(self._copies, self._views, strict=True):
            copy.grad = None if (own_grad := grad()) is None else own_grad.clone()
        with newton_schulz_in_fp64():
            self.muon.step()
        self.adamw.step()
        for copy, (view, _) in zip(self._copies, self._views, strict=True):
            view.copy_(copy)


@contextmanager
def newton_schulz_in_fp64() -> Iterator[None]:
    """Make torch's Newton-Schulz keep fp64, which it would round to bf16.

    It rounds by `x.bfloat16()` up to torch 2.14, and by `x.to(dtype=torch.bfloat16, copy=True)`
    from torch 2.15 on.
    """
    stock_bfloat16, stock_to = Tensor.bfloat16, Tensor.to

    def bfloat16(x: Tensor) -> Tensor:
        return x.clone() if x.dtype == torch.float64 else stock_bfloat16(x)

    def to(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.dtype == torch.float64 and options.get("dtype") == torch.bfloat16:
            return x.clone()
        return stock_to(x, *args, **options)

    Tensor.bfloat16, Tensor.to = bfloat16, to  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Tensor.bfloat16, Tensor.to
