"""The trainer: one config, one straight-line loop that measures as it learns.

```
config, methods, effects    settings of a run ── credit: which estimators and losses the trainer can run
preparation                 before the first step: the task, space on the disk, the run folder
    │
loop         draw ──► attempt_step ──► records, metrics ──► checkpoint, until the steps or rollouts are used up
    │
control      prompts, group sizes and weights of the next step, from earlier ones
draw         the groups of a step ── collect: rollouts of given problems, and their rewards
inputs       what an estimator needs besides rewards ── critic: learned values
credit       rewards ──► advantages ──► weights of tokens
update       weights ──► gradient, and the Gram from the same backward pass ──► optimiser
truth        true advantages, and the change that the update made, to compare the credit with
evaluate     accuracy on test problems, probes of the same few problems
    │
checkpoint   what a killed run continues from ── progress, trackers: where its numbers are shown
several      many runs in parallel ── supervised: a warm start before the first run
```
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
