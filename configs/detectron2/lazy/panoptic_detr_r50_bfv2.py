"""Second stage: the mask head over the frozen detector, 25 epochs."""

from detr_bf.detectron2 import recipe

from .common import schedule
from .panoptic_detr_r50_boxes_bfv2 import dataloader, optimizer, train

model = recipe("panoptic_detr_r50_bfv2", num_classes=133)
model.panoptic_dataset = "${dataloader.train.dataset.names}"
dataloader.train.mapper.masks = True
dataloader.evaluator.panoptic = True
_, train.max_iter, lr_multiplier = schedule(16, epochs=25, drop_epoch=15)
train.init_checkpoint = "output/panoptic_detr_r50_boxes_bfv2/model_final.pth"
train.output_dir = "output/panoptic_detr_r50_bfv2"
