"""An ordinary GRPO script for TRL, plus one line: `attach(trainer, …)`.

A Llama with 0.1 M parameters and one token per character learns to write digits. Nothing is downloaded; the script
takes less than a minute on one core. At the end it prints a table of measurements and the path of the run folder.

    pip install --constraint constraints.txt '.[trl]'    # from a checkout of scoregram
    python examples/trl_grpo.py
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import string
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from scoregram import attach


def tokenizer_of_characters() -> PreTrainedTokenizerFast:
    """One token per character."""
    characters = ["<pad>", "<end>", *string.digits, *string.ascii_lowercase, "+", "=", " "]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def small_llama(vocabulary: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def share_of_digits(completions: list[str], **_: object) -> list[float]:
    """Reward: share of the completion's characters that are digits."""
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in completions]


def main() -> None:
    """Train with measurements, then print them."""
    parser = argparse.ArgumentParser(description="GRPO with TRL, measured by scoregram")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None, help="run folder; a new temporary one by default")
    options = parser.parse_args()
    torch.manual_seed(0)
    scratch = Path(tempfile.mkdtemp(prefix="trl_grpo-"))
    tokenizer = tokenizer_of_characters()
    sums = [(a, b) for a in range(10) for b in range(10)]
    trainer = GRPOTrainer(
        model=small_llama(len(tokenizer)),
        reward_funcs=share_of_digits,
        args=GRPOConfig(
            output_dir=str(scratch / "trainer"),
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=8,
            learning_rate=3e-3,
            max_steps=options.steps,
            logging_steps=10,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        # the reward does not use the answers; the report shows them beside the rollouts
        train_dataset=Dataset.from_dict(
            {"prompt": [f"{a}+{b}=" for a, b in sums], "answer": [f"{a + b}" for a, b in sums]}
        ),
        processing_class=tokenizer,
    )

    attachment = attach(trainer, every=10, out=options.out or scratch / "run")  # the one line

    trainer.train()

    print(attachment)


if __name__ == "__main__":
    main()
