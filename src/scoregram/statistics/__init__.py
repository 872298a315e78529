"""Statistics of an update from the score Gram and the rewards: pure algebra in float64, no second pass over the model.

`groups` live and dead groups · `moments` a prompt's gradient moments · `baseline` the best baseline · `noise` signal,
noise and group size · `allocation` rollouts per prompt · `drawing` which prompts, and their weights · `update` what one
update is made of · `fidelity` credit against true advantages.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
