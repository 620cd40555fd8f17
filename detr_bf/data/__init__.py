"""Detection data: COCO files and images, transforms, batches, loader, checks and sample data sets."""
