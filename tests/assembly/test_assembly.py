from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from detr_bf.assembly import build_criterion, build_groups, build_model, read_initial_weights
from detr_bf.assembly.model import num_detections
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting
from detr_bf.common.structures import Batch
from detr_bf.config import load_config
from detr_bf.detectors import DETECTORS, Detector, MaskHead, Options
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.detr import detr
from detr_bf.detectors.product_masks import ProductMaskHead
from detr_bf.losses import CrossEntropy, Focal

SMALL = [
    "batch_former.enabled=true",
    "model.hidden_dim=32",
    "model.heads=2",
    "model.encoder_layers=2",
    "model.decoder_layers=1",
    "model.feedforward_dim=32",
    "model.backbone.name=resnet18",
    "model.backbone.weights=none",
]


def test_settings_reach_the_parts() -> None:
    overrides = [
        "model.pre_norm=true",
        "model.position_temperature=20",
        "model.input_norm=true",
        "model.num_queries=7",
        "batch_former.layers=[0,1]",
        "batch_former.shared=false",
        "batch_former.num_layers=2",
        "batch_former.dropout=0.25",
        "batch_former.position=after",
        "batch_former.mask_padding=true",
    ]
    model = build_model(load_config(None, [*SMALL, *overrides]), num_classes=5)
    batch_former = model.encoder.batch_former
    assert batch_former is not None
    assert (batch_former.insertions, batch_former.position, batch_former.mask_padding) == ((0, 1), "after", True)
    assert [len(mixer.layers) for mixer in batch_former.mixers.values()] == [2, 2]
    assert batch_former.mixers["0"].layers[0].dropout.p == 0.25
    assert model.encoder.layers[0].attention_residual.pre_norm
    assert model.tokens.position.temperature == 20
    assert any(isinstance(module, torch.nn.GroupNorm) for module in model.tokens.modules())
    assert model.decoder.queries.position.num_embeddings == 7
    assert model.decoder.heads.classes[0].out_features == 6


def test_an_unknown_detector_is_told_before_weights_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detr_bf.assembly.model.build_backbone", lambda *args, **kwargs: pytest.fail("too early"))
    with pytest.raises(InputError, match="detrr"):
        build_model(load_config(None, ["model.name=detrr"]), num_classes=5)


def test_every_pattern_of_an_anchor_can_find_an_object() -> None:
    settings = ["model.num_queries=10", "model.dab.patterns=3"]
    models = [load_config(None, [f"model.name={name}", *settings]).model for name in ("dn_detr", "detr")]
    assert list(map(num_detections, models)) == [30, 10]


def test_focal_has_no_background_logit_and_starts_low() -> None:
    config = load_config(None, [*SMALL, "loss.classification=focal", "loss.focal_gamma=1.5"])
    model = build_model(config, num_classes=5)
    assert model.decoder.heads.classes[0].out_features == 5
    assert model.decoder.heads.classes[0].bias.sigmoid().tolist() == pytest.approx([0.01] * 5)
    assert build_criterion(config).classification == Focal(0.25, 1.5)


def test_loss_weights_reach_the_criterion() -> None:
    overrides = ["loss.bbox_weight=7", "loss.no_object_weight=0.3", "loss.matcher.giou_cost=4"]
    criterion = build_criterion(load_config(None, overrides))
    assert criterion.bbox_weight == 7
    assert criterion.classification == CrossEntropy(0.3)
    assert criterion.matcher.giou_cost == 4


def test_the_published_detr_r50_has_its_size() -> None:
    config = load_config(
        Path(__file__).parents[2] / "configs" / "detr" / "detr_r50.yaml", ["model.backbone.weights=none"]
    )
    model = build_model(config, num_classes=91)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == 41_524_768  # recorded from facebookresearch/detr, like the next value
    assert sum(p.numel() for p in parameters if p.requires_grad) == 41_302_368


