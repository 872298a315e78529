"""Settings: which model a policy is loaded from, and how rollouts are drawn. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Literal

from scoregram.errors import fail, require_field_types

SamplerName = Literal["auto", "transformers", "fast", "vllm"]
"""Names of the sampling backends; `SamplingConfig.sampler` describes each."""


@dataclass(frozen=True)
class PolicyConfig:
    """Which model a policy is loaded from, its precision, device and adapters."""

    model: str = "tiny"
    """A hub id, a local folder, a `.gguf` file, or `tiny`: a small Llama that is built and warm-started here. The
    checkpoint of a PEFT adapter is loaded onto its base, and only the parameters that it trained require a gradient."""
    dtype: str = "float32"
    """Precision of the weights: float32, bfloat16, float16 or float64."""
    autocast: bool = False
    """Run matrix products in bfloat16, in sampling and training; the weights stay in `dtype`."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    attention: str = "sdpa"
    """Attention implementation of transformers: sdpa, eager, flash_attention_2, …"""
    lora_rank: int = 0
    """Train LoRA adapters of this rank on a frozen base; 0 trains every weight."""
    lora_alpha: float = 32.0
    """Adapters are scaled by `lora_alpha / lora_rank`."""
    lora_targets: tuple[str, ...] = ()
    """Names of the modules that get an adapter; if empty, every linear layer but the head."""
    prompt: Literal["auto", "plain", "chat"] = "auto"
    """`chat` applies the tokenizer's chat template to a prompt, `plain` leaves it as it is; `auto` is `chat` if the
    tokenizer has a template and the task has no prompt format of its own."""
    seed: int = 0
    """Seed of everything random in loading: fresh adapters, the tiny policy."""
    trust_remote_code: bool = False
    """Run the Python code in the model's repository; without it, loading such a model is an error."""

    def __post_init__(self) -> None:
        require_field_types(self, caller="PolicyConfig")
        if self.lora_rank < 0:
            fail("PolicyConfig", "lora_rank must be 0 or more", self.lora_rank, "0 trains every weight.")
        if self.lora_rank and not 0 < self.lora_alpha < float("inf"):
            remedy = "Adapters are scaled by lora_alpha / lora_rank; at 0 they would not train."
            fail("PolicyConfig", "lora_alpha must be positive and finite", self.lora_alpha, remedy)
        if self.autocast and self.dtype == "float16":
            remedy = "Choose dtype float32 or bfloat16, or leave out autocast."
            fail("PolicyConfig", "autocast computes in bfloat16, which does not mix with float16", self.dtype, remedy)


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn."""

    max_new_tokens: int
    """Tokens after which a rollout is cut off."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most probable token."""
    top_k: int = 0
    """Draw among this many most probable tokens (and those tied with the last of them); 0 keeps all."""
    top_p: float = 1.0
    """Draw among the fewest most probable tokens whose probabilities sum to at least this; 1 keeps all."""
    sampler: SamplerName = "auto"
    """The backend that draws the tokens. All draw from the same distribution, up to rounding.

    - `auto`: `fast` for a model that supports it, else `transformers`.
    - `transformers`: the forward pass of transformers with the model's own KV cache, or without a cache if the cache
      changes the logits. Works for every model.
    - `fast`: one KV cache filled once per prompt for all its rollouts; fused operations, Triton kernels and CUDA graphs
      where the model and the device support them. Raises an error for a model that it does not support.
    - `vllm`: a vLLM engine in this process, which gets the policy's weights at every call. Needs vllm and a GPU."""

    def __post_init__(self) -> None:
        require_field_types(self, caller="SamplingConfig")
        if self.max_new_tokens < 1:
            fail("SamplingConfig", "max_new_tokens must be at least 1", self.max_new_tokens, "Pass 1 or more.")
        if not 0 <= self.temperature < float("inf"):
            fail("SamplingConfig", "temperature must be 0 or more, and finite", self.temperature, "0 is greedy.")
        if self.top_k < 0:
            fail("SamplingConfig", "top_k must be 0 or more", self.top_k, "0 keeps every token.")
        if not 0 < self.top_p <= 1:
            fail("SamplingConfig", "top_p must lie in (0, 1]", self.top_p, "1 keeps every token.")

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p excludes some tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)
