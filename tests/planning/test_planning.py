"""Planner: counts compared with real runs, arithmetic compared with sums by hand, and advice."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from detr_bf.assembly import build_classification, build_model
from detr_bf.assembly.model import train_low_rank
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Target
from detr_bf.config import DetectionConfig, load_config
from detr_bf.engine import build_optimizer
from detr_bf.planning import GPUS, Gpu, Machine, Plan, describe_plan, gpu_named, make_plan, read_measured, trace
from detr_bf.planning.machine import largest_size, published_seconds_per_step, published_share, usual_size
from detr_bf.planning.plan import disk_of, memory_of, schedule_of, trace_of
from detr_bf.planning.trace import OBJECTS, Recorder, Work, fake_tensors
from tests.detectors import tiny as tiny_detectors
from tests.detectors.tiny import settings_of

CONFIGS = Path(__file__).parents[2] / "configs"
SIZE = (96, 128)
CLASSES = 5
TINY = (
    "batch_former.enabled=true",
    "model.hidden_dim=32",
    "model.heads=2",
    "model.encoder_layers=3",
    "model.decoder_layers=2",
    "model.feedforward_dim=64",
    "model.num_queries=6",
    "model.backbone.name=resnet18",
    "model.backbone.weights=none",
    "model.backbone.strides=[16]",
    "data.transforms.short_sides=[96]",
    "data.transforms.max_size=128",
    "train.batch_size=3",
)
MORE = {
    "conditional_detr": ("loss.classification=focal",),
    "deformable_detr": ("loss.classification=focal",),
    "deformable_detr_two_stage": ("loss.classification=focal", "model.extra_levels=1"),
}
DETECTORS = {name: (*settings_of(name, stride=16), *MORE.get(name, ())) for name in tiny_detectors.DETECTORS}
DETECTORS["without_batch_attention"] = ("batch_former.enabled=false",)
DETECTORS["queries"] = (*DETECTORS["detr"], "batch_former.at=queries", "batch_former.layers=[1]")
DETECTORS["backbone"] = (
    *DETECTORS["deformable_detr_two_stage"],
    "model.backbone.name=timm:vit_tiny_patch16_224",
    "model.backbone.vit.options={patch_size: 16, embed_dim: 16, depth: 3, num_heads: 2, img_size: 32}",
    "model.backbone.frozen_stages=4",
    "batch_former.at=backbone",
    "batch_former.layers=[1]",
)
FAST = ("detr", "queries", "smca_multi_scale", "deformable_detr_two_stage", "rtdetr", "without_batch_attention")
KINDS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in DETECTORS]
MASKS = ("model.backbone.strides=[32]", "model.masks=true", "freeze.detector=true")
TRAINS_ALL = "model.backbone.frozen_stages=0"
NO_GATHER, GATHER = "batch_former.gather=false", "batch_former.gather=true"


def tiny(*settings: str) -> DetectionConfig:
    return load_config(None, [*TINY, *settings])


def plan_of(config: DetectionConfig, *, recipe: DetectionConfig | None = None, **known: object) -> Plan:
    return make_plan(config, Machine(**{"gpus": 1, "num_classes": CLASSES, **known}), recipe)


def blank(count: int, references: bool = False) -> Batch:
    objects = Target(0, torch.zeros(OBJECTS, 4), torch.zeros(OBJECTS, dtype=torch.int64), SIZE, SIZE)
    images, mask = torch.zeros(count, 3, *SIZE, dtype=torch.uint8), torch.zeros(count, *SIZE, dtype=torch.bool)
    return Batch(images, mask, (objects,) * count, images.clone() if references else None)


def kept_by_a_real_run(config: DetectionConfig) -> int:
    """Return the bytes alive after a real forward pass: saved by autograd, and inputs and results of the criterion."""
    torch.manual_seed(0)
    model = build_model(config, CLASSES, pretrained=False).train()
    if config.freeze.lora:
        train_low_rank(model, config.freeze.lora)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    batch = blank(config.train.batch_size, config.data.reference != "none")
    half = config.train.precision == "bf16"
    classification = build_classification(config)
    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            outputs = model(batch)
        predicted = [outputs, *(part for _, part in outputs.groups)]
        if outputs.proposals:
            predicted += [outputs.proposals, *(part for _, part in outputs.proposals.groups)]
        groups = [group.assigned for group, _ in outputs.groups if group.assigned is not None]
        losses = [
            classification.loss(logits.float(), torch.zeros(logits.shape[:3], dtype=torch.int64), torch.ones(()))
            for part in predicted
            for logits in part.logits.chunk(part.num_streams, 1)
        ]
    for tensor in (batch.images, batch.padding_mask, *outputs.states, *groups, *losses):
        see(tensor)
    if batch.references is not None:
        see(batch.references)
    for part in predicted:
        for tensor in (part.logits, part.boxes, *(vars(part.distributions).values() if part.distributions else ())):
            see(tensor)
    return sum(size for storage, size in seen.values() if not storage.expired())


@pytest.mark.default_tier(
    "detr", "rtdetr", "deformable_detr_two_stage", "without_batch_attention", "queries", "backbone"
)
@pytest.mark.parametrize("name", DETECTORS)
def test_what_is_kept_is_what_a_real_run_keeps(name: str) -> None:
    config = tiny(*DETECTORS[name])
    assert trace(config, CLASSES, SIZE, device="cpu").kept == kept_by_a_real_run(config)


@pytest.mark.default_tier("detr", "rtdetr")
@pytest.mark.parametrize("name", KINDS)
def test_in_half_precision_it_is_nearly_so(name: str) -> None:
    """The CPU's attention in bf16 computes in float32 internally."""
    config = tiny(*DETECTORS[name], "train.precision=bf16")
    assert trace(config, CLASSES, SIZE, device="cpu").kept == pytest.approx(kept_by_a_real_run(config), rel=0.01)


