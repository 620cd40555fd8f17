"""RT-DETR, and the hybrid encoder of D-FINE: batch norms per stream, batch attention, denoising, refused settings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from detr_bf.acceleration.model import accelerate
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, FeatureMap, Target
from detr_bf.detectors import Detector, MaskHead, Options
from detr_bf.detectors.denoising import ContrastiveDenoising
from detr_bf.detectors.hybrid_encoder import CheckedNorm, NormedConvolution, RepVggBlock, cell_position
from detr_bf.detectors.smca_multi_scale import as_maps, as_tokens
from detr_bf.losses import HungarianMatcher, SetCriterion, Varifocal
from detr_bf.transformer import without_updating_statistics
from tests.detectors.tiny import DETECTORS, DIM, IMAGES, LOGITS, QUERIES, Averages, batch_former, images, model, shaken

both_versions = pytest.mark.parametrize("name", ["rtdetr", "rtdetrv2"])
every_hybrid = pytest.mark.parametrize("name", ["rtdetr", "rtdetrv2", "dfine"])
FUSED = 2  # index of the place after both encoder layers


def forked(name: str, *layers: int) -> Detector:
    former = batch_former(layers=list(layers), num_encoder_layers=FUSED + 1, dropout=0.0)
    return shaken(model(name, dropout=0.0, batch_former=former))


def plain_copy(name: str, other: Detector) -> Detector:
    """Build the detector without batch attention, with the other's weights and statistics."""
    copy = model(name, dropout=0.0)
    state = {key: x for key, x in other.state_dict().items() if "batch_former" not in key}
    copy.load_state_dict(state)
    return copy


def without_targets() -> Batch:
    return replace(images(), targets=())


@every_hybrid
@pytest.mark.parametrize("layers", [(0,), (1,), (FUSED,), (0, FUSED)])
def test_second_stream_does_not_change_the_first(name: str, layers: tuple[int, ...]) -> None:
    """The clean stream and, bit for bit, all running statistics are those of a step without batch attention."""
    module = forked(name, *layers)
    plain = plain_copy(name, module).train()
    before = {key: x.clone() for key, x in module.named_buffers()}
    both, clean = module.train()(without_targets()), plain(without_targets())
    assert (both.num_streams, clean.num_streams) == (2, 1)
    torch.testing.assert_close(both.logits[:, :IMAGES], clean.logits)  # the decoder runs on twice the rows
    torch.testing.assert_close(both.boxes[:, :IMAGES], clean.boxes)
    assert not torch.allclose(both.logits[:, IMAGES:], clean.logits)
    after, expected = dict(module.named_buffers()), dict(plain.named_buffers())
    changed = [key for key in expected if not torch.equal(after[key], before[key])]
    assert len(changed) == sum(key.endswith(("running_mean", "running_var", "tracked")) for key in expected) > 0
    for key, value in expected.items():
        assert torch.equal(after[key], value), key


@pytest.mark.parametrize("name", ["rtdetr", "dfine"])
def test_each_stream_is_normalised_by_itself(name: str) -> None:
    """Compare the second stream behind the fork with the convolutions run on it alone, in training mode."""
    module, batch = forked(name, 0).train(), without_targets()
    tokens = module.tokens(module.backbone(batch.images, batch.padding_mask), batch.padding_mask)
    hybrid, shapes = module.encoder, tokens.static["spatial_shapes"]
    memory = hybrid(tokens)
    second = hybrid.encoder(hybrid._level(tokens, 2)).tokens[IMAGES:]
    *finer, _ = as_maps(tokens.tokens, shapes)
    fused = hybrid.fusion([*finer, *as_maps(second, shapes[-1:])])
    alone = as_tokens([layer(x) for layer, x in zip(hybrid.projections, fused, strict=True)])
    torch.testing.assert_close(memory.tokens[IMAGES:], alone)


def test_statistics_are_tracked_again_after_an_error() -> None:
    norm = nn.BatchNorm2d(3).train()
    with pytest.raises(RuntimeError), without_updating_statistics(norm):
        norm(torch.randn(2, 4, 4, 4))  # of another number of channels
    with without_updating_statistics(norm):
        norm(torch.randn(2, 3, 4, 4))
    assert not norm.running_mean.any()
    norm(torch.randn(2, 3, 4, 4))
    assert norm.running_mean.any()


