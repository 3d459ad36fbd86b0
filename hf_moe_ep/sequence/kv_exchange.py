"""List, for `describe`, how attention modules get keys and values from other cp ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from hf_moe_ep.derive import caches_latents
from hf_moe_ep.plan import as_pattern
from hf_moe_ep.upstream.attention_interface import uses_flash_attention, uses_flex_attention
from hf_moe_ep.upstream.models import get_key_value_width, get_latent_width


@dataclass(frozen=True)
class KeyValueExchange:
    """How the attention modules of one kind get keys and values from the other cp ranks.

    Attributes:
        name: the pattern of the modules' names.
        class_name: the class of the modules.
        gathers_latents: True if latents are gathered, and keys and values are computed from them.
        uses_ring: True if keys and values travel from rank to rank (ring.py).
        keeps_received: True if the received tensors are kept for backward, unless the layer is
            checkpointed. Otherwise they are sent again in backward.
        window: the number of tokens that a query sees, if it is limited. A rank then receives only
            the keys and values of this window.
        width: the number of values per token that a rank sends to each other rank; None if unknown.
    """

    name: str
    class_name: str
    gathers_latents: bool
    uses_ring: bool
    keeps_received: bool
    window: int | None
    width: int | None


def list_key_value_exchanges(
    named: Iterable[tuple[str, nn.Module]], sp_size: int
) -> tuple[KeyValueExchange, ...]:
    """List the exchanges of the attention modules `named`, in the order of layers.

    Modules whose names have one pattern and whose exchanges are equal are listed once.
    """
    exchanges = []
    for name, module in named:
        latents = caches_latents(module)
        width = get_latent_width(module) if latents else get_key_value_width(module, sp_size)
        if latents and width is not None:
            width += int(getattr(module, "qk_rope_head_dim", 0))
        # Some classes store the window of the config in layers without a window, too (EXAONE).
        has_window = getattr(module, "is_sliding", True)
        window = getattr(module, "sliding_window", None) if has_window else None
        exchange = KeyValueExchange(
            as_pattern(name),
            type(module).__name__,
            gathers_latents=latents,
            uses_ring=uses_flex_attention(module) and window is None and not latents,
            keeps_received=latents or uses_flash_attention(module),
            window=window,
            width=width,
        )
        exchanges.append(exchange)
    return tuple(dict.fromkeys(exchanges))