OWN = ("data.reference=own", "batch_former.enabled=true", "batch_former.references=true")
STACK = ("data.reference=own", "batch_former.enabled=false", "model.backbone.reference=stack", TRAINS_ALL)


@pytest.mark.parametrize("settings", [(*OWN, "batch_former.mode=single_stream_inference"), OWN, STACK])
@pytest.mark.parametrize("name", ["detr", "deformable_detr_two_stage", "rtdetr"])
def test_references_are_held_as_a_real_run_holds_them(name: str, settings: tuple[str, ...]) -> None:
    config = tiny(*DETECTORS[name], *settings)
    assert trace(config, CLASSES, SIZE, device="cpu").kept == kept_by_a_real_run(config)


def test_references_cost_rows_of_the_backbone_and_of_batch_attention_alone() -> None:
    alone, beside = (
        trace(tiny(*DETECTORS["detr"], *settings), CLASSES, SIZE)
        for settings in (
            ("batch_former.enabled=true", "batch_former.mode=single_stream"),
            (*OWN, "batch_former.mode=single_stream_inference"),
        )
    )
    images, both = (sum(item.flops for item in found.work if item.name == "convolution") for found in (alone, beside))
    assert both == 2 * images
    three, pairs = (sum(found.batch_attention) for found in (alone, beside))
    assert pairs == 2 * three, "query, key and value of six images"
    assert alone.kept < beside.kept


def test_the_plan_says_that_images_attend_to_their_references() -> None:
    config, machine = tiny(*OWN), Machine(gpus=1, num_classes=CLASSES)
    plan = make_plan(config, machine, None)
    assert plan.sequence is None
    assert "Batch attention is between each image and its reference" in describe_plan(plan, config, machine)


@pytest.mark.default_tier("detr", "without_batch_attention")
@pytest.mark.parametrize("name", KINDS)
def test_recomputation_keeps_what_checkpointed_layers_keep(name: str) -> None:
    """Compare with torch.utils.checkpoint, which the model uses; losses are the same either way."""
    plain, again = (tiny(*DETECTORS[name], f"train.recompute_encoder={value}") for value in ("false", "true"))
    found, whole = (trace(config, CLASSES, SIZE, device="cpu") for config in (again, plain))
    assert whole.kept - found.kept == kept_without_losses(plain) - kept_without_losses(again)
    if name == "rfdetr":  # it has no encoder layers
        assert (found.recomputed, found.kept, whole.layers) == (0, whole.kept, ())
        return
    assert found.recomputed == max(whole.layers) > 0
    assert found.kept + found.recomputed < whole.kept


