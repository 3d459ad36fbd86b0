"""Files of a model with pipeline stages equal the files of a model without stages.

Hub files, streams for engines and training checkpoints are compared. A model with another number of
stages loads all of them.
"""

import copy
import json
import os
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from support.adapters import TARGETS, with_lora
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.extra_files import assert_same_bytes, is_of_head, read_files, write_with_extra
from support.hub_files import read_all
from support.parity import whole_parameters
from support.quantised import SIZES
from support.stages import even_rows, four_layers, state_of, state_of_all_stages
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_moe_ep import (
    SyncToken,
    apply_ep_fsdp2,
    data_parallel_rank,
    data_parallel_size,
    describe,
    from_pretrained,
    global_token_count,
    hub_tensors,
    load_checkpoint,
    patch,
    save_checkpoint,
    save_pretrained,
)
from hf_moe_ep.checkpoints.convert import convert
from hf_moe_ep.checkpoints.hub import write
from hf_moe_ep.checkpoints.hub.gather import gather_state_dict
from hf_moe_ep.checkpoints.storage import safetensors_file
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX, Reader, Writer, read_index
from hf_moe_ep.checkpoints.training.base import BASE, describe_base
from hf_moe_ep.checkpoints.verify import verify
from hf_moe_ep.integrations.saving import save_adapters
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.state import iterate_quantised_matrices

