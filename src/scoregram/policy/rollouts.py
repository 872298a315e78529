"""What sampling gives: a batch of rollouts with the probabilities under which they were drawn."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rollouts:
    """`N = P·R` rollouts, those of one prompt next to each other; every row is prompt, completion, then padding."""

    input_ids: Int[Tensor, "batch tokens"]
    """Prompt and completion without a gap."""
    attention_mask: Bool[Tensor, "batch tokens"]
    """False for padding, which is on the right."""
    completion_mask: Bool[Tensor, "batch tokens"]
    """True for the sampled tokens; a stop token that was sampled is one of them."""
    log_probs: Float[Tensor, "batch tokens"]
    """Log-probability of every sampled token under the policy at the sampling temperature, before top-k and top-p; 0
    outside the completion. Greedy rollouts are scored at temperature 1."""
    behaviour_log_probs: Float[Tensor, "batch tokens"]
    """The same under the distribution that the token was really drawn from; the same tensor where nothing is truncated,
    and 0 for greedy rollouts, which have no other choice."""
    prompt_lengths: Int[Tensor, " batch"]
    finished: Bool[Tensor, " batch"]
    """True for a rollout that ended with a stop token, false for one that reached the limit."""

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Sampled tokens of every rollout."""
        return self.completion_mask.sum(1)

    def completion_ids(self) -> list[list[int]]:
        """The sampled tokens of every rollout, without padding."""
        starts, lengths = self.prompt_lengths.tolist(), self.lengths.tolist()
        rows = zip(self.input_ids.tolist(), starts, lengths, strict=True)
        return [row[start : start + length] for row, start, length in rows]