def kept_without_losses(config: DetectionConfig) -> int:
    """Run the model's own forward pass on fake tensors."""
    with fake_tensors("cpu"):
        with unset_fake_temporarily(), torch.device("meta"):  # copy.deepcopy of a fake tensor copies its mode
            model = build_model(config, CLASSES, pretrained=False).train()
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        with Recorder(model) as recorder:
            outputs = model(blank(config.train.batch_size))
            kept = recorder.live
            del outputs
    return kept


def test_flops_of_matrices_and_convolutions_are_torchs() -> None:
    config = tiny("batch_former.enabled=false", TRAINS_ALL)
    model = build_model(config, CLASSES, pretrained=False).train()
    with FlopCounterMode(display=False) as counter:
        model(blank(3))
    found = trace(config, CLASSES, SIZE, device="cpu")
    assert sum(item.flops for item in found.work) == counter.get_total_flops()
    assert found.flops == 3 * counter.get_total_flops()


def test_flops_of_our_operators_by_hand() -> None:
    """Three images at 6 x 8 positions, 2 heads of 16 channels; over 4 processes each image attends to twelve."""
    (attention,) = works("detr", "batch_attention_packed")
    assert attention.flops == 2 * (3 * 3) * 48 * 2 * 16 * 2
    (gathered,) = works("detr", "batch_attention_packed", GATHER, processes=4)
    assert gathered.flops == 4 * attention.flops
    encoder, *_ = works("deformable_detr", "ms_deform_attn")
    tokens = 12 * 16 + 6 * 8 + 3 * 4
    assert encoder.flops == 10 * (2 * 3) * tokens * 2 * 3 * 4 * 16  # 2 streams of 3 images, 2 heads, 3 levels, 4 points


def works(name: str, operator: str, *settings: str, processes: int = 1) -> list[Work]:
    found = trace(tiny(*DETECTORS[name], *settings), CLASSES, SIZE, processes=processes)
    return [item for item in found.work if item.name == operator]


def test_on_a_gpu_attention_weights_are_never_held() -> None:
    """48 tokens: at least 2 heads x 48 x 48 numbers and their dropout in each of 3 layers of 3 images."""
    config = tiny("batch_former.enabled=false")
    held = trace(config, CLASSES, SIZE, device="cpu").kept - trace(config, CLASSES, SIZE).kept
    assert held > 3 * 3 * 2 * 48 * 48 * 4 * 2


def test_recomputed_layers_run_once_more() -> None:
    settings = (f"train.recompute_encoder={value}" for value in ("false", "true"))
    plain, again = (trace(tiny(setting, TRAINS_ALL), CLASSES, SIZE) for setting in settings)
    assert {item.times for item in plain.work} == {3}
    assert {item.times for item in again.work} == {3, 4}
    assert [item.flops for item in again.work] == [item.flops for item in plain.work]
    repeated = sum(item.flops for item in again.work if item.times == 4)
    rows, tokens = 6, 48  # two streams of three images
    linear = 4 * 32 * 32 + 2 * 32 * 64
    attention = 2 * tokens * 32
    assert repeated == 3 * rows * tokens * 2 * (linear + attention)


def test_frozen_first_stages_have_no_backward_pass() -> None:
    """Stem and first stage of a ResNet-18 have five convolutions, those of all four stages twenty."""
    plain, frozen = (
        [item for item in trace(tiny(*settings), CLASSES, SIZE).work if item.name == "convolution"]
        for settings in ((TRAINS_ALL,), ())
    )
    assert {item.times for item in plain} == {3}
    assert [item.times for item in frozen] == [1] * 5 + [3] * (len(plain) - 5)
    assert [item.flops for item in frozen] == [item.flops for item in plain]


def test_rfdetr_holds_the_masks_of_all_layers_groups_and_proposals() -> None:
    """Two layers and the proposals, of the main queries and one more group, for the six rows of two streams."""
    settings = (*DETECTORS["rfdetr"], "model.masks=true")
    without, found, coarse = (
        trace(tiny(*each), CLASSES, SIZE, device="cpu").kept
        for each in (DETECTORS["rfdetr"], settings, (*settings, "model.rfdetr.mask_stride=8"))
    )
    queries = 6  # fewer than the objects that are assumed
    masks = 3 * 2 * 6 * queries * 4 * SIZE[0] // 4 * SIZE[1] // 4
    assert found - without > masks
    assert found - coarse > masks * 3 // 4


