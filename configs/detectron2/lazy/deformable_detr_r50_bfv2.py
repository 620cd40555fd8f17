from detr_bf.detectron2 import recipe

from .common import schedule
from .deformable_detr_r50 import dataloader, optimizer, train

model = recipe("deformable_detr_r50_bfv2")
dataloader.train.total_batch_size = 24
epoch, train.max_iter, lr_multiplier = schedule(24)
train.eval_period = train.checkpointer.period = epoch
train.output_dir = "output/deformable_detr_r50_bfv2"
