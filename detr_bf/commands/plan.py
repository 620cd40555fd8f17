"""Estimate what a training run needs: GPU memory, time and disk; report its batch attention and learning rates."""

from __future__ import annotations

import argparse
from dataclasses import replace

from detr_bf.assembly.data import data_source
from detr_bf.assembly.training import resolved
from detr_bf.commands.arguments import split_settings
from detr_bf.common.errors import prefix_errors
from detr_bf.common.files import check_output_file, write_json
from detr_bf.common.text import safe_message
from detr_bf.config import load_config
from detr_bf.data.coco import read_annotations
from detr_bf.planning import COCO_IMAGES, Machine, describe_plan, gpu_named, make_plan, read_measured


def main(options: argparse.Namespace) -> int:
    """Make a plan, print it and write its numbers."""
    if options.json is not None:
        check_output_file(options.json, "--json")
    files, overrides = split_settings([*options.config, *options.settings])
    config = load_config(files, overrides, task="detection")
    images, num_classes = options.images, options.classes
    if config.data.root and None in (images, num_classes):
        config.data.skip_unreadable = 0.0  # no image is read
        with prefix_errors("without --images N and --classes N the data are counted"):
            content = read_annotations(data_source(config, "train").annotations)
        images = len(content.images) if images is None else images
        num_classes = content.class_map.num_classes if num_classes is None else num_classes
    machine = Machine(
        gpus=options.gpus,
        gpu=gpu_named(options.gpu),
        memory=options.gpu_memory,
        images=COCO_IMAGES if images is None else images,
        num_classes=num_classes,
        published_batch=options.published_batch,
        seconds_per_step=options.seconds_per_step,
        tflops=options.tflops,
    )
    if config.train.precision == "auto":
        config.train.precision = "bf16" if machine.gpu.bf16 else "fp16"
    if options.measured is not None:
        seconds, source = read_measured(options.measured, config)
        machine = replace(machine, seconds_per_step=seconds, seconds_source=source)
    plan = make_plan(config, machine, load_config(files, task="detection") if files else None)
    print(safe_message(describe_plan(plan, resolved(config, plan.schedule.steps), machine)))
    if options.json is not None:
        write_json(options.json, plan.to_dict())
    return 0
