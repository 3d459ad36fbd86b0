"""Install the hook of `hf-moe-ep run` when this process imports transformers.

Each Python process of a command that `hf-moe-ep run` has started imports this file when it starts.
The file waits until transformers.modeling_utils is imported, and then installs the hook of
hf_moe_ep/runner/hook.py. Until then it imports nothing of hf_moe_ep, because most Python processes
of a training command never import transformers. For the same reason it does not use
hf_moe_ep/upstream/wrap.py, which can wait for imports as well.

Python imports only the first sitecustomize in its path. If the environment has another one, this
file runs it as Python would have done.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in typing, which is slow to import
if TYPE_CHECKING:
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_AWAITED = "transformers.modeling_utils"


class _WaitForTransformers:
    """A meta path finder that installs the hook after the import of one module."""

    def __init__(self) -> None:
        self._is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _AWAITED or self._is_searching:
            return None
        from importlib.util import find_spec

        self._is_searching = True
        try:
            spec = find_spec(name)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _install_hook()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _install_hook() -> None:
    try:
        from hf_moe_ep.runner.hook import install
    except ImportError as error:
        raise ImportError(
            f"this process was started below `hf-moe-ep run`, but its Python ({sys.executable}) "
            f"cannot import hf_moe_ep, so models would not be patched: {error}. Install hf_moe_ep "
            f"there, or start the process outside of `hf-moe-ep run`"
        ) from error
    install()


def _run_next_sitecustomize() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    folders = [folder for folder in sys.path if os.path.abspath(folder) != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _WaitForTransformers())
_run_next_sitecustomize()
