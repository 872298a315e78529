"""The exact lab: worlds whose rollouts can all be listed, so that a claim about an estimator is decided, not sampled.

```
worlds ──► listing ──┐
                     ├──► exact (what is true) ──► moments, turns (what an estimator gives) ──► comparison, multiturn
policies ────────────┘
```
"""
