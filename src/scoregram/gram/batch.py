"""The rollouts to be measured, checked, unpacked and completed; and the plain forward pass over them."""

import inspect
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from scoregram.checks import fail, require_finite, require_same_shape


@dataclass(frozen=True)
class Batch:
    """`N` rollouts of `T` tokens, one sequence each, and which of their log-probabilities count."""

    input_ids: Tensor
    """`(N, T)`"""
    attention_mask: Tensor
    """`(N, T)` long, 1 for real tokens."""
    completion_mask: Tensor
    """`(N, T)` bool."""
    coefficients: Tensor
    """`(N, T)` float64, 0 outside the completion."""
    position_ids: Tensor
    """`(N, T)`"""
    temperature: float = 1.0

    @property
    def rollouts(self) -> int:
        """Number of rollouts."""
        return len(self.input_ids)

    def at(self, rows: Tensor | slice) -> "Batch":
        """Some of the rollouts."""
        return replace(
            self,
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            completion_mask=self.completion_mask[rows],
            coefficients=self.coefficients[rows],
            position_ids=self.position_ids[rows],
        )

    def weighted(self, weights: Tensor) -> "Batch":
        """The same with the coefficients of rollout `i` multiplied by `weights[i]`."""
        return replace(self, coefficients=self.coefficients * weights.to(self.coefficients)[:, None])


def make_batch(
    input_ids: Tensor,
    completion_mask: Tensor,
    attention_mask: Tensor | None,
    *,
    coefficients: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    temperature: float = 1.0,
) -> Batch:
    """Check what was given, unpack packed rollouts, and fill in what follows from it."""
    caller = "measure_gram"
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        fail(caller, "input_ids must be (N, T) and not empty", tuple(input_ids.shape), "Pass at least one rollout.")
    if not temperature > 0:
        fail(caller, "temperature must be positive", temperature, "Pass the temperature of the policy, usually 1.")
    require_same_shape(completion_mask, input_ids, name="completion_mask", like_name="input_ids", caller=caller)
    mask = completion_mask.bool()
    attention = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    require_same_shape(attention, input_ids, name="attention_mask", like_name="input_ids", caller=caller)
    weight = mask.double() if coefficients is None else coefficients
    require_same_shape(weight, input_ids, name="coefficients", like_name="input_ids", caller=caller)
    weight = torch.where(mask, weight.double(), 0.0)
    require_finite(weight, name="coefficients", caller=caller)
    if rollout_ids is not None:
        require_same_shape(rollout_ids, input_ids, name="rollout_ids", like_name="input_ids", caller=caller)
        input_ids, attention, mask, weight = unpacked(rollout_ids, input_ids, attention, mask, weight)
    refuse_unpredicted(mask, attention)
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    # views of our own, for tensors are marked on their way through the model
    return Batch(input_ids.view_as(input_ids), attention.long().clone(), mask, weight, positions, temperature)


def unpacked(rollout_ids: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Packed rollouts `(B, T)` as one right-padded sequence each.

    Args:
        rollout_ids: Rollout `0 … N-1` of every token, negative for padding; the tokens of a rollout are in order.
        values: Tensors `(B, T)`; padded with zeros.
    """
    owner, order = rollout_ids.reshape(-1), by_rollout(rollout_ids)
    counts = torch.bincount(owner[order])
    place = torch.arange(len(order), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
    made = []
    for value in values:
        block = value.new_zeros(len(counts), int(counts.max()))
        block[owner[order], place] = value.reshape(-1)[order]
        made.append(block)
    return tuple(made)


def repacked(values: Tensor, batch: Batch, rollout_ids: Tensor) -> Tensor:
    """What is known of the tokens of unpacked rollouts, back at their places in the packed sequences."""
    packed = values.new_zeros(rollout_ids.numel())
    packed[by_rollout(rollout_ids)] = values[batch.attention_mask.bool()]
    return packed.reshape(rollout_ids.shape)


def by_rollout(rollout_ids: Tensor) -> Tensor:
    """Places of all real tokens in the flattened sequences, one rollout after another."""
    owner = rollout_ids.reshape(-1)
    order = (owner >= 0).nonzero().squeeze(1)
    return order[owner[order].argsort(stable=True)]


def refuse_unpredicted(mask: Tensor, attention: Tensor) -> None:
    """Raise if a completion token has no token before it to predict it from, or is padding."""
    first = attention.long().argmax(1)
    at_start = mask.gather(1, first[:, None]).squeeze(1)
    if bool(at_start.any()):
        row = int(at_start.nonzero()[0])
        fail(
            "measure_gram",
            "the first token of a rollout cannot be a completion token, nothing predicts it",
            f"completion_mask[{row}, {int(first[row])}] = True",
            "Start the completion after the prompt, or put a BOS token in front.",
        )
    padded = mask & (attention == 0)
    if bool(padded.any()):
        row, column = (int(i) for i in padded.nonzero()[0])
        fail(
            "measure_gram",
            "completion tokens must be real tokens",
            f"completion_mask[{row}, {column}] = True where attention_mask is 0",
            "Mask out the padding.",
        )


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass: those of ids, mask, positions and cache switch that the model takes."""
    offered = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    accepted = inspect.signature(type(model).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    named = {name: value for name, value in offered.items() if name in accepted}
    if takes_any and "input_ids" not in named:
        named = {name: value for name, value in offered.items() if name != "position_ids"}
    return named  # type: ignore[return-value]


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Logits `(N, T, V)` of a plain forward pass."""
    inputs = model_inputs(model, batch)
    output = model(**inputs) if "input_ids" in inputs else model(batch.input_ids)
    return output if isinstance(output, Tensor) else output.logits


def token_log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """`(N, T)`: log-probability of every completion token given what stands before it, 0 elsewhere."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    predicted = logits[:, :-1].to(wide) / batch.temperature
    chosen = predicted.gather(2, batch.input_ids[:, 1:, None]).squeeze(2) - predicted.logsumexp(2)
    chosen = torch.where(batch.completion_mask[:, 1:], chosen, 0.0)
    return torch.nn.functional.pad(chosen, (1, 0))


def token_entropies(logits: Tensor, batch: Batch) -> Tensor:
    """`(N, T)`: entropy of the distribution that every completion token was drawn from, 0 elsewhere."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    predicted = torch.log_softmax(logits[:, :-1].to(wide) / batch.temperature, 2)
    entropies = torch.where(batch.completion_mask[:, 1:], -(predicted.exp() * predicted).sum(2), 0.0)
    return torch.nn.functional.pad(entropies, (1, 0))
