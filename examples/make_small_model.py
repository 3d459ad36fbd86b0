"""Write a small, untrained Qwen3-MoE checkpoint and a tokenizer, for runs on a laptop.

The tokenizer is a byte-level BPE trained only on the training text. The model is a stock
`Qwen3MoeForCausalLM` with random weights, nine tenths of them in experts, as in large models.
The directory looks like a checkpoint from the Hub: per-expert keys, config, tokenizer.
"""

import argparse

import torch
from text_data import split_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed
from transformers.utils.logging import disable_progress_bar


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def small_config(vocab_size: int, moe_intermediate_size: int = 160) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=moe_intermediate_size,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=192**-0.5,
        eos_token_id=0,
        pad_token_id=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir")
    parser.add_argument("--text_file", help="default: Python's own documentation")
    parser.add_argument("--vocab_size", type=int, default=384)
    parser.add_argument("--moe_intermediate_size", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    disable_progress_bar()

    train_text, _ = split_text(args.text_file)
    tokenizer = train_tokenizer(train_text, args.vocab_size)
    set_seed(args.seed)
    model = Qwen3MoeForCausalLM(small_config(len(tokenizer), args.moe_intermediate_size))
    # The embeddings are large compared with the outputs of the layers, so from the first step the
    # residual stream of a token clearly differs from that of another token. With embeddings as
    # small as other weights, the loss falls several times slower.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)

    total = model.num_parameters()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    print(f"{args.output_dir}: {total:,} parameters, {experts / total:.0%} of them in experts")


if __name__ == "__main__":
    main()
