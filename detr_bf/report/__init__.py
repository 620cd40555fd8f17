"""Everything to look at after a run: pictures, curves and one HTML page."""

from detr_bf.report.comparison import Comparison, Interval, compare, comparison_table, save_comparison
from detr_bf.report.curves import draw_curves
from detr_bf.report.drawing import draw_boxes, save_picture, tolerating
from detr_bf.report.fonts import class_labels
from detr_bf.report.html import write_report
from detr_bf.report.machine import machine_info
from detr_bf.report.metrics import Metrics, read_metrics
from detr_bf.report.panoptic import PanopticSheetRow, draw_panoptic, panoptic_sheet, save_panoptic_sheet
from detr_bf.report.sheet import SheetRow, comparison_sheet, save_sheet

__all__ = [
    "Comparison",
    "Interval",
    "Metrics",
    "PanopticSheetRow",
    "SheetRow",
    "class_labels",
    "compare",
    "comparison_sheet",
    "comparison_table",
    "draw_boxes",
    "draw_curves",
    "draw_panoptic",
    "machine_info",
    "panoptic_sheet",
    "read_metrics",
    "save_comparison",
    "save_panoptic_sheet",
    "save_picture",
    "save_sheet",
    "tolerating",
    "write_report",
]
