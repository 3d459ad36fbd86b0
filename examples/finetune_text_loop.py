"""Fine-tune as finetune_text.py does, in a bare Accelerate loop without the Trainer.

    accelerate launch --config_file examples/accelerate/cpu_4.yaml examples/finetune_text_loop.py \
        --model out/demo/start --ep_size 2 --output_dir out/loop --cpu --block_size 128 --lr 6e-3

From hf_moe_ep, the loop uses `patch`, `global_token_count`, `data_parallel_size` and the functions
for checkpoints. Every --save_steps steps it saves a checkpoint in --output_dir/step-N. If it is
started again, it resumes from the newest complete checkpoint, even in the middle of an epoch.

Any loop on several ranks needs `global_token_count`. A step's loss is the mean over the tokens of
all micro-batches of all ranks. Every micro-batch therefore divides the sum of its tokens' losses by
the count of all these tokens, and the losses of the micro-batches are added up. FSDP2 averages
gradients over data ranks, but their sum is needed; the factor `data_parallel_size` corrects this.

The loop does not use accelerator.accumulate, which would also divide by the number of micro-batches
and end a step early at the end of an epoch.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from text_data import pack, split_text
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from hf_moe_ep import (
    data_parallel_size,
    global_token_count,
    load_checkpoint,
    newest_checkpoint,
    patch,
    save_checkpoint,
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory or Hub name")
    parser.add_argument("--ep_size", type=int, default=1)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--text_file", help="default: Python's own documentation")
    parser.add_argument("--block_size", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=4, help="blocks per micro-batch and rank")
    parser.add_argument("--accumulation_steps", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=160)
    parser.add_argument("--save_steps", type=int, default=0, help="save every N steps; 0: never")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--cpu", action="store_true", help="needed if the launch config has use_cpu"
    )
    return parser.parse_args()


def repeat_forever(loader: DataLoader) -> Iterator[dict]:
    while True:
        yield from loader


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the mean loss of the held-out blocks. `loader` yields single blocks."""
    model.eval()
    # gather_for_metrics drops the blocks that were repeated to give all ranks the same number.
    losses = [accelerator.gather_for_metrics(model(**batch).loss.reshape(1)) for batch in loader]
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    args = parse_args()
    set_seed(args.seed)
    # A seedable sampler makes the order of the blocks independent of the number of ranks.
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    accelerator = Accelerator(cpu=args.cpu, dataloader_config=loading)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    patch(model, ep_size=args.ep_size)

    train_text, held_out_text = split_text(args.text_file)
    train = pack(tokenizer, train_text, args.block_size)
    held_out = pack(tokenizer, held_out_text, args.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    # The scheduler is not prepared: a prepared one advances once per data rank in each step.
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.max_steps // 8, args.max_steps)
    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True),
        DataLoader(held_out),
    )

    first_step = 0
    if (checkpoint := newest_checkpoint(args.output_dir)) is not None:
        first_step = load_checkpoint(checkpoint, model, optimizer, scheduler)["step"]
    # The batches of the steps before the checkpoint are loaded and skipped.
    batches = islice(repeat_forever(train_loader), first_step * args.accumulation_steps, None)
    steps = range(first_step, args.max_steps)
    bar = tqdm(steps, disable=not accelerator.is_main_process)
    model.train()
    for step in bar:
        micro_batches = list(islice(batches, args.accumulation_steps))
        num_items = global_token_count(model, [batch["labels"] for batch in micro_batches])
        step_loss = torch.zeros((), device=accelerator.device)
        for batch in micro_batches:
            loss = model(**batch, num_items_in_batch=num_items).loss * data_parallel_size(model)
            accelerator.backward(loss)
            step_loss += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{accelerator.reduce(step_loss, 'mean').item():.4f}")
        if args.save_steps and (step + 1) % args.save_steps == 0:
            folder = Path(args.output_dir, f"step-{step + 1}")
            save_checkpoint(folder, model, optimizer, scheduler, progress={"step": step + 1})

    accelerator.print(f"held-out loss {evaluate(accelerator, model, held_out_loader):.4f}")
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
