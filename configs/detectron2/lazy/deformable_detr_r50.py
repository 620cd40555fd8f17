from detr_bf.detectron2 import recipe

from .common import dataloader, optimizer, schedule, train

model = recipe("deformable_detr_r50")
dataloader.train.total_batch_size = 32
optimizer.lr = 2e-4
optimizer.params.point_multiplier = 0.1
epoch, train.max_iter, lr_multiplier = schedule(32)
train.eval_period = train.checkpointer.period = epoch
train.output_dir = "output/deformable_detr_r50"