def test_a_model_runs_from_pixels_to_boxes() -> None:
    model = build_model(load_config(None, SMALL), num_classes=5).train()
    images = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8)
    outputs = model(Batch(images, torch.zeros(2, 64, 96, dtype=torch.bool)))
    assert outputs.num_streams == 2
    assert outputs.boxes.shape == (1, 4, 100, 4)
    assert ((outputs.boxes >= 0) & (outputs.boxes <= 1)).all()


def test_official_detr_weights_are_read_under_our_names(tmp_path: Path) -> None:
    official = {
        "transformer.decoder.layers.0.multihead_attn.in_proj_weight": torch.arange(12.0).view(6, 2),
        "bbox_embed.layers.0.weight": torch.ones(2, 2),
        "input_proj.weight": torch.ones(2, 3, 1, 1),
    }
    torch.save({"model": official, "epoch": 3}, tmp_path / "detr.pth")
    weights = read_initial_weights(tmp_path / "detr.pth")
    assert weights["decoder.layers.0.cross_attention.attention.key.weight"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert "tokens.projections.0.weight" in weights


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(InputError, match="holds no weights"):
        read_initial_weights(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.heads=5", "model.heads=5 must divide"),
        ("model.name=detrr", "must be one of conditional_detr, .*deformable_detr, detr, .*smca.*; got 'detrr'"),
        ("model.name=detector", "got 'detector'"),
        ("model.backbone.strides=[16,32]", r"model\.backbone\.strides: this detector uses one feature map, got 2"),
        ("model.backbone.strides=[7]", r"model\.backbone\.strides=\[7\]: there is no stride 7"),
        ("model.backbone.name=resnet51", "model.backbone.name='resnet51': expected .*mean resnet"),
        ("batch_former.mixer=convolution", "batch_former.mixer must be one of attention; got 'convolution'"),
        ("batch_former.heads=5", "batch_former.heads=5"),
        ("model.input_norm=true", "model.hidden_dim must be divisible by 32, got 48"),
        ("model.hidden_dim=30", "divisible by 4|must divide"),
    ],
)
def test_settings_that_do_not_go_together(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(load_config(None, [*SMALL, "model.hidden_dim=48", override]), num_classes=5)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "mps", "meta", "cuda:1"])
def test_devices_that_do_not_exist(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="device"):
        device_of(load_config(None, [f"device={device}"]).device)


def test_settings_of_a_detector_reach_its_parts_and_its_optimiser() -> None:
    overrides = [
        "model.name=deformable_detr",
        "model.deformable.encoder_points=3",
        "model.deformable.decoder_points=2",
        "model.deformable.box_refine=true",
        "model.extra_levels=2",
        "optimizer.point_lr_factor=0.5",
    ]
    config = load_config(None, [*SMALL, *overrides])
    model = build_model(config, num_classes=5)
    assert model.encoder.layers[0].attention.attention.points == 3
    assert model.decoder.layers[0].cross_attention.attention.points == 2
    assert model.encoder.layers[0].attention.attention.levels == 3
    assert model.decoder.refine
    rates = {group["name"]: group["lr"] for group in build_groups(config, model)}
    assert rates["points"] == 0.5 * rates["transformer"]


