"""`scoregram compare`: several methods on one task, with the same number of rollouts and the same seeds.

`config` settings of a comparison · `cells` trains one run per method and seed · `intervals` over seeds and problems ·
`results` the numbers of each method · `table` tables, figure and page.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
