"""First stage of panoptic DETR with BatchFormerV2: boxes of things and stuff, 300 epochs."""

from detr_bf.detectron2 import recipe

from .common import dataloader, optimizer, schedule, train

model = recipe("panoptic_detr_r50_boxes_bfv2", num_classes=133)
dataloader.train.dataset.names = "coco_2017_train_panoptic"
dataloader.test.dataset.names = "coco_2017_val_panoptic"
_, train.max_iter, lr_multiplier = schedule(16, epochs=300, drop_epoch=200)
train.output_dir = "output/panoptic_detr_r50_boxes_bfv2"