def test_settings_another_detector_would_use_are_told(caplog: pytest.LogCaptureFixture) -> None:
    build_model(load_config(None, [*SMALL, "model.deformable.box_refine=true", "model.extra_levels=1"]), num_classes=5)
    assert "model.name=detr does not use model.extra_levels, model.deformable.box_refine" in caplog.text
    caplog.clear()
    build_model(load_config(None, SMALL), num_classes=5)
    assert "does not use" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["model.groups.one_to_many.repeats=3"],
            "model.groups.one_to_many.queries=0 does not use repeats and weight beside it",
        ),
        (
            ["loss.mal_gamma=2", "loss.varifocal_background=0.5", "loss.focal_alpha=0.5"],
            "loss.classification=cross_entropy does not use loss.focal_alpha, loss.varifocal_background, "
            "loss.mal_gamma",
        ),
        (
            ["loss.classification=focal", "loss.no_object_weight=0.3"],
            "loss.classification=focal does not use loss.no_object_weight",
        ),
        (
            ["loss.fgl_weight=1", "loss.union=false"],
            "model.name=detr does not use loss.fgl_weight, loss.union",
        ),
        (
            ["model.masks=true", "loss.mask_cells_per_point=8", "loss.matcher.mask_cost=1"],
            "a detector without RF-DETR's mask head does not use loss.mask_cells_per_point, loss.matcher.mask_cost",
        ),
        (
            ["model.masks=true", "model.rfdetr.mask_stride=8"],
            "model.name=detr does not use model.rfdetr.mask_stride",
        ),
    ],
)
def test_settings_of_other_losses_and_of_no_queries_are_told(
    settings: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    build_model(load_config(None, [*SMALL, *settings]), num_classes=5)
    assert caplog.messages == [said]


@pytest.mark.parametrize("name", ["dino", "dn_detr", "rtdetr", "rtdetrv2", "dfine"])
def test_cross_entropy_is_refused_where_no_object_would_be_a_class(name: str) -> None:
    strides = [32] if name == "dn_detr" else [8, 16, 32]
    settings = [*SMALL, f"model.name={name}", f"model.backbone.strides={strides}"]
    with pytest.raises(InputError, match=f"model.name={name} needs .*set loss.classification=focal"):
        build_model(load_config(None, settings), num_classes=5)
    for loss in ("focal", "varifocal", "mal"):
        build_model(load_config(None, [*settings, f"loss.classification={loss}"]), num_classes=5)


@pytest.mark.parametrize("name", ["rtdetr", "rtdetrv2"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.rtdetr.points=[4,4]", r"rtdetr.points=\[4, 4\]: expected one number, or one for each of the 3 levels"),
        ("model.rtdetr.expansion=0.01", "model.rtdetr.expansion=0.01|expansion=0.01 of 32 channels leaves none"),
        ("model.groups.group_detr=3", "model.name={name} has no groups of further queries"),
    ],
)
def test_settings_that_rtdetr_does_not_have(name: str, setting: str, said: str) -> None:
    settings = [*SMALL, f"model.name={name}", "model.backbone.strides=[8,16,32]", "loss.classification=focal", setting]
    with pytest.raises(InputError, match=said.format(name=name)):
        build_model(load_config(None, settings), num_classes=5)


def test_the_mask_head_of_rfdetr() -> None:
    """By default its own, over the maps of the detector alone; or DETR's, over finer ones too."""
    rfdetr = ["model.name=rfdetr", "model.encoder_layers=0", "model.rfdetr.cross_heads=4", "loss.classification=focal"]
    given = [*SMALL, *rfdetr, "model.masks=true", "model.decoder_layers=3"]
    own = load_config(None, [*given, "model.rfdetr.mask_stride=8", "loss.mask_cells_per_point=9"])
    model = build_model(own, num_classes=5)
    assert isinstance(model.mask_head, ProductMaskHead)
    assert (model.mask_head.stride, len(model.mask_head.blocks), len(model.backbone.channels)) == (8, 3, 1)
    for local in (False, True):
        matcher = build_criterion(own, local=local).matcher
        assert (matcher.mask_cost, matcher.dice_cost, matcher.cells_per_point) == (5.0, 5.0, 9)
        assert matcher.fixed_points == local, "evaluation changes no random numbers of training"
    other = build_model(load_config(None, [*given, "model.rfdetr.mask_head=detr"]), num_classes=5)
    assert isinstance(other.mask_head, MaskHead)
    assert len(other.backbone.channels) == 4
    assert build_model(load_config(None, [*SMALL, *rfdetr]), num_classes=5).mask_head is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.dfine.points=[4,4]"], r"model.dfine.points=\[4, 4\]: .* or one for each of the 3 levels"),
        (["model.dfine.expansion=0.01"], "model.dfine.expansion=0.01 of 32 channels leaves none"),
        (["model.dfine.reg_max=7"], "model.dfine.reg_max=7 must be an even number from 4 on"),
        (["model.dfine.reg_max=2"], "model.dfine.reg_max=2 must be an even number from 4 on"),
        (["model.dfine.eval_layer=2"], "model.dfine.eval_layer=2 must be from 0 to 1"),
        (["model.dfine.layer_scale=0.5"], "model.dfine.layer_scale=0.5 must be 1 or more"),
        (["model.dfine.layer_scale=2", "model.pre_norm=true"], "model.dfine.layer_scale=2.0: batch attention between"),
        (["model.dfine.eval_layer=0", "model.masks=true"], "model.dfine.eval_layer=0: a mask head reads the last"),
        (["model.dfine.encoder_dim=64", "model.masks=true"], "model.dfine.encoder_dim=64 must equal hidden_dim=32"),
        (["model.dfine.attention_levels=[0,1]"], r"model.dfine.attention_levels=\[0, 1\]: expected some of 0 to 2"),
        (["model.position_encoding=learned"], "model.position_encoding must be sine in D-FINE; got 'learned'"),
        (["model.groups.group_detr=3"], "model.name=dfine has no groups of further queries"),
        (["loss.classification=cross_entropy"], "model.name=dfine needs class scores without no-object"),
    ],
)
def test_settings_that_dfine_does_not_have(settings: list[str], said: str) -> None:
    given = [
        "model.name=dfine",
        "model.decoder_layers=2",
        "model.backbone.strides=[8,16,32]",
        "loss.classification=focal",
        *settings,
    ]
    with pytest.raises(InputError, match=said):
        build_model(load_config(None, [*SMALL, *given]), num_classes=5)


