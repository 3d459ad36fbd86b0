"""Evaluate a run of finetune_text.py from the files that it wrote, in one stock process.

The checkpoint is reloaded with stock transformers and evaluated on the held-out blocks. Its loss is
compared with two baselines, which are fitted on the training blocks and evaluated on the same
held-out tokens (all losses are in nats per token):

    unigram   add-k: the count of each token plus k, divided by the sum of these numbers
    bigram    interpolated Kneser-Ney: with c = counts, d = a discount, types(v) = number of
              different successors of v, cont(w) = share of different bigrams that end in w:
              p(w|v) = (max(c(v,w) - d, 0) + d * types(v) * cont(w)) / c(v)

k and d are the best values of a grid on the held-out text itself, which favours the baselines. The
formula is from Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language
Modeling", 1998.

The script exits with an error if the model's loss is not below the bigrams' loss, or if the
reloaded checkpoint has another loss than the Trainer logged. `--one_process DIR` also compares the
first 20 losses and the last held-out loss with those of the same training in one stock process.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from text_data import pack, split_text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed
from transformers.utils.logging import disable_progress_bar

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PROMPTS = ("The with statement", "Changed in version 3", "If the object")


def stack_blocks(blocks: list[dict]) -> torch.Tensor:
    return torch.stack([block["input_ids"] for block in blocks])


def unigram_loss(train: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> float:
    counts = torch.bincount(train.flatten(), minlength=vocab_size).double()
    losses = []
    for k in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        probs = (counts + k) / (counts.sum() + k * vocab_size)
        losses.append(-probs[targets].log().mean().item())
    return min(losses)


def bigram_loss(
    train: torch.Tensor, contexts: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> float:
    stream = train.flatten()
    pairs = stream[:-1] * vocab_size + stream[1:]
    bigrams, counts = pairs.unique(return_counts=True)
    firsts, seconds = bigrams // vocab_size, bigrams % vocab_size
    totals = torch.bincount(stream[:-1], minlength=vocab_size).double()[contexts]
    types = torch.bincount(firsts, minlength=vocab_size).double()[contexts]
    # Half a bigram is added for every word, so that every word has a probability above zero.
    cont = torch.bincount(seconds, minlength=vocab_size).double() + 0.5
    cont = (cont / cont.sum())[targets]

    wanted = contexts * vocab_size + targets
    index = torch.searchsorted(bigrams, wanted).clamp(max=len(bigrams) - 1)
    count = torch.where(bigrams[index] == wanted, counts[index], 0).double()
    losses = []
    for d in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        probs = ((count - d).clamp(min=0) + d * types * cont) / totals.clamp(min=1)
        losses.append(-torch.where(totals > 0, probs, cont).log().mean().item())
    return min(losses)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, held_out: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return the mean loss per token, and the number of tokens of each expert of each layer."""
    config = model.config
    total, load = 0.0, torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64)
    for input_ids in held_out.split(8):
        outputs = model(input_ids=input_ids, output_router_logits=True)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()
        total += F.cross_entropy(logits.float(), targets, reduction="sum").item()
        for layer, router_logits in enumerate(outputs.router_logits):
            chosen = router_logits.topk(config.num_experts_per_tok).indices
            load[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
    return total / held_out[:, 1:].numel(), load


def plot_losses(log: list[dict], unigram: float, bigram: float, path: Path) -> None:
    train = [(row["step"], row["loss"]) for row in log if "loss" in row]
    held_out = [(row["step"], row["eval_loss"]) for row in log if "eval_loss" in row]
    fig, ax = plt.subplots(figsize=(8, 4.5))
    ax.plot(*zip(*train), color="tab:blue", alpha=0.6, label="training")
    ax.plot(*zip(*held_out), "o-", color="tab:orange", label="held out")
    ax.axhline(unigram, color="gray", linestyle=":", label=f"unigram, held out ({unigram:.2f})")
    ax.axhline(bigram, color="black", linestyle="--", label=f"bigram, held out ({bigram:.2f})")
    ax.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches="tight")


def plot_load(load: torch.Tensor, path: Path) -> None:
    relative = load / load.double().mean(dim=1, keepdim=True)
    fig, ax = plt.subplots(figsize=(8, 3))
    image = ax.imshow(relative, vmin=0, cmap="viridis", aspect="auto")
    ax.set(xlabel="expert", ylabel="layer", title="tokens per expert / mean, held-out text")
    ax.set_yticks(range(len(load)))
    fig.colorbar(image)
    fig.savefig(path, dpi=120, bbox_inches="tight")


def print_speed(run: Path) -> None:
    for rank, row in enumerate(json.loads((run / "rank_stats.json").read_text())):
        print(f"  rank {rank}   {row['tokens_per_s']:6.0f} tokens/s   {row['peak_mib']:6.0f} MiB")


