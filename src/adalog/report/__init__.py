"""Reports: one HTML page that shows what a file holds, where its loss lies and what it costs, or compares two files."""

from adalog.report.measured import Losses, read_bench, read_evaluation, read_sensitivity
from adalog.report.page import comparison, report
from adalog.report.sites import Subject, examine

__all__ = [
    "Losses",
    "Subject",
    "comparison",
    "examine",
    "read_bench",
    "read_evaluation",
    "read_sensitivity",
    "report",
]
