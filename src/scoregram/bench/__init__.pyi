from .commands import Bench as Bench