def test_a_frozen_detector_has_no_backward_pass() -> None:
    found = trace(tiny(*MASKS, "batch_former.enabled=false"), CLASSES, SIZE)
    assert {item.times for item in found.work} == {1, 3}
    assert all(item.times == 1 for item in found.work if item.name == "max_pool2d_with_indices")


def test_low_rank_changes_need_less_of_everything() -> None:
    settings = (*DETECTORS["rtdetr"], TRAINS_ALL, "batch_former.enabled=false")
    config = tiny(*settings, "freeze.lora=2")
    model = build_model(config, CLASSES, pretrained=False)
    train_low_rank(model, 2)
    found, whole = trace(config, CLASSES, SIZE, device="cpu"), trace(tiny(*settings), CLASSES, SIZE, device="cpu")
    assert found.sizes.trainable == sum(each.nbytes for each in model.parameters() if each.requires_grad)
    assert found.sizes.trainable < whole.sizes.trainable / 2
    assert found.kept == kept_by_a_real_run(config)
    assert found.kept < whole.kept


def test_memory_by_hand() -> None:
    config = tiny("train.ema.enabled=true", GATHER)
    found = trace_of(config, Machine(gpus=4, num_classes=CLASSES))
    model = build_model(config, CLASSES, pretrained=False)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    memory = memory_of(config, Machine(gpus=4), found)
    assert trained < numbers
    assert memory.weights == memory.averaged == 4 * numbers + buffers
    assert memory.gradients == 4 * trained
    assert memory.moments == 8 * trained
    assert memory.activations == found.peak >= found.kept
    assert memory.exchange == 2 * (3 * 48 * 3 * 32 * 4)  # query, key and value of three images, twice
    rest = memory.total - memory.allowance
    assert memory.allowance == pytest.approx(0.6 * 2**30 + 0.1 * rest)
    assert memory_of(config, Machine(gpus=1), found).exchange == 0