def print_load(load: torch.Tensor) -> None:
    print("\nNumber of held-out tokens of each expert (rows: layers, columns: experts)")
    for layer, row in enumerate(load.tolist()):
        busiest = max(row) * len(row) / sum(row)
        cells = "".join(f"{tokens:6d}" for tokens in row)
        print(f"  {layer:2d} {cells}   busiest {busiest:.1f} x mean")


def print_samples(model: PreTrainedModel, tokenizer) -> None:
    print("\nContinuations (sampled, temperature 0.7)")
    set_seed(0)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=60, do_sample=True, temperature=0.7)
        print("  " + " ".join(tokenizer.decode(ids[0]).split()))


def read_log(run: Path) -> list[dict]:
    return json.loads((run / "trainer_state.json").read_text())["log_history"]


def last_eval_loss(log: list[dict]) -> float:
    return [row["eval_loss"] for row in log if "eval_loss" in row][-1]


def compare_with_one_process(log: list[dict], one_process: Path) -> list[str]:
    """Print a comparison of both runs, and return the differences that are too large."""
    stock_log = read_log(one_process)
    losses = [row["loss"] for row in log if "loss" in row][:20]
    stock_losses = [row["loss"] for row in stock_log if "loss" in row][:20]
    difference = max(abs(a - b) for a, b in zip(losses, stock_losses))
    end, stock_end = last_eval_loss(log), last_eval_loss(stock_log)
    print("\nThe same training on the same batches in one stock process")
    print_speed(one_process)
    print(f"  first {len(losses)} training losses: largest difference {difference:.1e}")
    print(f"  last held-out loss: {end:.4f} in this run, {stock_end:.4f} in the stock process")
    failures = []
    if len(losses) != len(stock_losses) or difference > 1e-4:
        failures.append(f"the first training losses differ by {difference:.1e}, more than 1e-4")
    if abs(end / stock_end - 1) > 0.02:
        failures.append(f"the last held-out losses, {end} and {stock_end}, differ by over 2 %")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path, required=True, help="the untrained model")
    parser.add_argument("--run", type=Path, required=True, help="--output_dir of the training")
    parser.add_argument("--one_process", type=Path, help="--output_dir of a run to compare with")
    same = "the same value as in training"
    parser.add_argument("--text_file", help=same)
    parser.add_argument("--block_size", type=int, default=256, help=same)
    parser.add_argument("--eval_blocks", type=int, default=64, help=same)
    parser.add_argument("--eval_multiple", type=int, default=1, help=same)
    args = parser.parse_args()
    disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(args.run)
    train_text, held_out_text = split_text(args.text_file)
    train = stack_blocks(pack(tokenizer, train_text, args.block_size))
    limits = (args.eval_blocks, args.eval_multiple)
    held_out = stack_blocks(pack(tokenizer, held_out_text, args.block_size, *limits))
    contexts, targets = held_out[:, :-1].flatten(), held_out[:, 1:].flatten()
    unigram = unigram_loss(train, targets, len(tokenizer))
    bigram = bigram_loss(train, contexts, targets, len(tokenizer))

    before, _ = held_out_loss(AutoModelForCausalLM.from_pretrained(args.start).eval(), held_out)
    model = AutoModelForCausalLM.from_pretrained(args.run).eval()
    after, load = held_out_loss(model, held_out)
    log = read_log(args.run)

    print(f"\nHeld-out loss, nats per token, over {targets.numel()} tokens")
    print(f"  before training                   {before:.4f}")
    print(f"  unigram, add-k                    {unigram:.4f}")
    print(f"  bigram, interpolated Kneser-Ney   {bigram:.4f}")
    print(f"  after training, reloaded          {after:.4f}   (Trainer: {last_eval_loss(log):.4f})")
    print("\nTraining speed and peak memory")
    print_speed(args.run)
    failures = compare_with_one_process(log, args.one_process) if args.one_process else []
    print_load(load)
    print_samples(model, tokenizer)

    plots = args.run / "loss.png", args.run / "expert_load.png"
    plot_losses(log, unigram, bigram, plots[0])
    plot_load(load, plots[1])
    print("\nPlots\n  " + "\n  ".join(map(str, plots)))

    if after >= bigram:
        failures.append(f"held-out loss {after:.4f} is not below the bigrams' loss {bigram:.4f}")
    if abs(after - last_eval_loss(log)) > 1e-3:
        failures.append(
            f"the reloaded model has held-out loss {after:.4f}, the Trainer logged "
            f"{last_eval_loss(log):.4f}"
        )
    if failures:
        sys.exit("FAILED: " + "; ".join(failures))


if __name__ == "__main__":
    main()
