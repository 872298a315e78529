"""What a run remembers of a group and of a rollout: tensors of one group or rollout alone, never padded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Bool, Float, Int
from torch import Tensor

from scoregram.types import GramMatrix, GroupAdvantages, GroupRewards


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupRecord:
    """One prompt group at one step: its rewards, its advantages and, where measured, its Gram."""

    step: int
    """Step of the run, counted as the run counts; the same number as in `metrics.jsonl`."""
    prompt_id: str
    """Stable name of the prompt, such as `gsm8k/test/17`."""
    prompt: str | None = None
    """Text of the prompt; None where it may not be stored."""
    kind: str = "train"
    """What the group was sampled for: `train`, or the name of a probe such as `fixed` or `held-out`."""
    rewards: GroupRewards
    """`(R,)`. `nan` for a rollout without a reward."""
    lengths: Int[Tensor, " rollouts"]
    """`(R,)`. Completion tokens of each rollout."""
    advantages: GroupAdvantages
    """`(R,)`. What the trainer used; stored as float64."""
    gram: GramMatrix | None = None
    """`(R, R)`, stored as float64. None for a group that was not measured."""
    by_layer: Mapping[str, GramMatrix] = field(default_factory=dict)
    """Module path → `(R, R)`. Stored symmetrised, in the precision that the writer was asked for (float32 if not)."""
    statistics: Mapping[str, float | int] = field(default_factory=dict)
    """Scalars of this group, such as its effective rank; `nan` where undefined. One column each."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchRecord:
    """All rollouts of one step with the Gram between them, across prompts too: noise and conflict are read from it."""

    step: int
    kind: str = "train"
    """As in `GroupRecord`."""
    prompt_ids: tuple[str, ...]
    """One per group, in the order of the rollouts."""
    sizes: Int[Tensor, " groups"]
    """`(P,)`. Rollouts of each group; they add up to `N`."""
    rewards: Float[Tensor, " rollouts"]
    """`(N,)`. `nan` for a rollout without a reward."""
    lengths: Int[Tensor, " rollouts"]
    """`(N,)`. Completion tokens."""
    weights: Float[Tensor, " rollouts"]
    """`(N,)`. Weight of each score in the update `Σ_i w_i ψ_i`; stored as float64."""
    gram: Float[Tensor, "rollouts rollouts"]
    """`(N, N)`. Stored symmetrised, in float32: half a megabyte for 512 rollouts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutRecord:
    """One rollout at one step: text, tokens, reward and what each token was worth.

    `T` counts the tokens of prompt and completion together, without padding. Everything per token is aligned with
    `token_ids`: entry `t` belongs to token `t`, and is 0 outside the completion.
    """

    step: int
    prompt_id: str
    group: int
    """Position of its group among the groups of this step."""
    index: int
    """Position of the rollout in its group."""
    prompt: str | None = None
    completion: str | None = None
    token_ids: Int[Tensor, " tokens"]
    """`(T,)`. Prompt, then completion."""
    prompt_length: int
    """Tokens of the prompt: the completion begins here."""
    completion_mask: Bool[Tensor, " tokens"] | None = None
    """`(T,)`. The tokens that the policy chose. None says: all from `prompt_length` on."""
    reward: float | int
    """What the advantage was made from; `nan` without a reward."""
    rewards: Mapping[str, float | int | None] = field(default_factory=dict)
    """Name of a reward function → what it gave this rollout. One column each."""
    log_probs: Float[Tensor, " tokens"]
    """`(T,)`. Log-probability of each token under the policy; stored as float32."""
    behaviour_log_probs: Float[Tensor, " tokens"] | None = None
    """`(T,)`. The same under the distribution that was really sampled. None says: no different."""
    advantage: float | int | None = None
    """The one advantage of all its tokens; None where they differ."""
    advantages: Float[Tensor, " tokens"] | None = None
    """`(T,)`. One advantage per token, stored as float32; None where `advantage` says it all."""
    finished: bool
    """Ended by a stop token, not by the limit on tokens."""
    kind: str = "train"
    """As in `GroupRecord`."""
