"""Methods side by side: the same task, the same rollouts, several seeds, one table.

`config` what is compared · `cells` trains one run per method and seed · `intervals` over seeds and problems · `results`
what each run says · `table` tables, figure and page.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
