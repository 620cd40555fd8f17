"""Image files and COCO annotations to batches, and the checks before the first step."""
