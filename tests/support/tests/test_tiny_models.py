"""The tiny models can be a reference: fp64 throughout, every expert used, reproducible."""

import torch
from support.tiny_models import batch, tiny


def test_every_parameter_and_expert_gets_a_gradient_in_fp64() -> None:
    model = tiny()
    output = model(**batch(model, 3, 37, seed=1))
    assert output.logits.dtype == torch.float64
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-4, name
    for layer in model.model.layers:
        per_expert = layer.mlp.experts.gate_up_proj.grad.abs().amax(dim=(1, 2))
        assert (per_expert > 0).all(), per_expert


def test_routing_is_neither_uniform_nor_limited_to_few_experts() -> None:
    model = tiny()
    inputs = batch(model, 4, 64, seed=2)
    output = model(**inputs, output_router_logits=True)
    for logits in output.router_logits:
        top2 = logits.softmax(-1).topk(2).indices
        share = torch.bincount(top2.flatten(), minlength=8) / top2.numel()
        assert 0.02 < share.min() < share.max() < 0.5, share
        assert logits.std() > 0.3, logits.std()  # it is near 0 if routing is uniform
    for logits in model(**batch(model, 2, 16), output_router_logits=True).router_logits:
        counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=8)
        assert (counts > 0).all(), counts


def test_equal_seeds_give_equal_weights_and_the_global_generator_is_not_used() -> None:
    before = torch.random.get_rng_state()
    first, second, other = tiny(seed=3), tiny(seed=3), tiny(seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_overrides_reach_the_config() -> None:
    model = tiny(dtype=torch.bfloat16, num_experts=4, attn_implementation="eager")
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 48, 32)
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "eager"
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_batch_pads_rows_unevenly_and_ignores_labels() -> None:
    model = tiny()
    inputs = batch(model, 3, 11, seed=5, pad=4)
    assert inputs["attention_mask"].sum(1).tolist() == [11, 9, 7]
    ignored = inputs["labels"] == -100
    assert ignored[inputs["attention_mask"] == 0].all()
    assert ignored[inputs["attention_mask"] == 1].any()
    assert torch.equal(inputs["labels"][~ignored], inputs["input_ids"][~ignored])
    assert (inputs["labels"][:, 1] != -100).all()