def test_moments_and_checkpoint_are_as_large_as_the_real_ones(tmp_path: Path) -> None:
    config = tiny()
    model = build_model(config, CLASSES, pretrained=False)
    optimizer = build_optimizer(
        [{"name": "all", "params": [p for p in model.parameters() if p.requires_grad], "lr": 1}]
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    plan = disk_of(config, trace(config, CLASSES, SIZE))
    assert plan.file == pytest.approx((tmp_path / "file.pt").stat().st_size, rel=0.01)
    assert plan.total == 3 * plan.file
    config.train.epochs, config.checkpoint.keep_every, config.train.ema.enabled = 50, 20, True
    more = disk_of(config, trace(config, CLASSES, SIZE))
    assert more.files == 5
    stored = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    assert more.file == plan.file + stored


@pytest.mark.default_tier("detr")
@pytest.mark.parametrize("name", ["detr", "deformable_detr"])
def test_a_larger_batch_needs_more_of_everything_but_the_model(name: str) -> None:
    plans = [plan_of(tiny(*DETECTORS[name], f"train.batch_size={size}")) for size in (1, 2, 4)]
    memory = [plan.memory for plan in plans]
    assert memory[0].activations < memory[1].activations < memory[2].activations
    # an affine function of the batch
    first, second = (memory[i + 1].activations - memory[i].activations for i in range(2))
    assert second == pytest.approx(2 * first, rel=0.02)
    assert len({(part.weights, part.gradients, part.moments) for part in memory}) == 1
    assert plans[0].time.flops_per_step < plans[1].time.flops_per_step < plans[2].time.flops_per_step


@pytest.mark.full
def test_gradients_replace_activations_unless_they_remain_from_batch_to_batch() -> None:
    one, more, ranks = (
        plan_of(tiny(f"train.accumulate={count}"), gpus=gpus) for count, gpus in ((1, 1), (2, 1), (1, 2))
    )
    trained = one.memory.moments / 2
    assert one.memory.activations > trained
    assert one.memory.gradients == 0
    assert more.memory.gradients == ranks.memory.gradients == trained
    frozen = trace(tiny(), CLASSES, SIZE)
    few = memory_of(tiny(), Machine(gpus=1), replace(frozen, peak=0, kept=100))
    assert few.gradients + few.activations == trained  # at the optimizer's step


@pytest.mark.full
def test_accumulation_costs_time_and_no_memory() -> None:
    one, four = (plan_of(tiny(f"train.accumulate={count}"), gpus=2) for count in (1, 4))
    assert four.memory == one.memory
    assert four.sequence == one.sequence
    assert four.time.flops_per_step == 4 * one.time.flops_per_step
    assert four.time.seconds_per_step == pytest.approx(4 * one.time.seconds_per_step)
    assert four.traffic.gradients == one.traffic.gradients


def test_batch_attention_spans_a_process_or_all_of_them() -> None:
    machine = {"gpus": 8}
    alone = plan_of(tiny(NO_GATHER), **machine).sequence
    gathered = plan_of(tiny(GATHER, "train.accumulate=2"), **machine).sequence
    assert alone is not None
    assert gathered is not None
    assert (alone.used, alone.alone, alone.gathered) == (3, 3, 24)
    assert (gathered.used, gathered.alone, gathered.gathered) == (24, 3, 24)
    for nothing in ("batch_former.enabled=false", "batch_former.mode=duplicate"):
        assert plan_of(tiny(nothing), **machine).sequence is None


def test_traffic_by_hand() -> None:
    """Three quarters of query, key and value are sent, and of the result received; gradients take the reverse way."""
    config = tiny(GATHER, "train.accumulate=2")
    plan = plan_of(config, gpus=4)
    assert plan.traffic.gradients == 2 * 3 / 4 * plan.memory.gradients
    numbers = 3 * 48 * 32
    assert plan.traffic.exchange == pytest.approx(2 * 2 * (3 / 4) * 4 * numbers * 4)
    alone = plan_of(config, gpus=1)
    assert (alone.traffic.gradients, alone.traffic.exchange) == (0, 0)


def test_two_insertions_exchange_twice_and_hold_one_at_a_time() -> None:
    once, twice = (plan_of(tiny(GATHER, f"batch_former.layers={layers}"), gpus=4) for layers in ("[0]", "[0,2]"))
    assert twice.traffic.exchange == 2 * once.traffic.exchange
    assert twice.memory.exchange == once.memory.exchange


def test_learning_rate_follows_the_total_batch_and_changes_nothing() -> None:
    config = tiny("train.batch_size=4", "optimizer.lr=0.0001", "optimizer.backbone_lr=0.00001")
    before = copy.deepcopy(config)
    machine = Machine(gpus=8, num_classes=CLASSES, published_batch=16)
    plan = make_plan(config, machine)
    rates = plan.rates
    assert rates is not None
    assert rates.factor == 2
    assert (rates.lr, rates.backbone_lr) == pytest.approx((0.0002, 0.00002))
    assert config == before
    text = describe_plan(plan, config, machine)
    assert "published for 16 images a step (--published-batch), here 32, x 2" in text
    assert "optimizer.lr=0.0002 optimizer.backbone_lr=2e-05 instead of 0.0001 and 1e-05" in text
    assert "optimizer.warmup_steps" in text


def test_the_published_batch_is_the_recipes_own() -> None:
    recipe = tiny("train.batch_size=4", "train.accumulate=6")
    kept = plan_of(tiny("train.batch_size=3"), gpus=8, recipe=recipe).rates
    less = plan_of(tiny("train.batch_size=3"), gpus=2, recipe=recipe).rates
    assert kept is not None
    assert less is not None
    assert (kept.published_batch, kept.factor) == (24, 1)
    assert less.factor == 0.25
    assert plan_of(tiny()).rates is None
    given = plan_of(tiny("train.batch_size=3"), gpus=8, recipe=recipe, published_batch=12).rates
    assert given is not None
    assert given.factor == 2


def test_steps_by_hand() -> None:
    """50 images on 2 GPUs with 3 each: 8 batches, 3 steps of 3 batches, the last of 2."""
    config = tiny("train.accumulate=3", "train.epochs=10")
    schedule = schedule_of(config, Machine(gpus=2, images=50), 2.0)
    assert (schedule.images_per_step, schedule.steps_per_epoch, schedule.steps, schedule.epochs) == (18, 3, 30, 10)
    config.train.max_steps = 15
    assert (schedule_of(config, Machine(gpus=2, images=50), 2.0).steps, schedule.epochs) == (15, 10)
    assert schedule_of(config, Machine(gpus=2, images=1), 2.0).steps_per_epoch == 1
    config.train.max_steps, config.train.minutes = None, 0.5
    by_time = schedule_of(config, Machine(gpus=2, images=50), 2.0)
    assert (by_time.steps, by_time.epochs) == (15, 5)


def test_sizes_of_the_published_recipe() -> None:
    data = DetectionConfig().data
    assert largest_size(data) == (800, 1333)
    assert usual_size(data) == (640, 853)
    data.transforms.short_sides, data.transforms.max_size = [128], 128
    assert largest_size(data) == (128, 128)
    assert usual_size(data) == (96, 128)


def test_sizes_of_squares_and_of_one_side_for_each_batch() -> None:
    data = DetectionConfig().data
    data.batch_sides = [480, 832]
    assert largest_size(data) == (832, 1333)
    assert usual_size(data) == (656, 875)
    data.transforms.square = 640
    assert largest_size(data) == (832, 832)
    assert usual_size(data) == (656, 656)
    data.batch_sides = []
    assert largest_size(data) == usual_size(data) == (640, 640)


def test_an_operator_takes_the_longer_of_arithmetic_and_memory() -> None:
    gpu = Gpu("", float32=2, tf32=4, half=8, memory=1, bandwidth=1)
    kinds = {"float32": 2, "convolution": 4, "half": 8}
    for kind, rate in kinds.items():
        assert gpu.least_seconds([Work("", 10**12, 1, kind, 3)]) == pytest.approx(3 / rate)
    assert gpu.least_seconds([Work("", 1, 10**9, "half", 1)]) == pytest.approx(1)


def test_the_estimate_gives_back_the_published_training() -> None:
    """300 epochs in 3 days on 16 V100 with 4 images each; the share is derived from that and lies between 0 and 1."""
    assert 0.1 < published_share() < 0.6
    assert published_seconds_per_step() == pytest.approx(3 * 24 * 3600 / (300 * 118287 / 64))
    config = load_config(None, ["batch_former.enabled=false", "train.batch_size=4", "train.epochs=300"])
    time = make_plan(config, Machine(gpus=16, gpu=GPUS["v100"])).time
    assert time.days == pytest.approx(3, rel=0.01)
    assert time.source == "estimated"


def test_a_measured_step_and_a_measured_rate_replace_the_estimate() -> None:
    config = tiny("train.epochs=2")
    measured = plan_of(config, images=300, seconds_per_step=0.5).time
    assert (measured.seconds_per_step, measured.source) == (0.5, "--seconds-per-step")
    assert measured.days == pytest.approx(200 * 0.5 / 86400)
    rated = plan_of(config, tflops=2.0).time
    assert rated.seconds_per_step == pytest.approx(rated.flops_per_step / 2e12)
    with_both = plan_of(config, tflops=2.0, seconds_per_step=0.5).time
    assert with_both.seconds_per_step == 0.5


def test_a_benchmarks_record_gives_the_time_of_its_own_precision_and_batch(tmp_path: Path) -> None:
    """Images of 96 x 128 pixels, measured with twice as many pixels, over two batches."""
    file = tmp_path / "step.json"
    step = {"median": 0.25, "low": 0.2, "high": 0.3}
    rows = [
        {"precision": "float32", "batch_size": 3, "step": step},
        {"precision": "bf16", "batch_size": 3, "step": {**step, "median": 0.125}},
        {"precision": "float32", "batch_size": 64, "step": None},
    ]
    record = {"recipe": "detr/detr_r50", "height": 192, "width": 128, "rows": rows}
    file.write_text(json.dumps(record))
    seconds, source = read_measured(file, tiny("train.accumulate=2", "data.transforms.short_sides=[96]"))
    assert seconds == pytest.approx(0.25 * 2 / 2)
    assert "detr/detr_r50 192 x 128" in source
    assert read_measured(file, tiny("train.precision=bf16"))[0] == pytest.approx(0.125 / 2)
    for size in (4, 64):  # not measured: out of memory
        with pytest.raises(InputError, match=rf"no step of .*=float32 .*={size}; it has float32 3, bf16 3"):
            read_measured(file, tiny(f"train.batch_size={size}"))
    with pytest.raises(InputError, match="file not found"):
        read_measured(tmp_path / "none.json", tiny())
    for content in ("no json", "[]", '{"rows": [{"precision": "bf16"}]}', "{}"):
        file.write_text(content)
        with pytest.raises(InputError, match=r"is not what benchmarks/step\.py"):
            read_measured(file, tiny())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"height": "192"}, "192 is no number above 0"),
        ({"height": 0}, "0 is no number above 0"),
        ({"width": 2**70}, "is no number above 0"),
        ({"rows": [{"precision": "float32", "batch_size": 3, "step": {"median": math.nan}}]}, "nan is no number"),
        ({"rows": [{"precision": "float32", "batch_size": 3, "step": {"median": -1}}]}, "-1 is no number"),
        ({"rows": [{"precision": "float32", "batch_size": 3, "step": {"median": True}}]}, "True is no number"),
        ({"rows": [{"precision": [], "batch_size": 3, "step": {"median": 1}}]}, "unhashable"),
    ],
)
def test_a_record_of_nonsense_is_refused_by_the_name_of_its_file(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    file = tmp_path / "step.json"
    rows = [{"precision": "float32", "batch_size": 3, "step": {"median": 0.25}}]
    file.write_text(json.dumps({"recipe": "x", "height": 192, "width": 128, "rows": rows} | change))
    with pytest.raises(InputError, match=rf"step\.json is not what benchmarks/step\.py .*{said}"):
        read_measured(file, tiny())


def test_a_record_that_is_nested_deeply_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"deep\.json is not what .*nested too deeply"):
        read_measured(tmp_path / "deep.json", tiny())
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match=r"pipe\.json is not what .*a FIFO"):
        read_measured(tmp_path / "pipe.json", tiny())


