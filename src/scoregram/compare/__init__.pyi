from .cells import compare_methods as compare_methods
from .cells import require_compared_effects as require_compared_effects
from .config import CompareConfig as CompareConfig
from .table import is_comparison as is_comparison
from .table import write_comparison_report as write_comparison_report
