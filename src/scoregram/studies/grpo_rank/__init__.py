"""Study of arXiv:2606.29238, which says that the gradients of GRPO have an effective rank of about 2.

`claims/` decides the paper's statements by enumeration. The rest replicates its experiment:

```
presets ──► replication (train, measure) ──► readings ──► exhibits ──► verdicts ──► record, page
```
"""

PAPER_ID = "arXiv:2606.29238"
