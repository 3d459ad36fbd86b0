"""Write a small, untrained Qwen3-VL-MoE checkpoint with tokenizer and image processor.

The model is for runs on a laptop. The tokenizer is the tokenizer of make_small_model.py plus the
placeholder tokens of pictures, and the model is a stock `Qwen3VLMoeForConditionalGeneration` with
random weights. A picture of 8 x 8 pixels is scaled to 16 x 16 pixels, which are 4 x 4 patches and
2 x 2 tokens of the language model.
"""

import argparse

import torch
from digit_data import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from make_small_model import train_tokenizer
from text_data import split_text
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

VOCAB_SIZE = 320
PATCH, MERGE, SIDE = 4, 2, 16
HIDDEN, VISION_HIDDEN = 96, 64


def small_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLMoeConfig:
    """Return a config in which all numbers of heads are even, so that sp_size 2 can split them."""
    ids = tokenizer.convert_tokens_to_ids
    return Qwen3VLMoeConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "moe_intermediate_size": 80,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "max_position_embeddings": 512,
            "initializer_range": HIDDEN**-0.5,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4]},
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": VISION_HIDDEN,
            "num_heads": 4,
            "intermediate_size": 128,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": (SIDE // PATCH) ** 2,
            "deepstack_visual_indexes": [0],
            "initializer_range": VISION_HIDDEN**-0.5,
        },
        image_token_id=ids(IMAGE_PAD),
        video_token_id=ids(VIDEO_PAD),
        vision_start_token_id=ids(VISION_START),
        vision_end_token_id=ids(VISION_END),
    )


def small_image_processor() -> Qwen2VLImageProcessorPil:
    """Return a processor that scales pictures to about SIDE x SIDE pixels, with values -1 .. 1."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=MERGE,
        size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2},  # areas, not edges
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    disable_progress_bar()

    tokenizer = train_tokenizer(split_text()[0], VOCAB_SIZE)
    tokenizer.add_tokens([VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD], special_tokens=True)
    set_seed(args.seed)
    model = Qwen3VLMoeForConditionalGeneration(small_config(tokenizer))
    # make_small_model.py explains why the embeddings are large.
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    small_image_processor().save_pretrained(args.output_dir)

    total = model.num_parameters()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    print(f"{args.output_dir}: {total:,} parameters, {experts / total:.0%} of them in experts")


if __name__ == "__main__":
    main()
