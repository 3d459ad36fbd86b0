"""Install the fake of Liger in this process for the duration of a block."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import transformers.models.qwen3_moe.modeling_qwen3_moe as modeling

_REPLACED = ("apply_rotary_pos_emb", "Qwen3MoeRMSNorm", "Qwen3MoeExperts")


@contextmanager
def installed_liger() -> Iterator[ModuleType]:
    """Yield the fake's `liger_kernel.transformers`, and restore all that it replaced at the end."""
    folder = str(Path(__file__).parent / "for_path")
    before = {name: getattr(modeling, name) for name in _REPLACED}
    forward = modeling.Qwen3MoeForCausalLM.forward
    sys.path.insert(0, folder)
    try:
        import liger_kernel.transformers

        yield liger_kernel.transformers
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
            del sys.modules[name]
        for name, value in before.items():
            setattr(modeling, name, value)
        modeling.Qwen3MoeForCausalLM.forward = forward  # type: ignore[method-assign]
