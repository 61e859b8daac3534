"""Write an HTML page about one artifact, with its sites, losses and cost, or a page that compares two artifacts."""

from adalog.report.measured import Losses, read_bench, read_evaluation, read_sensitivity
from adalog.report.page import comparison, report
from adalog.report.sites import ReportData, examine

__all__ = [
    "Losses",
    "ReportData",
    "comparison",
    "examine",
    "read_bench",
    "read_evaluation",
    "read_sensitivity",
    "report",
]
