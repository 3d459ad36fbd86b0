"""Install the hook of `hf-moe-ep run` in the process of the tests, for one test."""

import contextlib
import inspect
import logging
from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from hf_moe_ep.config import get_variable
from hf_moe_ep.runner import hook

NAMES = ("from_pretrained", "_from_config")


@contextlib.contextmanager
def hooked(monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator[None]:
    """Install the hook with settings in the block: `hooked(monkeypatch, ep_size=2)`."""
    stock = {name: inspect.getattr_static(PreTrainedModel, name) for name in NAMES}
    with monkeypatch.context() as patched:
        for name, value in settings.items():
            patched.setenv(get_variable(name), str(value))
        hook.install()
        try:
            yield
        finally:
            for name, method in stock.items():
                setattr(PreTrainedModel, name, method)
            hook._warn_once.cache_clear()
            logger = logging.getLogger("hf_moe_ep.runner")
            logger.handlers = [h for h in logger.handlers if h.name != "hf-moe-ep run"]
            logger.propagate = True
