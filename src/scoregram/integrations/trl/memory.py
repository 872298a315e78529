"""What a measurement would take in memory, estimated before it is tried, and how many groups fit into one pass."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from scoregram.gram import CHUNK_ELEMENTS, CHUNK_ELEMENTS_CUDA, STORE_BYTES, sharded_modules

SHARE = 0.8
"""Part of the free memory that a measurement may take where no limit is given."""
HIDDEN_KEPT, INNER_KEPT = 16, 5
"""Activations that a layer keeps for its backward pass, in units of its hidden and its intermediate size."""


def bytes_of_pass(model: nn.Module, rollouts: int, tokens: int) -> int:
    """Estimate of what one measuring pass allocates at its peak, the copy of the gradient included.

    Activations of every layer (of one layer and the borders of the others under gradient checkpointing), the kept
    gradients of the logits, one chunk of per-rollout gradients. Of a sharded model no gradient is kept; what is
    gathered of its parameters counts in its place. Generous for the usual decoder, and no more than an
    estimate: a pass that runs out of memory all the same is given up without harm.
    """
    config = text_config(model)
    hidden = int(getattr(config, "hidden_size", 0) or 1024)
    inner = int(getattr(config, "intermediate_size", 0) or 4 * hidden)
    layers = int(getattr(config, "num_hidden_layers", 0) or 1)
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    width = max((parameter.element_size() for parameter in parameters), default=4)
    layer = HIDDEN_KEPT * hidden + INNER_KEPT * inner
    if getattr(config, "_attn_implementation", "") == "eager":
        layer += 2 * heads * tokens
    is_checkpointed = bool(getattr(model, "is_gradient_checkpointing", False))
    kept = layer + 2 * layers * hidden if is_checkpointed else layers * layer
    on_gpu = bool(parameters) and parameters[0].is_cuda
    logits = min(rollouts * tokens * int(getattr(config, "vocab_size", 0) or 0) * width, STORE_BYTES)
    gradient = gathered_bytes(model) or sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    chunk = (CHUNK_ELEMENTS_CUDA if on_gpu else CHUNK_ELEMENTS) * 4
    return rollouts * tokens * kept * width + 2 * logits + gradient + chunk


def gathered_bytes(model: nn.Module) -> int:
    """What a sharded model gathers at a time: its largest parts, five of them; 0 for a model in one piece.

    The layer that runs, the next one and the buffer of its gathering, the embedding and the head.
    """
    sizes: list[int] = []
    seen: set[int] = set()
    for module in reversed(sharded_modules(model)):  # those inside first
        own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        sizes.append(sum(parameter.numel() * parameter.element_size() for parameter in own))
    return sum(sorted(sizes)[-5:])


def free_bytes(model: nn.Module, processes: int = 1) -> float:
    """Memory that is free where the model is, for each of several processes that begin at once."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    import psutil  # comes with accelerate

    return psutil.virtual_memory().available / processes


def passes_within(limit: float, model: nn.Module, bounds: Sequence[int], tokens: int) -> list[slice] | None:
    """Rows that go through the model together: as many whole groups as fit; None if not even one does.

    Args:
        limit: Bytes.
        model: The model.
        bounds: Where groups begin, and where the last one ends: `0, 8, 16`; one number if there is no group.
        tokens: Length of the rows.
    """
    passes: list[slice] = []
    start = bounds[0]
    for before, here in pairwise(bounds):
        if bytes_of_pass(model, here - before, tokens) > limit:
            return None
        if bytes_of_pass(model, here - start, tokens) > limit:
            passes.append(slice(start, before))
            start = before
    return [*passes, slice(start, bounds[-1])] if bounds[-1] > start else passes


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model in a model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
