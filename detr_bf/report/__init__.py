"""Everything to look at after a run: pictures, curves and one HTML page."""

from detr_bf.report.curves import draw_curves
from detr_bf.report.drawing import draw_boxes, save_picture
from detr_bf.report.html import write_report
from detr_bf.report.machine import machine_info
from detr_bf.report.metrics import Metrics, read_metrics
from detr_bf.report.sheet import SheetRow, comparison_sheet, save_sheet

__all__ = [
    "Metrics",
    "SheetRow",
    "comparison_sheet",
    "draw_boxes",
    "draw_curves",
    "machine_info",
    "read_metrics",
    "save_picture",
    "save_sheet",
    "write_report",
]
