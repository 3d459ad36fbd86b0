"""Evaluate a run of finetune_vision.py from the files that it wrote, in one stock process.

The model is reloaded with stock transformers and evaluated on every held-out picture. Its answer is
the most likely token of the whole vocabulary. Losses are in nats per label.

The script exits with an error if fewer than 80 % of the answers are right, or if the reloaded model
has other losses than the Trainer logged.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from digit_data import Sample, collate, held_out_samples, read_digits
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LEAST_ACCURACY = 0.8
BATCH_SIZE = 32
COLUMNS, CELL_WIDTH, CELL_HEIGHT = 20, 12, 16  # of the plot; cell sizes in pixels of the scans


@dataclass
class Result:
    """A model's answers to the held-out pictures, and its losses on pictures and text."""

    answers: list[str]
    digits_loss: float
    text_loss: float

    def accuracy(self, digits: list[int]) -> float:
        right = sum(answer == str(digit) for answer, digit in zip(self.answers, digits))
        return right / len(digits)


@torch.no_grad()
def score(
    model: PreTrainedModel, samples: list[Sample], pad_token_id: int
) -> tuple[float, torch.Tensor]:
    """Return the mean loss per label, and the most likely token at the position of each label."""
    losses, tokens = [], []
    for first in range(0, len(samples), BATCH_SIZE):
        batch = collate(samples[first : first + BATCH_SIZE], pad_token_id=pad_token_id)
        targets = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1][targets != -100]
        losses.append(F.cross_entropy(logits, targets[targets != -100], reduction="none"))
        tokens.append(logits.argmax(-1))
    return torch.cat(losses).mean().item(), torch.cat(tokens)


def evaluate(
    directory: Path, tokenizer: PreTrainedTokenizerBase, digits: list[Sample], text: list[Sample]
) -> Result:
    model = AutoModelForImageTextToText.from_pretrained(directory).eval()
    digits_loss, tokens = score(model, digits, tokenizer.pad_token_id)
    text_loss, _ = score(model, text, tokenizer.pad_token_id)
    return Result([tokenizer.decode(token) for token in tokens.tolist()], digits_loss, text_loss)


def last_logged(run: Path, name: str) -> float:
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [row[name] for row in log if name in row][-1]


def plot_answers(
    pictures: list[Image.Image], digits: list[int], answers: list[str], path: Path
) -> None:
    """Plot every held-out picture above its answer. Wrong answers are red, with the true digit."""
    rows = -(-len(pictures) // COLUMNS)
    sheet = np.zeros((rows * CELL_HEIGHT, COLUMNS * CELL_WIDTH), dtype=np.uint8)
    fig, ax = plt.subplots(figsize=(COLUMNS * 0.6, rows * 0.8))
    num_right = 0
    for i, (picture, digit, answer) in enumerate(zip(pictures, digits, answers, strict=True)):
        top, left = i // COLUMNS * CELL_HEIGHT + 1, i % COLUMNS * CELL_WIDTH + 2
        sheet[top : top + 8, left : left + 8] = picture
        right = answer == str(digit)
        num_right += right
        text, color = (answer, "white") if right else (f"{answer} (is {digit})", "tomato")
        ax.text(left + 3.5, top + 10.5, text, color=color, ha="center", va="center", fontsize=8)
    ax.imshow(sheet, cmap="gray", vmin=0, vmax=255)
    ax.set_title(f"{num_right} of {len(digits)} held-out digits were read right")
    ax.axis("off")
    fig.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path, required=True, help="the untrained model")
    parser.add_argument("--run", type=Path, required=True, help="--output_dir of the training")
    parser.add_argument("--plot", type=Path, required=True, help="PNG file to write")
    args = parser.parse_args()
    disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(args.run)
    image_processor = AutoImageProcessor.from_pretrained(args.run, backend="pil")
    pictures, digits = read_digits(held_out=True)
    samples = held_out_samples(tokenizer, image_processor)
    before, after = (evaluate(folder, tokenizer, *samples) for folder in (args.start, args.run))
    accuracy = after.accuracy(digits)

    print(f"\nHeld out: {len(digits)} scanned digits, {len(samples[1])} blocks of text")
    print("                     before training   after, reloaded   in the Trainer")
    print(f"  digits read right {before.accuracy(digits):16.1%} {accuracy:17.1%}")
    failures = []
    for name in ("digits_loss", "text_loss"):
        loss, logged = getattr(after, name), last_logged(args.run, f"eval_{name}")
        print(f"  {name:17} {getattr(before, name):16.4f} {loss:17.4f} {logged:16.4f}")
        if abs(loss - logged) > 1e-3:
            failures.append(
                f"the reloaded model has {name} {loss:.4f}, the Trainer logged {logged:.4f}"
            )
    plot_answers(pictures, digits, after.answers, args.plot)
    print(f"\nPlot of every picture and its answer: {args.plot}")

    if accuracy < LEAST_ACCURACY:
        failures.append(
            f"{accuracy:.1%} of the digits were read right, fewer than {LEAST_ACCURACY:.0%}"
        )
    if failures:
        sys.exit("FAILED: " + "; ".join(failures))


if __name__ == "__main__":
    main()
