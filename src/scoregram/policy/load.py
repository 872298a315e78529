"""Load a language model and its tokenizer as a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scoregram.policy.config import PolicyConfig
from scoregram.tasks.task import Task


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer and what is needed to sample from it."""

    model: Any
    """A `PreTrainedModel`, or a `PeftModel` around one."""
    tokenizer: Any
    config: PolicyConfig
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""
    pad_id: int
    context: int
    """Positions the model knows: prompt and completion together."""
    chat: bool = False
    """Whether prompts go through the tokenizer's chat template."""

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, as the model expects it."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of completion tokens, without special tokens."""
        raise NotImplementedError


def load_policy(config: PolicyConfig, task: Task | None = None) -> Policy:
    """The policy that `config` describes."""
    raise NotImplementedError
