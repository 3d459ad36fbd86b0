"""Count the steps of a Trainer as axolotl 0.19 does, and train inside a call of its function.

The formulas are those of axolotl/utils/config/__init__.py, axolotl/utils/trainer.py and
axolotl/core/builders/base.py.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import Trainer

# The real function calls Trainer.train itself, with more functions in between.
_TRAIN = "def train(cfg, dataset_meta):\n    dataset_meta.run()\n"


class Configuration(dict):
    """axolotl's configuration: a key that is not set is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@dataclass
class Data:
    """A data set of `num_samples`, which axolotl packs into `num_packed` rows."""

    num_samples: int
    num_packed: int = 0

    def __len__(self) -> int:
        return self.num_samples


def count_steps(cfg: Any, dataset: Data, update: bool = True) -> int:
    if not cfg.sample_packing:
        return math.ceil(len(dataset) * cfg.num_epochs / cfg.batch_size)
    if cfg.sample_packing_eff_est:
        tokens = 0.99 * cfg.total_num_tokens / cfg.sample_packing_eff_est / cfg.sequence_len
        return int(math.floor(tokens // cfg.batch_size) - 1) * cfg.num_epochs
    batches = max(1, dataset.num_packed * cfg.micro_batch_size // cfg.batch_size)
    if update:
        cfg["sample_packing_eff_est"] = 0.9
    return math.floor(batches * cfg.num_epochs)


class Builder:
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def _configure_warmup_and_logging(self, total_num_steps: int, arguments: dict) -> None:
        cfg = self.cfg
        if cfg.warmup_steps is not None:
            warmup_steps = cfg.warmup_steps
        elif cfg.warmup_ratio is not None:
            warmup_steps = max(int(cfg.warmup_ratio * total_num_steps), 0)
        else:
            warmup_steps = min(int(0.03 * total_num_steps), 100)
        arguments["warmup_steps"] = 2 if warmup_steps == 1 else warmup_steps
        interval = max(min(int(0.005 * total_num_steps), 10), 1)
        arguments["logging_steps"] = cfg.logging_steps or interval


@contextmanager
def installed_axolotl() -> Iterator[None]:
    """Install modules with the functions above under axolotl's names."""
    names = ("axolotl", "axolotl.train", "axolotl.utils.trainer", "axolotl.core.builders.base")
    modules: Any = {name: ModuleType(name) for name in names}
    exec(_TRAIN, vars(modules["axolotl.train"]))
    modules["axolotl.utils.trainer"].calculate_total_num_steps = count_steps
    modules["axolotl.core.builders.base"].TrainerBuilderBase = Builder
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def configure(cfg: Configuration, args: Any, dataset: Any, world_size: int) -> int | None:
    """Set the batch size of `cfg` and the arguments of a Trainer. Returns the count of steps."""
    cfg["batch_size"] = cfg.micro_batch_size * cfg.gradient_accumulation_steps * world_size
    counted: int | None = None
    if not cfg.streaming and cfg.rl != "grpo":
        counted = count_steps(cfg, dataset)
        if cfg.max_steps and not cfg.rl:
            counted = min(counted, cfg.max_steps)
    args.max_steps = cfg.max_steps or counted or -1
    derived: dict[str, Any] = {}
    if counted:
        Builder(cfg)._configure_warmup_and_logging(counted, derived)
    for name, value in derived.items():
        setattr(args, name, value)
    return counted


def run(cfg: Configuration, dataset: Any, counted: int | None, call: Callable[[], Any]) -> None:
    """Call `call` as axolotl.train.train calls Trainer.train."""
    meta = SimpleNamespace(train_dataset=dataset, total_num_steps=counted, run=call)
    sys.modules["axolotl.train"].train(cfg, meta)


def train_by_axolotl(trainer: Trainer, num_epochs: float, **keys: Any) -> None:
    """Train for `num_epochs`, whose steps are counted by axolotl's formula."""
    cfg = Configuration(
        micro_batch_size=trainer.args.per_device_train_batch_size,
        gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
        num_epochs=num_epochs,
        **keys,
    )
    with installed_axolotl():
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        counted = configure(cfg, trainer.args, trainer.train_dataset, world_size)
        run(cfg, trainer.train_dataset, counted, trainer.train)
