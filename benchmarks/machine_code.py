"""Find the loops of a compiled kernel in its listing (`cuobjdump --dump-sass`).

The speed of a loop of matrix products depends on how it waits for loads and products, which the
number of registers does not show. One step of such a loop on sm_90, shortened:

    DEPBAR.LE SB0, 0x2                 waits until at most two groups of loads are unfinished
    HGMMA.64x256x16.F32.BF16 ...       a product on the tensor cores (HMMA on sm_80)
    WARPGROUP.DEPBAR.LE gsb0, 0x1      waits until at most one group of products is unfinished
    LDGSTS ... ; LDGDEPBAR             starts loads of a later step; closes their group
    BRA                                jumps back to the first line

If a step closes two groups, "at most two" means that the loads of one whole step run while another
step computes. "At most zero" waits for every load that was started. Such a loop does not prefetch,
even if it has several stages.

TMA copies a block by one instruction (UTMALDG), and a barrier (SYNCS) waits for the copy. If only
one factor of the product is copied by TMA, the loads of the other factor show how far the loop
prefetches: LDGSTS in groups as above, or LDG, whose result the same step uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", re.MULTILINE)
_JUMP = re.compile(r"^BRA\b.*?0x([0-9a-f]+)")
_TENSOR_CORES = ("HGMMA", "HMMA")
# Exact fp32 products do not use tensor cores. A loop with at least _MIN_FFMA of these
# multiplications counts as a loop of products.
_EXACT = "FFMA"
_MIN_FFMA = 64


@dataclass(frozen=True)
class Loop:
    """One loop of matrix products. All numbers are per step.

    `steps_ahead` is the number of whole steps whose loads may run while one step computes. It is
    None if TMA copies both factors, because the code of a barrier does not contain a number of
    steps. `serial` is True if each product waits for the previous product. `spills` counts accesses
    to registers that were spilled to memory.
    """

    instructions: int
    products: int
    loads: int
    steps_ahead: int | None
    serial: bool
    spills: int


def product_loops(listing: str) -> list[Loop]:
    """Find the innermost loops of matrix products, in the order of the listing."""
    instructions = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(listing)]
    index_of = {address: index for index, (address, _) in enumerate(instructions)}
    code = [text for _, text in instructions]
    kinds = _TENSOR_CORES if any(text.startswith(_TENSOR_CORES) for text in code) else (_EXACT,)
    spans = []
    for last, text in enumerate(code):
        jump = _JUMP.match(text)
        first = index_of.get(int(jump.group(1), 16), last) if jump else last
        products = sum(text.startswith(kinds) for text in code[first:last])
        if products >= (1 if kinds == _TENSOR_CORES else _MIN_FFMA):
            spans.append((first, last))
    # Code that waits again for a block of TMA comes after the kernel's end and jumps into a loop,
    # so its span overlaps this loop. The shortest of overlapping spans is the loop.
    innermost: list[tuple[int, int]] = []
    for first, last in sorted(spans, key=lambda span: span[1] - span[0]):
        if all(last < start or end < first for start, end in innermost):
            innermost.append((first, last))
    innermost.sort()
    return [_read_loop(code[first : last + 1], kinds) for first, last in innermost]


def _read_loop(body: list[str], kinds: tuple[str, ...]) -> Loop:
    products = sum(text.startswith(kinds) for text in body)
    groups = sum(text.startswith("LDGDEPBAR") for text in body)
    in_flight = [int(n, 16) for text in body for n in re.findall(r"^DEPBAR\.LE SB0, 0x(\w+)", text)]
    full_waits = sum(text.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x0") for text in body)
    steps_ahead = min(in_flight) // groups if in_flight and groups else 0
    has_tma = any(text.startswith("UTMALDG") for text in body)
    has_other_loads = any(text.startswith(("LDGSTS", "LDG.")) for text in body)
    return Loop(
        instructions=len(body),
        products=products,
        loads=sum(text.startswith(("LDGSTS", "UTMALDG")) for text in body),
        steps_ahead=None if has_tma and not has_other_loads else steps_ahead,
        serial=full_waits > 1,
        spills=sum(text.startswith(("LDL", "STL")) for text in body),
    )
