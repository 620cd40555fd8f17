"""Sample data sets built from images in installed packages, written as COCO JSON and image files.

The images are composites: objects pasted on photographs or textures.
"""

from detr_bf.data.samples.digits import build_digits
from detr_bf.data.samples.pairs import build_pairs
from detr_bf.data.samples.scenes import build_scenes

__all__ = ["build_digits", "build_pairs", "build_scenes"]
