"""Files in the layout that is derived from transformers' conversion equal the files of stock."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.architectures import MODEL_TYPES, few_fast, tiny
from support.hub_files import assert_equal, read_all
from support.resident import Resident
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    PermuteForRope,
    WeightConverter,
)

from hf_moe_ep.checkpoints.hub.extra import find_extra
from hf_moe_ep.checkpoints.hub.layout import (
    PADDING,
    find_hub_layout,
    group_by_shared_tensors,
    list_distinct_tensors,
)
from hf_moe_ep.checkpoints.hub.pieces import Piece, make_whole_piece
from hf_moe_ep.checkpoints.hub.read import find_weights, load_weights
from hf_moe_ep.checkpoints.hub.traced import Tracer, Untraceable
from hf_moe_ep.checkpoints.hub.write import group_tensors, split_files, write_checkpoint
from hf_moe_ep.plan import ModelPlan, Stored
from hf_moe_ep.ranks.boxes import Box
from hf_moe_ep.upstream.hub import build_empty_model

# Without `stored` and stacked weights, each layout comes from transformers' conversion alone.
PLAN = ModelPlan("no_expert_weights", expert_weights=())


def _cut_slabs(rows: int, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield a tensor in slabs of `rows` rows each, as a save gathers it from the ranks."""
    if not tensor.ndim:
        yield (), tensor
        return
    for start in range(0, len(tensor), rows):
        slab = tensor[start : start + rows]
        yield ((start, start + len(slab)), *((0, size) for size in slab.shape[1:])), slab


def _save_slab_by_slab(
    model: PreTrainedModel, folder: Path, plan: ModelPlan = PLAN, rows: int = 3
) -> None:
    """Save an unpatched model as a sharded model is saved."""
    folder.mkdir()
    tensors = {name: tensor.detach() for name, tensor in list_distinct_tensors(model).items()}
    groups = group_tensors(
        model, plan, tensors, lambda _, tensor: tensor.dtype, lambda _, t: _cut_slabs(rows, t)
    )
    write_checkpoint(folder, split_files(groups, 50_000))


def _load_model(model_class: Any, folder: Path, plan: ModelPlan = PLAN) -> PreTrainedModel:
    """Build the model that the config in a folder describes, and load its weights."""
    model = build_empty_model(folder, model_class, torch.get_default_dtype, {})
    names = {parameter: name for name, parameter in model.named_parameters()}
    tied = {name: names[p] for name, p in model.named_parameters(remove_duplicate=False)}
    stored = find_weights(model, folder, plan, names.values()).stored
    load_weights(model, stored, torch.device("cpu"))
    for name, first_name in tied.items():
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, model.get_parameter(first_name))
    assert isinstance(model, PreTrainedModel)
    return model


def _read_stock_files(folder: Path) -> dict[str, Tensor]:
    files = folder.glob("*.safetensors")
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


