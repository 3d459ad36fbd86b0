"""GRPO of TRL, with the routing of its samples replayed: recorded (R2), or an engine's (R3)."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.adapters import ATTENTION
from support.forced import random_ids
from support.tiny_models import tiny
from support.words import text, tokenizer
from torch import Tensor

from hf_moe_ep import patch
from hf_moe_ep.trl import ROUTES, replay_routing

# TRL still says gradient_checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LAYERS, EXPERTS, TOP_K = 2, 8, 2


def _trainer(folder: Any, lora: bool = False, **arguments: Any) -> Any:
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
    rows = [{"prompt": text(list(range(3, 4 + index % 4)))} for index in range(8)]
    model = patch(tiny(dtype=torch.float32))
    return GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(words)) for words in completions],
        args=GRPOConfig(**options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(model.config.vocab_size),
        peft_config=LoraConfig(r=4, target_modules=list(ATTENTION)) if lora else None,
    )


class _Seen:
    """What reaches the experts of all layers, forward by forward, with TRL's own call around it."""

    def __init__(self, trainer: Any) -> None:
        self.updates: list[tuple[Tensor, Tensor]] = []  # what came with the samples, what ran
        self.references: list[tuple[Tensor, Tensor]] = []  # what ran, what runs without replay
        self._ids: dict[int, Tensor] = {}
        self._trainer = trainer
        layers = trainer.accelerator.unwrap_model(trainer.model).get_decoder().layers
        for place, layer in enumerate(layers):
            layer.mlp.experts.register_forward_pre_hook(partial(self._see, place))
        loss = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: self._update(loss, model, inputs)

    def _see(self, place: int, experts: Any, args: tuple[Tensor, ...]) -> None:
        self._ids.setdefault(place, args[1].detach())

    def of(self, run: Any) -> tuple[Any, Tensor]:
        """What `run` returns, and the ids of its forward: a recompute comes later."""
        self._ids.clear()
        value = run()
        return value, torch.stack([self._ids[place] for place in range(LAYERS)], dim=1)

    def _update(self, loss: Any, model: Any, inputs: Any) -> Any:
        value, ids = self.of(lambda: loss(model, inputs))
        self.updates.append((inputs[ROUTES].flatten(0, 1).long(), ids))
        return value


def test_the_update_chooses_what_the_pass_for_old_log_probabilities_chose(tmp_path: Any) -> None:
    """R2: after steps of a large learning rate, shuffled and split, each sample has its experts."""
    trainer = _trainer(tmp_path)
    replay = replay_routing(trainer, "R2")
    seen = _Seen(trainer)
    trainer.train()
    assert len(seen.updates) == 3
    for recorded, ran in seen.updates:
        assert torch.equal(recorded, ran)
    assert replay.last.live == 0 and replay.last.agreement < 0.95
    assert not torch.equal(seen.updates[0][0], seen.updates[1][0])


@pytest.mark.parametrize("mode", ["R2", pytest.param("R3", marks=pytest.mark.slow)])
def test_the_policy_without_adapters_is_no_policy(tmp_path: Any, mode: str) -> None:
    """With LoRA, log-probabilities of the reference are those of a trainer without replay."""
    trainer = _trainer(tmp_path, lora=True)
    _with_engine(trainer, _Engine())
    replay_routing(trainer, mode)
    seen = _Seen(trainer)
    logps: list[tuple[bool, Tensor, Tensor]] = []
    original = trainer._get_per_token_logps_and_entropies

    def compared(model: Any, *args: Any, **kwargs: Any) -> Any:
        off = trainer.model.base_model.model.model.layers[0].self_attn.q_proj.disable_adapters
        found = original(model, *args, **kwargs)
        if off:
            stock = type(trainer)._get_per_token_logps_and_entropies
            logps.append((off, found[0], stock(trainer, model, *args, **kwargs)[0]))
        return found

    trainer._get_per_token_logps_and_entropies = compared
    trainer.train()
    assert len(logps) == 1 and torch.equal(logps[0][1], logps[0][2])
    rows = sum(len(batch[ROUTES]) for batch in trainer._buffered_inputs)
    assert rows == sum(len(batch["completion_ids"]) for batch in trainer._buffered_inputs)
    for routes, ran in seen.updates:
        given = routes[:, 0, 0] >= 0
        assert torch.equal(routes[given], ran[given]) and given.any()