def objects(*counts: int, classes: int = LOGITS) -> tuple[Target, ...]:
    """Return targets with so many objects each."""
    generator = torch.Generator().manual_seed(4)
    boxes = (torch.rand(count, 4, generator=generator) * 0.3 + 0.2 for count in counts)
    return tuple(
        Target(image, box, torch.randint(classes, (len(box),), generator=generator), (16, 24), (16, 24))
        for image, box in enumerate(boxes)
    )


@both_versions
@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 3), (2 * QUERIES, 1)])
def test_denoising_of_any_number_of_objects(name: str, counts: tuple[int, int]) -> None:
    """Every part gets a gradient in every batch, as ranks with different objects need; both streams have one noise."""
    module = forked(name, 0).train()
    batch = replace(images(), targets=objects(*counts))
    outputs = module(batch)
    ((group, denoised),) = outputs.groups
    dummies = name == "rtdetrv2" and not any(counts)
    assert group.size == 2 * group.parts * max(*counts, int(dummies))
    assert torch.equal(*group.assigned.chunk(2))
    assert denoised.logits.shape[1:3] == (2 * IMAGES, group.size)
    report = SetCriterion(Varifocal(), HungarianMatcher(Varifocal(), 2))(outputs, batch.targets)
    assert report.total.isfinite()
    assert (report.losses["loss_ce_dn"] != 0) == (any(counts) or dummies)
    assert (report.losses["loss_bbox_dn"] != 0) == any(counts)
    report.total.backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None, key


@pytest.mark.parametrize("classes", [1, 1000])
def test_denoising_of_one_class_and_of_a_thousand(classes: int) -> None:
    module = model("rtdetr", num_logits=classes).train()
    batch = replace(images(), targets=objects(3, 2, classes=classes))
    outputs = module(batch)
    assert SetCriterion(Varifocal(), HungarianMatcher(Varifocal(), 2))(outputs, batch.targets).total.isfinite()
    assert outputs.groups[0][1].logits.shape[-1] == classes


def test_denoising_can_be_switched_off() -> None:
    module = (
        DETECTORS["rtdetr"].make(Averages(3), [3] * 3, options(), denoising=ContrastiveDenoising(queries=0)).train()
    )
    assert module(images()).groups == ()


@every_hybrid
@pytest.mark.parametrize("keep_dropout", [False, True])
def test_the_mask_stage_changes_no_statistics_and_denoises_nothing(name: str, keep_dropout: bool) -> None:
    module = model(name, mask_head=MaskHead(DIM, heads=2, finer_channels=[3] * 2))
    module.freeze_all_but_masks(keep_dropout=keep_dropout)
    before = {key: value.clone() for key, value in module.named_buffers()}
    outputs = module.train()(images())
    assert outputs.groups == ()
    assert all(torch.equal(value, before[key]) for key, value in module.named_buffers())
    assert module.decoder.layers[0].training == keep_dropout


@pytest.mark.parametrize("keep_dropout", [False, True])
@pytest.mark.parametrize("name", ["dn_detr", "group_detr", "h_deformable_detr"])
def test_a_frozen_decoder_has_no_further_queries(name: str, keep_dropout: bool) -> None:
    module = model(name)
    module.freeze_all_but_masks(keep_dropout=keep_dropout)
    assert module.train()(images()).groups == ()


@pytest.mark.parametrize(("height", "width"), [(3, 3), (2, 5)])
def test_positions_against_a_loop(height: int, width: int) -> None:
    found = cell_position(height, width, 8, temperature=100.0)
    for row in range(height):
        for column in range(width):
            parts = [(f(number), f(number / 10)) for number in (row, column) for f in (math.sin, math.cos)]
            expected = torch.tensor([x for part in parts for x in part])
            torch.testing.assert_close(found[row * width + column], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_encoding": "learned"}, "must be sine in RT-DETR; got 'learned'"),
        ({"hidden_dim": 34}, "hidden_dim=34 of the encoder must be divisible by 4"),
    ],
)
def test_wrong_settings_of_rtdetr_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model("rtdetr", **changes)