@pytest.mark.parametrize(
    ("name", "usual"),
    [("dn_detr", (0.2, 0.4)), *((name, (0.5, 1)) for name in ("dino", "rtdetr", "rtdetrv2", "dfine"))],
)
def test_noise_that_is_not_given_is_that_of_the_detector(name: str, usual: tuple[float, float]) -> None:
    strides = [32] if name == "dn_detr" else [8, 16, 32]
    settings = [*SMALL, f"model.name={name}", f"model.backbone.strides={strides}", "loss.classification=focal"]
    for given, expected in (
        ([], usual),
        (["model.denoising.label_noise=0", "model.denoising.box_noise=0.3"], (0, 0.3)),
    ):
        queries = build_model(load_config(None, [*settings, *given]), num_classes=5).decoder.queries
        noise = getattr(queries, "denoising", queries)
        assert (noise.label_noise, noise.box_noise) == expected


def test_smca_warns_of_cells_of_another_size(caplog: pytest.LogCaptureFixture) -> None:
    settings = [*SMALL, "model.name=smca", "model.backbone.strides=[16]"]
    build_model(load_config(None, settings), num_classes=5)
    assert "model.smca.stride=32, but a cell of the feature map has 16 pixels" in caplog.text
    caplog.clear()
    build_model(load_config(None, [*settings, "model.smca.stride=16"]), num_classes=5)
    assert not caplog.text


def test_a_detector_declares_its_options_and_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new detector needs no change outside its file: here it reads one setting of SMCA and takes no no-object."""

    @dataclass(frozen=True)
    class Own:
        smooth: float = setting("smca.smooth", 1.0)
        box_noise: float = setting("denoising.box_noise", 0.7)  # null in the config
        fixed: int = 3

    given = []

    @declare(Own, no_object=False)
    def novelty(backbone: nn.Module, channels: Sequence[int], options: Options, own: Own) -> Detector:
        given.append((own, options.strides))
        return detr.build(backbone, channels, options)

    monkeypatch.setitem(DETECTORS, "novelty", novelty)
    settings = [*SMALL, "model.name=novelty", "model.smca.smooth=5", "model.smca.stride=16"]
    with pytest.raises(InputError, match=r"model.name=novelty needs class scores without no-object"):
        build_model(load_config(None, settings), 3)
    build_model(load_config(None, [*settings, "loss.classification=focal"]), 3)
    assert given == [(Own(smooth=5.0), (32,))]
    assert "model.name=novelty does not use model.smca.stride\n" in caplog.text
