"""Transformers models as policies: their mode, precision and context, and facts that are found out once per model."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from scoregram.checks import fail

UNBOUNDED = 2**31 - 1
"""Context of a model without a limit, such as a state-space model."""

UNSUPPORTED = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Exceptions that mean, in a trial: the model does not support this computation."""

PROBE_PROMPTS = ((1, 2, 3), (4, 5, 6, 7, 8, 9, 1, 2), (9, 8, 7, 6, 5))
"""Prompts of unequal lengths for trials; `probe_tokens` turns the numbers into token ids."""
PROBE_COMPLETION = (3, 1, 2)
"""The completion of every probe prompt, in the same numbers."""
LOGIT_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Difference between logits, relative to the largest, that rounding explains. Many float64 models compute some
operations in float32."""
TF32_ROUNDING = 1e-2
"""The same for float32 on a GPU where matrix products may use TF32."""
BATCH_NOISE_FACTOR = 4
"""A difference also counts as rounding if it is at most this multiple of what another batch composition causes."""


class PolicyWarning(UserWarning):
    """A default was chosen for something the policy lacks, or the policy cannot use the fastest code path."""


@dataclass
class ModelFacts:
    """Facts about one model that are expensive to find out; each is filled when it is first needed."""

    attention_reach: int | None = None
    """Tokens that the narrowest attention layer sees; see `attention_reach`."""
    size: tuple[int, int] | None = None
    """Weights outside the embeddings, and hidden units of all layers together."""
    decoder_misfits: dict[tuple[type, bool], float] = field(default_factory=dict)
    """By decoder class and whether autocast was on: the error of its logits, in units of what rounding explains."""
    supports_packing: dict[bool, bool] = field(default_factory=dict)
    """By whether autocast was on: whether packed groups have the log-probabilities of single rows."""
    vllm_engine: Any = None
    """The vLLM engine that samples from this model's weights."""


_facts: WeakKeyDictionary[nn.Module, ModelFacts] = WeakKeyDictionary()


def policy_facts(model: nn.Module) -> ModelFacts:
    """The facts known about a model; they are forgotten when the model is garbage collected."""
    return _facts.setdefault(model, ModelFacts())


def base_model(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]


def has_argument(model: nn.Module, name: str) -> bool:
    """Whether the model's forward pass takes an argument of this name."""
    return name in signature(base_model(model).forward).parameters


def context_of(model: nn.Module) -> int:
    """Longest text in tokens, prompt and completion together, that a model has positions for."""
    config = base_model(model).config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
    given = [getattr(config, name, None) for name in names]
    return min((int(size) for size in given if isinstance(size, int) and size > 0), default=UNBOUNDED)


def attention_reach(model: nn.Module) -> int:
    """Tokens that the narrowest attention layer sees; 0 if a layer caches anything but its own keys and values.

    A model is *plain attention* for texts up to this length: every token attends to all tokens before it.
    """
    facts = policy_facts(model)
    if facts.attention_reach is None:
        facts.attention_reach = _attention_reach(model)
    return facts.attention_reach


def _attention_reach(model: nn.Module) -> int:
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    config = base_model(model).config
    if not has_argument(model, "position_ids") or not has_argument(model, "past_key_values"):
        return 0
    text = config.get_text_config()
    if getattr(text, "alibi", False) or getattr(text, "num_kv_shared_layers", 0):
        return 0
    reaches = {
        DynamicLayer: lambda _: UNBOUNDED,
        DynamicSlidingWindowLayer: lambda layer: int(getattr(layer, "sliding_window", 0)),
    }
    layers = DynamicCache(config=config).layers
    return min((reaches.get(type(layer), lambda _: 0)(layer) for layer in layers), default=UNBOUNDED)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, dropout is off and no autograd graph is recorded; every module gets its mode back, also on an exception.

    Gradients are switched off by `no_grad`: tensors made in inference mode could not be used in a loss.
    """
    trained = [module for module in model.modules() if module.training]
    try:
        for module in trained:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in trained:
            module.training = True
        if is_autocast(model):
            torch.clear_autocast_cache()  # a training pass would reuse casts that have no autograd graph


def is_autocast(model: nn.Module) -> bool:
    """Whether autocast is on for the model's device."""
    return torch.is_autocast_enabled(next(model.parameters()).device.type)


def hides_precision(model: nn.Module) -> bool:
    """Whether autocast makes a model compute in a narrower dtype than its weights have."""
    return is_autocast(model) and next(model.parameters()).dtype in {torch.float32, torch.float64}


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of matrix products with a tensor: autocast's where it is on, else the tensor's own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def without_autocast(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, a model computes in the precision of its weights."""
    return torch.autocast(next(model.parameters()).device.type, enabled=False)


def recompute_layers(model: nn.Module, *, caller: str) -> None:
    """Switch on gradient checkpointing: layers run again in the backward pass instead of storing their activations.

    transformers checkpoints only layers in training mode, so the layers are put into training mode, but no module
    inside them: dropout stays off. `evaluating` suspends it while sampling. The hook that transformers puts on the
    embedding serves reentrant checkpointing alone and is taken off: fused decoders refuse a model with hooks.

    Raises:
        ScoregramError: If the model does not support gradient checkpointing, or a layer applies dropout itself.
    """
    base = base_model(model)
    if not getattr(base, "supports_gradient_checkpointing", False):
        fail(caller, "the model must support gradient checkpointing", type(base).__name__, "Switch it off.")
    base.gradient_checkpointing_enable({"use_reentrant": False})
    if getattr(base, "_require_grads_hook", None) is not None:
        base.disable_input_require_grads()
    for name, module in base.named_modules():
        if not vars(module).get("gradient_checkpointing", False):
            continue
        rates = {key: rate for key, rate in vars(module).items() if "drop" in key and isinstance(rate, float) and rate}
        if rates:
            fail(caller, "layers must not drop activations", f"{rates} in {name}", "Set them to 0 in its config.")
        module.training = True


def vocabulary_of(model: nn.Module) -> int:
    """Number of token ids that the input embedding has."""
    return int(base_model(model).get_input_embeddings().num_embeddings)


def probe_tokens(numbers: Sequence[int], vocabulary: int) -> list[int]:
    """Token ids from all over a vocabulary, one for each number: `⌊frac(n φ) V⌋`, `φ = (√5 - 1) / 2`.

    Ids are spread because the first ids of many vocabularies are special tokens, and on texts of special tokens models
    are ill-conditioned. An error of up to a thousandth in every product, less than bfloat16 rounding, changes a logit
    after SmolLM2's id 6, `<filename>`, by 10; after ids from all over the vocabulary, by 0.3 or less.
    """
    golden_ratio = (5**0.5 - 1) / 2
    return [int(number * golden_ratio % 1 * vocabulary) for number in numbers]


def largest_magnitude(values: Tensor) -> float:
    """The largest absolute value."""
    return float(values.abs().max())


def logit_rounding(logits: Tensor) -> float:
    """Relative difference between logits that rounding explains, for their dtype and device."""
    uses_tf32 = logits.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return TF32_ROUNDING if uses_tf32 and logits.dtype is torch.float32 else LOGIT_ROUNDING[logits.dtype]


def weights_sha256(model: nn.Module) -> str:
    """The sha256 of all parameters: name, dtype, shape and values of each, in the order of their names.

    It does not depend on the file format or the device.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
