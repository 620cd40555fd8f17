"""The digits of `make demo` with the settings of ../../demo_deformable.yaml; see ../yacs/digits.yaml."""

from pathlib import Path

from detectron2.config import LazyCall as L
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import CosineParamScheduler

from detr_bf.detectron2 import recipe, register_coco

from .common import dataloader, optimizer, train

root = Path(__file__).resolve().parents[3]
for part in ("train", "val"):
    register_coco(f"digits_{part}", root / ".cache/digits" / part, root / ".cache/digits" / f"{part}.json")

model = recipe(str(root / "configs/demo_deformable.yaml"), num_classes=10)
dataloader.train.dataset.names = "digits_train"
dataloader.train.total_batch_size = 8
dataloader.train.mapper.augmentations.update(short_sides=[128], max_size=128, flip="none", crop_probability=0.0)
dataloader.test.dataset.names = "digits_val"
dataloader.test.mapper.augmentations.update(short_side=128, max_size=128)
dataloader.train.num_workers = dataloader.test.num_workers = 0
optimizer.lr = 1e-3
optimizer.params.backbone_multiplier = 0.2
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(CosineParamScheduler)(start_value=1.0, end_value=0.0),
    warmup_factor=0.01,
    warmup_length=100 / 3000,
    warmup_method="linear",
)
train.device = "cpu"
train.max_iter = train.eval_period = 3000
train.checkpointer.period = 375
train.output_dir = "output/digits"
