"""Sample data sets built on the user's machine from what installed packages carry. They are composites: objects pasted
on photographs, not photographs of scenes. What is written is ordinary COCO JSON and image files."""

from detr_bf.data.samples.digits import build_digits
from detr_bf.data.samples.scenes import build_scenes
from detr_bf.data.samples.stamps import build_stamps

__all__ = ["build_digits", "build_scenes", "build_stamps"]
