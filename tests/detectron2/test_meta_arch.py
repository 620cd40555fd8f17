"""Meta-architecture: the same results on detectron2's inputs as the core on its own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2.config")

from detectron2.config import instantiate
from detectron2.data import MetadataCatalog
from detectron2.data.detection_utils import annotations_to_instances
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_model as build_d2_model
from detectron2.structures import BitMasks, Instances
from detectron2.utils.events import EventStorage
from omegaconf import OmegaConf

from detr_bf.assembly import build_criterion, build_model, build_panoptic_postprocess, build_postprocess
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.detectron2 import build_detr_bf
from detr_bf.detectron2.meta_arch import core_config
from detr_bf.detectron2.tensors import output_target, target_of
from detr_bf.detectron2.training import recipe

from .conftest import DETECTORS

# Losses of proposals and further queries end so.
FURTHER = {
    "dino": ("enc", "dn"),
    "dn_detr": ("dn",),
    "group_detr": ("group",),
    "h_deformable_detr": ("enc", "one_to_many"),
    "rtdetr": ("enc", "dn"),
    "rtdetrv2": ("enc", "dn"),
}

Cfg = Callable[..., Any]
Inputs = list[dict[str, Any]]


def pair(cfg: Any) -> tuple[Any, Any]:
    """Return the model of the adapter and that of the core, with the same weights."""
    adapter = build_d2_model(cfg)
    core = build_model(core_config(cfg), cfg.MODEL.DETR_BF.NUM_CLASSES, pretrained=False)
    core.load_state_dict({name.removeprefix("detector."): value for name, value in adapter.state_dict().items()})
    return adapter, core


def core_batch(inputs: Inputs, *, masks: bool = False) -> Batch:
    targets = [target_of(each["instances"], num_classes=3, masks=masks) for each in inputs]
    return Batch.collate([(each["image"], target) for each, target in zip(inputs, targets, strict=True)])


@pytest.mark.parametrize("batch_former", [False, True])
@pytest.mark.parametrize("architecture", DETECTORS)
def test_losses_and_gradients_are_the_cores(
    tiny_cfg: Cfg, inputs: Inputs, architecture: str, batch_former: bool
) -> None:
    cfg = tiny_cfg(architecture, batch_former=batch_former)
    adapter, core = pair(cfg)
    torch.manual_seed(3)  # of the noise in denoising
    losses = adapter.train()(inputs)
    batch = core_batch(inputs)
    torch.manual_seed(3)
    report = build_criterion(core_config(cfg))(core.train()(batch), batch.targets)
    assert losses.keys() == report.losses.keys()
    for name, loss in report.weighted().items():
        torch.testing.assert_close(losses[name], loss, rtol=0, atol=0)
    sum(losses.values()).backward()
    report.total.backward()
    theirs = dict(core.named_parameters())
    for name, parameter in adapter.detector.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", DETECTORS)
def test_further_queries_have_losses_in_the_dictionary(tiny_cfg: Cfg, inputs: Inputs, architecture: str) -> None:
    model = build_d2_model(tiny_cfg(architecture, batch_former=True)).train()
    with EventStorage() as storage:
        losses = model(inputs)
    kinds = ("loss_ce", "loss_bbox", "loss_giou")
    ends = FURTHER.get(architecture, ())
    layers = {f"{kind}{end}" for kind in kinds for end in ("", *(f"_{each}" for each in ends))}
    inner = {f"{kind}{end}_0" for kind in kinds for end in ("", *(f"_{each}" for each in ends if each != "enc"))}
    assert losses.keys() == layers | inner
    assert all(loss.isfinite() and loss > 0 for loss in losses.values())
    streams = [storage.latest()[f"stream/{name}"][0] for name in ("clean", "batchformer")]
    assert sum(streams) / 2 == pytest.approx(float(sum(losses.values()).detach()), rel=1e-5)


@pytest.mark.parametrize("objects", [True, False], ids=["objects", "none"])
@pytest.mark.parametrize("architecture", DETECTORS)
def test_every_parameter_gets_a_gradient_as_detectron2s_ddp_needs(
    tiny_cfg: Cfg, inputs: Inputs, architecture: str, objects: bool
) -> None:
    if not objects:
        for each in inputs:
            each["instances"] = each["instances"][:0]
    model = build_d2_model(tiny_cfg(architecture, batch_former=True)).train()
    sum(model(inputs).values()).backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


@pytest.mark.parametrize("architecture", DETECTORS)
def test_detections_are_the_cores(tiny_cfg: Cfg, inputs: Inputs, architecture: str) -> None:
    cfg = tiny_cfg(architecture, batch_former=True, masks=architecture != "smca_multi_scale")
    adapter, core = pair(cfg)
    for each in inputs:
        found = adapter.eval()([each])[0]["instances"]
        batch = core_batch([each])
        target = output_target(0, batch.targets[0].size, (each["height"], each["width"]))
        with torch.inference_mode():
            [wanted] = build_postprocess(core_config(cfg))(core.eval()(batch), [target])
        kept = (wanted.boxes.clamp(min=0)[:, 2:] > 0).all(1)
        assert kept.all()
        torch.testing.assert_close(found.scores, wanted.scores)
        assert torch.equal(found.pred_classes, wanted.labels)
        limits = torch.tensor([each["width"], each["height"]] * 2)
        torch.testing.assert_close(found.pred_boxes.tensor, wanted.boxes.clamp(min=0).minimum(limits))
        if wanted.masks is not None:
            assert found.pred_masks.shape == (len(found), each["height"], each["width"])


def test_the_event_storage_gets_what_is_not_summed(tiny_cfg: Cfg, inputs: Inputs) -> None:
    model = build_d2_model(tiny_cfg(batch_former=True)).train()
    with EventStorage() as storage:
        losses = model(inputs)
    stored = storage.latest()
    assert {"class_error", "cardinality_error", "stream/clean", "stream/batchformer"} <= stored.keys()
    assert not stored.keys() & losses.keys()
    streams = (stored["stream/clean"][0] + stored["stream/batchformer"][0]) / 2
    assert streams == pytest.approx(float(sum(losses.values())), rel=1e-5)


def test_no_class_is_no_object(tiny_cfg: Cfg, inputs: Inputs) -> None:
    model = build_d2_model(tiny_cfg()).eval()
    torch.nn.init.constant_(model.detector.decoder.heads.classes[0].bias, 0)
    model.detector.decoder.heads.classes[0].bias.data[-1] = 50  # no object, with certainty
    found = model(inputs)
    assert all(each["instances"].pred_classes.max() < 3 for each in found)


@pytest.mark.parametrize("architecture", ["detr", "deformable_detr", "dab_detr", "dino", "rtdetrv2"])
def test_an_image_alone_is_found_as_in_a_batch(tiny_cfg: Cfg, inputs: Inputs, architecture: str) -> None:
    cfg = tiny_cfg(architecture, batch_former=True)
    model = build_d2_model(cfg).eval()
    other = {**inputs[0], "image": 255 - inputs[0]["image"]}
    together = model([inputs[0], inputs[1], other])
    for number, each in enumerate((inputs[0], inputs[1], other)):
        alone, found = model([each])[0]["instances"], together[number]["instances"]
        torch.testing.assert_close(found.scores, alone.scores)
        torch.testing.assert_close(found.pred_boxes.tensor, alone.pred_boxes.tensor, rtol=1e-4, atol=1e-3)


def test_where_evaluation_is_of_a_batch_the_images_stay_together(tiny_cfg: Cfg, inputs: Inputs) -> None:
    cfg = tiny_cfg(batch_former=True)
    cfg.MODEL.DETR_BF.BATCHFORMER.MODE = "mini_batch_inference"
    model = build_d2_model(cfg).eval()
    together, alone = model(inputs)[0]["instances"], model(inputs[:1])[0]["instances"]
    assert not torch.allclose(together.scores, alone.scores)


def test_training_with_one_image_is_warned_of(tiny_cfg: Cfg, inputs: Inputs, caplog: pytest.LogCaptureFixture) -> None:
    model = build_d2_model(tiny_cfg(batch_former=True)).train()
    with caplog.at_level(logging.WARNING):
        model(inputs[:1])
    assert "BatchFormerV2" in caplog.text


def test_two_streams_are_trained_and_one_is_evaluated(tiny_cfg: Cfg, inputs: Inputs) -> None:
    model = build_d2_model(tiny_cfg(batch_former=True))
    streams = []
    model.detector.register_forward_hook(lambda module, arguments, outputs: streams.append(outputs.num_streams))
    model.train()(inputs)
    model.eval()(inputs[:1])
    assert streams == [2, 1]


def test_bit_masks_train_as_polygons_do(tiny_cfg: Cfg, inputs: Inputs) -> None:
    model = build_d2_model(tiny_cfg(masks=True)).train()
    bits = copy.deepcopy(inputs)
    for each in bits:
        instances = each["instances"]
        instances.gt_masks = BitMasks.from_polygon_masks(instances.gt_masks, *instances.image_size)
    for name, loss in model(inputs).items():
        torch.testing.assert_close(model(bits)[name], loss)


def test_images_may_be_of_floats_and_in_the_other_order(tiny_cfg: Cfg, inputs: Inputs) -> None:
    cfg = tiny_cfg()
    model = build_d2_model(cfg).eval()
    cfg.INPUT.FORMAT = "BGR"
    flipped = build_d2_model(cfg).eval()
    flipped.load_state_dict(model.state_dict())
    wanted = model(inputs)[0]["instances"]
    found = flipped([{**inputs[0], "image": inputs[0]["image"].flip(0).float()}])[0]["instances"]
    assert torch.equal(found.scores, wanted.scores)


def test_a_backbone_of_detectron2_takes_its_place(tiny_cfg: Cfg, inputs: Inputs) -> None:
    cfg = tiny_cfg("deformable_detr", batch_former=True, masks=True, d2_backbone=True)
    cfg.merge_from_list(["MODEL.DETR_BF.BACKBONE.STRIDES", "[8, 16, 32]"])
    model = build_d2_model(cfg)
    assert model.detector.backbone.strides == (4, 8, 16, 32)
    assert model.detector.backbone.channels == (64, 128, 256, 512)
    losses = model.train()(inputs)
    assert all(loss.isfinite() for loss in losses.values())
    assert model.eval()(inputs)[1]["instances"].pred_masks.shape[1:] == (160, 128)


def fpn_cfg(tiny_cfg: Cfg) -> Any:
    cfg = tiny_cfg(masks=True, d2_backbone=True)
    cfg.MODEL.BACKBONE.NAME = "build_resnet_fpn_backbone"
    cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    return cfg


def test_a_backbone_that_pads_further_finds_masks_in_their_place(tiny_cfg: Cfg, inputs: Inputs) -> None:
    model = build_d2_model(fpn_cfg(tiny_cfg)).eval()
    image = {**inputs[0], "image": inputs[0]["image"][:, :40, :68], "height": 40, "width": 68}
    padded = torch.zeros(3, 64, 96, dtype=torch.uint8)
    padded[:, :40, :68] = image["image"]
    batch = Batch(padded[None], torch.ones(1, 64, 96, dtype=torch.bool))
    batch.padding_mask[:, :40, :68] = False
    with torch.inference_mode():
        logits = model.detector(batch).masks.all()[0]
    enlarged = torch.nn.functional.interpolate(logits[None], size=(64, 96), mode="bilinear")[0, :, :40, :68]
    wanted = enlarged.sigmoid() > 0.5
    found = model([image])[0]["instances"]
    assert found.pred_masks.any()
    assert all(any(torch.equal(mask, other) for other in wanted) for mask in found.pred_masks)


def test_what_unused_maps_are_made_of_does_not_learn(tiny_cfg: Cfg, inputs: Inputs) -> None:
    cfg = fpn_cfg(tiny_cfg)
    cfg.MODEL.MASK_ON = False
    model = build_d2_model(cfg).train()
    sum(model(inputs).values()).backward()
    without = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert not without
    assert not model.detector.backbone.body.fpn_output2.weight.requires_grad
    assert model.detector.backbone.body.fpn_output5.weight.requires_grad


def test_epochs_of_batch_attention_are_refused(tiny_cfg: Cfg) -> None:
    cfg = tiny_cfg(batch_former=True)
    cfg.MODEL.DETR_BF.BATCHFORMER.UNTIL_EPOCH = 3
    with pytest.raises(InputError, match="detectron2 trains without epochs"):
        build_d2_model(cfg)


def test_settings_of_our_backbones_are_refused_for_theirs(tiny_cfg: Cfg) -> None:
    cfg = tiny_cfg(d2_backbone=True)
    cfg.MODEL.DETR_BF.BACKBONE.FROZEN_STAGES = 5
    with pytest.raises(InputError, match=r"BACKBONE\.FROZEN_STAGES has no effect with NAME detectron2"):
        build_d2_model(cfg)


def test_weights_of_nothing_here_are_told(tiny_cfg: Cfg) -> None:
    model = build_d2_model(tiny_cfg())
    theirs = {name.removeprefix("detector."): value for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=r"none of the \d+ tensors has a name of this model"):
        model.load_state_dict(theirs, strict=False)


def test_detectron2s_predictor_works_on_a_drawn_image(tiny_cfg: Cfg, tmp_path: Any) -> None:
    cfg = tiny_cfg(batch_former=True)
    torch.save({"model": build_d2_model(cfg).state_dict()}, tmp_path / "model.pth")
    cfg.MODEL.WEIGHTS = str(tmp_path / "model.pth")
    cfg.INPUT.MIN_SIZE_TEST = 64
    found = DefaultPredictor(cfg)(np.zeros((50, 70, 3), dtype=np.uint8))["instances"]
    assert found.image_size == (50, 70)
    assert len(found) == 7


def test_losses_are_of_full_precision_under_autocast(tiny_cfg: Cfg, inputs: Inputs) -> None:
    model = build_d2_model(tiny_cfg(masks=True, batch_former=True)).train()
    wanted = model(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(inputs)
    for name, loss in found.items():
        assert loss.dtype == torch.float32, name
        torch.testing.assert_close(loss, wanted[name], rtol=0.1, atol=0.05)


def test_an_image_without_objects_trains_a_mask_head(tiny_cfg: Cfg, inputs: Inputs) -> None:
    empty = annotations_to_instances([], (80, 64), mask_format="bitmask")
    assert not empty.has("gt_masks")
    losses = build_d2_model(tiny_cfg(masks=True)).train()([inputs[0], {**inputs[1], "instances": empty}])
    assert all(loss.isfinite() for loss in losses.values())


def test_a_backbone_without_a_wanted_stride_is_told(tiny_cfg: Cfg) -> None:
    cfg = tiny_cfg(d2_backbone=True)
    cfg.MODEL.DETR_BF.BACKBONE.STRIDES = [64]
    with pytest.raises(InputError, match=r"ResNet has feature maps of strides \[4, 8, 16, 32\]"):
        build_d2_model(cfg)


def test_what_cannot_be_trained_on_is_told(tiny_cfg: Cfg, inputs: Inputs) -> None:
    model = build_d2_model(tiny_cfg()).train()
    with pytest.raises(InputError, match=r"images \[1\] of the batch have no 'instances'"):
        model([inputs[0], {"image": inputs[1]["image"]}])
    inputs[1]["instances"].gt_classes += 2
    with pytest.raises(InputError, match=r"image 1 of the batch has classes from 3 to 3"):
        model(inputs)


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_classes_is_told_before_training(
    tiny_cfg: Cfg, catalogs: None, count: int, split: str
) -> None:
    MetadataCatalog.get("toy").thing_dataset_id_to_contiguous_id = {10 * index: index for index in range(count)}
    MetadataCatalog.get("named").thing_classes = [str(index) for index in range(count)]
    for name in ("toy", "named"):
        cfg = tiny_cfg()
        cfg.DATASETS[split] = (name,)
        with pytest.raises(InputError, match=f"{name} has {count} classes, the model 3: .*NUM_CLASSES {count}"):
            build_d2_model(cfg)


def panoptic_cfg(tiny_cfg: Cfg) -> Any:
    metadata = MetadataCatalog.get("toy_panoptic")
    metadata.thing_dataset_id_to_contiguous_id = {10: 0, 30: 2}
    metadata.stuff_dataset_id_to_contiguous_id = {20: 1}
    cfg = tiny_cfg(masks=True)
    cfg.DATASETS.TRAIN = ("toy_panoptic",)
    cfg.MODEL.DETR_BF.PANOPTIC.ENABLED = True
    cfg.MODEL.DETR_BF.PANOPTIC.THRESHOLD = 0.0
    return cfg


def test_panoptic_maps_are_the_cores(tiny_cfg: Cfg, inputs: Inputs, catalogs: None) -> None:
    cfg = panoptic_cfg(tiny_cfg)
    adapter, core = pair(cfg)
    [found] = adapter.eval()(inputs[:1])
    ids, segments = found["panoptic_seg"]
    batch = core_batch(inputs[:1], masks=True)
    target = output_target(0, batch.targets[0].size, (inputs[0]["height"], inputs[0]["width"]))
    class_map = ClassMap((10, 20, 30), ("a", "b", "c"), (True, False, True))
    with torch.inference_mode():
        [wanted] = build_panoptic_postprocess(core_config(cfg), class_map)(core.eval()(batch), [target])
    assert torch.equal(ids, wanted.ids)
    assert [(s["id"], s["category_id"], s["area"]) for s in segments] == [
        (s.id, s.label, s.area) for s in wanted.segments
    ]
    assert all(s["isthing"] == (s["category_id"] != 1) for s in segments)
    assert (found["instances"].pred_classes != 1).all()


def test_panoptic_maps_need_a_data_set_of_either_split(tiny_cfg: Cfg, inputs: Inputs, catalogs: None) -> None:
    cfg = panoptic_cfg(tiny_cfg)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (), ("toy_panoptic",)
    assert "panoptic_seg" in build_d2_model(cfg).eval()(inputs)[0]
    cfg.DATASETS.TEST = ()
    with pytest.raises(InputError, match=r"PANOPTIC\.ENABLED needs the metadata of a data set .*DATASETS\.TRAIN or"):
        build_d2_model(cfg)


def test_panoptic_maps_need_masks_and_metadata(tiny_cfg: Cfg, catalogs: None) -> None:
    cfg = panoptic_cfg(tiny_cfg)
    cfg.MODEL.MASK_ON = False
    with pytest.raises(InputError, match=r"set MODEL\.MASK_ON True"):
        build_d2_model(cfg)
    cfg.MODEL.MASK_ON = True
    MetadataCatalog.get("toy_panoptic").stuff_dataset_id_to_contiguous_id[20] = 7
    with pytest.raises(InputError, match=r"2 thing and 1 stuff classes; .* must be 0 to 2"):
        build_d2_model(cfg)


def test_only_the_mask_head_learns_where_the_detector_is_frozen(tiny_cfg: Cfg, inputs: Inputs) -> None:
    cfg = tiny_cfg(masks=True, batch_former=True)
    cfg.MODEL.DETR_BF.FREEZE.DETECTOR = True
    model = build_d2_model(cfg).train()
    sum(model(inputs).values()).backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning
    assert all(name.startswith("detector.mask_head.") for name in learning)


@pytest.mark.parametrize("architecture", ["deformable_detr", "dino", "h_deformable_detr", "rtdetrv2"])
def test_keyword_arguments_build_what_yacs_builds(tiny_cfg: Cfg, inputs: Inputs, architecture: str) -> None:
    cfg = tiny_cfg(architecture, batch_former=True)
    model = build_d2_model(cfg).eval()
    core = core_config(cfg)
    built = build_detr_bf(
        num_classes=3,
        model=OmegaConf.structured(core.model),  # as in a LazyConfig
        loss={"classification": core.loss.classification},
        batch_former={"enabled": True, "dropout": 0.0},
    ).eval()
    built.load_state_dict(model.state_dict())
    assert torch.equal(built(inputs)[0]["instances"].scores, model(inputs)[0]["instances"].scores)


def test_an_unknown_setting_is_told() -> None:
    with pytest.raises(InputError, match=r"build_detr_bf: unknown key 'model.num_query'"):
        build_detr_bf(num_classes=3, model={"num_query": 7})


def test_a_recipe_is_a_lazy_call_whose_settings_can_be_overridden(inputs: Inputs) -> None:
    lazy = recipe("deformable_detr_r50_bfv2", num_classes=3)
    assert lazy.model.num_queries == 300
    lazy.model.backbone.name = "resnet18"
    lazy.model.hidden_dim = 32
    lazy.pretrained = False
    model = instantiate(lazy).eval()
    assert model.detector.encoder.batch_former is not None
    assert isinstance(model(inputs)[0]["instances"], Instances)