def test_half_precision_is_faster_where_there_are_tensor_cores() -> None:
    full, half = (plan_of(tiny(f"train.precision={name}"), gpu=GPUS["a100"]) for name in ("float32", "bf16"))
    assert half.time.flops_per_step == full.time.flops_per_step
    kinds = {item.kind for item in trace(tiny("train.precision=bf16"), CLASSES, SIZE).work}
    assert {"half", "float32"} <= kinds


@pytest.mark.full
def test_what_does_not_fit_says_so_and_what_would_help() -> None:
    """Every proposal is planned, extends the previous one, needs less memory, and the last one fits."""
    settings = (*DETECTORS["deformable_detr_two_stage"], "model.feedforward_dim=2048", "train.batch_size=4")
    config = tiny(*settings)
    needed, sparing = need(*settings), (*settings, "train.precision=bf16", "train.recompute_encoder=true")
    larger, smaller = need(*sparing), need(*sparing, "train.batch_size=2", "train.accumulate=2")
    machine = Machine(gpus=1, num_classes=CLASSES, memory=(smaller + larger) / 2 / 2**30)
    plan = make_plan(config, machine)
    assert not plan.fits
    assert [(step.settings, step.fits) for step in plan.helps] == [
        ("train.precision=bf16", False),
        ("train.precision=bf16 train.recompute_encoder=true", False),
        ("train.precision=bf16 train.recompute_encoder=true train.batch_size=2 train.accumulate=2", True),
    ]
    needs = [needed, *(step.needed for step in plan.helps)]
    assert needs == sorted(set(needs), reverse=True)
    assert [need(*settings, *step.settings.split()) for step in plan.helps] == needs[1:]
    text = describe_plan(plan, config, machine)
    assert f"does not fit: needs {needed / 2**30:.1f} GB of {machine.memory:.1f} GB" in text
    assert "batch attention then spans 2 images instead of 4" in text


