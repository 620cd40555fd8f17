"""Context Broadcasting and relative localization in the encoders of detectors, by config."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detr_bf.assembly import build_criterion, build_detector_criterion, build_groups, build_model
from detr_bf.assembly.compilation import compile_model
from detr_bf.assembly.plugins import add_detector_plugins, encoder_of
from detr_bf.classification.assembly import add_diverse, add_v1, add_v2
from detr_bf.classification.config import PluginsConfig
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Outputs, Target
from detr_bf.config import DetectionConfig, load_config
from detr_bf.config.detection import DetectorContextConfig, DetectorLocalizationConfig, DetectorPluginsConfig
from detr_bf.detectors import Detector
from detr_bf.engine import load_strict
from detr_bf.losses import SetCriterion
from detr_bf.planning import trace
from detr_bf.plugins import ContextBroadcasting, PluginCriterion, RelativeLocalizationLoss
from tests.detectors.tiny import (
    BLIND_TO_PADDING,
    TWO_STAGE,
    WITH_ENCODER,
    batch_former,
    images,
    model,
    settings_of,
    shaken,
)
from tests.plugins import tiny

SMALL = (
    "batch_former.enabled=true",
    "model.hidden_dim=32",
    "model.heads=2",
    "model.encoder_layers=2",
    "model.decoder_layers=2",
    "model.feedforward_dim=32",
    "model.num_queries=5",
    "model.backbone.name=resnet18",
    "model.backbone.weights=none",
    "device=cpu",
)
CONTEXT = "plugins.context_broadcasting."
LOCAL = "plugins.relative_localization."
BOTH = (f"{CONTEXT}enabled=true", f"{CONTEXT}scaled=true", f"{LOCAL}enabled=true", f"{LOCAL}weight=0.5")
OF_DETECTORS = {name: settings_of(name) for name in WITH_ENCODER}
every_detector = pytest.mark.parametrize("name", WITH_ENCODER)


def config(*settings: str) -> DetectionConfig:
    return load_config(None, [*SMALL, *settings])


def built(*settings: str) -> Detector:
    torch.manual_seed(0)
    return build_model(config(*settings), num_classes=3)


def with_plugins(detector: Detector, variant: str = "abs") -> Detector:
    """Add both plug-ins to every layer, with random scales."""
    plugins = DetectorPluginsConfig(
        context_broadcasting=DetectorContextConfig(enabled=True, layers="all", scaled=True),
        relative_localization=DetectorLocalizationConfig(enabled=True, weight=1.0, variant=variant),
    )
    add_detector_plugins(detector, plugins)
    torch.manual_seed(5)
    for parameter in encoder_of(detector).plugins.parameters():
        nn.init.normal_(parameter, std=0.1)
    return detector


def targets(count: int = 2) -> tuple[Target, ...]:
    box, label = torch.tensor([[0.3, 0.4, 0.2, 0.3]]), torch.tensor([1])
    return tuple(Target(number, box, label, (32, 48), (32, 48)) for number in range(count))


def step(detector: Detector, batch: Batch) -> tuple[Outputs, Tensor, dict[str, Tensor]]:
    """Return outputs, localization loss, and the gradients of both, always from the same random seed."""
    torch.manual_seed(7)
    detector.zero_grad()
    outputs = detector.train()(batch)
    local = encoder_of(detector).plugins["relative_localization"]()
    (outputs.logits.square().mean() + outputs.boxes.square().mean() + local).backward()
    return outputs, local, {name: p.grad.clone() for name, p in detector.named_parameters() if p.grad is not None}


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr")
@pytest.mark.parametrize("name", OF_DETECTORS)
def test_plugins_stand_in_the_one_encoder_and_leave_all_other_weights_as_they_start(name: str) -> None:
    plain, plugged = built(*OF_DETECTORS[name]), built(*OF_DETECTORS[name], *BOTH)
    added = {key for key in plugged.state_dict() if "plugins" in key.split(".")}
    prefix = next(path for path, module in plugged.named_modules() if module is encoder_of(plugged))
    assert {key.removeprefix(f"{prefix}.plugins.").split(".")[0] for key in added} == {
        "context_broadcasting",
        "relative_localization",
    }
    rest = {key: value for key, value in plugged.state_dict().items() if key not in added}
    assert rest.keys() == plain.state_dict().keys()
    assert all(torch.equal(rest[key], value) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("scaled", ["true", "false"])
def test_weights_with_and_without_context_broadcasting_are_not_taken_for_one_another(scaled: str) -> None:
    plain, plugged = built(), built(f"{CONTEXT}enabled=true", f"{CONTEXT}scaled={scaled}")
    key = r"encoder\.plugins\.context_broadcasting\."
    with pytest.raises(InputError, match=rf"unknown to the model \(1\): {key}"):
        load_strict(plain, plugged.state_dict(), "theirs.pt")
    with pytest.raises(InputError, match=rf"missing in the file \(1\): {key}"):
        load_strict(plugged, plain.state_dict(), "theirs.pt")
    with pytest.raises(RuntimeError, match=f"Missing key.*{key}"):
        plugged.load_state_dict(plain.state_dict())


def test_settings_reach_the_plugins() -> None:
    local_settings = ("variant=all", "num_pairs=9", "normalize=false", "hidden=5")
    settings = (f"{CONTEXT}layers=[0]", *(LOCAL + setting for setting in local_settings))
    plugins = built(*BOTH, *settings).encoder.plugins
    context, local = plugins["context_broadcasting"], plugins["relative_localization"]
    assert isinstance(context, ContextBroadcasting)
    assert isinstance(local, RelativeLocalizationLoss)
    assert (context.layers, list(context.scales)) == ((0,), ["0"])
    assert local.weight == 0.5
    assert [(each.variant, each.pairs, each.normalize) for each in local.predictors] == [("abs", 9, False)] * 2
    assert [each.mlp.layers[1].out_features for each in local.predictors] == [5, 5]


def test_without_them_there_is_nothing_of_them() -> None:
    assert not hasattr(built().encoder, "plugins")
    assert isinstance(build_detector_criterion(config(), built()), SetCriterion)
    context = config(f"{CONTEXT}enabled=true")
    assert isinstance(build_detector_criterion(context, build_model(context, 3)), SetCriterion), "no loss to add"


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@every_detector
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_loss_is_added_to_those_of_the_set_criterion_and_trains_the_encoder(name: str, weight: float) -> None:
    detector = with_plugins(shaken(model(name, batch_former=batch_former()), std=0.1))
    plain = build_criterion(config())
    torch.manual_seed(7)
    outputs = detector.train()(replace(images(), targets=tuple(targets())))
    assert outputs.num_streams == 2
    encoder_of(detector).plugins["relative_localization"].weight = weight
    report, expected = PluginCriterion(plain, encoder_of(detector))(outputs, targets()), plain(outputs, targets())
    assert set(report.losses) == {*expected.losses, "loss_localization"}
    assert report.weights["loss_localization"] == weight
    local = report.losses["loss_localization"]
    assert 0 < local.item() < 2
    torch.testing.assert_close(report.total, expected.total + weight * local)
    assert ("loss_giou_enc" in report.losses) == (name in TWO_STAGE)
    streams = ("stream/clean", "stream/batchformer")
    torch.testing.assert_close(sum(report.logged[stream] for stream in streams) / 2, report.total.detach())
    assert {key: value.item() for key, value in report.logged.items() if key not in streams} == {
        key: value.item() for key, value in expected.logged.items() if key not in streams
    }
    local.backward()
    for part in (encoder_of(detector).layers[0], detector.tokens):
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in part.parameters())
    assert all(p.grad is None for p in detector.decoder.parameters())


@pytest.mark.parametrize("fork", [0, 1])
def test_every_layer_is_measured_also_before_the_second_stream(fork: int) -> None:
    detector = with_plugins(shaken(model(batch_former=batch_former(layers=[fork])), std=0.1), "all")
    rows: list[int] = []
    for predictor in encoder_of(detector).plugins["relative_localization"].predictors:
        predictor.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])) or None)
        predictor.register_forward_pre_hook(lambda module, args: check_extent(args[2]))
    step(detector, images())
    assert rows == ([4, 4] if fork == 0 else [2, 4])


def check_extent(extent: Tensor) -> None:
    """Check the extents: full 8 x 12 cells for the first image of each stream, 4 x 6 for the second."""
    assert extent.tolist() == [[8, 12], [4, 6]] * (len(extent) // 2)


@pytest.mark.parametrize("name", BLIND_TO_PADDING)
def test_padding_is_left_out_of_the_mean(name: str) -> None:
    """An image padded to four times its area gives the same outputs as without padding."""
    detector, batch = with_plugins(shaken(model(name))).eval(), images()
    for scale in encoder_of(detector).plugins["context_broadcasting"].scales.values():
        nn.init.ones_(scale)
    alone = Batch(batch.images[1:, :, :16, :24], batch.padding_mask[1:, :16, :24])
    with torch.no_grad():
        together, single, plain = detector(batch), detector(alone), shaken(model(name)).eval()(alone)
    torch.testing.assert_close(together.logits[:, 1:], single.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(together.boxes[:, 1:], single.boxes, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(single.logits, plain.logits, atol=1e-2)


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@every_detector
@pytest.mark.parametrize("variant", ["abs", "all"])
def test_recomputed_layers_give_the_same_bits(name: str, variant: str) -> None:
    found = []
    for recompute in (False, True):
        settings = {"dropout": 0.3, "batch_former": batch_former(layers=[1]), "activation_checkpointing": recompute}
        found.append(step(with_plugins(shaken(model(name, **settings), std=0.1), variant), images()))
    (outputs, local, gradients), (again, local_again, gradients_again) = found
    assert torch.equal(outputs.logits, again.logits)
    assert torch.equal(local, local_again)
    assert gradients.keys() == gradients_again.keys()
    assert all(torch.equal(gradients[key], gradients_again[key]) for key in gradients)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["detr", *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_ENCODER if name != "detr")]
)
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_layers_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without graph breaks; aot_eager traces like Inductor but generates no C++."""
    usual = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: usual(self, backend="aot_eager", **settings))
    plain = with_plugins(shaken(model(name, batch_former=batch_former(layers=[1]), dropout=0.0), std=0.1), "all")
    compiled = copy.deepcopy(plain)
    compile_model(compiled, config("train.compile=true"))
    larger = Batch(images().images.repeat(1, 1, 2, 1), images().padding_mask.repeat(1, 2, 1) & False)
    for batch in (images(), larger):
        (outputs, local, gradients), (expected, wanted, of_plain) = step(compiled, batch), step(plain, batch)
        torch.testing.assert_close(outputs.logits, expected.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(local, wanted)
        assert gradients.keys() == of_plain.keys()
        for key, gradient in of_plain.items():
            torch.testing.assert_close(gradients[key], gradient, atol=1e-5, rtol=1e-3, msg=lambda m, key=key: key + m)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_scales_have_no_weight_decay_and_every_parameter_is_trained_once() -> None:
    settings = config(*BOTH)
    detector = build_model(settings, num_classes=3)
    groups = {group["name"]: group for group in build_groups(settings, detector)}
    scales = encoder_of(detector).plugins["context_broadcasting"].scales
    assert {id(p) for p in groups["scales"]["params"]} == {id(p) for p in scales.parameters()}
    assert (groups["scales"]["weight_decay"], groups["transformer"]["weight_decay"]) == (0.0, 1e-4)
    assert groups["scales"]["lr"] == groups["transformer"]["lr"]
    grouped = sorted(id(p) for group in groups.values() for p in group["params"])
    assert grouped == sorted(id(p) for p in detector.parameters() if p.requires_grad)


def test_a_copy_has_plugins_of_its_own() -> None:
    """The averaged weights are such a deep copy."""
    detector = with_plugins(shaken(model(), std=0.1))
    other = copy.deepcopy(detector)
    nn.init.zeros_(encoder_of(detector).plugins["context_broadcasting"].scales["0"])
    with torch.no_grad():
        changed, same = detector.eval()(images()), other.eval()(images())
        again = with_plugins(shaken(model(), std=0.1)).eval()(images())
    assert torch.equal(same.logits, again.logits)
    assert not torch.equal(changed.logits, same.logits)


def test_the_mask_stage_keeps_context_broadcasting_as_it_is() -> None:
    masks = ("model.masks=true", "freeze.detector=true", f"{CONTEXT}enabled=true", f"{CONTEXT}scaled=true")
    detector = built(*masks).train()
    plugins = list(detector.encoder.plugins.parameters())
    assert plugins
    assert not any(p.requires_grad for p in plugins)
    pixels = torch.randint(256, (2, 3, 64, 96), dtype=torch.uint8)
    before = detector(Batch(pixels, torch.zeros(2, 64, 96, dtype=torch.bool))).logits
    nn.init.ones_(detector.encoder.plugins["context_broadcasting"].scales["1"])
    assert not torch.equal(detector(Batch(pixels, torch.zeros(2, 64, 96, dtype=torch.bool))).logits, before)


@pytest.mark.parametrize("name", ["detr", "deformable_detr"])
def test_the_planner_counts_a_detector_with_plugins(name: str) -> None:
    """Means add a little compute; scales and the predictor add a few weights."""
    plugged, plain = (
        trace(config(*OF_DETECTORS[name], *settings, "train.recompute_encoder=true"), 3, (96, 128))
        for settings in (BOTH, ())
    )
    added = sum(p.numel() for p in encoder_of(built(*OF_DETECTORS[name], *BOTH)).plugins.parameters())
    assert plugged.sizes.trainable - plain.sizes.trainable == 4 * added
    assert plugged.flops >= plain.flops
    assert plugged.needed >= plain.needed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((f"{LOCAL}enabled=true",), rf"{LOCAL}weight must be given.*{LOCAL}weight=0.01"),
        ((*BOTH, f"{LOCAL}variant=ce"), rf"{LOCAL}variant=ce needs images of one size, .*: use abs, signed or all"),
        ((*BOTH, f"{LOCAL}variant=reg"), rf"{LOCAL}variant=reg needs images of one size"),
        ((*BOTH, f"{LOCAL}variant=l1"), f"{LOCAL}variant must be one of abs, signed"),
        ((*BOTH, f"{LOCAL}num_pairs=0"), f"{LOCAL}num_pairs must be greater than 0"),
        ((*BOTH, f"{LOCAL}weight=-1"), f"{LOCAL}weight must be 0 or more"),
        ((*BOTH, "model.masks=true", "freeze.detector=true"), rf"trains only the mask head.*set {LOCAL}enabled=false"),
        ((*BOTH, f"{CONTEXT}layers=[2]"), r"plugins.context_broadcasting.layers=\[2\]: the model has 2 blocks"),
        ((*BOTH, f"{CONTEXT}layers=[]"), r"plugins.context_broadcasting.layers=\[\]: .*indices from 0 to 1"),
        ((*BOTH, f"{CONTEXT}layers=[1,0]"), r"plugins.context_broadcasting.layers.*must ascend"),
        (
            (*BOTH, f"{CONTEXT}position=mid", f"{CONTEXT}scaled=true"),
            "plugins.context_broadcasting.position='mid' with scaled=True",
        ),
        ((*BOTH, f"{CONTEXT}layers=lower"), "plugins.context_broadcasting.layers='lower'"),
        ((*BOTH, f"{CONTEXT}layers=3"), "plugins.context_broadcasting.layers must be a word .* got 3"),
        (("batch_former.enabled=false", "model.encoder_layers=0", *BOTH), "model.encoder_layers=1 or more"),
    ],
)
def test_bad_settings_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        built(*settings)


