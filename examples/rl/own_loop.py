"""Reinforcement learning in a loop of your own: weights go to an engine after each step.

    python examples/rl/engine.py --model start --port 29600 &
    torchrun --nproc-per-node 2 examples/rl/own_loop.py --model start --port 29600 --ep_size 2

Each step samples completions on the engine, computes a reward (the share of even token ids), takes
one policy-gradient step on all ranks, and sends the engine what has changed: `hub_tensors` with a
`SyncToken`. `engine.py` stands for vLLM or SGLang; with one of these, replace `Link`.

The script prints, for each step, how far the engine's log-probabilities are from the trainer's.
After a correct sync they differ by rounding only.
"""

import argparse

import torch
import torch.distributed as dist
from engine import Link
from torch import Tensor

from hf_moe_ep import SyncToken, data_parallel_size, from_pretrained, hub_tensors, save_pretrained


def log_probabilities(model: torch.nn.Module, tokens: Tensor, length: int) -> Tensor:
    """Return the log-probabilities of the last `length` tokens, [B, length]."""
    scores = model(input_ids=tokens).logits[:, -length - 1 : -1].float().log_softmax(-1)
    return scores.gather(-1, tokens[:, -length:, None])[..., 0]


def sync(model: torch.nn.Module, link: Link | None, token: SyncToken) -> int:
    """Send the engine all tensors that have changed since the last call; every rank calls this."""
    stream = hub_tensors(model, since=token)
    infos = [tuple(info) for info in stream.metadata()]
    if link is not None:
        link.give(("update", infos))
    for _, tensor in stream:
        if link is not None:
            link.send(tensor.cpu())
    return len(infos)


def sample(link: Link | None, prompts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Let the engine sample, and return its tokens and log-probabilities on every rank."""
    answer = [None]
    if link is not None:
        link.give(("sample", (prompts, length)))
        answer = [link.take()]
    dist.broadcast_object_list(answer, src=0)
    assert answer[0] is not None
    return answer[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--port", type=int, default=29600)
    parser.add_argument("--ep_size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--output_dir", default="out/own_loop")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = from_pretrained(options.model, ep_size=options.ep_size)
    model.train()  # a loaded model is in evaluation mode, in which layers are not checkpointed
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    link, token = Link(options.port, 0) if rank == 0 else None, SyncToken()
    vocabulary, rows = model.config.vocab_size, 16 * world_size
    prompts = torch.randint(vocabulary, (rows, 4), generator=torch.Generator().manual_seed(1))
    for step in range(options.steps):
        num_sent = sync(model, link, token)
        tokens, of_engine = sample(link, prompts, options.length)
        rewards = (tokens[:, -options.length :] % 2 == 0).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        own = slice(rank * 16, rank * 16 + 16)
        logprobs = log_probabilities(model, tokens[own], options.length)
        loss = -(advantages[own, None] * logprobs).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        distance = (logprobs.detach() - of_engine[own]).abs().max()
        dist.all_reduce(distance, dist.ReduceOp.MAX)
        if rank == 0:
            print(
                f"step {step}: reward {rewards.mean():.3f}, sent {num_sent} tensors, engine's "
                f"log-probabilities differ by {distance:.1e}",
                flush=True,
            )
    assert data_parallel_size(model) == world_size
    save_pretrained(model, options.output_dir)
    if link is not None:
        link.give(("stop", None))
        link.take()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