def need(*settings: str) -> float:
    """Return the bytes of a GPU."""
    config, machine = tiny(*settings), Machine(gpus=1, num_classes=CLASSES)
    return memory_of(config, machine, trace_of(config, machine)).total


def test_nothing_is_proposed_where_it_fits() -> None:
    machine = Machine(gpus=1, num_classes=CLASSES)
    plan = make_plan(tiny(), machine)
    text = describe_plan(plan, tiny(), machine)
    assert plan.fits
    assert plan.helps == ()
    assert "fits:" in text
    assert "helps" not in text


@pytest.mark.full
def test_where_nothing_is_enough_it_says_that() -> None:
    machine = Machine(gpus=1, num_classes=CLASSES, memory=0.1)
    text = describe_plan(make_plan(tiny(), machine), tiny(), machine)
    assert "beyond that: smaller images" in text
    assert "fits" not in text.replace("does not fit", "")
    modest = tiny("train.batch_size=1", "train.precision=bf16", "train.recompute_encoder=true")
    assert "no setting of train helps" in describe_plan(make_plan(modest, machine), modest, machine)


@pytest.mark.full
def test_a_batch_of_landscape_and_portrait_images_gives_a_warning() -> None:
    config = tiny("train.batch_size=16")
    plan = plan_of(config)
    assert plan.mixed == pytest.approx(plan.memory.total + 1.1 * plan.memory.activations / 3)
    square = replace(config.data.transforms, short_sides=[128])
    real = plan_of(replace(config, data=replace(config.data, transforms=square))).memory.total
    assert plan.mixed == pytest.approx(real, rel=0.02)
    machine = Machine(gpus=1, num_classes=CLASSES, memory=(plan.memory.total + plan.mixed) / 2**31)
    assert "data.aspect_buckets" in describe_plan(make_plan(config, machine), config, machine)


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"gpus": 0}, "--gpus"),
        ({"gpus": -2}, "--gpus"),
        ({"gpus": 1, "memory": 0.0}, "--gpu-memory"),
        ({"gpus": 1, "memory": float("nan")}, "--gpu-memory"),
        ({"gpus": 1, "images": 0}, "--images"),
        ({"gpus": 1, "num_classes": 0}, "--classes"),
        ({"gpus": 1, "published_batch": 0}, "--published-batch"),
        ({"gpus": 1, "seconds_per_step": float("inf")}, "--seconds-per-step"),
        ({"gpus": 1, "tflops": -1.0}, "--tflops"),
    ],
)
def test_numbers_that_cannot_be_are_refused(settings: dict[str, float], option: str) -> None:
    with pytest.raises(InputError, match=f"{option} must be greater than 0 and finite, got "):
        Machine(**settings)


