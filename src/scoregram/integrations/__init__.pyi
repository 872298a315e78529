from .dumps.config import MeasureConfig as MeasureConfig
from .dumps.measure import measure as measure
from .trl import attach as attach
