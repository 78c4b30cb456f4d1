"""Norms while a model trains: warm-up, and a monitor of what goes into them."""

from fusednorm.training.monitor import NormMonitor
from fusednorm.training.report import NormReport, Outlier
from fusednorm.training.warmup import NormWarmup

__all__ = ["NormMonitor", "NormReport", "NormWarmup", "Outlier"]
