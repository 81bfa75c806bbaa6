"""The report and its renderers. Nothing here measures, and nothing here needs torch."""

from normprobe.report.render import Format, document, render
from normprobe.report.report import FailOn, Report

__all__ = ["FailOn", "Format", "Report", "document", "render"]
