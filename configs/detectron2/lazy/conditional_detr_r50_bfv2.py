from detr_bf.detectron2 import recipe

from .common import dataloader, lr_multiplier, optimizer, train

model = recipe("conditional_detr_r50_bfv2")
train.output_dir = "output/conditional_detr_r50_bfv2"