TIED = {"tie_word_embeddings": True}
STAGES = {"pp_size": 2, "ep_size": 2}
ETP = {"pp_size": 2, "etp_size": 2}
# A state that was saved with 2 stages and ep_size 2 is loaded with these layouts.
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
    """A model and its optimizer. A step trains the same rows on any number of data ranks."""

    def __init__(
        self, seed: int, sizes: dict[str, Any], *, adapters: str | None = None, **config: Any
    ) -> None:
        self.model = four_layers(seed, **config)
        if adapters is not None:
            self.model = with_lora(self.model, r=3, seed=5, **TARGETS[adapters])
        apply_ep_fsdp2(self.model, **sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def step(self, number: int) -> None:
        """Train 8 rows: one data rank trains all rows, two train 4 rows each, four train 2 each."""
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
        return state_of_all_stages(self.model, self.optimizer)


def _count_values(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def assert_equal(where: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys(), where
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{where}: {name} differs"


def a_run_resumes_at_any_number_of_stages(
    config: dict[str, Any], rank: int, world: int, folder: str
) -> None:
    """Other layouts load a checkpoint of 2 stages bit by bit, and 2 stages load theirs."""
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


def adapters_on_quantised_experts_resume(kind: str, rank: int, world: int, folder: str) -> None:
    """Adapters resume at other layouts, if the hashes of the experts of all stages are equal."""
    held, config = {"experts_dtype": kind}, {"adapters": "both", **SIZES[kind]}
    run = Run(0, STAGES | held, **config)
    run.step(0)
    save_checkpoint(f"{folder}/stages", run.model, run.optimizer)
    saved = _gather_factors(run)
    run.step(1)
    uninterrupted = _gather_factors(run)
    base = json.loads(Path(folder, "stages", BASE).read_text())
    assert len(base["hashes"]) == 4 * 2 * 2  # layers, matrices, tensors of a matrix
    for name in ("no stages", "4 stages", "other layers", "etp"):
        resumed = Run(0, LAYOUTS[name] | held, **config)
        assert describe_base(resumed.model) == base, name
        load_checkpoint(f"{folder}/stages", resumed.model, resumed.optimizer)
        assert_equal(name, _gather_factors(resumed), saved)
        resumed.step(1)
        for key, value in _gather_factors(resumed).items():
            assert_close(f"{name}, next step: {key}", value, uninterrupted[key], FP64_MODEL)
    other = Run(0, STAGES | held, **config)
    stage = state_of(other.model).stage
    if stage.is_last:
        with torch.no_grad():
            _, stack, _ = next(iterate_quantised_matrices(other.model))
            get_local_tensor(stack.block_scale).mul_(2)
    before = _gather_factors(other)
    with pytest.raises(ValueError, match=r"layers.2.mlp.experts.*1 of 16 tensors.*another base"):
        load_checkpoint(f"{folder}/stages", other.model, other.optimizer)
    assert_equal("refused", _gather_factors(other), before)


def _gather_factors(run: Run) -> dict[str, Tensor]:
    """Gather the factors of all stages on every rank, in the shapes of PEFT."""
    own = pack_factors(run.model, whole_parameters(run.model))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return {n: x for tensors in by_rank for n, x in tensors.items() if "lora_" in n}


def a_stage_quantises_the_experts_that_it_reads(
    kind: str, rank: int, world: int, folder: str
) -> None:
    """A stage holds the bytes that a stage of a loaded model has after quantising."""
    if rank == 0:
        four_layers(0, **SIZES[kind]).save_pretrained(f"{folder}/base")
    dist.barrier()
    held = {**STAGES, "experts_dtype": kind}
    want = apply_ep_fsdp2(with_lora(four_layers(0, **SIZES[kind]), r=3), **held)
    got = from_pretrained(f"{folder}/base", peft_config=want.peft_config["default"], **held)
    base_parameters = {n: p for n, p in want.named_parameters() if "lora_" not in n}
    parameters = dict(got.named_parameters())
    assert len(base_parameters) < len(parameters) == len(dict(want.named_parameters()))
    for name, parameter in base_parameters.items():
        assert torch.equal(get_local_tensor(parameters[name]), get_local_tensor(parameter)), name
    assert "held in " in describe(got)
    for model in (want, got):
        with pytest.raises(ValueError, match=r"hub_tensors cannot export.*merge-adapter"):
            hub_tensors(model, merge_adapters=True)


def files_and_streams_equal_those_without_stages(
    sizes: dict[str, int], config: dict[str, Any], rank: int, world: int, folder: str
) -> None:
    """Files, streams and keys equal those of the same model without stages."""
    run = Run(rank, sizes, **config)
    run.step(0)
    save_pretrained(run.model, f"{folder}/stages")
    unstaged = four_layers(0, **config)
    joined = run.state()
    with torch.no_grad():
        for name, parameter in unstaged.named_parameters():
            parameter.copy_(joined[name])
    if rank == 0:
        unstaged.save_pretrained(f"{folder}/stock")
    dist.barrier()
    got, want = read_all(Path(folder, "stages")), load_file(f"{folder}/stock/model.safetensors")
    assert_equal("files", got, want)
    streamed = dict(hub_tensors(run.model, max_bytes=20_000))
    assert_equal("stream", streamed, want)
    infos = {info.key: (info.shape, info.dtype) for info in hub_tensors(run.model).metadata()}
    assert infos == {key: (tuple(x.shape), x.dtype) for key, x in want.items()}
    for layout in (sizes, {"pp_size": 4}):
        loaded = from_pretrained(f"{folder}/stages", experts_implementation="eager", **layout)
        assert _count_values(loaded) < 0.7 * _count_values(unstaged)
        for name, parameter in whole_parameters(loaded).items():
            name = state_of(loaded).stage.aliases.get(name, name)
            assert torch.equal(parameter, joined[name]), name


def a_gathered_state_dict_of_all_stages_is_saved(rank: int, world: int, folder: str) -> None:
    """Accelerate's examples pass `get_state_dict(model)`, which has all stages, to the model."""
    for config in ({}, TIED):
        path = f"{folder}/{len(config)}"
        model: Any = four_layers(0, **config)
        apply_ep_fsdp2(model, pp_size=2)
        save_pretrained(model, f"{path}/shards")
        state_dict = gather_state_dict(model)
        if rank == 0:
            model.save_pretrained(f"{path}/gathered", state_dict=state_dict)
            got, want = (read_all(Path(path, name)) for name in ("gathered", "shards"))
            assert_equal("files", got, want)
        dist.barrier()


# With these sizes matrices of Linear layers have at least one block of 128 x 128 values.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 130, "head_dim": 64}


def a_stream_in_fp8_equals_the_stream_without_stages(rank: int, world: int) -> None:
    """Values, scales, and the matrices that the config lists, are the same as without stages."""
    model = four_layers(0, mlp_only_layers=[0], **WIDE)
    unstaged = hub_tensors(patch(copy.deepcopy(model)), dtype="fp8")
    apply_ep_fsdp2(model, **STAGES)
    stream = hub_tensors(model, dtype="fp8", max_bytes=60_000)
    for ask in (stream.metadata_of_rank, lambda: stream.quantization_config):
        with pytest.raises(ValueError, match=r"stage \d of 2 only; call metadata\(\)"):
            ask()
    assert stream.metadata() == unstaged.metadata() == stream.metadata_of_rank()
    assert stream.quantization_config == unstaged.quantization_config
    assert_same_stream(stream, unstaged)


def assert_same_stream(got: Any, want: Any) -> dict[str, Tensor]:
    """Compare keys, their order and values, and return the tensors."""
    tensors, wanted = dict(got), dict(want)
    assert list(tensors) == list(wanted)
    for key, value in wanted.items():
        assert tensors[key].dtype == value.dtype, key
        assert torch.equal(tensors[key].double(), value.double()), key
    return tensors


def a_stream_has_the_merged_adapters_of_all_stages(
    options: dict[str, Any], rank: int, world: int
) -> None:
    """Adapters of all stages are merged, and a second sync sends only changed tensors."""
    adapted = partial(with_lora, r=3, seed=5, **options)
    model, unstaged = adapted(four_layers(0)), patch(adapted(four_layers(0)))
    apply_ep_fsdp2(model, **STAGES, pp_layers=(1, 3))
    with pytest.raises(ValueError, match=r"this model has adapters.*merge_adapters=True"):
        next(hub_tensors(model))
    token, merge = SyncToken(), {"merge_adapters": True}
    held = assert_same_stream(
        hub_tensors(model, **merge, since=token), hub_tensors(unstaged, **merge)
    )
    assert not list(hub_tensors(model, **merge, since=token)), "nothing has changed"
    # One factor of each stage. A rank has a part of one of them.
    changed = [f"layers.{layer}.self_attn.q_proj.lora_B.default.weight" for layer in (0, 2)]
    for trained in (model, unstaged):
        own = [p for n, p in trained.named_parameters() if n.endswith(tuple(changed))]
        assert len(own) == (1 if trained is model else 2)
        for parameter in own:
            parameter.data.mul_(1.5)
    delta = dict(hub_tensors(model, **merge, since=token))
    assert list(delta) == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 2)]
    held |= delta
    assert_equal("held by the engine", held, dict(hub_tensors(unstaged, **merge)))


def adapters_that_cannot_be_merged_raise_on_every_stage(rank: int, world: int) -> None:
    """The error of one stage is raised on all ranks, and the next stream works."""
    layers = [f"layers.{layer}.self_attn.v_proj" for layer in (2, 3)]
    dora = with_lora(four_layers(0), r=2, parameters=(), modules=layers, use_dora=True)
    tied = with_lora(four_layers(0, **TIED), r=2, parameters=(), modules=("lm_head",))
    for model, match in (
        (dora, r"layers.2.self_attn.v_proj has an adapter that cannot be merged"),
        (tied, r"the output head has an adapter.*another of the 2 pipeline stages"),
    ):
        apply_ep_fsdp2(model, pp_size=2)
        with pytest.raises(ValueError, match=match):
            next(hub_tensors(model, merge_adapters=True))
    last = with_lora(four_layers(0), r=2, parameters=(), modules=layers)
    unstaged = patch(copy.deepcopy(last))
    apply_ep_fsdp2(last, pp_size=2)
    merge = {"merge_adapters": True}
    assert_same_stream(hub_tensors(last, **merge), hub_tensors(unstaged, **merge))


def _find_layer(key: str) -> int:
    """Return the layer of a key; the embedding counts as layer 0, norm and head as layer 3."""
    _, is_layer, rest = key.partition("layers.")
    return int(rest.split(".")[0]) if is_layer else 0 if "embed" in key else 3


def _layers_by_file(folder: Path) -> dict[str, set[int]]:
    """Return the layers in each file."""
    index = json.loads((folder / INDEX).read_text())
    layers: dict[str, set[int]] = {}
    for key, file in index["weight_map"].items():
        layers.setdefault(file, set()).add(_find_layer(key))
    assert index["metadata"]["hf_moe_ep_sha256"].keys() == layers.keys()
    return layers


def each_stage_writes_its_files(rank: int, world: int, folder: str) -> None:
    """No tensor is sent to another stage, and a writer gets one slab at a time."""
    model = four_layers(0)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    largest = max(parameter.numel() for parameter in model.parameters())
    apply_ep_fsdp2(model, **STAGES, pp_layers=(1, 3))
    opened: list[str] = []
    stock = safetensors_file.Path.open

    def open_path(path: Path, *args: Any, **kwargs: Any) -> Any:
        if args[:1] == ("wb",):
            opened.append(path.name)
        return stock(path, *args, **kwargs)

    column = state_of(model).meshes.stages.column.get_group()
    between = mock.Mock(side_effect=AssertionError("a tensor leaves its stage"))
    broadcast = dist.broadcast

    def broadcast_in_stage(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        assert group is not column, "a tensor leaves its stage"
        return broadcast(tensor, *args, group=group, **kwargs)

    slabs: list[int] = []
    write_slab = write._write_slab

    def measure_slab(file: Any, dtype: Any, pieces: Any, box: Any, slab: Tensor) -> None:
        slabs.append(slab.untyped_storage().nbytes() // slab.itemsize)
        write_slab(file, dtype, pieces, box, slab)

    with (
        mock.patch.object(safetensors_file.Path, "open", open_path),
        mock.patch.object(dist, "send", between),
        mock.patch.object(dist, "broadcast", broadcast_in_stage),
        mock.patch.object(write, "_write_slab", measure_slab),
    ):
        save_pretrained(model, f"{folder}/saved", max_shard_size=60_000)
    assert max(slabs, default=0) <= largest and bool(slabs) == (rank in (0, 2))
    own_layers = {0} if rank < 2 else {1, 2, 3}
    by_file = _layers_by_file(Path(folder, "saved"))
    own = {file for file, layers in by_file.items() if layers & own_layers}
    assert all(by_file[file] <= own_layers for file in own) and len(own) > 1
    assert set(opened) == (own if rank in (0, 2) else set())
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/saved", dtype=torch.float64)
    assert_equal("stock loads", loaded.state_dict(), want)
    verify(f"{folder}/saved")


def a_folder_that_is_not_shared_is_refused(rank: int, world: int, folder: str) -> None:
    """The error leaves the previous checkpoint and no temporary file."""
    model = apply_ep_fsdp2(four_layers(0), pp_size=2)
    save_pretrained(model, f"{folder}/0")
    dist.barrier()
    before = sorted(os.listdir(f"{folder}/0"))
    with pytest.raises(
        ValueError, match=r"rank 1 writes the tensors of pipeline stage 1 of 2.*all nodes share"
    ):
        save_pretrained(model, f"{folder}/{rank}")
    dist.barrier()
    assert sorted(os.listdir(f"{folder}/0")) == before
    save_pretrained(model, f"{folder}/0")


def an_error_of_one_stage_leaves_the_folder_unchanged(rank: int, world: int, folder: str) -> None:
    """If the writer of the second stage fails, every rank raises, and no file changes."""
    model = apply_ep_fsdp2(four_layers(0), pp_size=2)
    save_pretrained(model, folder)
    dist.barrier()
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    error = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with (
        mock.patch.object(Writer, "write", error) if rank == 1 else nullcontext(),
        pytest.raises(RuntimeError, match=r"rank 1: .*No space left on device"),
    ):
        save_pretrained(model, folder, max_shard_size=60_000)
    dist.barrier()
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before


# Options of LoraConfig: adapters on experts and attention, without and with trained modules.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapters": {},
    "adapters and modules": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


def saved_adapters_equal_those_without_stages(
    options: dict[str, Any], rank: int, world: int, folder: str
) -> None:
    """Every way to save adapters writes the tensors that PEFT saves without stages."""
    torch.manual_seed(rank)
    model = with_lora(four_layers(0), r=3, **options)
    apply_ep_fsdp2(model, **STAGES)
    torch.manual_seed(0)
    stock = with_lora(four_layers(0), r=3, **options)
    with pytest.raises(ValueError, match=r"pp_size=2.*call hf_moe_ep.save_pretrained\(model"):
        save = partial(save_adapters, PeftModel.save_pretrained, model)
        save(f"{folder}/none", state_dict={"a": torch.ones(1)})
    save_pretrained(model, f"{folder}/ours")
    model.save_pretrained(f"{folder}/on every rank")
    state_dict = gather_state_dict(model)
    assert bool(state_dict) == (rank == 0)
    if rank == 0:
        model.save_pretrained(f"{folder}/with a state dict", state_dict=state_dict)
        stock.save_pretrained(f"{folder}/stock")
    dist.barrier()
    want = load_file(f"{folder}/stock/adapter_model.safetensors")
    config = json.loads(Path(folder, "stock", "adapter_config.json").read_text())
    for name in ("ours", "on every rank", "with a state dict"):
        assert_equal(name, load_file(f"{folder}/{name}/adapter_model.safetensors"), want)
        got = json.loads(Path(folder, name, "adapter_config.json").read_text())
        assert got == config, f"{name}: {got} instead of {config}"
    opened = PeftModel.from_pretrained(four_layers(0), f"{folder}/ours")
    rows = even_rows(stock, 0, 0)[0]
    with torch.no_grad():
        assert torch.equal(opened(**rows).logits, stock.eval()(**rows).logits)
    resumed = apply_ep_fsdp2(with_lora(four_layers(0), r=3, seed=9, **options), ep_size=2)
    save_checkpoint(f"{folder}/run", model, None)
    load_checkpoint(f"{folder}/run", resumed, None)
    save_pretrained(resumed, f"{folder}/resumed")
    assert_equal("resumed", load_file(f"{folder}/resumed/adapter_model.safetensors"), want)


def adapters_of_no_layer_are_refused(rank: int, world: int) -> None:
    """PEFT's prompts belong to no stage, and would get the gradients of one stage only."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = get_peft_model(four_layers(0), config)
    with pytest.raises(ValueError, match=r"prompt_encoder\S+ belongs to no layer.*LoraConfig"):
        apply_ep_fsdp2(model, pp_size=2)


CHECKS: dict[str, Any] = {
    "resumes": partial(a_run_resumes_at_any_number_of_stages, {}),
    "resumes, tied": partial(a_run_resumes_at_any_number_of_stages, TIED),
    "resumes, nf4": partial(adapters_on_quantised_experts_resume, "nf4"),
    "resumes, fp8": partial(adapters_on_quantised_experts_resume, "fp8"),
    "loads, nf4": partial(a_stage_quantises_the_experts_that_it_reads, "nf4"),
    "hub": partial(files_and_streams_equal_those_without_stages, STAGES, {}),
    "hub, tied": partial(files_and_streams_equal_those_without_stages, STAGES, TIED),
    "hub, etp": partial(files_and_streams_equal_those_without_stages, ETP, {}),
    "own files": each_stage_writes_its_files,
    "stream in FP8": a_stream_in_fp8_equals_the_stream_without_stages,
    **{
        f"stream, {name}": partial(a_stream_has_the_merged_adapters_of_all_stages, options)
        for name, options in ADAPTERS.items()
    },
    **{
        name: partial(saved_adapters_equal_those_without_stages, options)
        for name, options in ADAPTERS.items()
    },
}


def adapters_of_one_stage_are_all_that_is_saved(rank: int, world: int, folder: str) -> None:
    """The other stage has only frozen parameters, which a checkpoint does not contain."""
    stages, unstaged = {"pp_size": 2}, {"ep_size": 2}
    for number, (sizes, others) in enumerate(((stages, unstaged), (unstaged, stages))):
        run, resumed = (Run(rank, layout, adapters="a layer") for layout in (sizes, others))
        run.step(0)
        save_checkpoint(f"{folder}/{number}", run.model, run.optimizer)
        tensors = json.loads(Path(f"{folder}/{number}/state.json").read_text())["tensors"]
        assert len(tensors) == 2 * 3 and all("lora" in name for name in tensors)
        load_checkpoint(f"{folder}/{number}", resumed.model, resumed.optimizer)
        assert_equal(f"{sizes} to {others}", resumed.state(), run.state())


def parameter_groups_of_stages_that_differ_are_refused(rank: int, world: int, folder: str) -> None:
    """A checkpoint has one lr per group, which all stages would load."""
    run = Run(rank, {"pp_size": 2})
    run.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    with pytest.raises(ValueError, match=r"lr of parameter group 0 is 0.1 on .* 0 and 0.2 on .* 1"):
        save_checkpoint(f"{folder}/lr", run.model, run.optimizer)
    run.optimizer.param_groups[0]["lr"] = 0.1
    if rank == 1:
        run.optimizer.add_param_group({"params": []})
    with pytest.raises(ValueError, match=r"different numbers of parameter groups \(1, 2\)"):
        save_checkpoint(f"{folder}/groups", run.model, run.optimizer)
    if rank == 0:
        run.optimizer.add_param_group({"params": []})
    save_checkpoint(f"{folder}/groups", run.model, run.optimizer)


def extra_tensors_are_written_by_the_first_stage(rank: int, world: int, folder: str) -> None:
    """Every save has the tensors that the class ignores, and only rank 0 reads them."""
    root = Path(folder)
    if rank == 0:
        write_with_extra(root / "base", "glm4_moe")
    dist.barrier()
    model = from_pretrained(root / "base", pp_size=2)
    copied: list[str] = []
    copy_tensor = Writer.copy

    def copy_and_count(writer: Any, key: str, *args: Any) -> None:
        copied.append(key)
        copy_tensor(writer, key, *args)

    with mock.patch.object(Writer, "copy", copy_and_count):
        save_pretrained(model, root / "saved", max_shard_size=60_000)
    save_checkpoint(root / "step", model, None)
    stream = dict(hub_tensors(model))
    before = read_files(root / "base")
    extra = {key for key in before if is_of_head(key, model)}
    assert len(extra) == 41 and set(copied) == (extra if rank == 0 else set())
    if rank == 0:
        convert(root / "step", root / "converted")
    dist.barrier()
    assert verify(root / "saved").facts["ignored tensors"].startswith("41, such as ")
    for got in (stream, read_files(root / "saved"), read_files(root / "converted")):
        assert got.keys() == before.keys()
        assert_same_bytes(got, before)


def a_stage_reads_only_its_own_tensors(rank: int, world: int, folder: str) -> None:
    """Each rank reads the bytes of its stage once. The last stage also reads a tied embedding."""
    for name, config in (("base", {}), ("tied", TIED)):
        path = Path(folder, name)
        if rank == 0:
            four_layers(0, **config).save_pretrained(path, max_shard_size="60KB")
        dist.barrier()
        with mock.patch.object(Reader, "_fill_from_file") as fill:
            from_pretrained(path, experts_implementation="eager", pp_size=2, pp_layers=(1, 3))
        tensors = read_index(path)
        read: Counter[str] = Counter()
        for file, target, start in (call.args for call in fill.call_args_list):
            (key,) = (
                key
                for key, tensor in tensors.items()
                if tensor.file == file and 0 <= start - tensor.start < tensor.nbytes
            )
            read[key] += len(target)
        own_layers = {0} if rank == 0 else {1, 2, 3}
        own = {key for key in tensors if _find_layer(key) in own_layers}
        own |= {"model.embed_tokens.weight"} if config else set()
        assert len(own) < 0.8 * len(tensors)
        assert read == {key: tensors[key].nbytes for key in own}


TWO_RANKS = (
    a_gathered_state_dict_of_all_stages_is_saved,
    adapters_of_one_stage_are_all_that_is_saved,
    parameter_groups_of_stages_that_differ_are_refused,
    a_folder_that_is_not_shared_is_refused,
    an_error_of_one_stage_leaves_the_folder_unchanged,
    adapters_of_no_layer_are_refused,
    adapters_that_cannot_be_merged_raise_on_every_stage,
    extra_tensors_are_written_by_the_first_stage,
    a_stage_reads_only_its_own_tensors,
)


@pytest.mark.parametrize("claim", [*on_ranks(4, CHECKS, slow=True), *on_ranks(2, *TWO_RANKS)])
def test_files_of_stages(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
