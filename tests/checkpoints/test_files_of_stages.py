"""Files of a model with pipeline stages: hub layout, streams, checkpoints, sharded loading.

All files equal those of a model without stages, and load at any number of stages.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.hub_files import read_all
from support.parity import whole_parameters, whole_state
from support.stages import even_rows, four_layers, state_of
from torch import Tensor, nn

from hf_moe_ep import (
    apply_ep_fsdp2,
    data_parallel_rank,
    data_parallel_size,
    from_pretrained,
    global_token_count,
    hub_tensors,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
)

TIED = {"tie_word_embeddings": True}
STAGES = {"pp_size": 2, "ep_size": 2}
ETP = {"pp_size": 2, "etp_size": 2}
# Layouts at which a state is loaded that was saved with 2 stages and ep_size 2.
LAYOUTS: dict[str, dict[str, Any]] = {
    "the same": STAGES,
    "no stages": {"ep_size": 4},
    "4 stages": {"pp_size": 4},
    "sp": {"pp_size": 2, "sp_size": 2},
    "other layers": {**STAGES, "pp_layers": (1, 3)},
    "cp": {"pp_size": 2, "cp_size": 2},
    "etp": ETP,
}


class Run:
    """A model and its optimizer, which trains all rows of a step on any number of data ranks."""

    def __init__(self, seed: int, sizes: dict[str, Any], **config: Any) -> None:
        self.model = four_layers(seed, **config)
        apply_ep_fsdp2(self.model, **sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def step(self, number: int) -> None:
        """Train 8 rows: one data rank has 8 of them, two have 4 each, and four have 2 each."""
        model, rank = self.model, data_parallel_rank(self.model)
        size = data_parallel_size(model)
        (first, _), (second, _) = (even_rows(model, other, number) for other in range(2))
        rows = {name: torch.cat([first[name], second[name]]) for name in first}
        own = {name: value.chunk(size)[rank] for name, value in rows.items()}
        count = global_token_count(model, own["labels"])
        self.optimizer.zero_grad()
        loss = model(**own, num_items_in_batch=count).loss
        (loss * size).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Gather parameters and moments of all stages, on every rank."""
        stage = state_of(self.model).stage
        aliases = {} if stage is None else stage.aliases
        own = {}
        for key, tensor in whole_state(self.model, self.optimizer).items():
            name, comma, moment = key.partition(",")
            own[aliases.get(name, name) + comma + moment] = tensor
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, own)
        joined: dict[str, Tensor] = {}
        for tensors in by_rank:
            for name, tensor in tensors.items():
                assert torch.equal(joined.setdefault(name, tensor), tensor), f"{name} differs"
        return joined


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def assert_equal(where: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys(), where
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{where}: {name} differs"


def resumes(config: dict[str, Any], rank: int, world: int, folder: str) -> None:
    """A checkpoint of 2 stages is loaded at other layouts, and theirs at 2 stages, bit by bit."""
    run = Run(rank, STAGES, **config)
    for number in range(2):
        run.step(number)
    save_checkpoint(f"{folder}/stages", run.model, run.optimizer, progress={"step": 2})
    saved = run.state()
    run.step(2)
    uninterrupted = run.state()
    for name, sizes in LAYOUTS.items():
        resumed = Run(10 + rank, sizes, **config)
        progress = load_checkpoint(f"{folder}/stages", resumed.model, resumed.optimizer)
        assert progress == {"step": 2}
        assert_equal(name, resumed.state(), saved)
        back = f"{folder}/{name.replace(' ', '_')}"
        save_checkpoint(back, resumed.model, resumed.optimizer)
        resumed.step(2)
        for key, value in resumed.state().items():
            assert_close(f"{name}, next step: {key}", value, uninterrupted[key], FP64_MODEL)
        again = Run(20 + rank, STAGES, **config)
        load_checkpoint(back, again.model, again.optimizer)
        assert_equal(f"back from {name}", again.state(), saved)


def writes_hub_files(
    sizes: dict[str, int], config: dict[str, Any], rank: int, world: int, folder: str
) -> None:
    """Files, streams and keys equal those of the same model without stages."""
    run = Run(rank, sizes, **config)
    run.step(0)
    save_pretrained(run.model, f"{folder}/stages")
    whole = four_layers(0, **config)
    joined = run.state()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(joined[name])
    if rank == 0:
        whole.save_pretrained(f"{folder}/stock")
    dist.barrier()
    got, want = read_all(Path(folder, "stages")), load_file(f"{folder}/stock/model.safetensors")
    assert_equal("files", got, want)
    streamed = dict(hub_tensors(run.model, max_bytes=20_000))
    assert_equal("stream", streamed, want)
    infos = {info.key: (info.shape, info.dtype) for info in hub_tensors(run.model).metadata()}
    assert infos == {key: (tuple(x.shape), x.dtype) for key, x in want.items()}
    for layout in (sizes, {"pp_size": 4}):
        loaded = from_pretrained(f"{folder}/stages", experts_implementation="eager", **layout)
        assert _count(loaded) < 0.7 * _count(whole)
        for name, parameter in whole_parameters(loaded).items():
            name = state_of(loaded).stage.aliases.get(name, name)
            assert torch.equal(parameter, joined[name]), name


def adapters_are_saved_without_stages(rank: int, world: int, folder: str) -> None:
    """A checkpoint of adapters loads without stages, where PEFT can save them."""
    torch.manual_seed(rank)
    model = with_lora(four_layers(0), r=3)
    apply_ep_fsdp2(model, **STAGES)
    with pytest.raises(ValueError, match=r"adapters of a model with pp_size=2.*save_checkpoint"):
        save_pretrained(model, folder)
    save_checkpoint(f"{folder}/run", model, None)
    torch.manual_seed(10 + rank)
    resumed = with_lora(four_layers(0), r=3)
    apply_ep_fsdp2(resumed, ep_size=2)
    load_checkpoint(f"{folder}/run", resumed, None)
    save_pretrained(resumed, f"{folder}/adapters")
    torch.manual_seed(0)
    stock = with_lora(four_layers(0), r=3)
    if rank == 0:
        stock.save_pretrained(f"{folder}/stock")
    dist.barrier()
    got, want = (
        load_file(f"{folder}/{name}/adapter_model.safetensors") for name in ("adapters", "stock")
    )
    assert_equal("adapters", got, want)


CHECKS: dict[str, Any] = {
    "resumes": partial(resumes, {}),
    "resumes, tied": partial(resumes, TIED),
    "hub": partial(writes_hub_files, STAGES, {}),
    "hub, tied": partial(writes_hub_files, STAGES, TIED),
    "hub, etp": partial(writes_hub_files, ETP, {}),
    "adapters": adapters_are_saved_without_stages,
}


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(4, CHECKS))
def test_files_of_stages(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