@pytest.mark.parametrize("model_type", few_fast(MODEL_TYPES))
def test_files_equal_those_that_stock_writes(model_type: str, tmp_path: Path) -> None:
    """Keys, shapes, dtypes and values of every MoE type are equal, and stock's files are read."""
    model = tiny(model_type, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stock")
    _save_slab_by_slab(model, tmp_path / "ours")
    assert_equal(read_all(tmp_path / "ours"), _read_stock_files(tmp_path / "stock"))
    read = _load_model(type(model), tmp_path / "stock")
    assert_equal(read.state_dict(), model.state_dict())


class _Flip(ConversionOps):
    """A conversion by torch.flip, which the tracer does not support."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return {key: torch.flip(values[0], [0]) for key, values in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny("mixtral", dtype=torch.float32)


def _derive_layout(
    model: PreTrainedModel, shapes: dict[str, tuple[int, ...]], *conversions: WeightConverter
) -> dict[str, list[Piece]]:
    """Derive the pieces of tensors, {name: shape}, for given conversions."""
    stock_conversions = getattr(model, "_weight_conversions", None)
    model._weight_conversions = list(conversions)
    try:
        layout = dict(find_hub_layout(model, PLAN, shapes))
    finally:
        model._weight_conversions = stock_conversions
    return layout if layout[PADDING] else {name: layout[name] for name in shapes}


def test_the_pieces_of_interleaved_rows(stock: PreTrainedModel) -> None:
    """The file has the rows of a parameter, gate and up, in the order 0 3 1 4 2 5.

    In the view [E, 3, 2, H] of the file's tensor, gate is [:, :, 0] and up is [:, :, 1].
    """
    loading = WeightConverter("mlp.w13", "mlp.gate_up", [Interleave(dim=1)])
    pieces = _derive_layout(stock, {"a.mlp.gate_up": (2, 6, 5)}, loading)["a.mlp.gate_up"]
    gate, up = pieces
    assert (gate.key, gate.shape, gate.view) == ("a.mlp.w13", (2, 6, 5), (2, 3, 2, 5))
    assert (gate.start, gate.sizes, gate.axes, gate.corner) == (
        (0, 0, 0),
        (2, 3, 5),
        (0, 1, 3),
        (0, 0, 0, 0),
    )
    assert (up.start, up.corner, up.steps) == ((0, 3, 0), (0, 0, 1, 0), (1, 1, 1))
    # Rows 2 to 4 of expert 1 are the last row of gate and the first two rows of up, which are the
    # rows 4, 1 and 3 in the file.
    rows = ((1, 2), (2, 5), (0, 5))
    parts = [piece.cut(rows) for piece in pieces]
    assert [part.box_in_view for part in parts if part] == [
        ((1, 2), (2, 3), (0, 1), (0, 5)),
        ((1, 2), (0, 2), (1, 2), (0, 5)),
    ]


def test_the_pieces_of_two_parameters_in_one_tensor(stock: PreTrainedModel) -> None:
    """Two parameters are columns 0 to 2 and 3 to 5 of the file's tensor [4, 6].

    In the view [4, 2, 3] of this tensor they are [:, 0] and [:, 1].
    """
    loading = WeightConverter("attn.both", ["attn.one", "attn.two"], [Chunk(dim=1)])
    layout = _derive_layout(stock, {"attn.one": (4, 3), "attn.two": (4, 3)}, loading)
    (first,), (second,) = layout.values()
    assert (first.shape, first.view, first.corner) == ((4, 6), (4, 2, 3), (0, 0, 0))
    assert (second.shape, second.view, second.corner) == ((4, 6), (4, 2, 3), (0, 1, 0))


class _Pad(ConversionOps):
    """A conversion that appends two columns of zeros to the tensor that is saved."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        (key, values), *_others = input_dict.items()
        tensor = values[0] if isinstance(values, list) else values
        return {key: torch.cat([tensor, tensor.new_zeros(tensor.shape[0], 2)], dim=1)}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def test_the_pieces_of_padding(stock: PreTrainedModel) -> None:
    """The file's tensor [4, 5] has the parameter in columns 0 to 2, and then two of zeros."""
    layout = _derive_layout(stock, {"head": (4, 3)}, WeightConverter("hub", "head", [_Pad()]))
    (values,), (zeros,) = layout["head"], layout[PADDING]
    assert (values.shape, values.sizes, values.corner) == ((4, 5), (4, 3), (0, 0))
    assert (zeros.key, zeros.shape, zeros.corner) == (values.key, (4, 5), (0, 3))
    assert zeros.sizes[:2] == (4, 2)


def test_the_pieces_of_permuted_rotary_rows(stock: PreTrainedModel) -> None:
    """The file has the rows 0 1 2 3 of each of 2 heads in the order 0 2 1 3."""
    loading = WeightConverter("q.hub", "q.weight", [PermuteForRope(permute_layer_names=["q."])])
    stock.config.num_attention_heads, num_heads = 2, stock.config.num_attention_heads
    try:
        pieces = _derive_layout(stock, {"q.weight": (8, 3)}, loading)["q.weight"]
    finally:
        stock.config.num_attention_heads = num_heads
    file_tensor = torch.full((8, 3), -1)
    parameter = torch.arange(24).view(8, 3)
    for piece in pieces:
        inside = tuple(slice(*ends) for ends in piece.box_in_view)
        values = parameter[piece.slices_in(((0, 8), (0, 3)))]
        file_tensor.view(piece.view)[inside] = piece.in_view(values)
    assert file_tensor[:, 0].div(3, rounding_mode="floor").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_conversion_that_cannot_be_traced_is_refused(stock: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"how the hub stores this Mixtral.*calls flip"):
        _derive_layout(stock, {"a.down": (2, 3)}, WeightConverter("a.w2", "a.down", [_Flip()]))


def test_a_plan_overrides_the_conversion(tmp_path: Path) -> None:
    model = tiny("mixtral", dtype=torch.float32)
    plan = ModelPlan("mixtral", stored={"down_proj": Stored(transposed=True)})
    _save_slab_by_slab(model, tmp_path / "ours", plan, rows=2)
    saved = read_all(tmp_path / "ours")
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(saved[name], model.state_dict()[name].transpose(1, 2))
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in saved


def test_a_text_model_reads_a_multimodal_checkpoint_as_in_stock(tmp_path: Path) -> None:
    """A multimodal checkpoint has other names for the tensors of the text model."""
    model = tiny("qwen3_5_moe_text", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    state = _read_stock_files(tmp_path)
    assert not any("language_model" in key for key in state)
    renamed = {
        key.replace("model.", "model.language_model.", 1): tensor for key, tensor in state.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path)
    assert_equal(loaded.state_dict(), model.state_dict())
    assert_equal(_load_model(type(model), tmp_path).state_dict(), model.state_dict())


def test_an_error_names_missing_and_unexpected_keys(tmp_path: Path) -> None:
    model = tiny("mixtral", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    state = {
        key.replace(".w1.", ".gate."): tensor for key, tensor in _read_stock_files(tmp_path).items()
    }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    text = (
        r"missing 32 tensors: model.layers.0.block_sparse_moe.experts.0.w1.weight.* and 27 more; "
        r".*holds instead 32 tensors: model.layers.0.block_sparse_moe.experts.0.gate.weight.*plan="
    )
    with pytest.raises(ValueError, match=text):
        _load_model(transformers.MixtralForCausalLM, tmp_path)


def test_a_text_class_uses_the_text_part_of_a_config(tmp_path: Path) -> None:
    tiny("qwen3_5_moe").save_pretrained(tmp_path)
    want = transformers.Qwen3_5MoeForCausalLM.from_pretrained(tmp_path)
    got = _load_model(transformers.Qwen3_5MoeForCausalLM, tmp_path)
    assert_equal(dict(got.state_dict()), dict(want.state_dict()))


def _change_files(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the files of a checkpoint by one file with changed tensors."""
    tensors = change(_read_stock_files(folder))
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _add_old_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add a buffer that the files of Moonlight and Kimi contain."""
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


def _remove_biases_and_add_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the biases and add a norm, as in the files of A.X-K1 (modeling_axk1.py)."""
    kept = {key: x for key, x in tensors.items() if "e_score_correction_bias" not in key}
    assert len(kept) < len(tensors)
    return kept | {"model.layers.0.post_mlp_layernorm.weight": torch.ones(4)}


def _remove_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefix, which the files of DeepSeek-V4 do not have."""
    return {key.removeprefix("model."): x for key, x in tensors.items()}


def _use_original_names_and_add_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Use the names of DeepSeek's own code, as the files of DeepSeek-V4 do."""
    new_names = {"embed_tokens.weight": "embed.weight"}
    new_names |= {f"hc_head.hc_{kind}": f"hc_head_{kind}" for kind in ("base", "fn", "scale")}
    without_prefix = _remove_prefix(tensors)
    assert new_names.keys() < without_prefix.keys()
    head = {key: torch.ones(4) for key in HEAD_KEYS}
    return {new_names.get(key, key): x for key, x in without_prefix.items()} | head


HEAD_KEYS = ("mtp.0.attn.q_norm.weight", "mtp.0.norm.weight", "mtp.0.hc_head_fn")


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("deepseek_v3", _add_old_buffers),
        ("axk1", _remove_biases_and_add_norm),
        ("deepseek_v4", _remove_prefix),
        ("deepseek_v4", _use_original_names_and_add_head),
    ],
)
def test_published_files_are_read_as_stock_reads_them(
    model_type: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    if model_type not in MODEL_TYPES:
        pytest.skip(f"this transformers has no {model_type}")
    model = tiny(model_type)
    if change is _remove_biases_and_add_norm and not model._keys_to_ignore_on_load_missing:
        pytest.skip("in this transformers the class needs its biases")
    model.save_pretrained(tmp_path)
    _change_files(tmp_path, change)
    want, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    if change is _use_original_names_and_add_head and info["missing_keys"]:
        pytest.skip("this transformers does not know the original names")
    found = find_weights(model, tmp_path, PLAN, [name for name, _ in model.named_parameters()])
    extra = set(HEAD_KEYS) if change is _use_original_names_and_add_head else set()
    assert {key for key in found.extra if not key.endswith("post_mlp_layernorm.weight")} == extra
    references = find_extra(want, PLAN)
    assert (set() if references is None else references.tensors().keys()) == found.extra.keys()
    got = _load_model(type(model), tmp_path)
    assert_equal(dict(got.state_dict()), dict(want.state_dict()))


def test_a_long_dim_needs_memory_for_one_coordinate_only(stock: PreTrainedModel) -> None:
    """The n-gram embedding of Qwen4-Exp has 320 million rows."""
    join = WeightConverter(["a.one", "a.two"], "a.emb", [Concatenate(dim=0)])
    with Resident() as resident:
        _derive_layout(stock, {"a.emb": (20_000_000, 2)}, join)
    assert resident.grown < 700 * 2**20


def test_a_reshape_across_dims_is_refused() -> None:
    """Rows of the result, [4, 3], would begin in the middle of rows of the parameter, [6, 2]."""
    with pytest.raises(Untraceable, match=r"reshape of \(6, 2\) into \(4, 3\)"):
        Tracer().tensor(0, (6, 2)).reshape(4, 3)


def test_groups_that_a_later_parameter_joins_stay_where_the_first_of_them_was() -> None:
    """Parameter c shares one checkpoint tensor with b, and another one with a."""
    keys = {"a": ["1"], "d": ["3"], "b": ["2"], "c": ["2", "1"]}
    layout = {name: [make_whole_piece(key, (4,)) for key in ks] for name, ks in keys.items()}
    assert group_by_shared_tensors(layout, keys) == [["a", "c", "b"], ["d"]]
