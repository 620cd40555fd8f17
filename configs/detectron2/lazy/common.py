"""Settings shared by all COCO configs; see ../yacs/base_coco.yaml."""

from detectron2.config import LazyCall as L
from detectron2.data import build_detection_test_loader, build_detection_train_loader, get_detection_dataset_dicts
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import MultiStepParamScheduler
from omegaconf import OmegaConf

from detr_bf.detectron2 import (
    DetrBfDatasetMapper,
    build_clipped_optimizer,
    build_evaluator,
    detector_parameters,
)
from detr_bf.detectron2.mapper import eval_augmentations, train_augmentations

IMAGES = 118287  # of COCO train2017


def schedule(batch_size, epochs=50, drop_epoch=40):
    """Steps per epoch, total steps and learning rate schedule with one drop to a tenth."""
    steps = -(-IMAGES // batch_size)
    multiplier = L(WarmupParamScheduler)(
        scheduler=L(MultiStepParamScheduler)(
            values=[1.0, 0.1], milestones=[steps * drop_epoch], num_updates=steps * epochs
        ),
        warmup_factor=1.0,
        warmup_length=0.001,
        warmup_method="linear",
    )
    return steps, steps * epochs, multiplier


dataloader = OmegaConf.create()
dataloader.train = L(build_detection_train_loader)(
    dataset=L(get_detection_dataset_dicts)(names="coco_2017_train", filter_empty=False),
    mapper=L(DetrBfDatasetMapper)(
        is_train=True, augmentations=L(train_augmentations)(), image_format="${model.input_format}", masks=False
    ),
    total_batch_size=16,
    num_workers=4,
)
dataloader.test = L(build_detection_test_loader)(
    dataset=L(get_detection_dataset_dicts)(names="coco_2017_val", filter_empty=False),
    mapper=L(DetrBfDatasetMapper)(
        is_train=False, augmentations=L(eval_augmentations)(), image_format="${model.input_format}"
    ),
    num_workers=4,
)
dataloader.evaluator = L(build_evaluator)(
    dataset_name="${..test.dataset.names}",
    output_dir="${train.output_dir}/inference",
    masks="${..train.mapper.masks}",
    panoptic=False,
)

optimizer = L(build_clipped_optimizer)(
    params=L(detector_parameters)(lr="${..lr}", weight_decay=1e-4, backbone_multiplier=0.1),
    name="ADAMW",
    lr=1e-4,
    clip_norm=0.1,
)

epoch, max_iter, lr_multiplier = schedule(16)
train = OmegaConf.create(
    {
        "output_dir": "./output",
        "init_checkpoint": "",
        "max_iter": max_iter,
        "amp": {"enabled": False},
        "ddp": {"broadcast_buffers": False, "find_unused_parameters": False},
        "checkpointer": {"period": epoch, "max_to_keep": 100},
        "eval_period": epoch,
        "log_period": 20,
        "device": "cuda",
        "seed": 42,
    }
)
