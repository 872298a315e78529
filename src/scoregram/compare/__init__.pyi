from .cells import compare_methods as compare_methods
from .config import CompareConfig as CompareConfig
from .table import is_comparison as is_comparison
from .table import write_comparison_report as write_comparison_report
