"""Ways to get per-rollout gradients, or their Gram, side by side.

Every way takes the same model and rollouts and returns the Gram it found, None if it does not give one. All but the
Gram alone leave the training gradient `Σ_i w_i ψ_i` in `.grad`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scoregram.gram import backward_with_gram, measure_gram, row_gram

COLUMNS = 1 << 26
"""Columns of kept gradients multiplied at a time: products over rows a billion elements apart read astray on a GPU."""


@dataclass(frozen=True)
class Work:
    """A model and the rollouts to measure on it, of equal length, the first quarter prompt."""

    model: Any
    """A causal language model of the transformers library."""
    input_ids: Tensor
    completion_mask: Tensor
    weights: Tensor

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def prompt(self) -> int:
        """Tokens before the completion."""
        return int((~self.completion_mask[0]).sum())

    def log_probs(self, rows: slice = slice(None)) -> Tensor:
        """Summed log-probability of each completion, by a plain forward pass, the head on completions only."""
        ids = self.input_ids[rows]
        kept = ids.shape[1] - self.prompt + 1
        logits = self.model(input_ids=ids, logits_to_keep=kept, use_cache=False).logits[:, :-1]
        flat = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, self.prompt :].flatten(), reduction="none")
        return -flat.view(len(ids), -1).sum(1)

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def plain(work: Work) -> None:
    """The floor: one forward and backward pass of a weighted loss."""
    (work.log_probs() * work.weights).sum().backward()


def one_backward_each(work: Work) -> Tensor:
    """One backward pass per rollout, all gradients kept: `N × D`."""
    kept = []
    for index in range(len(work.input_ids)):
        total = work.log_probs(slice(index, index + 1)).sum()
        kept.append(torch.autograd.grad(total, work.parameters))
    return from_rows(work, (torch.stack([grad.flatten() for grad in grads]) for grads in zip(*kept, strict=True)))


def vmapped(work: Work) -> Tensor:
    """`vmap(grad)` over a functional call, with eager attention and a mask made by hand: `N × D` at once."""
    config = work.model.config
    named = {name: p.detach() for name, p in work.model.named_parameters() if p.requires_grad}
    length = work.input_ids.shape[1]
    closed = torch.full((length, length), float("-inf"), device=work.input_ids.device).triu(1)[None, None]

    def total(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        inputs = {"input_ids": ids[None], "attention_mask": closed.to(next(iter(parameters.values())).dtype)}
        out = torch.func.functional_call(work.model, parameters, kwargs=inputs | {"use_cache": False}, tie_weights=True)
        predicted = out.logits[0, work.prompt - 1 : -1].float()
        return -F.cross_entropy(predicted, ids[work.prompt :], reduction="sum")

    implementation = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        grads: Any = torch.func.vmap(torch.func.grad(total), in_dims=(None, 0))(named, work.input_ids)
    finally:
        config._attn_implementation = implementation
    return from_rows(work, (grads[name].flatten(1) for name in named))


def opacus(work: Work) -> Tensor:
    """Opacus' per-sample gradients, kept for every parameter: `N × D`."""
    from opacus import GradSampleModule  # pyright: ignore[reportMissingImports]

    wrapped = GradSampleModule(work.model, batch_first=True, loss_reduction="sum", strict=False)
    try:
        positions = torch.arange(work.input_ids.shape[1], device=work.input_ids.device).expand_as(work.input_ids)
        logits = wrapped(input_ids=work.input_ids, position_ids=positions, use_cache=False).logits
        predicted = logits[:, work.prompt - 1 : -1].flatten(0, 1).float()
        (-F.cross_entropy(predicted, work.input_ids[:, work.prompt :].flatten(), reduction="sum")).backward()
        rows = [getattr(parameter, "grad_sample").flatten(1) for parameter in work.parameters]  # noqa: B009
    finally:
        wrapped.remove_hooks()
        for parameter in work.parameters:
            vars(parameter).pop("grad_sample", None)
    return from_rows(work, rows)


def from_rows(work: Work, rows: Iterable[Tensor]) -> Tensor:
    """Gram of kept gradients, `(N, d)` for every parameter in turn; their weighted sums go to `.grad`."""
    grams = []
    for parameter, whole in zip(work.parameters, rows, strict=True):
        weights = work.weights.to(whole.dtype)
        pieces = [whole[:, start : start + COLUMNS].contiguous() for start in range(0, whole.shape[1], COLUMNS)]
        parameter.grad = torch.cat([weights @ piece for piece in pieces]).view_as(parameter)
        grams += [row_gram(piece)[0] for piece in pieces]
    return torch.stack(grams).sum(0).cpu()


def gram_only(work: Work) -> Tensor:
    """scoregram: the Gram, nothing else."""
    return measure_gram(work.model, work.input_ids, work.completion_mask).matrix


def gram_and_gradient(work: Work) -> Tensor:
    """scoregram: the Gram and the training gradient."""
    return backward_with_gram(work.model, work.input_ids, work.completion_mask, weights=work.weights).matrix


WAYS: MappingProxyType[str, Callable[[Work], Tensor | None]] = MappingProxyType(
    {
        "plain": plain,
        "gram+gradient": gram_and_gradient,
        "gram": gram_only,
        "n-backwards": one_backward_each,
        "vmap": vmapped,
        "opacus": opacus,
    }
)
