"""BatchFormerV2 between the blocks of a plain vision transformer, against forward passes written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detr_bf.assembly import build_criterion, build_model
from detr_bf.assembly.training import build_groups
from detr_bf.backbones import Backbone, VitOptions, build_backbone
from detr_bf.batchformer import BatchFormerV2
from detr_bf.batchformer.inspection import recorded, statistics
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch
from detr_bf.config import DetectionConfig, load_config
from detr_bf.detectors import Detector
from detr_bf.engine.step import TrainingStep
from tests.detectors import tiny
from tests.processes import run_together

NAME = "vit_small_patch14_reg4_dinov2"  # class token and four registers
DEPTH, DIM, HEADS, SIDE = 4, 16, 2, 8
OPTIONS = {"patch_size": SIDE, "embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS, "img_size": 4 * SIDE}
WHOLE: dict[str, Any] = {}
WINDOWS = {"window": 2, "global_blocks": [2]}
MAPS = {"maps": [0, 2, 3], "windows": 2, "global_blocks": [2]}  # RF-DETR's
KINDS = pytest.mark.parametrize("vit", [WHOLE, WINDOWS, MAPS], ids=["whole", "windows", "maps"])


def build(vit: dict[str, Any], **changes: Any) -> Backbone:
    """Build a backbone in training, with random weights."""
    torch.manual_seed(0)
    backbone = build_backbone(
        f"timm:{NAME}",
        weights="none",
        strides=[SIDE],
        dilation=False,
        frozen_stages=0,
        frozen_norm=False,
        vit=VitOptions(**{"options": OPTIONS, **vit}),
    )
    settings = {"layers": [1, 2], "num_encoder_layers": DEPTH, "place": "backbone", "dropout": 0.0, "heads": HEADS}
    backbone.batch_former = BatchFormerV2(DIM, **(settings | changes))
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.3)
    return backbone.train()


def images(*sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return random images in one padded batch, and its mask."""
    torch.manual_seed(1)
    height, width = (max(size[side] for size in sizes) for side in (0, 1))
    mask = torch.ones(len(sizes), height, width, dtype=torch.bool)
    for row, (rows, columns) in enumerate(sizes):
        mask[row, :rows, :columns] = False
    return torch.randint(0, 256, (len(sizes), 3, height, width), dtype=torch.uint8), mask


def maps_of(backbone: Backbone, sizes: tuple[tuple[int, int], ...]) -> list[Tensor]:
    return [each.tensor for each in backbone(*images(*sizes))]


SQUARES = ((4 * SIDE, 4 * SIDE),) * 3  # of the size of the positions, without padding


def written_out(backbone: Backbone, vit: dict[str, Any]) -> list[Tensor]:
    """Maps of three images without padding; positions attend to each other image by image in a sequence of their own.

    Tokens are kept as (rows, windows, tokens of a window, C).
    """
    former, body = backbone.batch_former, backbone.body.vit
    pixels = (images(*SQUARES)[0] - backbone.mean) / backbone.std
    grid = body.patch_embed.proj(pixels).permute(0, 2, 3, 1)  # (3, 4, 4, C)
    grid = grid + body.pos_embed.view(4, 4, DIM)
    cells = grid.view(3, 2, 2, 2, 2, DIM).transpose(2, 3).reshape(3, 4, 4, DIM)  # windows of 2 x 2 patches
    prefix = grid.new_zeros(0, DIM) if vit is WINDOWS else torch.cat([body.cls_token, body.reg_token], dim=1)[0]
    if vit is WHOLE:  # one window
        cells = cells.flatten(1, 2)[:, None]
    x = torch.cat([prefix.expand(*cells.shape[:2], -1, -1), cells], dim=2)
    found = []
    for index, block in enumerate(body.blocks):
        if index in former.insertions and former.position == "before":
            x = mixed(x, former, index)
        first = 0 if index in (0, 1, 3) and vit is not WHOLE else 1  # a block in windows, or over the whole image
        x = block(x.flatten(first, first + 1)).view_as(x)
        if index in former.insertions and former.position == "after":
            x = mixed(x, former, index)
        if index in (vit["maps"] if vit is MAPS else [DEPTH - 1]):
            patches = body.norm(x)[:, :, len(prefix) :].flatten(1, 2).view(len(x), 2, 2, 2, 2, DIM)
            found.append(patches.transpose(2, 3).reshape(len(x), 4, 4, DIM).permute(0, 3, 1, 2))
    return [each if len(each) == len(x) else torch.cat([each, each]) for each in found]


