"""Half precision: detector under autocast, losses outside, as in the trainer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from detr_bf.assembly import build_groups, build_model
from detr_bf.common.structures import Target
from detr_bf.config import load_config
from detr_bf.detectors import Detector, MaskHead
from detr_bf.engine import build_optimizer
from detr_bf.losses import CrossEntropy, HungarianMatcher, LossReport, SetCriterion
from tests.detectors.tiny import (
    CHANNELS,
    DETECTORS,
    DIM,
    LOGITS,
    TWO_STAGE,
    Averages,
    batch_former,
    images,
    model,
    shaken,
    with_fixed_norms,
)

CRITERION = SetCriterion(CrossEntropy(), HungarianMatcher(CrossEntropy()))
SCALE = 8.0  # of the loss, against underflow in float16

every_detector = pytest.mark.parametrize("name", DETECTORS)
both_halves = pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])


def detector(name: str, *, masks: bool) -> Detector:
    """Build a detector with dropout only in batch attention, and with random weights.

    Initial queries are so similar that rounding would decide which of them are matched.
    """
    settings: dict[str, object] = {"dropout": 0.0, "batch_former": batch_former(dropout=0.5)}
    finer = DETECTORS[name][0] + 1
    if name in TWO_STAGE:  # all tokens, so that rounding cannot change the selection
        with_masks, without = (6, 96) if name == "rfdetr" else (9, 126)  # one level, or three
        settings |= {"num_queries": with_masks if masks else without, "groups": ()}
    if masks:
        settings["mask_head"] = MaskHead(DIM, heads=2, finer_channels=[CHANNELS] * finer, see_boxes=name != "detr")
    module = model(name, **settings)
    if masks:
        module.backbone = Averages(finer + 1)
    generator = torch.Generator().manual_seed(6)  # weights with which rounding decides no match
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        content = getattr(module.decoder.queries, "content", None) if name in TWO_STAGE else None
        if isinstance(content, nn.Embedding):  # the same, so that rounding cannot change the content of a token's query
            content.weight.copy_(content.weight[:1].expand_as(content.weight))
    # Batch norm over the few cells of the coarsest map would enlarge the rounding of bfloat16.
    return with_fixed_norms(module.train())


def targets() -> list[Target]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for number, (count, size) in enumerate(((3, (32, 48)), (2, (16, 24)))):
        centre, extent = (torch.rand(count, 2, generator=generator) for _ in range(2))
        boxes = torch.cat([0.3 + 0.4 * centre, 0.1 + 0.3 * extent], dim=1)
        labels = torch.randint(LOGITS - 1, (count,), generator=generator)
        masks = torch.rand(count, *size, generator=generator) > 0.5
        made.append(Target(number, boxes, labels, size, size, masks=masks))
    return made


def trained(module: nn.Module, precision: torch.dtype) -> tuple[LossReport, Tensor]:
    """Return the losses and all gradients, concatenated."""
    torch.manual_seed(7)
    module.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        outputs = module(images())
    report = CRITERION(outputs, targets())
    (SCALE * report.total).backward()
    content = getattr(module.decoder.queries, "content", None)
    if isinstance(content, nn.Embedding) and torch.equal(content.weight, content.weight[:1].expand_as(content.weight)):
        content.weight.grad = content.weight.grad.sum(0)[None].expand_as(content.weight)  # rows in no fixed order
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
    return report, torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]) / SCALE


@pytest.mark.default_tier("detr", "rtdetr", "dino")
@every_detector
@both_halves
@pytest.mark.parametrize("masks", [False, True])
def test_losses_are_float32_and_gradients_nearly_those_of_float32(
    name: str, precision: torch.dtype, masks: bool
) -> None:
    if name == "smca_multi_scale" and masks and precision == torch.bfloat16:
        pytest.skip("torch on a CPU reads memory nobody wrote in bf16 depthwise convolutions of maps one cell wide")
    torch.manual_seed(0)
    module = detector(name, masks=masks)
    (exact, expected), (report, gradient) = trained(module, torch.float32), trained(module, precision)
    assert ("loss_mask" in report.losses) == masks
    for key, value in report.losses.items():
        assert value.dtype == torch.float32, key
        assert value.isfinite(), key
    assert report.total.item() == pytest.approx(exact.total.item(), rel=0.01)
    assert gradient.isfinite().all()
    assert torch.cosine_similarity(gradient, expected, dim=0) > 0.99
    assert gradient.norm().item() == pytest.approx(expected.norm().item(), rel=0.05)
    assert not torch.equal(gradient, expected), "autocast was on"


@both_halves
def test_batch_attention_runs_in_half_precision(precision: torch.dtype) -> None:
    module = detector("detr", masks=False)
    seen = []
    mixer = module.encoder.batch_former.mixers["shared"].layers[0]
    mixer.self_attn.out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    trained(module, precision)
    assert seen == [precision]


def test_the_optimiser_is_fused_on_a_cpu() -> None:
    settings = ["model.backbone.weights=none", "model.encoder_layers=1", "model.decoder_layers=1"]
    config = load_config(None, [*settings, "batch_former.enabled=true"])
    optimizer = build_optimizer(build_groups(config, build_model(config, num_classes=3)))
    assert len(optimizer.param_groups) == 3
    assert all(group["fused"] for group in optimizer.param_groups)


@both_halves
@pytest.mark.parametrize("name", ["dab_detr", "dn_detr"])
def test_tiny_anchors_do_not_overflow(name: str, precision: torch.dtype) -> None:
    """The wanted size divided by that of such a box is above the largest float16."""
    module = shaken(model(name, dropout=0.0)).train()
    with torch.no_grad():
        module.decoder.queries.anchors.weight[0, 2:] = -14.0
    report, gradients = trained(module, precision)
    assert report.total.isfinite()
    assert gradients.isfinite().all()
