"""A tokenizer with a word for each token of a tiny model: "word0", "word1", "word2", ..."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

PAD, EOS = 1, 2


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Make the tokenizer. Batches are padded on the left, because generation needs that."""
    words = {f"word{index}": index for index in range(vocab_size)}
    model = Tokenizer(WordLevel(words, unk_token="word0"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="word0",
        pad_token=f"word{PAD}",
        eos_token=f"word{EOS}",
        padding_side="left",
    )


def text_of_tokens(tokens: list[int]) -> str:
    """Return the text that the tokenizer turns into `tokens`."""
    return " ".join(f"word{token}" for token in tokens)
