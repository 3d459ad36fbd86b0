"""Pictures of digits and plain text for the vision example, mixed at random.

The pictures are the 1797 handwritten digits of 8 x 8 pixels that scikit-learn contains. They are
real scans (UCI, "Optical Recognition of Handwritten Digits") and need no download. The last 320
digits are held out. The text is the text of text_data.py. There are two kinds of samples:

    kind       content                                                    pictures
    pictures   What digits are these? [picture] -> 7 [picture] -> 0       1 to 6
    text       one block of plain text                                    none

In picture samples only the digits have labels; in text samples every token has a label.
`DigitsAndText` draws both kinds with equal probability, in runs of `run` samples of one kind. If a
run is as long as a rank's batch, a rank may have pictures in one step and none in the next, and
other ranks may differ.

The PIL version of Qwen-VL's stock image processor prepares the pictures. The stock processor for
text and pictures, which contains the image processor, is not used, because it needs torchvision for
videos. This file does the rest of its work: it inserts a placeholder token for every 2 x 2 patches.
"""

import torch
from PIL import Image
from sklearn.datasets import load_digits
from text_data import pack, split_text
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

QUESTION = "What digits are these?"
ARROW = " -> "
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
NUM_HELD_OUT = 320
MAX_PICTURES = 6
BLOCK_SIZE = 64

Sample = dict[str, torch.Tensor]


def read_digits(*, held_out: bool) -> tuple[list[Image.Image], list[int]]:
    """Return the pictures, 8 x 8 pixels in 256 shades of grey, and the digits that they show."""
    data = load_digits()
    part = slice(-NUM_HELD_OUT, None) if held_out else slice(-NUM_HELD_OUT)
    shades = (data.images[part] * (255 / 16)).astype("uint8")
    return [Image.fromarray(picture) for picture in shades], data.target[part].tolist()


def picture_sample(
    tokenizer: PreTrainedTokenizerBase,
    image_processor,
    pictures: list[Image.Image],
    digits: list[int],
) -> Sample:
    """Build a sample: token ids, labels on the digits, token types (1 = picture) and pixels."""
    pixels = image_processor(pictures, return_tensors="pt")
    arrow = tokenizer.encode(ARROW)
    start, end, pad = tokenizer.convert_tokens_to_ids([VISION_START, VISION_END, IMAGE_PAD])
    ids = tokenizer.encode(QUESTION)
    labels, types = [-100] * len(ids), [0] * len(ids)
    for grid, digit in zip(pixels["image_grid_thw"], digits, strict=True):
        num_tokens = int(grid.prod()) // image_processor.merge_size**2
        answer = tokenizer.convert_tokens_to_ids(str(digit))
        ids += [start, *[pad] * num_tokens, end, *arrow, answer]
        labels += [-100] * (num_tokens + 2 + len(arrow)) + [answer]
        types += [0, *[1] * num_tokens, 0, *[0] * len(arrow), 0]
    columns = {"input_ids": ids, "labels": labels, "mm_token_type_ids": types}
    return {name: torch.tensor(column) for name, column in columns.items()} | dict(pixels)


def text_samples(tokenizer: PreTrainedTokenizerBase, text: str, **limits: int) -> list[Sample]:
    """Return blocks of plain text as samples; `limits` are arguments of `text_data.pack`."""
    blocks = pack(tokenizer, text, BLOCK_SIZE, **limits)
    return [block | {"mm_token_type_ids": torch.zeros_like(block["input_ids"])} for block in blocks]


def held_out_samples(
    tokenizer: PreTrainedTokenizerBase, image_processor
) -> tuple[list[Sample], list[Sample]]:
    """Return a sample for every held-out picture, and as many samples of held-out text."""
    pictures, digits = read_digits(held_out=True)
    _, text = split_text()
    return [
        picture_sample(tokenizer, image_processor, [picture], [digit])
        for picture, digit in zip(pictures, digits, strict=True)
    ], text_samples(tokenizer, text, max_blocks=NUM_HELD_OUT)


class DigitsAndText(Dataset):
    """Random training samples. The generator of sample i has the seed i."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, image_processor, *, num_samples: int, run: int
    ) -> None:
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.num_samples, self.run = num_samples, run
        self.pictures, self.digits = read_digits(held_out=False)
        self.blocks = text_samples(tokenizer, split_text()[0])

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> Sample:
        of_run, of_sample = (torch.Generator().manual_seed(seed) for seed in (i // self.run, i))
        if torch.randint(2, (), generator=of_run):
            return self.blocks[torch.randint(len(self.blocks), (), generator=of_sample)]
        count = int(torch.randint(1, MAX_PICTURES + 1, (), generator=of_sample))
        chosen = torch.randint(len(self.pictures), (count,), generator=of_sample).tolist()
        pictures, digits = ([column[j] for j in chosen] for column in (self.pictures, self.digits))
        return picture_sample(self.tokenizer, self.image_processor, pictures, digits)


def collate(samples: list[Sample], *, pad_token_id: int) -> Sample:
    """Build a batch, padded on the right. The pixels and grids of all pictures are concatenated."""
    fill = {"input_ids": pad_token_id, "labels": -100, "mm_token_type_ids": 0}
    columns = {name: [sample[name] for sample in samples] for name in fill}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    batch = {
        name: torch.nn.utils.rnn.pad_sequence(
            column, batch_first=True, padding_value=fill.get(name, 0)
        )
        for name, column in columns.items()
    }
    for name in ("pixel_values", "image_grid_thw"):
        parts = [sample[name] for sample in samples if name in sample]
        if parts:
            batch[name] = torch.cat(parts)
    return batch