@pytest.mark.parametrize(
    ("group", "changes", "message"),
    [
        ("batchformer_v2", {"layers": [4]}, r"^plugins.batchformer_v2.layers=\[4\]: the model has 4 blocks"),
        ("batchformer_v2", {"layers": 7}, r"^plugins.batchformer_v2.layers must be a word .* got 7"),
        ("batchformer_v2", {"layers": ["a"]}, r"^plugins.batchformer_v2.layers must be a word .* got \['a'\]"),
        ("batchformer_v2", {"heads": 3}, r"^plugins.batchformer_v2.heads=3 must divide the width 16"),
        ("batchformer_v2", {"mode": "three"}, r"^plugins.batchformer_v2.mode must be one of two_stream"),
        ("batchformer", {"heads": 5}, r"^plugins.batchformer.heads=5 must divide the width 16"),
    ],
)
def test_batch_attention_that_does_not_fit_names_its_setting(group: str, changes: dict[str, Any], message: str) -> None:
    add = {"batchformer_v2": add_v2, "batchformer": add_v1}[group]
    if group == "batchformer_v2":
        changes = {"layers": "all"} | changes
    settings = replace(getattr(PluginsConfig(), group), enabled=True, **changes)
    with pytest.raises(InputError, match=message):
        add(tiny.vit(), settings)


