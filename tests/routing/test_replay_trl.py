"""TRL's GRPO replays routing: R2 replays recorded routes, and R3 replays an engine's routes."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.adapters import ATTENTION
from support.forced import draw_random_ids
from support.tiny_models import tiny
from support.words import make_tokenizer, text_of_tokens
from torch import Tensor

from hf_moe_ep import patch
from hf_moe_ep.trl import ROUTES, replay_routing

# TRL uses the option gradient_checkpointing, for which transformers warns.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LAYERS, EXPERTS, TOP_K = 2, 8, 2


def _build_trainer(folder: Any, lora: bool = False, **arguments: Any) -> Any:
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_completion_length": 5,
        "max_steps": 3,
        "learning_rate": 0.05,
        "beta": 0.1 if lora else 0.0,
        "gradient_checkpointing": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | arguments
    rows = [{"prompt": text_of_tokens(list(range(3, 4 + index % 4)))} for index in range(8)]
    model = patch(tiny(dtype=torch.float32))
    return GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(words)) for words in completions],
        args=GRPOConfig(**options),
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(model.config.vocab_size),
        peft_config=LoraConfig(r=4, target_modules=list(ATTENTION)) if lora else None,
    )


class _UpdateRecorder:
    """Records the expert ids in the forwards of TRL's policy updates.

    Attributes:
        updates: for each update, the ids stored with the samples and the ids that experts received.
    """

    def __init__(self, trainer: Any) -> None:
        self.updates: list[tuple[Tensor, Tensor]] = []
        self._ids: dict[int, Tensor] = {}
        layers = trainer.accelerator.unwrap_model(trainer.model).get_decoder().layers
        for index, layer in enumerate(layers):
            layer.mlp.experts.register_forward_pre_hook(partial(self._record, index))
        loss = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: self._update(loss, model, inputs)

    def _record(self, index: int, experts: Any, args: tuple[Tensor, ...]) -> None:
        self._ids.setdefault(index, args[1].detach())

    def _update(self, loss: Any, model: Any, inputs: Any) -> Any:
        self._ids.clear()
        value = loss(model, inputs)  # the layers are recomputed later, in backward
        ids = torch.stack([self._ids[index] for index in range(LAYERS)], dim=1)
        self.updates.append((inputs[ROUTES].flatten(0, 1).long(), ids))
        return value


def test_r2_replays_the_routes_of_the_old_log_probabilities(tmp_path: Any) -> None:
    """TRL shuffles and splits the samples. Weights change by large steps, experts do not change."""
    trainer = _build_trainer(tmp_path)
    replay = replay_routing(trainer, "R2")
    recorder = _UpdateRecorder(trainer)
    trainer.train()
    assert len(recorder.updates) == 3
    for recorded, used in recorder.updates:
        assert torch.equal(recorded, used)
    assert replay.last.live == 0 and replay.last.agreement < 0.95
    assert not torch.equal(recorder.updates[0][0], recorder.updates[1][0])


@pytest.mark.parametrize("mode", ["R2", pytest.param("R3", marks=pytest.mark.slow)])
def test_the_reference_is_not_replayed(tmp_path: Any, mode: str) -> None:
    """With LoRA the reference is the model with disabled adapters. It routes live."""
    trainer = _build_trainer(tmp_path, lora=True)
    _attach_engine(trainer, _Engine())
    replay_routing(trainer, mode)
    recorder = _UpdateRecorder(trainer)
    reference_logps: list[tuple[Tensor, Tensor]] = []
    original = trainer._get_per_token_logps_and_entropies

    def compared(model: Any, *args: Any, **kwargs: Any) -> Any:
        layer = trainer.model.base_model.model.model.layers[0]
        result = original(model, *args, **kwargs)
        if layer.self_attn.q_proj.disable_adapters:
            stock = type(trainer)._get_per_token_logps_and_entropies
            reference_logps.append((result[0], stock(trainer, model, *args, **kwargs)[0]))
        return result

    trainer._get_per_token_logps_and_entropies = compared
    trainer.train()
    assert len(reference_logps) == 1 and torch.equal(*reference_logps[0])
    rows = sum(len(batch[ROUTES]) for batch in trainer._buffered_inputs)
    assert rows == sum(len(batch["completion_ids"]) for batch in trainer._buffered_inputs)
    for routes, used in recorder.updates:
        has_routes = routes[:, 0, 0] >= 0
        assert torch.equal(routes[has_routes], used[has_routes]) and has_routes.any()


class _Engine:
    """A fake of vllm.LLM. It returns expert ids [tokens - 1, layers, K] of each sample.

    The ids of the last token are missing. Sample `wrong` has an expert twice.
    """

    def __init__(self, arrays: bool = True, wrong: int | None = None) -> None:
        self.arrays, self.wrong = arrays, wrong
        self.returned: list[Any] = []

    def generate(self, samples: list[list[int]]) -> list[Any]:
        outputs = []
        for number, tokens in enumerate(samples):
            ids = draw_random_ids(1, len(tokens) - 1, LAYERS, EXPERTS, TOP_K, seed=number)[
                0
            ].numpy()
            if number == self.wrong:
                ids[0, 1] = 3
            completion = SimpleNamespace(routed_experts=ids if self.arrays else None)
            outputs.append(SimpleNamespace(outputs=[completion]))
            self.returned.append(ids)
        return outputs


def _attach_engine(trainer: Any, engine: _Engine) -> None:
    trainer.vllm_generation = SimpleNamespace(llm=engine)
    generate = trainer._generate

    def generated(prompts: Any) -> Any:
        result = generate(prompts)
        samples = [prompt + answer for prompt, answer in zip(result[0], result[1], strict=True)]
        trainer.vllm_generation.llm.generate(samples)
        return result

    trainer._generate = generated


@pytest.mark.parametrize("truncated", [False, True])
def test_r3_replays_the_routes_of_the_engine(tmp_path: Any, truncated: bool) -> None:
    """Prompts are padded left and completions right. Padding and last tokens route live."""
    trainer = _build_trainer(tmp_path, mask_truncated_completions=truncated)
    engine = _Engine()
    _attach_engine(trainer, engine)
    replay = replay_routing(trainer, "R3")
    recorder = _UpdateRecorder(trainer)
    trainer.train()
    arrays = {array.tobytes() for array in engine.returned}
    for routes, used in recorder.updates:
        has_routes = routes[:, 0, 0] >= 0
        assert torch.equal(routes[has_routes], used[has_routes]) and not has_routes.all()
    rows = trainer._buffered_inputs[0][ROUTES]
    for row in rows:
        has_routes = row[row[:, 0, 0] >= 0]
        assert has_routes.numpy().tobytes() in arrays
    assert replay.last.replayed > 0 and replay.last.live > 0


@pytest.mark.slow
def test_r3_checks_the_routes_of_every_sample(tmp_path: Any) -> None:
    """Sample 6 has wrong routes, and is not in the part of the batch that TRL computes first."""
    trainer = _build_trainer(tmp_path)
    _attach_engine(trainer, _Engine(wrong=6))
    replay_routing(trainer, "R3")
    with pytest.raises(ValueError, match=r"layer 1 of the routes, \[3, 3\], has an expert twice"):
        trainer.train()


def test_unsupported_trainers_and_modes_are_refused(tmp_path: Any) -> None:
    trainer = _build_trainer(tmp_path)
    with pytest.raises(ValueError, match="mode='R4'"):
        replay_routing(trainer, "R4")
    with pytest.raises(ValueError, match="reads routes from vLLM in this process"):
        replay_routing(trainer, "R3")
    with pytest.raises(
        ValueError, match=r"not a GRPOTrainer .* no _generate_and_score_completions"
    ):
        replay_routing(SimpleNamespace(model=trainer.model), "R2")
    _attach_engine(trainer, _Engine(arrays=False))
    for name in ("tools", "rollout_func"):
        several = copy.copy(trainer)
        setattr(several, name, [print])
        with pytest.raises(ValueError, match=f"with {name} a sample is generated in several calls"):
            replay_routing(several, "R3")
    replay_routing(copy.copy(trainer), "R3")
    with pytest.raises(ValueError, match="without routed_experts"):
        trainer.vllm_generation.llm.generate([[1, 2]])


def test_r3_needs_the_routes_of_all_samples_from_one_call(tmp_path: Any) -> None:
    """The engine's last call has only some samples, as for samples that have called a tool."""
    trainer, engine = _build_trainer(tmp_path), _Engine()
    _attach_engine(trainer, engine)
    replay_routing(trainer, "R3")
    generate = trainer._generate

    def generate_twice(prompts: Any) -> Any:
        result = generate(prompts)
        trainer.vllm_generation.llm.generate([[1, 2, 3]])
        return result

    trainer._generate = generate_twice
    with pytest.raises(ValueError, match=r"routes of 1 samples in its last call, but the batch"):
        trainer.train()