def test_unknown_gpus_and_precisions_they_lack_are_refused() -> None:
    with pytest.raises(InputError, match=r"--gpu abacus is not known; known are h200, .*--tflops"):
        gpu_named("abacus")
    assert gpu_named("A100") is GPUS["a100"]
    with pytest.raises(InputError, match=r"V100 16GB cannot do: use train.precision=fp16"):
        plan_of(tiny("train.precision=bf16"), gpu=GPUS["v100"])
    assert plan_of(tiny("train.precision=fp16"), gpu=GPUS["v100"]).fits


def test_the_models_own_faults_are_told_as_when_training() -> None:
    with pytest.raises(InputError, match="this detector uses one feature map"):
        plan_of(tiny("model.backbone.strides=[16,32]"))


def test_planning_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    before = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    plan_of(tiny("train.precision=bf16", "train.recompute_encoder=true"))
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == before
    assert torch.zeros(1).device.type == "cpu"
    assert type(torch.zeros(1)) is Tensor
    assert torch.equal(torch.get_rng_state(), state)


def recipes() -> Sequence[str]:
    found = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
    assert len(found) > 30
    return [
        name
        for name in found
        if not name.startswith(("base/", "classification/", "compare/", "detectron2/", "experiments/", "masked/"))
    ]


REPRESENTATIVE = ("demo.yaml", "panoptic/panoptic_detr_r50_bfv2.yaml", "smca/smca_multi_scale_r50.yaml")


@pytest.mark.default_tier("demo.yaml0")
@pytest.mark.parametrize("name", [*REPRESENTATIVE, *(pytest.param(name, marks=pytest.mark.slow) for name in recipes())])
def test_every_recipe_is_planned(name: str) -> None:
    path = CONFIGS / name
    config, machine = load_config(path), Machine(gpus=8)
    plan = make_plan(config, machine, load_config(path))
    text = describe_plan(plan, config, machine)
    assert plan.memory.activations > 0
    assert plan.time.days > 0
    assert plan.fits or plan.helps
    assert plan.rates is not None
    assert plan.rates.factor == 8
    assert "Assumptions:" in text


def test_attention_of_a_vision_transformer_is_planned() -> None:
    """timm calls the fused attention with all of its arguments."""
    backbone = (
        "model.backbone.name=timm:vit_tiny_patch16_224",
        "model.backbone.vit.options={patch_size: 8, embed_dim: 24, depth: 2, num_heads: 2}",
        "model.backbone.strides=[8]",
    )
    found, without = (plan_of(tiny(*backbone, *more)) for more in ((), ("model.backbone.vit.options.depth=1",)))
    assert found.time.flops_per_step > without.time.flops_per_step