def test_a_network_that_does_not_fit_names_the_plug_in() -> None:
    swin, plugins = tiny.swin(), PluginsConfig()
    with pytest.raises(InputError, match=r"^plugins.batchformer_v2: got a SwinTransformer"):
        add_v2(swin, replace(plugins.batchformer_v2, enabled=True))
    with pytest.raises(InputError, match=r"^plugins.diverse_patch: got a PoolingVisionTransformer"):
        add_diverse(tiny.pit(), replace(plugins.diverse_patch, enabled=True), tiny.CLASSES)
    add_v1(swin, replace(plugins.batchformer, enabled=True))
    with pytest.raises(InputError, match=r"^plugins.batchformer: the model has a plug-in batchformer already"):
        add_v1(swin, replace(plugins.batchformer, enabled=True))


def test_settings_reach_batch_attention_and_diverse_patch() -> None:
    model, plugins = tiny.vit(), PluginsConfig()
    for add in (add_v1, add_v2):
        add(model, plugins.batchformer if add is add_v1 else plugins.batchformer_v2)
    assert not hasattr(model, "plugins"), "the plug-ins are disabled"
    settings = {"num_layers": 2, "heads": 2, "dropout": 0.25}
    v2 = replace(plugins.batchformer_v2, enabled=True, layers=[1, 3], position="after", shared=False, **settings)
    add_v2(model, v2)
    attention = model.plugins["batchformer_v2"].batch_former
    assert (list(attention.insertions), attention.position, len(attention.mixers)) == ([1, 3], "after", 2)
    other = tiny.vit()
    add_v1(other, replace(plugins.batchformer, enabled=True, shared_classifier=False, **settings))
    mixer = other.plugins["batchformer"].batch_former.mixer
    assert [(layer.self_attn.num_heads, layer.dropout.p) for layer in mixer.layers] == [(2, 0.25)] * 2
    add_diverse(other, replace(plugins.diverse_patch, enabled=True, cosine=0.5, mixing=0.0), tiny.CLASSES)
    assert other.plugins["diverse_patch"].weights == {"cosine": 0.5, "contrastive": 1.0, "mixing": 0.0}


