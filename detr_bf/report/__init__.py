"""Everything to look at after a run: pictures, curves and one HTML page."""

from detr_bf.report.curves import draw_curves
from detr_bf.report.drawing import draw_boxes, save_picture
from detr_bf.report.html import write_report
from detr_bf.report.machine import machine_info
from detr_bf.report.metrics import Metrics, read_metrics
from detr_bf.report.panoptic import PanopticSheetRow, draw_panoptic, panoptic_sheet, save_panoptic_sheet
from detr_bf.report.sheet import SheetRow, comparison_sheet, save_sheet

__all__ = [
    "Metrics",
    "PanopticSheetRow",
    "SheetRow",
    "comparison_sheet",
    "draw_boxes",
    "draw_curves",
    "draw_panoptic",
    "machine_info",
    "panoptic_sheet",
    "read_metrics",
    "save_panoptic_sheet",
    "save_picture",
    "save_sheet",
    "write_report",
]