class _Engine:
    """As vllm.LLM: a sample has the experts of all tokens but the last, [tokens - 1, layers, K]."""

    def __init__(self, arrays: bool = True, wrong: int | None = None) -> None:
        self.arrays, self.wrong = arrays, wrong
        self.returned: list[Any] = []

    def generate(self, samples: list[list[int]]) -> list[Any]:
        outputs = []
        for number, tokens in enumerate(samples):
            ids = random_ids(1, len(tokens) - 1, LAYERS, EXPERTS, TOP_K, seed=number)[0].numpy()
            if number == self.wrong:
                ids[0, 1] = 3
            one = SimpleNamespace(routed_experts=ids if self.arrays else None)
            outputs.append(SimpleNamespace(outputs=[one]))
            self.returned.append(ids)
        return outputs


def _with_engine(trainer: Any, engine: _Engine) -> None:
    trainer.vllm_generation = SimpleNamespace(llm=engine)
    generate = trainer._generate

    def generated(prompts: Any) -> Any:
        found = generate(prompts)
        samples = [prompt + answer for prompt, answer in zip(found[0], found[1], strict=True)]
        trainer.vllm_generation.llm.generate(samples)
        return found

    trainer._generate = generated


@pytest.mark.parametrize("truncated", [False, True])
def test_both_passes_choose_what_the_engine_chose(tmp_path: Any, truncated: bool) -> None:
    """R3: prompts padded left, completions right, the last token and padding live."""
    trainer = _trainer(tmp_path, mask_truncated_completions=truncated)
    engine = _Engine()
    _with_engine(trainer, engine)
    replay = replay_routing(trainer, "R3")
    seen = _Seen(trainer)
    trainer.train()
    arrays = {array.tobytes() for array in engine.returned}
    for routes, ran in seen.updates:
        given = routes[:, 0, 0] >= 0
        assert torch.equal(routes[given], ran[given]) and not given.all()
    rows = trainer._buffered_inputs[0][ROUTES]
    for row in rows:
        given = row[row[:, 0, 0] >= 0]
        assert given.numpy().tobytes() in arrays
    assert replay.last.replayed > 0 and replay.last.live > 0


@pytest.mark.slow
def test_each_sample_of_an_engine_is_looked_at(tmp_path: Any) -> None:
    """A wrong row in a later part of the generation batch than the first one TRL computes."""
    trainer = _trainer(tmp_path)
    _with_engine(trainer, _Engine(wrong=6))
    replay_routing(trainer, "R3")
    with pytest.raises(ValueError, match=r"layer 1 of the routes, \[3, 3\], has an expert twice"):
        trainer.train()


def test_what_cannot_be_replayed_is_refused(tmp_path: Any) -> None:
    trainer = _trainer(tmp_path)
    with pytest.raises(ValueError, match="mode='R4'"):
        replay_routing(trainer, "R4")
    with pytest.raises(ValueError, match="reads routes from vLLM in this process"):
        replay_routing(trainer, "R3")
    with pytest.raises(
        ValueError, match=r"not a GRPOTrainer .* no _generate_and_score_completions"
    ):
        replay_routing(SimpleNamespace(model=trainer.model), "R2")
    _with_engine(trainer, _Engine(arrays=False))
    replay_routing(copy.copy(trainer), "R3")
    with pytest.raises(ValueError, match="without routed_experts"):
        trainer.vllm_generation.llm.generate([[1, 2]])