def test_a_variant_that_is_off_is_nobodys_business() -> None:
    assert config(f"{LOCAL}variant=ce").plugins.relative_localization.variant == "ce"


VIT = (
    "batch_former.enabled=false",
    "model.backbone.name=timm:vit_tiny_patch16_224",
    "model.backbone.vit.options={patch_size: 8, embed_dim: 16, depth: 4, num_heads: 2, img_size: 32}",
    "model.backbone.strides=[16]",
    "model.backbone.frozen_stages=0",
)
IN_BACKBONE = (f"{CONTEXT}enabled=true", f"{CONTEXT}where=backbone", f"{CONTEXT}layers=all")


@pytest.mark.parametrize("windows", [{}, {"window": 2, "global_blocks": [1, 3]}], ids=str)
@pytest.mark.parametrize("position", ["end", "both", "front"])
def test_context_in_the_blocks_of_the_backbone_leaves_padding_out(windows: dict[str, Any], position: str) -> None:
    """Features of an image alone and beside a larger one."""
    settings = (*VIT, *(f"model.backbone.vit.{name}={value}" for name, value in windows.items()))
    detector = built(*settings, *IN_BACKBONE, f"{CONTEXT}position={position}").eval()
    without = built(*settings).eval()
    pixels = torch.randint(0, 256, (2, 3, 64, 48), dtype=torch.uint8)
    mask = torch.zeros(2, 64, 48, dtype=torch.bool)
    mask[1, 40:], mask[1, :, 24:] = True, True
    with torch.no_grad():
        (both,) = detector.backbone(pixels, mask)
        (alone,) = detector.backbone(pixels[1:, :, :40, :24].contiguous(), torch.zeros(1, 40, 24, dtype=torch.bool))
        (plain,) = without.backbone(pixels, mask)
    torch.testing.assert_close(both.tensor[1:, :, :3, :2], alone.tensor, rtol=1e-4, atol=1e-5)
    assert (both.tensor - plain.tensor).abs().max() > 1e-3


