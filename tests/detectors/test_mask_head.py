"""Mask head alone and in every detector, and the training stage of the mask head alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.structures import FeatureMap, Outputs
from detr_bf.detectors import Detector, MaskHead
from detr_bf.detectors.mask_head import AttentionMaps, box_coverage
from tests.detectors.tiny import (
    CHANNELS,
    DETECTORS,
    DIM,
    IMAGES,
    LAYERS,
    QUERIES,
    Averages,
    images,
    model,
    shaken,
    with_fixed_norms,
)

HEADS = 2
PRODUCTS = "rfdetr_products"  # RF-DETR with its own mask head
NAMES = [*DETECTORS, PRODUCTS]

pytestmark = pytest.mark.usefixtures("float64")


def batch_former(**settings: object) -> BatchFormerV2:
    return BatchFormerV2(DIM, layers=[0], num_encoder_layers=LAYERS, heads=2, **settings)


def with_masks(name: str = "detr", **changes: object) -> Detector:
    """Build the detector with a mask head, one of DETR that reads two maps finer than those of the tokens."""
    if name == PRODUCTS:
        return model("rfdetr", masks=True, **changes)
    finer = DETECTORS[name][0] + 1
    head = MaskHead(DIM, heads=HEADS, finer_channels=[CHANNELS] * finer, see_boxes=name != "detr")
    detector = model(name, mask_head=head, **changes)
    detector.backbone = Averages(finer + 1)
    return detector


def test_attention_is_shared_among_all_heads_and_places() -> None:
    torch.manual_seed(0)
    maps = AttentionMaps(DIM, HEADS)
    states, keys = torch.randn(1, 3, DIM), torch.randn(1, 5, DIM)
    padding = torch.tensor([[False, True, False, False, True]])
    found = maps(states, keys, padding)
    query, key = maps.query(states)[0], maps.key(keys)[0]
    for number in range(3):
        powers = {}
        for head in range(HEADS):
            channels = slice(head * DIM // HEADS, (head + 1) * DIM // HEADS)
            for position in (0, 2, 3):
                product = torch.dot(query[number, channels], key[position, channels]) / (DIM / HEADS) ** 0.5
                powers[head, position] = product.exp().item()
        for (head, position), power in powers.items():
            assert found[0, number, head, position].item() == pytest.approx(power / sum(powers.values()), rel=1e-4)
    torch.testing.assert_close(found.sum((2, 3)), torch.ones(1, 3))
    assert not found[..., padding[0]].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_does_not_depend_on_which_others_are_asked_for(name: str) -> None:
    """Compare value and gradients of masks computed only for the matched queries."""
    detector = with_masks(name, batch_former=batch_former(dropout=0.0), dropout=0.0).train()
    row, query = torch.tensor([3, 0, 3]), torch.tensor([1, 4, 0])
    gradients = []
    for choose in (lambda masks: masks.all()[row, query], lambda masks: masks.of(row, query)):
        masks = choose(detector(images()).masks)
        detector.zero_grad()
        masks.square().sum().backward()
        gradients.append([masks, *(p.grad.clone() for p in detector.parameters() if p.grad is not None)])
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_cells_that_a_box_covers() -> None:
    """Coverage relative to the unpadded part; the second image fills half of the map in both directions."""
    padding = torch.zeros(2, 4, 6, dtype=torch.bool)
    padding[1, 2:] = padding[1, :, 3:] = True
    boxes = torch.tensor([[0.5, 0.5, 0.5, 0.5]]).expand(2, 1, 4)  # from a quarter to three quarters
    found = box_coverage(boxes, padding).double()
    down, across = torch.tensor([0.0, 1, 1, 0]), torch.tensor([0, 0.5, 1, 1, 0.5, 0])
    torch.testing.assert_close(found[0, 0], down[:, None] * across)
    down, across = torch.tensor([0.5, 0.5, 0, 0]), torch.tensor([0.25, 1, 0.25, 0, 0, 0])
    torch.testing.assert_close(found[1, 0], down[:, None] * across)


@pytest.mark.parametrize("name", ["detr", PRODUCTS])
def test_no_mask_at_all(name: str) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    masks = with_masks(name)(images()).masks
    assert masks.of(nothing, nothing).shape == (0, 8, 12)


@pytest.mark.parametrize("name", NAMES)
def test_every_detector_has_a_mask_for_every_query(name: str) -> None:
    detector = with_masks(name).train()
    batch = images()
    outputs = detector(batch)
    masks = outputs.masks.all()
    assert masks.shape == (IMAGES, outputs.logits.shape[2], *(side // 4 for side in batch.images.shape[-2:]))
    masks.sum().backward()
    assert all(parameter.grad.any() for parameter in detector.mask_head.parameters() if parameter.dim() > 1)
    encoder = [*detector.encoder.parameters()] or [*detector.tokens.parameters()]
    assert any(parameter.grad is not None for parameter in encoder), "trained jointly"


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_two_streams(name: str) -> None:
    """The first half equals the evaluation outputs; the second half sees the same images."""
    detector = with_masks(name, dropout=0.0, batch_former=batch_former(dropout=0.0))
    batch = images()
    both, clean = with_fixed_norms(detector.train())(batch), detector.eval()(batch)
    assert (both.num_streams, clean.num_streams) == (2, 1)
    first, second = both.masks.all().chunk(2)
    torch.testing.assert_close(first, clean.masks.all(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(second, clean.masks.all())
    for module in detector.modules():
        if isinstance(module, BatchFormerV2):
            module.mode = "duplicate"
    first, second = detector.train()(batch).masks.all().chunk(2)
    torch.testing.assert_close(first, second)


def state(detector: Detector) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in detector.state_dict().items()}


def train_a_little(detector: Detector) -> None:
    """Update all parameters that have a gradient, and the statistics of all modules in training mode."""
    optimizer = torch.optim.AdamW([p for p in detector.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for _ in range(2):
        outputs = detector.train()(images())
        (outputs.masks.all().square().mean() + 0 * outputs.logits.mean()).backward()
        optimizer.step()


class NormalisedAverages(Averages):
    """Backbone with batch-norm statistics that change in training mode."""

    def __init__(self, levels: int) -> None:
        super().__init__(levels)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, images: Tensor, padding_mask: Tensor) -> Sequence[FeatureMap]:
        return super().forward(255 * self.norm(images / 255), padding_mask)


def frozen(*, keep_dropout: bool = False, **changes: object) -> Detector:
    detector = with_masks(**changes)
    detector.backbone = NormalisedAverages(detector.backbone.levels)
    detector.freeze_all_but_masks(keep_dropout=keep_dropout)
    return detector


@pytest.mark.parametrize("name", ["detr", PRODUCTS])
@pytest.mark.parametrize("attends", [False, True])
def test_the_mask_stage_changes_no_tensor_of_the_detector(name: str, attends: bool) -> None:
    detector = frozen(name=name, dropout=0.5, batch_former=batch_former() if attends else None)
    before = state(detector)
    train_a_little(detector)
    changed = {name for name, tensor in state(detector).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.startswith("mask_head.")}


@pytest.mark.parametrize("name", ["detr", "smca_multi_scale"])
def test_the_frozen_detector_has_no_dropout_and_two_streams(name: str) -> None:
    detector = frozen(name=name, dropout=0.5, batch_former=batch_former())
    detector.eval()
    expected = detector(images())
    outputs = detector.train()(images())
    assert outputs.num_streams == 2
    for found, wanted in zip(clean_stream(outputs), clean_stream(expected), strict=True):
        torch.testing.assert_close(found, wanted)
    assert torch.equal(detector(images()).masks.all(), outputs.masks.all()), "batch attention has no dropout either"
    assert detector.eval()(images()).num_streams == 1


def clean_stream(outputs: Outputs) -> tuple[Tensor, Tensor, Tensor]:
    assert outputs.masks is not None
    parts = replace(outputs, num_streams=1)
    return parts.logits[:, :IMAGES], parts.boxes[:, :IMAGES], outputs.masks.all()[:IMAGES]


def test_dropout_can_be_kept_as_the_authors_have_it() -> None:
    detector = frozen(keep_dropout=True, dropout=0.5)
    before = state(detector)
    assert not torch.equal(detector.train()(images()).logits, detector(images()).logits)
    train_a_little(detector)
    changed = {name for name, tensor in state(detector).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.startswith("mask_head.")}, "batch norms stay as they are"


def test_masks_of_products() -> None:
    """Masks of all layers, groups and proposals: computed one by one, by row, and at points."""
    detector = shaken(with_masks(PRODUCTS, dropout=0.0)).train()
    outputs = detector(images())
    assert outputs.proposals is not None
    parts = (outputs, outputs.groups[0][1], outputs.proposals, outputs.proposals.groups[0][1])
    assert [len(part.layer_masks) for part in parts] == [2, 2, 1, 1]
    assert torch.equal(outputs.masks.all(), outputs.layer_masks[-1].all())
    for masks in (masks for part in parts for masks in part.layer_masks):
        every = masks.all()
        assert every.shape == (IMAGES, QUERIES, 8, 12)
        products = torch.einsum("rqc,rchw->rqhw", masks.vectors, masks.maps) + detector.mask_head.bias
        torch.testing.assert_close(every, products)
        query = torch.tensor([3, 0, 2])
        torch.testing.assert_close(masks.by_row(query, [1, 2]), every[[0, 1, 1], query])
        cells = torch.cartesian_prod(torch.arange(8), torch.arange(12))
        centres = (cells.flip(1) + 0.5) / torch.tensor([12, 8])
        torch.testing.assert_close(masks.at(centres).unflatten(2, (8, 12)), every)
        torch.testing.assert_close(masks.at(torch.tensor([[0.0, 1.0]]))[..., 0], every[..., -1, 0])
        between = torch.tensor([[1 / 12, 1 / 8]])  # the corner of four cells
        torch.testing.assert_close(masks.at(between)[..., 0], every[..., :2, :2].mean((2, 3)))
    assert detector.eval()(images()).groups == ()


def test_the_size_of_the_masks_of_products() -> None:
    detector = model("rfdetr", masks=True)
    detector.mask_head.stride = 8
    assert detector(images()).masks.all().shape[2:] == (4, 6)


def test_products_without_auxiliary_losses() -> None:
    """All blocks are used, and only the last layer has masks."""
    detectors = [shaken(model("rfdetr", masks=True, dropout=0.0, aux_loss=aux)).train() for aux in (True, False)]
    both, last = (detector(images()) for detector in detectors)
    assert len(last.layer_masks) == 1
    torch.testing.assert_close(last.masks.all(), both.masks.all())
