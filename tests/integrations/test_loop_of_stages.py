"""Test that an Accelerator loop over pipeline stages equals stock in one process.

Accelerate divides the rows of a data loader. Ranks at the same position of each stage get the same
rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import FP32_BUDGET, launched
from support.stages import state_of_all_stages
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_moe_ep import clip_grad_norm_, data_parallel_rank, data_parallel_size, patch

ROWS, ACCUMULATED = 24, 2
STEPS, LR, MOMENTUM = 10, 0.1, 0.9
STAGES, WHOLE = {"ep_size": 2, "pp_size": 2}, {"ep_size": 4}
STAGES_WITH_ETP = {"etp_size": 2, "pp_size": 2}
SIZES = {"num_hidden_layers": 4}
Row = dict[str, Tensor]


def rows() -> list[Row]:
    model = tiny(num_hidden_layers=1)
    batches = [batch(model, 1, 9, seed=i, ignore=0.1 * (i % 7)) for i in range(ROWS)]
    return [{name: value[0] for name, value in one.items()} for one in batches]


def equals_stock(ep: int, rank: int, world: int) -> None:
    """Each step accumulates two batches. The last batch of the evaluation has fewer rows."""
    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
        model = patch(tiny(dtype=torch.float32, seed=rank, **SIZES), ep_size=ep, pp_size=2)
        stock = tiny(dtype=torch.float32, **SIZES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stock_optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
        loader: Any = DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]
        evaluated: Any = DataLoader(rows()[:7], batch_size=2)  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, loader, evaluated, scheduler = accelerator.prepare(
            model, optimizer, loader, evaluated, scheduler
        )
        data_rank, data_ranks = data_parallel_rank(model), data_parallel_size(model)
        assert data_ranks == world // 2 and data_rank == rank % data_ranks
        losses = []
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    losses.append((loss.detach(), norm))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        batches = [rows()[i : i + 2] for i in range(0, ROWS, 2)]
        per_step = ACCUMULATED * data_ranks
        for step, start in enumerate(range(0, len(batches), per_step)):
            for number, part in enumerate(batches[start : start + per_step]):
                want = stock(**{n: torch.stack([row[n] for row in part]) for n in part[0]}).loss
                (want / per_step).backward()
                if number == per_step - data_ranks + data_rank:
                    assert_close(f"loss of step {step}", losses[step][0], want, FP32_BUDGET)
            want_norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
            assert_close(f"norm {step}", torch.as_tensor(losses[step][1]), want_norm, FP32_BUDGET)
            # Accelerate steps a scheduler once per data rank.
            stock_optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step * data_ranks)
            stock_optimizer.step()
            stock_optimizer.zero_grad()
        model.eval()
        stock.eval()
        seen = []
        with torch.no_grad():
            for inputs in evaluated:
                logits = model(**{n: x for n, x in inputs.items() if n != "labels"}).logits
                seen.append(accelerator.gather_for_metrics(logits))
            whole = {n: torch.stack([row[n] for row in rows()[:7]]) for n in rows()[0]}
            assert_close("logits", torch.cat(seen), stock(**whole).logits, FP32_BUDGET)
        state = accelerator.get_state_dict(model)
        if rank == 0:
            assert state.keys() == stock.state_dict().keys()
            for key, value in stock.state_dict().items():
                assert_close(key, state[key], value, FP32_BUDGET)


def _make_even_rows() -> list[Row]:
    """Return 8 rows per step with equal numbers of labels, so that a mean of means is the mean."""
    inputs = batch(tiny(num_hidden_layers=1), 8 * STEPS, 9, ignore=0.0)
    return [{name: value[row] for name, value in inputs.items()} for row in range(8 * STEPS)]


def _run_steps(
    rank: int, layout: dict[str, int], steps: range, folder: Path
) -> list[tuple[Tensor, Any]]:
    """Load the state before these steps, run them, save, and return losses and norms."""
    with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
        # Otherwise Accelerate steps a scheduler once per data rank.
        options: dict[str, Any] = {"step_scheduler_with_optimizer": False}
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **options)
        model = patch(tiny(dtype=torch.float32, seed=rank, **SIZES), **layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        data_ranks = 4 // layout.get("pp_size", 1)
        some = _make_even_rows()[8 * steps.start : 8 * steps.stop]
        loader: Any = DataLoader(some, batch_size=4 // data_ranks)  # type: ignore[arg-type]
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        assert data_parallel_size(model) == data_ranks
        if steps.start:
            accelerator.load_state(str(folder / f"step-{steps.start}"))
        results, losses = [], []
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                losses.append(accelerator.reduce(loss.detach(), "mean"))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    results.append((torch.stack(losses).mean(), norm))
                    losses = []
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder / f"step-{steps.stop}"))
        return results


def continues_at_another_layout(
    rank: int, world: int, folder: str, stages: dict[str, int] = STAGES
) -> None:
    """A run of ten steps continues from two stages with ep 2 at ep 4, and then at stages again."""
    got = []
    for layout, steps in ((stages, range(4)), (WHOLE, range(4, 7)), (stages, range(7, STEPS))):
        got += _run_steps(rank, layout, steps, Path(folder))
    stock = tiny(dtype=torch.float32, **SIZES)
    optimizer = torch.optim.SGD(stock.parameters(), lr=LR, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    assert len(got) == STEPS
    for step, (loss, norm) in enumerate(got):
        part = _make_even_rows()[8 * step : 8 * step + 8]
        want = stock(**{n: torch.stack([row[n] for row in part]) for n in part[0]}).loss
        want.backward()
        want_norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
        assert_close(f"loss of step {step}", loss, want.detach(), FP32_BUDGET)
        assert_close(f"norm of step {step}", torch.as_tensor(norm), want_norm, FP32_BUDGET)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Resumed:
    """A model and an optimizer whose state is saved and loaded with other numbers of stages.

    Attributes:
        config: changes of the model's config.
        frozen: prefixes of the names of frozen parameters.
        apart: parameters with this word in their names are a group of their own.
        wrap: a function that changes the model before `patch`.
        optimizer: creates the optimizer from a list of parameter groups.
    """

    config: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    apart: str = ""
    wrap: Callable[[nn.Module], nn.Module] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def start(self, seed: int, layout: dict[str, int]) -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model = tiny(dtype=torch.float32, seed=seed, **SIZES, **self.config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        if self.wrap is not None:
            model = self.wrap(model)
        patch(model, **layout)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": [p for _, p in named]}]
        if self.apart:
            apart = [p for name, p in named if self.apart in name]
            others = [p for name, p in named if self.apart not in name]
            groups = [{"params": apart, "lr": 1e-3, "weight_decay": 0.5}, {"params": others}]
        model, optimizer = accelerator.prepare(model, self.optimizer(groups, lr=1e-2))
        return accelerator, model, optimizer


def resumes(case: Resumed, rank: int, world: int, folder: str) -> None:
    """A state of two stages is loaded with and without stages, and one without stages in stages."""
    for number, (saved, loaded) in enumerate(((2, 2), (2, 1), (1, 2))):
        path = f"{folder}/{number}"
        with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
            accelerator, model, optimizer = case.start(0, {"pp_size": saved})
            inputs = batch(model, 4, 9, seed=number)
            accelerator.backward(model(**inputs).loss)
            _clip_trained_parameters(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            accelerator.save_state(path)
            want, wanted_groups = (
                state_of_all_stages(model, optimizer),
                _list_group_options(optimizer),
            )
        with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
            accelerator, model, optimizer = case.start(1, {"pp_size": loaded})
            accelerator.load_state(path)
            got = state_of_all_stages(model, optimizer)
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                assert torch.equal(got[name], tensor), f"{saved} to {loaded}: {name}"
            assert _list_group_options(optimizer) == wanted_groups, f"{saved} to {loaded}"
            accelerator.backward(model(**inputs).loss)
            optimizer.step()


def _add_second_adapter(model: nn.Module) -> nn.Module:
    adapted = with_lora(model, parameters=(), modules=("q_proj",))
    adapted.add_adapter("second", adapted.peft_config["default"])
    adapted.set_adapter("second")
    return adapted


def an_adapter_that_the_model_lacks_is_an_error(rank: int, world: int, folder: str) -> None:
    """The saved run trained a second adapter on all stages, which the resumed run does not have."""
    first_adapter = partial(with_lora, parameters=(), modules=("q_proj",))
    with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
        accelerator, _, _ = Resumed(wrap=_add_second_adapter).start(0, {"pp_size": 2})
        accelerator.save_state(folder)
    with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
        accelerator, _, _ = Resumed(wrap=first_adapter).start(1, {"pp_size": 2})
        message = r"trained .*layers\.0\.self_attn\.q_proj\.lora_A\.second.* and 3 more, which this"
        with pytest.raises(ValueError, match=message):
            accelerator.load_state(folder)


def _clip_trained_parameters(accelerator: Accelerator, model: nn.Module) -> None:
    """Every stage returns the norm of all stages, also a stage that trains nothing."""
    trained = [p for p in model.parameters() if p.requires_grad]
    want = clip_grad_norm_(model, float("inf"))
    norm = torch.as_tensor(accelerator.clip_grad_norm_(trained, 0.5))
    assert_close("norm", norm.to(want), want, FP32_BUDGET)
    assert want > 0


def _list_group_options(optimizer: Any) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return [{key: x for key, x in group.items() if key != "params"} for group in groups]


UPPER_LAYERS = partial(with_lora, parameters=(), modules=("layers.2.self_attn.q_proj",), seed=0)
RESUMED = {
    "a stage that trains nothing": Resumed(
        frozen=("model.embed_tokens", "model.layers.0.", "model.layers.1.")
    ),
    "a group that is empty on a stage": Resumed(apart="embed_tokens"),
    "a tied embedding": Resumed(config={"tie_word_embeddings": True}),
    "an optimizer without state": Resumed(optimizer=torch.optim.SGD),
    "adapters of one stage": Resumed(wrap=UPPER_LAYERS),
}


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, an_adapter_that_the_model_lacks_is_an_error),
        *on_ranks(4, continues_at_another_layout, slow=True),
        *on_ranks(2, {name: partial(resumes, case) for name, case in RESUMED.items()}, slow=True),
        Check(
            "2 stages with etp 2, ep 4, and back",
            4,
            partial(continues_at_another_layout, stages=STAGES_WITH_ETP),
            slow=True,
        ).as_parameter(),
        Check("2 stages", 2, partial(equals_stock, 1)).as_parameter(),
        Check("2 stages, ep 2", 4, partial(equals_stock, 2), slow=True).as_parameter(),
    ],
)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
