"""What can be trained: each task says how its data are checked, how its runs are built, and what they leave."""

from detr_bf.tasks.choice import task_of
from detr_bf.tasks.classification import ClassificationTask
from detr_bf.tasks.detection import DetectionTask
from detr_bf.tasks.masked import MaskedTask
from detr_bf.tasks.task import Task

__all__ = ["ClassificationTask", "DetectionTask", "MaskedTask", "Task", "task_of"]
