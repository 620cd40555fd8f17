"""Pictures, curves and the HTML page of a run."""

from detr_bf.report.curves import Metrics, read_metrics
from detr_bf.report.detection import DETECTION_PAGE
from detr_bf.report.drawing import draw_boxes, save_picture, tolerating
from detr_bf.report.fonts import class_labels
from detr_bf.report.html import write_report, write_side_by_side
from detr_bf.report.machine import machine_info, process_memory
from detr_bf.report.panoptic import PanopticSheetRow, draw_panoptic, panoptic_sheet
from detr_bf.report.sheet import (
    Augmented,
    ProbableClasses,
    SheetRow,
    augmented_sheet,
    comparison_sheet,
    prediction_sheet,
)
from detr_bf.report.task_page import TaskPage

__all__ = [
    "DETECTION_PAGE",
    "Augmented",
    "Metrics",
    "PanopticSheetRow",
    "ProbableClasses",
    "SheetRow",
    "TaskPage",
    "augmented_sheet",
    "class_labels",
    "comparison_sheet",
    "draw_boxes",
    "draw_panoptic",
    "machine_info",
    "panoptic_sheet",
    "prediction_sheet",
    "process_memory",
    "read_metrics",
    "save_picture",
    "tolerating",
    "write_report",
    "write_side_by_side",
]
