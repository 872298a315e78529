"""Estimated memory of a pass, and the memory that is free."""

from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from scoregram.gram.contract import CHUNK_ELEMENTS
from scoregram.gram.head import STORE_BYTES
from scoregram.gram.model import sharded_modules, trainable_parameters
from scoregram.gram.slab import SLAB_ELEMENTS

MEMORY_SHARE = 0.8
"""Part of the free memory that a measurement may take: the estimates below are not exact."""
HIDDEN_KEPT, INNER_KEPT = 16, 5
"""Activations that a layer keeps for its backward pass, in units of its hidden and its intermediate size."""


def text_config(model: nn.Module) -> Any:
    """The config of the language model inside a model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def bytes_of_pass(model: nn.Module, rollouts: int, tokens: int, *, parameters: Sequence[Tensor] | None = None) -> int:
    """Estimated peak memory of one measuring pass in bytes, the copy of the gradient included.

    The sum of: activations of every layer (under gradient checkpointing, of one layer and the inputs of the others),
    the kept gradients of the logits, the gradient, and one chunk of per-rollout gradients. For a sharded model no
    gradient is kept; the parameters that it gathers at a time count instead. The estimate is generous for usual
    decoders. `parameters` are the trainable parameters, which a caller may have listed already.
    """
    config = text_config(model)
    hidden = int(getattr(config, "hidden_size", 0) or 1024)
    inner = int(getattr(config, "intermediate_size", 0) or 4 * hidden)
    layers = int(getattr(config, "num_hidden_layers", 0) or 1)
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    parameters = trainable_parameters(model) if parameters is None else parameters
    width = max((parameter.element_size() for parameter in parameters), default=4)
    layer = HIDDEN_KEPT * hidden + INNER_KEPT * inner
    if getattr(config, "_attn_implementation", "") == "eager":
        layer += 2 * heads * tokens
    is_checkpointed = bool(getattr(model, "is_gradient_checkpointing", False))
    kept = layer + 2 * layers * hidden if is_checkpointed else layers * layer
    on_gpu = bool(parameters) and parameters[0].is_cuda
    logits = min(rollouts * tokens * int(getattr(config, "vocab_size", 0) or 0) * width, STORE_BYTES)
    gradient = gathered_bytes(model) or gradient_bytes(parameters)
    chunk = (SLAB_ELEMENTS if on_gpu else CHUNK_ELEMENTS) * 4
    return rollouts * tokens * kept * width + 2 * logits + gradient + chunk


def gradient_bytes(parameters: Sequence[Tensor]) -> int:
    """Size of the gradient of all trainable parameters."""
    return sum(parameter.nbytes for parameter in parameters)


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of parameters that a sharded model gathers at a time: its five largest units; 0 if it is not sharded.

    The five are the running layer, the next one, the buffer into which it is gathered, the embedding and the head.
    """
    sizes: list[int] = []
    seen: set[int] = set()
    for module in reversed(sharded_modules(model)):  # inner modules first, so that an outer one counts only the rest
        own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        sizes.append(sum(parameter.numel() * parameter.element_size() for parameter in own))
    return sum(sorted(sizes)[-5:])


def free_bytes(model: nn.Module, processes: int = 1) -> float:
    """Free memory on the device of the model, for each of several processes that measure at the same time."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available / processes
