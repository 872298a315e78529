"""The exact lab: worlds whose rollouts can all be enumerated, so that a claim about an estimator is decided exactly.

```
worlds (worlds, listings, policies) ──► exact (ground truth) ──► moments, turns (expected update and error of an
estimator) ──► comparison, multiturn
companions (five systems named beside GRPO, in discounted worlds that need not end)
```
"""