def mixed(x: Tensor, former: BatchFormerV2, layer: int) -> Tensor:
    """Insert batch attention: the last three rows, one sequence for each window and token."""
    mixer, second = former.mixers[str(layer)], x[-3:]
    parts = [[mixer(second[:, v, s][:, None], None, None)[:, 0] for s in range(x.shape[2])] for v in range(x.shape[1])]
    return torch.cat([x[:3], torch.stack([torch.stack(part, dim=1) for part in parts], dim=1)])


@KINDS
@pytest.mark.parametrize("position", ["before", "after"])
def test_a_written_out_forward_pass(vit: dict[str, Any], position: str) -> None:
    backbone = build(vit, position=position, shared=False)
    with torch.no_grad():
        found, expected = maps_of(backbone, SQUARES), written_out(backbone, vit)
    assert [len(each) for each in found] == [6] * (3 if vit is MAPS else 1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(*found[-1].chunk(2), atol=1e-2)


@KINDS
def test_the_clean_stream_and_evaluation_are_those_without(vit: dict[str, Any]) -> None:
    """An image of the clean stream does not depend on its neighbours either, without windows that follow the batch."""
    backbone, sizes = build(vit), ((32, 32), (20, 28), (32, 9))
    with torch.no_grad():
        found, evaluated = maps_of(backbone, sizes), maps_of(backbone.eval(), sizes)
        former, backbone.batch_former = backbone.batch_former, None
        plain = maps_of(backbone, sizes)
        backbone.batch_former = former
        pixels, mask = images(*sizes)
        beside = backbone.train()(pixels[[1, 0, 2]], mask[[1, 0, 2]])
    for both, whole, alone, other in zip(found, evaluated, plain, beside, strict=True):
        assert torch.equal(whole, alone)
        torch.testing.assert_close(both[:3], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.tensor[[1, 0, 2, 4, 3, 5]], both, rtol=1e-4, atol=1e-5)
        assert other.num_streams == 2
        assert torch.equal(other.padding_mask[:3], other.padding_mask[3:])


@KINDS
@pytest.mark.parametrize("mask_padding", [False, True])
def test_padding_of_other_images(vit: dict[str, Any], mask_padding: bool) -> None:
    """The second stream sees it, as in the authors' code, unless ``mask_padding`` is set."""
    backbone = build(vit, layers=[DEPTH - 1], mask_padding=mask_padding)
    former, found = backbone.batch_former, []
    for value in (0.0, 5.0):  # of the tokens in the padding

        def change(_: nn.Module, args: tuple[Any, ...], value: float = value) -> tuple[Any, ...]:
            padding = args[0].per_sample["padding_mask"][..., None]
            return (args[0].with_tokens(args[0].tokens.masked_fill(padding, value)),)

        with former.register_forward_pre_hook(change), torch.no_grad():
            found.append(maps_of(backbone, ((32, 32), (32, 16), (32, 32)))[-1])
    same = torch.isclose(*found, atol=1e-5).all(1)  # (6, 4, 4)
    assert same[:3].all()
    assert same[3:].all() == mask_padding


@KINDS
def test_the_most_similar_image_is_chosen_by_its_patches(vit: dict[str, Any]) -> None:
    """Two equal images attend to each other, whatever is beside them."""
    backbone = build(vit, neighbours=1)
    pixels, mask = images((32, 32), (20, 28))
    with torch.no_grad():
        three, two = (backbone(pixels[rows], mask[rows])[-1].tensor for rows in ([0, 1, 0], [0, 0]))
    torch.testing.assert_close(three[[3, 5]], two[2:], rtol=1e-4, atol=1e-5)


def test_a_control_and_single_streams() -> None:
    for vit in (WHOLE, WINDOWS, MAPS):
        for mode, rows in (("duplicate", 6), ("self_only", 6), ("single_stream", 3), ("single_stream_inference", 3)):
            backbone = build(vit, mode=mode)
            with torch.no_grad():
                trained, evaluated = maps_of(backbone, SQUARES)[-1], maps_of(backbone.eval(), SQUARES)[-1]
            assert len(trained) == rows
            assert len(evaluated) == 3
            if mode == "duplicate":
                assert torch.equal(*trained.chunk(2))
            elif mode == "self_only":
                assert not torch.allclose(*trained.chunk(2), atol=1e-2)
            assert torch.allclose(trained[:3], evaluated, atol=1e-5) == (mode != "single_stream")


def gathered(sizes: tuple[int, ...], vit: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the second stream of this rank's images, and the gradient of a weight of the mixer."""
    backbone = build(vit, gather=True).double()
    pixels, mask = images(*[(32, 32)] * sum(sizes))
    start = sum(sizes[: distributed.rank()])
    own = slice(start, start + sizes[distributed.rank()])
    second = backbone(pixels[own], mask[own])[-1].tensor.chunk(2)[1]
    second.sin().sum().backward()
    return second.detach(), backbone.batch_former.mixers["shared"].layers[0].linear1.weight.grad


@pytest.mark.default_tier("maps")
@KINDS
def test_two_ranks_equal_one_process_with_all_images(vit: dict[str, Any]) -> None:
    second, gradient = gathered((3,), vit)
    parts = run_together(2, gathered, (2, 1), vit)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), second, rtol=0, atol=1e-9)
    torch.testing.assert_close(sum(part[1] for part in parts), gradient, rtol=0, atol=1e-8)


