"""DiversePatch's losses against loops and in the cases where they are known."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.vit import add_batchformer_v2, add_diverse_patch, num_streams, patch_cutmix
from detr_bf.vit.diverse_patch import contrastive_loss, cosine_loss, mixing_loss
from tests.vit import tiny

ROWS, PATCHES, DIM, CLASSES = 2, 6, 4, 5


def patches(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, PATCHES, DIM, generator=generator, dtype=torch.float64)


def test_cosine_as_a_loop_over_pairs() -> None:
    h = patches()
    values = [
        abs(float(a @ b) / float(a.norm() * b.norm()))
        for image in h
        for i, a in enumerate(image)
        for j, b in enumerate(image)
        if i != j
    ]
    assert len(values) == ROWS * PATCHES * (PATCHES - 1)
    assert cosine_loss(h).item() == pytest.approx(sum(values) / len(values), rel=1e-12)


def test_cosine_of_same_orthogonal_and_clustered_patches() -> None:
    same = patches()[:, :1].expand(-1, PATCHES, -1)
    clusters = torch.eye(2, dtype=torch.float64).repeat_interleave(PATCHES // 2, 0)[None]
    assert cosine_loss(same).item() == pytest.approx(1)
    assert cosine_loss(-same * torch.tensor([1, -1] * 3)[:, None]).item() == pytest.approx(1), "the sign does not count"
    assert cosine_loss(torch.eye(PATCHES)[None]).item() == 0
    assert cosine_loss(clusters).item() == pytest.approx((PATCHES / 2 - 1) / (PATCHES - 1))


def test_contrastive_as_a_loop_over_patches() -> None:
    first, last = patches(1), patches()
    values = []
    for h1, hl in zip(first, last, strict=True):
        for i in range(PATCHES):
            others = sum(hl[j] for j in range(PATCHES) if j != i) / (PATCHES - 1)
            values.append(math.log1p(math.exp(float(h1[i] @ (others - hl[i])))))
    assert contrastive_loss(first, last).item() == pytest.approx(sum(values) / len(values), rel=1e-12)


def test_contrastive_of_equal_last_patches_is_ln_2_whatever_the_first() -> None:
    last = patches()[:, :1].expand(-1, PATCHES, -1)
    for scale in (1.0, 100.0):
        assert contrastive_loss(scale * patches(1), last).item() == pytest.approx(math.log(2), abs=1e-12)


def test_contrastive_gives_the_first_layer_no_gradient() -> None:
    first, last = patches(1).requires_grad_(), patches().requires_grad_()
    contrastive_loss(first, last).backward()
    assert first.grad is None
    assert (last.grad != 0).any()


def test_mixing_as_a_loop_over_patches() -> None:
    logits = torch.randn(ROWS, PATCHES, CLASSES, dtype=torch.float64)
    labels = torch.randint(CLASSES, (ROWS, PATCHES))
    values = [
        -math.log(float(logits[r, p, labels[r, p]].exp() / logits[r, p].exp().sum()))
        for r in range(ROWS)
        for p in range(PATCHES)
    ]
    assert mixing_loss(logits, labels).item() == pytest.approx(sum(values) / len(values), rel=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    first, last = patches(1), patches().requires_grad_()
    assert torch.autograd.gradcheck(cosine_loss, (last,))
    assert torch.autograd.gradcheck(lambda last: contrastive_loss(first, last), (last,))
    logits = torch.randn(ROWS, PATCHES, CLASSES, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(CLASSES, (ROWS, PATCHES))
    assert torch.autograd.gradcheck(lambda logits: mixing_loss(logits, labels), (logits,))


@pytest.mark.parametrize("build", [tiny.vit, tiny.deit])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 2.0, 3.0), (1.0, 0.0, 0.0)])
def test_in_a_model_it_reads_the_patches_without_prefix(build: object, weights: tuple[float, ...]) -> None:
    """Against the model taken apart: what enters the first block, what leaves the last norm."""
    model = build()  # type: ignore[operator]
    cosine, contrastive, mixing = weights
    plugin = add_diverse_patch(model, CLASSES, cosine=cosine, contrastive=contrastive, mixing=mixing)
    labels = torch.arange(tiny.IMAGES)[:, None].expand(-1, 16)
    model.train()(tiny.images())
    losses = plugin(labels if mixing else None)
    prefix = model.num_prefix_tokens
    embedded = model._pos_embed(model.patch_embed(tiny.images()))
    first, last = embedded[:, prefix:], model.norm(model.blocks(embedded))[:, prefix:]
    expected = {"cosine": cosine * cosine_loss(last), "contrastive": contrastive * contrastive_loss(first, last)}
    if mixing:
        logits = F.linear(last, plugin.patch_head.weight, plugin.patch_head.bias)
        expected["mixing"] = mixing * mixing_loss(logits, labels)
    assert set(losses) == {name for name, weight in zip(expected, weights, strict=False) if weight}
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected[name])


def test_losses_reach_all_blocks_but_the_contrastive_one_not_the_embedding_directly() -> None:
    model = tiny.vit()
    plugin = add_diverse_patch(model, CLASSES, cosine=0, mixing=0)
    for block in model.blocks:  # with blocks that pass nothing on, only the direct way is left
        block.requires_grad_(False)
        block.register_forward_hook(lambda module, args, output: output.detach().requires_grad_())
    model.train()(tiny.images())
    plugin()["contrastive"].backward()
    assert model.patch_embed.proj.weight.grad is None
    assert model.norm.weight.grad is not None


def test_second_stream_of_batchformer_has_the_same_labels() -> None:
    model = tiny.vit()
    add_batchformer_v2(model, [0], dropout=0.0, mode="duplicate")
    plugin = add_diverse_patch(model, CLASSES)
    labels = torch.randint(CLASSES, (tiny.IMAGES, 16))
    model.train()(tiny.images())
    both = plugin(labels, num_streams(model))
    model.plugins["batchformer_v2"].remove()
    model(tiny.images())
    for name, loss in plugin(labels).items():
        torch.testing.assert_close(both[name], loss)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "got None"),
        (torch.zeros(tiny.IMAGES, 9, dtype=torch.long), r"\(3, 16\)"),
        (torch.full((tiny.IMAGES, 16), CLASSES), "from 0 to 4"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: Tensor | None, message: str) -> None:
    model = tiny.vit()
    plugin = add_diverse_patch(model, CLASSES)
    model.train()(tiny.images())
    with pytest.raises(InputError, match=message):
        plugin(labels)


def test_wrong_number_of_streams_is_refused() -> None:
    model = tiny.vit()
    plugin = add_diverse_patch(model, CLASSES)
    model.train()(tiny.images())
    with pytest.raises(InputError, match="num_streams=2, but 3 images"):
        plugin(torch.zeros(tiny.IMAGES, 16, dtype=torch.long), 2)


def mixed_batch(seed: int, smoothing: float = 0.0) -> tuple[Tensor, Tensor, object]:
    """Images whose pixels all hold their label."""
    labels = torch.tensor([0, 3, 1, 4])
    images = labels.double()[:, None, None, None].expand(-1, 3, 12, 16).clone()
    generator = torch.Generator().manual_seed(seed)
    mix = patch_cutmix(images, labels, patch_size=(3, 4), num_classes=CLASSES, smoothing=smoothing, generator=generator)
    return images, labels, mix


@pytest.mark.parametrize("seed", range(20))
def test_cutmix_keeps_patches_whole_and_counts_what_it_did(seed: int) -> None:
    _, labels, mix = mixed_batch(seed)
    for image, target, patch_labels in zip(mix.images, mix.targets, mix.patch_labels, strict=True):
        assert patch_labels.shape == (16,)
        for patch, label in enumerate(patch_labels.tolist()):
            row, column = divmod(patch, 4)
            assert (image[:, 3 * row : 3 * row + 3, 4 * column : 4 * column + 4] == label).all()
        counts = torch.bincount(patch_labels, minlength=CLASSES) / 16
        torch.testing.assert_close(target, counts)
    foreign = mix.patch_labels != labels[:, None]
    areas = {frozenset(row.nonzero().flatten().tolist()) for row in foreign if row.any()}
    assert len(areas) <= 1, "one rectangle for all"
    for area in areas:
        rows, columns = {p // 4 for p in area}, {p % 4 for p in area}
        assert len(area) == len(rows) * len(columns), "and it is a rectangle"


def test_cutmix_takes_every_share_of_the_image() -> None:
    shares = torch.tensor([float(mixed_batch(seed)[2].targets[0, 0]) for seed in range(300)])
    assert shares.min() < 0.2
    assert shares.max() == 1
    assert 0.55 < shares.mean() < 0.85, "half, and what is clipped, and images paired with themselves"


def test_cutmix_smooths_the_images_targets_only() -> None:
    _, _, sharp = mixed_batch(3)
    _, _, smooth = mixed_batch(3, smoothing=0.1)
    torch.testing.assert_close(smooth.targets, 0.9 * sharp.targets + 0.1 / CLASSES)
    assert torch.equal(smooth.patch_labels, sharp.patch_labels)


def test_cutmix_refuses_patches_that_do_not_fit_and_unknown_labels() -> None:
    images = torch.zeros(2, 3, 12, 16)
    with pytest.raises(InputError, match="do not fill"):
        patch_cutmix(images, torch.tensor([0, 1]), patch_size=(5, 4), num_classes=CLASSES)
    with pytest.raises(InputError, match="from 0 to 4"):
        patch_cutmix(images, torch.tensor([0, 5]), patch_size=(3, 4), num_classes=CLASSES)
