"""Study of arXiv:2606.29238, which says that the gradients of GRPO have an effective rank of about 2.

`claims/` decides the paper's statements by enumeration. The rest replicates its experiment:

```
presets ──► replication (train, measure) ──► readings ──► exhibits ──► verdicts ──► record, page
```
"""

from types import MappingProxyType

PAPER_ID = "arXiv:2606.29238"
PAPER_VERSION = 1
PRINTED_TOP1 = MappingProxyType({2: (0.6, 0.7), 4: (0.7, 0.8), 8: (0.5, 0.6)})
"""Group size → range of top-1 fractions that Table 1 of the paper prints."""
PAPER_SIZES = tuple(PRINTED_TOP1)
"""Group sizes of the paper."""
PAPER_SCALE = "4 B"
"""Parameters of the model of the paper, Nemotron-4B."""
ABOUT_TWO = 0.25
"""An effective rank is about 2 within this distance of 2."""
