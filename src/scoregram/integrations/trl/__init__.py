"""`attach(trainer)`, called before `trainer.train()`, measures the Gram and the metrics of a TRL trainer's steps.

```
attachment         attach(trainer): TRL's methods wrapped, restored at the end ── support: versions, settings, memory
    │
generation         what TRL generated, as Rollouts ── custom_advantages: those of the user, in place of the trainer's
window             the micro-batches of one optimisation step ──► ObservedStep: its rollouts from all processes
separate_pass      Gram from an extra backward pass     ┐
fused_step         Gram and gradient from one pass      ┴──► CheckedGram; step_fusion decides which steps
step               ObservedStep + CheckedGram ──► Step ──► read_step ──► MeasuredStep
    │
recording          MeasuredStep ──► the trainer's metrics, the run folder; its log ──► advice
recommendations    every N steps: the sizes that the noise asks for, and the worst finding; never applied
summary            all measured steps: trust, pooled noise, the table that users print
```

Names are imported lazily, so torch loads at the first use; only the functions that need TRL import it. `docs/trl.md`
says what is measured and how far it can be trusted.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