def test_wrong_widths_and_points_are_refused() -> None:
    make = partial(DETECTORS["rtdetrv2"].make, Averages(3), [3] * 3)
    with pytest.raises(InputError, match="encoder_dim=64 must equal hidden_dim=32 with a mask head"):
        make(options(mask_head=MaskHead(DIM, heads=2, finer_channels=[3])), encoder_dim=64)
    with pytest.raises(InputError, match="one for each of the 3 levels"):
        make(options(), points=[4, 4])


def test_one_cell_in_training_is_refused() -> None:
    batch = Batch(torch.zeros(1, 3, 16, 16, dtype=torch.uint8), torch.zeros(1, 16, 16, dtype=torch.bool))
    module = model("rtdetr")
    assert module.eval()(batch).boxes.isfinite().all()
    with pytest.raises(InputError, match="one image of one cell"):
        module.train()(batch)


def options(**changes: object) -> Options:
    return Options(num_logits=LOGITS, hidden_dim=DIM, heads=2, num_queries=QUERIES, encoder_layers=1, **changes)


def trained(module: nn.Module, x: Tensor) -> None:
    """Run the forward pass in training, which changes the statistics of the norms."""
    module.train()(x + 1)


def stepped(module: nn.Module, x: Tensor) -> None:
    """Take a step of the fused optimizer of our training; torch counts no change of the parameters then."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    module(x).square().mean().backward()
    optimizer.step()


def added(module: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)


def assigned(module: nn.Module, x: Tensor) -> None:
    """Replace the parameters twice: the address of the first tensors may be used again."""
    for factor in (1.0, 0.7):
        for parameter in module.parameters():
            parameter.data = parameter.data * factor


@pytest.mark.parametrize("change", [trained, stepped, added, assigned])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "block",
    [
        partial(RepVggBlock, 6),
        partial(NormedConvolution, 6, 4),
        partial(NormedConvolution, 6, 4, 3, 2, activation=nn.SiLU()),
        partial(NormedConvolution, 6, 4, 3, 2, activation=nn.GELU()),
    ],
)
def test_norms_are_folded_in_inference_and_follow_every_change(
    block: Callable[[], nn.Module], inference: bool, change: Callable[[nn.Module, Tensor], None]
) -> None:
    torch.manual_seed(0)
    module, x = accelerate(block()).eval(), torch.randn(2, 6, 9, 7)
    first = next(part for part in module.modules() if isinstance(part, nn.Conv2d))
    context = torch.inference_mode if inference else torch.no_grad
    for _ in range(3):
        expected = module.eval()(x)  # with gradients, not folded
        for _ in range(2):  # the second time with the kept weights
            with context():
                assert torch.allclose(module(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert first._conv_forward.kept is not None
        assert copy.deepcopy(first)._conv_forward.kept is None
        change(module, x)
        with context():
            found = module.eval()(x)
        assert not torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_norms_without_running_statistics_are_not_folded() -> None:
    module = NormedConvolution(6, 4)
    module.norm = nn.BatchNorm2d(4, track_running_stats=False)
    accelerate(module)
    x = torch.randn(2, 6, 9, 7)
    with torch.no_grad():
        assert torch.equal(module.eval()(x), module.norm(module.convolution(x)))


@every_hybrid
def test_one_image_gets_the_gradients_of_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with batch norms written out, in float64; torch's backward pass depends on strides for one image."""
    module = shaken(model(name, dropout=0.0)).double().train()
    levels = [
        FeatureMap(torch.rand(1, *each.tensor.shape[1:], dtype=torch.float64), each.padding_mask[:1])
        for each in module.backbone(images().images, images().padding_mask)
    ]
    padding = images().padding_mask[:1]

    def gradients() -> list[Tensor]:
        outputs = module.detect(levels, padding)
        return torch.autograd.grad(outputs.logits.square().sum() + outputs.boxes.sum(), trained, allow_unused=True)

    trained = [parameter for part in (module.encoder, module.tokens) for parameter in part.parameters()]
    found = gradients()
    monkeypatch.setattr(CheckedNorm, "forward", normed)
    for one, other in zip(found, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def normed(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Batch norm in training, by its formula."""
    centred = x - x.mean((0, 2, 3), keepdim=True)
    scale = norm.weight[:, None, None] / (centred.square().mean((0, 2, 3), keepdim=True) + norm.eps).sqrt()
    return centred * scale + norm.bias[:, None, None]
