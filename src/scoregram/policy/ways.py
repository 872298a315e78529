"""Three ways to get the logits of the next token of many rollouts, from the fastest to the one that always works.

Each is a class with the same four verbs. `fastest_way` takes the first whose logits agree with a plain forward pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from scoregram.policy.modes import base_of

PREFILL_TOKENS = 32768
"""Most tokens of prompts in one forward pass."""


class Way(ABC):
    """How the logits of the next token are had; one object serves one batch."""

    any_lengths = False
    """Whether prompts of unequal lengths may go into one batch."""

    def __init__(self, model: nn.Module, capacity: int) -> None:
        """`capacity`: tokens of the longest prompt and completion together."""
        self.model, self.capacity = model, capacity

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:
        """`(N, V)` logits of the first new token of `repeats` rollouts of every prompt."""

    @abstractmethod
    def step(self, token: Tensor) -> Tensor:
        """`(N, V)` logits behind one more token `(N,)` of every row."""

    @abstractmethod
    def keep(self, places: Tensor) -> None:
        """Drop every other row."""

    def decoding(self) -> AbstractContextManager[None]:
        """What every step has to run inside of."""
        return nullcontext()


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward pass has an argument of this name."""
    return name in signature(base_of(model).forward).parameters


class Shared(Way):
    """Plain attention: one block of keys and values, written once per prompt for all its rollouts.

    Prompts are padded on the left, so that every row writes the same column.
    """

    any_lengths = True

    def __init__(self, model: nn.Module, capacity: int) -> None:
        super().__init__(model, capacity)
        self.capacity = -(-capacity // 16) * 16  # rows of a mask must be aligned for some kernels

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:  # noqa: D102
        from scoregram.policy.cache import SharedCache

        device = next(self.model.parameters()).device
        longest = max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        positions = torch.arange(longest, device=device) - pads[:, None]
        self.is_padded = len(set(map(len, prompts))) > 1
        self.cache = SharedCache(len(prompts) * repeats, self.capacity)
        logits, chunk = [], max(1, PREFILL_TOKENS // longest)
        for first in range(0, len(prompts), chunk):
            here = slice(first, first + chunk)
            logits.append(self.prefill(ids[here], positions[here], first * repeats, repeats))
        pads = pads.repeat_interleave(repeats)
        self.position = (longest - pads)[:, None]  # of the next token
        hidden = torch.arange(self.capacity, device=device) < pads[:, None]
        open_everywhere = torch.zeros(hidden.shape, dtype=self.cache.keys[0].dtype, device=device)
        lowest = torch.finfo(open_everywhere.dtype).min
        self.mask = open_everywhere.masked_fill(hidden, lowest)[:, None, None]  # (N, 1, 1, capacity)
        return torch.cat(logits).repeat_interleave(repeats, 0)

    def prefill(self, ids: Tensor, positions: Tensor, first_row: int, repeats: int) -> Tensor:
        """`(P, V)` logits behind prompts, whose keys and values go into the rows of their rollouts.

        Args:
            ids: `(P, T)`, padded on the left.
            positions: `(P, T)`, negative for padding.
            first_row: Of the first rollout.
            repeats: Rollouts of each prompt.
        """
        from transformers.cache_utils import DynamicCache

        last_only = {"logits_to_keep": 1} if takes(self.model, "logits_to_keep") else {}
        prefilled = DynamicCache()
        out = self.model(
            input_ids=ids,
            attention_mask=(positions >= 0).long() if self.is_padded else None,
            position_ids=positions.clamp(min=0),
            past_key_values=prefilled,
            use_cache=True,
            **last_only,
        )
        layers: list[Any] = prefilled.layers
        for index, layer in enumerate(layers):
            self.cache.fill(index, layer.keys, layer.values, first_row, repeats)
        return out.logits[:, -1]

    def step(self, token: Tensor) -> Tensor:  # noqa: D102
        if self.cache.column is not None:
            self.mask.index_fill_(3, self.cache.column, 0.0)
        logits = self.logits(token, self.mask[..., : self.cache.seen])
        self.cache.advance()
        self.position += 1
        return logits

    def logits(self, token: Tensor, mask: Tensor) -> Tensor:
        """`(N, V)` logits behind `token`, by the model's own forward pass."""
        out = self.model(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.logits[:, -1]

    def use_columns(self) -> int:
        """From now on let a tensor say which column is written, so that a step can be captured; the columns so far."""
        written = self.cache.length
        self.cache.column = torch.tensor([written], device=self.mask.device)
        self.mask[..., written:] = torch.finfo(self.mask.dtype).min
        return written

    def decoding(self) -> AbstractContextManager[None]:  # noqa: D102
        from scoregram.policy.attention import grouped_heads

        return grouped_heads(self.model)

    def keep(self, places: Tensor) -> None:  # noqa: D102
        self.cache.keep(places)
        self.mask, self.position = self.mask[places], self.position[places]


class Grown(Way):
    """Any model with a cache of its own that can be reordered by rows: windows, state spaces, mixtures of both.

    Prompts of one length only, so that nothing is padded and no model has to know of padding.
    """

    def __init__(self, model: nn.Module, capacity: int) -> None:
        super().__init__(model, capacity)
        self.name = "past_key_values" if takes(model, "past_key_values") else "cache_params"

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:  # noqa: D102
        ids = torch.tensor(prompts, device=next(self.model.parameters()).device)
        out = self.model(input_ids=ids, use_cache=True)
        self.cache: Any = getattr(out, self.name)
        rows = torch.arange(len(prompts), device=ids.device).repeat_interleave(repeats)
        self.cache.reorder_cache(rows)
        return out.logits[rows, -1]

    def step(self, token: Tensor) -> Tensor:  # noqa: D102
        out = self.model(input_ids=token[:, None], use_cache=True, **{self.name: self.cache})
        self.cache = getattr(out, self.name)
        return out.logits[:, -1]

    def keep(self, places: Tensor) -> None:  # noqa: D102
        self.cache.reorder_cache(places)


class Recomputed(Way):
    """Any model at all: every token is a forward pass over the whole text."""

    def start(self, prompts: Sequence[Sequence[int]], repeats: int) -> Tensor:  # noqa: D102
        ids = torch.tensor(prompts, device=next(self.model.parameters()).device)
        self.ids = ids.repeat_interleave(repeats, 0)
        return self.model(input_ids=ids, use_cache=False).logits[:, -1].repeat_interleave(repeats, 0)

    def step(self, token: Tensor) -> Tensor:  # noqa: D102
        self.ids = torch.cat([self.ids, token[:, None]], 1)
        return self.model(input_ids=self.ids, use_cache=False).logits[:, -1]

    def keep(self, places: Tensor) -> None:  # noqa: D102
        self.ids = self.ids[places]
