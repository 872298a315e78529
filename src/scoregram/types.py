"""Shapes as types: one alias for every tensor that a public function takes or returns.

Axes, everywhere in this project:

| letter | axis | meaning |
|---|---|---|
| `P` | prompts | groups in a batch |
| `R` | rollouts | rollouts of one prompt (the group size) |
| `N` | rollouts of a batch | `P · R` |
| `T` | tokens | token positions of a rollout, padded |
| `H` | turns | turns of a rollout, padded |
| `D` | parameters | length of a score |

Under pytest, jaxtyping and beartype check the axis names at run time; otherwise they are documentation.
"""

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

# One number per rollout of every group.
Rewards = Float[Tensor, "prompts rollouts"]
Advantages = Float[Tensor, "prompts rollouts"]
Observed = Bool[Tensor, "prompts rollouts"]
PerRollout = Shaped[Tensor, "prompts rollouts"]

# One number per prompt.
PerPrompt = Float[Tensor, " prompts"]

# One group alone.
GroupRewards = Float[Tensor, " rollouts"]
GroupAdvantages = Float[Tensor, " rollouts"]
GramMatrix = Float[Tensor, "rollouts rollouts"]
Spectrum = Float[Tensor, " values"]

# Any number of spectra at once, and one number for each of them.
Spectra = Float[Tensor, "*batch values"]
PerSpectrum = Float[Tensor, "*batch"]

# One number per token or turn of every rollout.
TokenMask = Bool[Tensor, "prompts rollouts tokens"]
TokenValues = Float[Tensor, "prompts rollouts tokens"]
TokenAdvantages = Float[Tensor, "prompts rollouts tokens"]
TurnMask = Bool[Tensor, "prompts rollouts turns"]
TurnRewards = Float[Tensor, "prompts rollouts turns"]
TurnAdvantages = Float[Tensor, "prompts rollouts turns"]

# Flat batches, as a loss takes them: `N` rollouts, right-padded to `T` tokens.
LogProbs = Float[Tensor, "batch tokens"]
Mask = Bool[Tensor, "batch tokens"]
TokenIds = Int[Tensor, "batch tokens"]
BatchRewards = Float[Tensor, " batch"]
BatchAdvantages = Float[Tensor, " batch"] | Float[Tensor, "batch tokens"]
TokenWeights = Float[Tensor, "batch tokens"]
Pairs = Int[Tensor, "pairs 2"]
Loss = Float[Tensor, ""]

# Scores themselves appear only in the exact lab, where they are small.
Scores = Float[Tensor, "rollouts parameters"]

# Grams beyond one group: a whole batch, its diagonal blocks, its prompts, held-out × trained rollouts.
BatchGram = Float[Tensor, "batch batch"]
BatchWeights = Float[Tensor, " batch"]
PromptOf = Int[Tensor, " batch"]
GroupGrams = Float[Tensor, "prompts rollouts rollouts"]
PromptGram = Float[Tensor, "prompts prompts"]
CrossGram = Float[Tensor, "held batch"]
HeldWeights = Float[Tensor, " held"]
HeldPromptOf = Int[Tensor, " held"]
PromptMask = Bool[Tensor, " prompts"]