@KINDS
def test_the_grid_of_the_tokens_is_stated(vit: dict[str, Any]) -> None:
    """Processes with images of other sizes align their tokens by it."""
    backbone, seen = build(vit), []
    backbone.batch_former.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    maps_of(backbone, ((32, 40), (16, 9)))
    for batch in seen:
        assert sum(height * width for height, width in batch.static["spatial_shapes"]) == batch.tokens.shape[1]
        assert batch.per_sample["padding_mask"].shape == batch.tokens.shape[:2]
    assert seen


@pytest.mark.full
@pytest.mark.parametrize("vit", [WHOLE, MAPS], ids=["whole", "maps"])  # windows compile for a minute
def test_a_compiled_backbone_computes_the_same(vit: dict[str, Any]) -> None:
    backbone = build(vit)
    with torch.no_grad():
        expected = maps_of(backbone, ((32, 32), (20, 28)))
        backbone.compile(backend="eager", dynamic=True)
        for found, each in zip(maps_of(backbone, ((32, 32), (20, 28))), expected, strict=True):
            torch.testing.assert_close(found, each)


def test_attention_of_the_blocks_is_logged() -> None:
    backbone = build(MAPS)
    with recorded(backbone.batch_former, 8) as recording, torch.no_grad():
        maps_of(backbone, ((32, 32), (20, 28), (32, 9)))
    found = statistics(recording)
    assert {"attention/1/others", "attention/2/entropy", "stream_distance/1"} <= found.keys()
    assert all(value.isfinite() for value in found.values())


SETTINGS = (
    *("model.hidden_dim=32", "model.heads=2", "model.decoder_layers=2", "model.feedforward_dim=32"),
    *("model.num_queries=5", "model.dropout=0", "model.encoder_layers=1", "loss.classification=focal"),
    "model.backbone={name: 'timm:vit_tiny_patch16_224', weights: none, strides: [8], frozen_stages: 0}",
    f"model.backbone.vit.options={{patch_size: {SIDE}, embed_dim: {DIM}, depth: {DEPTH}, num_heads: 2, img_size: 32}}",
    "batch_former={enabled: true, at: backbone, layers: [1], dropout: 0.1}",
)
RFDETR = (
    *("model.name=rfdetr", "model.encoder_layers=0", "model.rfdetr.cross_heads=4", "model.groups.group_detr=2"),
    *("model.backbone.vit.maps=[0,2,3]", "model.backbone.vit.windows=2", "model.backbone.vit.global_blocks=[2]"),
)


def config_of(*changes: str) -> DetectionConfig:
    return load_config(None, [*SETTINGS, *changes])


def built(*changes: str) -> Detector:
    torch.manual_seed(0)
    return build_model(config_of(*changes), tiny.LOGITS)


def batch() -> Batch:
    return tiny.images()


CONTEXT = "plugins.context_broadcasting={enabled: true, where: backbone, layers: all}"


@pytest.mark.parametrize(
    "changes", [(), RFDETR, ("model.name=deformable_detr", CONTEXT)], ids=["detr", "rfdetr", "context"]
)
def test_a_detector_learns(changes: tuple[str, ...]) -> None:
    """Train on two images; both streams get better, and batch attention gets other weights."""
    config, detector = config_of(*changes), built(*changes)
    step = TrainingStep(detector.train(), build_criterion(config), torch.device("cpu"), torch.float32)
    optimizer = torch.optim.AdamW(detector.parameters(), lr=2e-3, weight_decay=0)
    before = detector.backbone.batch_former.mixers["shared"].layers[0].linear1.weight.clone()
    streams = []
    for _ in range(25):
        report = step(batch())
        optimizer.zero_grad()
        report.total.backward()
        optimizer.step()
        streams.append([float(report.logged[f"stream/{name}"]) for name in ("clean", "batchformer")])
    for first, last in zip(streams[0], streams[-1], strict=True):
        assert last < 0.8 * first
    assert not torch.equal(before, detector.backbone.batch_former.mixers["shared"].layers[0].linear1.weight)


