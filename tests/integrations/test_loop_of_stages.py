"""An Accelerator loop over pipeline stages equals stock in one process.

Accelerate deals the rows of a data loader: the ranks of a column get the same ones.
"""

from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support.checks import Check, Found
from support.close import assert_close
from support.launched import FP32_BUDGET, launched
from support.tiny_models import batch, tiny
from torch import Tensor
from torch.utils.data import DataLoader

from hf_moe_ep import data_parallel_rank, data_parallel_size, patch

ROWS, ACCUMULATED = 24, 2
SIZES = {"num_hidden_layers": 4}
Row = dict[str, Tensor]


def rows() -> list[Row]:
    model = tiny(num_hidden_layers=1)
    batches = [batch(model, 1, 9, seed=i, ignore=0.1 * (i % 7)) for i in range(ROWS)]
    return [{name: value[0] for name, value in one.items()} for one in batches]


def equals_stock(ep: int, rank: int, world: int) -> None:
    """Steps accumulate two batches; the last batch of the evaluation has fewer rows."""
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


@pytest.mark.parametrize(
    "claim",
    [
        Check("2 stages", 2, partial(equals_stock, 1)).as_parameter(),
        Check("2 stages, ep 2", 4, partial(equals_stock, 2), slow=True).as_parameter(),
    ],
)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
