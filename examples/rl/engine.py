"""A stand-in for an inference engine: a process of its own that is sent weights and samples tokens.

    python examples/rl/engine.py --model start --port 29600

It takes a checkpoint's tensors by their keys, as vLLM and SGLang do, and converts them with
transformers. The trainer and the engine share a store (orders and answers) and a gloo group of two
processes (tensors):

    trainer                                engine
    order ("update", [(key, dtype, shape), ..])
    broadcasts the tensors in this order   receives them
    order ("sample", prompts)              answers with token ids and their log-probabilities
    order ("stop", None)                   answers, and ends
"""

import argparse
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TIMEOUT = timedelta(minutes=10)


class Link:
    """One end of the connection between a trainer (rank 0) and an engine (rank 1)."""

    def __init__(self, port: int, rank: int) -> None:
        self.store = dist.TCPStore("localhost", port, 2, is_master=rank == 0, timeout=TIMEOUT)
        prefixed = dist.PrefixStore("tensors", self.store)
        self.group = dist.ProcessGroupGloo(prefixed, rank, 2, TIMEOUT)
        self.orders = 0

    def give(self, what: Any) -> None:
        """Leave an object for the other process."""
        self.store.set(f"object{self.orders}", pickle.dumps(what))
        self.orders += 1

    def take(self) -> Any:
        """Wait for the next object of the other process."""
        what = pickle.loads(self.store.get(f"object{self.orders}"))
        self.orders += 1
        return what

    def send(self, tensor: Tensor) -> None:
        """Broadcast a tensor of the trainer, or receive into a tensor of the engine, as bytes."""
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([flat], options).wait()


class Engine:
    """A model that is built anew from a checkpoint's tensors after each update."""

    def __init__(self, folder: str) -> None:
        self.config = AutoConfig.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tensors: dict[str, Tensor] = {}

    def update(self, link: Link, infos: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        """Receive tensors. Those that are not sent again keep their values."""
        for key, dtype, shape in infos:
            tensor = torch.empty(shape, dtype=dtype)
            link.send(tensor)
            self.tensors[key] = tensor
        self.model = type(self.model).from_pretrained(
            None, config=self.config, state_dict=dict(self.tensors)
        )
        self.model.eval()

    @torch.no_grad()
    def sample(self, prompts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return token ids [B, S + length], and the log-probabilities of the new ones."""
        tokens, logprobs = prompts, []
        for _ in range(length):
            scores = self.model(input_ids=tokens).logits[:, -1].float().log_softmax(-1)
            new = torch.multinomial(scores.exp(), 1)
            logprobs.append(scores.gather(-1, new))
            tokens = torch.cat([tokens, new], dim=1)
        return tokens, torch.cat(logprobs, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--port", type=int, default=29600)
    options = parser.parse_args()
    torch.manual_seed(0)
    engine, link = Engine(options.model), Link(options.port, 1)
    while True:
        order, content = link.take()
        if order == "stop":
            link.give("stopped")  # the trainer's process holds the store, so it waits
            return
        if order == "update":
            engine.update(link, content)
        else:
            link.give(engine.sample(*content))


if __name__ == "__main__":
    main()
