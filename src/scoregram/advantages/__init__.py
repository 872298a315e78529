"""Every advantage estimator as a pure function, and the table of what each one claims.

`group` one number per rollout · `batch` whitening and selection over prompts · `token`, `turn` credit inside a
rollout · `geometry` reweighting by gradients · `table` the claims, and `estimate` by name.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