def test_norms_of_the_projector_count_the_clean_stream() -> None:
    """LW-DETR: patches alone, maps before and after the fork, batch norms between backbone and decoder."""
    lwdetr = (*RFDETR, "model.rfdetr.layer_norm=false", "model.backbone.vit.class_token=false")
    module, plain = built(*lwdetr), built(*lwdetr, "batch_former.enabled=false")
    plain.load_state_dict({key: x for key, x in module.state_dict().items() if "batch_former" not in key})
    both, alone = module.train()(batch()), plain.train()(batch())
    assert (both.num_streams, alone.num_streams) == (2, 1)
    clean, second = both.logits.chunk(2, dim=1)
    torch.testing.assert_close(clean, alone.logits)
    assert not torch.allclose(second, clean)
    found = dict(module.named_buffers())
    assert any(key.startswith("tokens.") and value.any() for key, value in found.items())
    for key, value in plain.named_buffers():
        torch.testing.assert_close(found[key], value, msg=key)


def test_context_broadcasting_is_that_of_each_stream() -> None:
    """The clean stream is that of a detector with Context Broadcasting alone."""
    both, alone = built(CONTEXT).train(), built(CONTEXT, "batch_former.enabled=false").train()
    alone.load_state_dict(both.state_dict(), strict=False)
    with torch.no_grad():
        found, expected = (each.backbone(batch().images, batch().padding_mask)[0].tensor for each in (both, alone))
    torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-4, atol=1e-5)


def test_groups_of_parameters_and_frozen_blocks() -> None:
    """Batch attention has its own rate, and learns through frozen blocks behind it."""
    changes = ("batch_former.lr_factor=0.5", "batch_former.weight_decay=0.25", "model.backbone.frozen_stages=5")
    config, detector = config_of(*changes), built(*changes)
    (group,) = [each for each in build_groups(config, detector) if each["name"] == "batch_former"]
    own = list(detector.backbone.batch_former.parameters())
    assert {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in own}
    assert (group["lr"], group["weight_decay"]) == (float(config.optimizer.lr) / 2, 0.25)
    assert not any(parameter.requires_grad for parameter in detector.backbone.body.vit.blocks.parameters())
    detector.train()(batch()).logits.square().sum().backward()
    assert all(parameter.grad.any() for parameter in own)


def test_until_epoch_ends_it() -> None:
    changes = ("batch_former.until_epoch=2",)
    step = TrainingStep(
        built(*changes).train(), build_criterion(config_of(*changes)), torch.device("cpu"), torch.float32
    )
    for epoch, streams in ((1, True), (2, False)):
        step.begin_epoch(epoch)
        assert ("stream/clean" in step(batch()).logged) == streams


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([f"batch_former.layers=[{DEPTH}]"], rf"batch_former\.layers=\[4\]: the feature maps come from {DEPTH} blocks"),
        (["model.backbone.vit.maps=[1]", "batch_former.layers=[2]"], "come from 2 blocks of the backbone"),
        (
            ["batch_former.references=true", "data.reference=own"],
            r"batch_former\.references=true works in the encoder alone",
        ),
        (["batch_former.heads=3"], r"batch_former\.heads=3 must divide the width 16"),
        (["batch_former.layers=[]"], r"batch_former\.layers=\[\]"),
    ],
)
def test_user_mistakes(changes: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        built(*changes)


def test_another_backbone_is_refused() -> None:
    settings = ["model.backbone={name: resnet18, weights: none}", "batch_former={enabled: true, at: backbone}"]
    message = r"batch_former\.at=backbone works between .* vision transformer, .* this backbone \(ResNetBody\) is none"
    with pytest.raises(InputError, match=message):
        build_model(load_config(None, settings), tiny.LOGITS)


def test_a_state_dict_round_trip(tmp_path: Path) -> None:
    """Also into a detector without batch attention, which starts alike, and whose evaluation is the same to the bit."""
    trained = built(*RFDETR)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    plain = built(*RFDETR, "batch_former.enabled=false")
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())
    torch.manual_seed(3)
    again = build_model(config_of(*RFDETR), tiny.LOGITS)
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    again.load_state_dict(state)
    found = plain.load_state_dict(state, strict=False)
    assert all(key.startswith("backbone.batch_former.") for key in found.unexpected_keys)
    assert found.missing_keys == []
    with torch.no_grad():
        outputs = [each.eval()(batch()) for each in (trained, again, plain)]
    for other in outputs[1:]:
        assert torch.equal(other.logits, outputs[0].logits)
        assert torch.equal(other.boxes, outputs[0].boxes)
