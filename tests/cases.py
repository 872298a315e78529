"""Small models of real architectures, built from configs, and batches of rollouts to measure on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: build("Llama"),
    "llama-tied": lambda: build("Llama", tie_word_embeddings=True),
    "llama-bias": lambda: build("Llama", attention_bias=True, mlp_bias=True),
    "qwen3": lambda: build("Qwen3", head_dim=8),  # per-head norms of queries and keys
    "gemma3": lambda: build("Gemma3", config="Gemma3TextConfig", head_dim=8),  # norms by 1 + w, scaled tied embedding
    "gemma2": lambda: build("Gemma2", head_dim=8),  # capped logits
    "gpt2": lambda: build(
        "GPT2", model="GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),  # Conv1D, learned positions
    "gpt-neox": lambda: build("GPTNeoX"),
    "phi": lambda: build("Phi"),  # a head with a bias
    "opt": lambda: build("OPT", ffn_dim=40, word_embed_proj_dim=32),
    "bloom": lambda: build("Bloom", n_layer=2, n_head=4),
    "falcon": lambda: build("Falcon"),
    "stablelm": lambda: build("StableLm"),
    "cohere": lambda: build("Cohere"),  # scaled logits
    "granite": lambda: build("Granite", logits_scaling=2.0),
    "nemotron": lambda: build("Nemotron", head_dim=8),  # LayerNorm1P
    "olmoe": lambda: build("Olmoe", **MIXTURE),
    "qwen3-moe": lambda: build("Qwen3Moe", head_dim=8, moe_intermediate_size=16, **MIXTURE),
    "mixtral": lambda: build("Mixtral", num_local_experts=4),
    "gpt-oss": lambda: build("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "mamba": lambda: build("Mamba", state_size=4),
    "nemotron-h": lambda: build(
        "NemotronH",
        layers_block_type=["mamba", "full_attention", "mlp"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=4,
    ),
}


def build(family: str, *, model: str = "", config: str = "", **settings: object) -> Any:
    """A float64 model with random weights; norms, scales and biases moved off their initial values."""
    torch.manual_seed(0)
    config_class = getattr(transformers, config or f"{family}Config")
    model_class = getattr(transformers, model or f"{family}ForCausalLM")
    made = model_class(config_class(**(SMALL | settings), bos_token_id=1, eos_token_id=2, pad_token_id=0)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    if hasattr(made.config, "_experts_implementation_internal"):
        made.config._experts_implementation_internal = "eager"  # the grouped product knows no float64
    return made.eval()


@dataclass(frozen=True)
class Rollouts:
    """A batch with prompts, completions and padding."""

    input_ids: Tensor
    completion_mask: Tensor
    attention_mask: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `measure_gram` takes after the model."""
        return self.input_ids, self.completion_mask, self.attention_mask


def rollouts(count: int = 5, tokens: int = 11, *, seed: int = 0, padding: str = "right") -> Rollouts:
    """Random rollouts of unequal lengths; the one before the last has no completion token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, tokens), generator=generator)
    attention = torch.ones_like(ids)
    completion = torch.zeros(count, tokens, dtype=torch.bool)
    for row in range(count):
        short = row % 3
        real = slice(short, tokens) if padding == "left" else slice(0, tokens - short)
        attention[row] = 0
        attention[row, real] = 1
        completion[row, real.start + 4 : real.stop] = True
    completion[max(count - 2, 0)] = False
    return Rollouts(ids, completion, attention)


class Opaque(torch.autograd.Function):
    """A product that no interceptor sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, kernel)
        return x * kernel

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        x, kernel = ctx.saved_tensors
        return grads[0] * kernel, (grads[0] * x).sum((0, 1))


CASTS = frozenset({Tensor.float, Tensor.to, Tensor.type})


class KeepDouble(TorchFunctionMode):
    """Casts of float64 to float32 are not made: many models compute their norms in float32 whatever their dtype."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_cast = func in CASTS and args[0].dtype is torch.float64
        if is_cast and (func is Tensor.float or torch.float32 in (*args[1:], *kwargs.values())):
            return args[0]
        to_single = bool(kwargs) and kwargs.get("dtype") is torch.float32
        if to_single and any(isinstance(arg, Tensor) and arg.dtype is torch.float64 for arg in args):
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)