def test_skipped_blocks_and_scales_of_the_backbone() -> None:
    detector = built(*VIT, *IN_BACKBONE, f"{CONTEXT}scaled=true", f"{CONTEXT}skip=[3]")
    names = {name for name, _ in detector.named_parameters() if "plugins" in name}
    assert names == {f"backbone.body.vit.plugins.context_broadcasting.scales.{block}" for block in (0, 1, 2)}
    groups = build_groups(config(*VIT), detector)
    assert [len(group["params"]) for group in groups if group["name"] == "scales"] == [3]
    assert {group["weight_decay"] for group in groups if group["name"] == "scales"} == {0.0}


def test_context_in_another_backbone_is_refused() -> None:
    with pytest.raises(InputError, match=r"where=backbone needs a plain vision transformer, such as model\.backbone"):
        built(*IN_BACKBONE)


def test_rates_and_decay_of_a_vision_transformer() -> None:
    settings = (*VIT, "optimizer.decay_vectors=false", "optimizer.layer_decay=0.5", "optimizer.backbone_lr=1")
    detector = built(*settings)
    names = {id(parameter): name.removeprefix("backbone.body.") for name, parameter in detector.named_parameters()}
    groups = {names[id(x)]: group for group in build_groups(config(*settings), detector) for x in group["params"]}
    for spared in ("vit.pos_embed", "vit.cls_token", "vit.blocks.0.norm1.weight"):
        assert groups[spared]["weight_decay"] == 0
    assert groups["vit.patch_embed.proj.weight"]["weight_decay"] > 0
    rates = [groups[f"vit.blocks.{block}.mlp.fc1.weight"]["lr"] for block in range(4)]
    assert rates == pytest.approx([rates[3] / 8, rates[3] / 4, rates[3] / 2, rates[3]])
    assert groups["vit.pos_embed"]["lr"] == pytest.approx(rates[0] / 2)
