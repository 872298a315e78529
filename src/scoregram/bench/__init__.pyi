from .commands import Bench as Bench
from .commands import BenchPreset as BenchPreset
