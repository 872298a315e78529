"""Benchmarks: both sides of every ratio are timed in turns on one machine, and their results are compared.

`commands` the options · `harness` timing, records and tables · `gram`, `sample`, `train` with `trainers`, `trl`,
`preset` one benchmark each.
"""

from scoregram.bench.commands import Bench as Bench
from scoregram.bench.commands import BenchPreset as BenchPreset
