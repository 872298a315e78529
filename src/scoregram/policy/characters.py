"""A tokenizer of single characters, built in code: printable ASCII, a line feed, and the special tokens."""

import string
from typing import TYPE_CHECKING

from scoregram.checks import fail

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
VOCABULARY = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *CHARACTERS))}


def character_tokenizer(context: int) -> "PreTrainedTokenizerFast":
    """A transformers tokenizer with one token per character, for texts of up to `context` tokens.

    A character that is not in the vocabulary becomes the unknown token, which decodes to nothing where special tokens
    are skipped. No token is added to a text by itself.

    Raises:
        ScoregramError: If transformers is not installed.
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as missing:
        fail("character_tokenizer", "needs transformers", str(missing), "Install it: pip install 'scoregram[hf]'.")
    characters = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
