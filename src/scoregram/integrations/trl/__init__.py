"""One line before `trainer.train()`: the Gram of every measured step of a TRL trainer, and all that follows from it.

```
attachment      attach(trainer): TRL's methods wrapped, restored at the end ── support: versions, settings, memory
    │
generation      what TRL generated, as Rollouts; advantages of one's own
window          the micro-batches of one optimisation step ──► ObservedStep: its rollouts from all processes
separate_pass   Gram beside the trainer's gradient   ┐
fused_step      Gram and gradient from one pass      ┴──► CheckedGram
step            ObservedStep + CheckedGram ──► Step ──► read_step ──► metrics and run folder
```

Names load their module, and with it torch, when first used; TRL is imported where it is needed. `docs/trl.md` says what
is measured and how far it can be trusted.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
