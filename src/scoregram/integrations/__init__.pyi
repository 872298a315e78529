from .dumps.config import MeasureConfig as MeasureConfig
from .dumps.loop import measure as measure
from .trl import attach as attach
