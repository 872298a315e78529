"""Model shapes to measure on, with random weights: the cost does not depend on what a model has learned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Shape:
    """A causal language model of the transformers library, by family and configuration."""

    family: str
    config: Mapping[str, Any]

    @property
    def build(self) -> Callable[[], nn.Module]:
        """A function that makes the model, on the current default device and dtype."""
        import transformers

        config = getattr(transformers, f"{self.family}Config")(**self.config)
        return lambda: getattr(transformers, f"{self.family}ForCausalLM")(config)


SHAPES: MappingProxyType[str, Shape] = MappingProxyType(
    {
        "llama-tiny": Shape(
            "Llama",
            {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
            | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
        ),
        "tiny": Shape(  # of the embedded policy
            "Llama",
            {"vocab_size": 99, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2}
            | {"num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": True},
        ),
        "llama-25m": Shape(
            "Llama",
            {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6}
            | {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
        ),
        "smollm2-135m": Shape(
            "Llama",
            {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
            | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        ),
        "llama-1b": Shape(
            "Llama",
            {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
        ),
        "nemotron-4b": Shape(
            "Nemotron",
            {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 32}
            | {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5},
        ),
    }
)
