"""What every way of `bench gram` starts from and ends with: a model with its rollouts, the Gram of kept gradients."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scoregram.gram import CudaGraphGram, row_gram

_COLUMNS_AT_ONCE = 1 << 26
"""Columns of kept gradients in one matrix product: on a GPU, products of rows a billion elements apart are wrong."""
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_KEPT_ON_CPU = 1 << 31
"""Bytes of float64 gradients that the definition keeps at a time; a quarter of the free memory on a GPU."""


@dataclass(frozen=True)
class GramWork:
    """A model and rollouts of equal length; the first quarter of each is the prompt."""

    model: Any
    """A causal language model of the transformers library."""
    input_ids: Tensor
    completion_mask: Tensor
    weights: Tensor
    graphs: CudaGraphGram
    """For the way that replays CUDA graphs."""
    autocast: bool = False
    """Whether products are taken in bfloat16, whatever the dtype of the weights."""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def prompt_length(self) -> int:
        """Tokens before the completion."""
        return int((~self.completion_mask[0]).sum())

    def precision(self) -> torch.autocast:
        """A block in which every way runs."""
        return torch.autocast(self.input_ids.device.type, torch.bfloat16, enabled=self.autocast)

    def no_autocast(self) -> torch.autocast:
        """A block inside `precision` in which products have the dtype of their factors."""
        return torch.autocast(self.input_ids.device.type, enabled=False)

    def log_probs(self, rows: slice = slice(None)) -> Tensor:
        """Summed log-probability of each completion, by a plain forward pass; the head sees completions only."""
        ids = self.input_ids[rows]
        kept = ids.shape[1] - self.prompt_length + 1
        logits = self.model(input_ids=ids, logits_to_keep=kept, use_cache=False).logits[:, :-1]
        flat = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, self.prompt_length :].flatten(), reduction="none")
        return -flat.view(len(ids), -1).sum(1)

    def weighted_loss(self) -> Tensor:
        """`Σ_i w_i log π_i`, whose gradient is the training gradient."""
        return (self.log_probs() * self.weights).sum()

    def drop_gradients(self) -> None:
        """Set every `.grad` to None."""
        for parameter in self.parameters:
            parameter.grad = None


def random_work(model: nn.Module, rollouts: int, tokens: int, *, autocast: bool = False) -> GramWork:
    """Random weights, and rollouts of random tokens in which low token ids are frequent, as in text."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.vocab_size)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    ids = (vocabulary * torch.rand(rollouts, tokens, generator=generator) ** 3).long().to(device)
    mask = torch.zeros(rollouts, tokens, dtype=torch.bool, device=device)
    mask[:, tokens // 4 :] = True
    weights = torch.randn(rollouts, generator=generator).to(device)
    return GramWork(model, ids, mask, weights, CudaGraphGram(model), autocast)


def gram_of_rows(work: GramWork, rows: Iterable[Tensor]) -> Tensor:
    """Gram of kept gradients, `(N, d)` for each parameter in turn; their weighted sums go to `.grad`."""
    grams = []
    for parameter, whole in zip(work.parameters, rows, strict=True):
        weights = work.weights.to(whole.dtype)
        pieces = [
            whole[:, start : start + _COLUMNS_AT_ONCE].contiguous()
            for start in range(0, whole.shape[1], _COLUMNS_AT_ONCE)
        ]
        with work.no_autocast():
            total = torch.cat([weights @ piece for piece in pieces]).to(parameter.dtype)
        parameter.grad = total.view_as(parameter)
        grams += [row_gram(piece)[0] for piece in pieces]
    return torch.stack(grams).sum(0).cpu()


def gram_by_definition(work: GramWork) -> Tensor:
    """`K_ij = ⟨ψ_i, ψ_j⟩` in float64: one backward pass per rollout of a float64 copy of the model, without autocast.

    The parameters are taken in parts whose gradients fit into memory; each part costs the `N` passes once more.

    Returns:
        `(N, N)`, float64, on the CPU.
    """
    exact = replace(work, model=copy.deepcopy(work.model).double(), autocast=False)
    count = len(work.input_ids)
    total = torch.zeros(count, count, dtype=torch.float64)
    for part in parts_in_memory(exact.parameters, count):
        with KeepFloat64():
            scores = (exact.log_probs(slice(index, index + 1)).sum() for index in range(count))
            grads = [torch.autograd.grad(score, part) for score in scores]
        for rows in zip(*grads, strict=True):
            matrix = torch.stack([row.flatten() for row in rows])  # (N, d)
            for piece in matrix.split(_COLUMNS_AT_ONCE, dim=1):
                total += (piece.contiguous() @ piece.contiguous().mT).cpu()
    return total


def parts_in_memory(parameters: Sequence[Tensor], rollouts: int) -> Iterator[list[Tensor]]:
    """The parameters in order, in parts whose `rollouts` float64 gradients fit; at least one parameter each."""
    device = parameters[0].device
    free = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else _KEPT_ON_CPU
    part: list[Tensor] = []
    for parameter in parameters:
        if part and 8 * rollouts * sum(p.numel() for p in (*part, parameter)) > free:
            yield part
            part = []
        part.append(parameter)
    yield part


class KeepFloat64(TorchFunctionMode):
    """A block in which float64 is never cast to float32: most models compute their norms in float32 otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, without its effect if it would cast float64 to float32."""
        kwargs = kwargs or {}
        targets = (*args[1:], *kwargs.values())
        is_cast = func is Tensor.float or (func in (Tensor.to, Tensor.type) and torch.float32 in targets)
        if is_cast and args[0].dtype is torch.float64:
            return args[0]
        if kwargs.get("dtype") is torch.float32 and any(
            isinstance(arg, Tensor) and arg.dtype is torch.float64 for arg in args
        ):
            kwargs = kwargs | {"dtype": torch.float64}
        if func in _PRODUCTS:  # the rotary embedding multiplies frequencies, kept here, by positions in float32
            kinds = {arg.dtype for arg in args}
            args = [arg.double() for arg in args] if kinds == {torch.float32, torch.float64} else args
        return func(*args, **kwargs)
