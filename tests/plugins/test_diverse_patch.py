"""DiversePatch's losses compared with loops, and in cases with known results."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.plugins import add_batchformer_v2, add_diverse_patch, num_streams, patch_cutmix
from detr_bf.plugins.diverse_patch import contrastive_loss, cosine_loss, mixing_loss, mixing_patch_size
from tests.plugins import tiny

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
            own = math.exp(float(h1[i] @ hl[i]))
            others = math.exp(float(h1[i] @ (sum(hl[j] for j in range(PATCHES) if j != i) / (PATCHES - 1))))
            values.append(-math.log(own / (own + others)))
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
    """Compare with a model taken apart: patch embeddings, without their positions, and outputs of the last norm."""
    model = build()  # type: ignore[operator]
    cosine, contrastive, mixing = weights
    plugin = add_diverse_patch(model, CLASSES, cosine=cosine, contrastive=contrastive, mixing=mixing)
    labels = torch.arange(tiny.IMAGES)[:, None].expand(-1, 16)
    model.train()(tiny.images())
    losses = plugin(labels if mixing else None)
    prefix = model.num_prefix_tokens
    first = model.patch_embed(tiny.images())
    last = model.norm(model.blocks(model._pos_embed(first)))[:, prefix:]
    expected = {"cosine": cosine * cosine_loss(last), "contrastive": contrastive * contrastive_loss(first, last)}
    if mixing:
        logits = F.linear(last, plugin.patch_head.weight, plugin.patch_head.bias)
        expected["mixing"] = mixing * mixing_loss(logits, labels)
    assert set(losses) == {name for name, weight in zip(expected, weights, strict=False) if weight}
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected[name])


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 3.0), (2.0, 0.0)])
def test_in_swin_it_reads_the_tokens_behind_the_final_norm(weights: tuple[float, float]) -> None:
    """Compare with a model taken apart, and with loops over the 4 x 4 tokens."""
    model = tiny.swin()
    cosine, mixing = weights
    plugin = add_diverse_patch(model, CLASSES, cosine=cosine, contrastive=0, mixing=mixing)
    labels = torch.randint(CLASSES, (tiny.IMAGES, 16), generator=torch.Generator().manual_seed(2))
    model.train()(tiny.images())
    losses = plugin(labels if mixing else None)
    last = model.norm(model.layers(model.patch_embed(tiny.images())))
    assert last.shape == (tiny.IMAGES, 4, 4, 32)
    similar, entropies = [], []
    for image, wanted in zip(last, labels, strict=True):
        tokens = [image[row, column] for row in range(4) for column in range(4)]
        similar += [abs(F.cosine_similarity(a, b, dim=0).item()) for a in tokens for b in tokens if a is not b]
        if plugin.patch_head is not None:
            entropies += [F.cross_entropy(plugin.patch_head(a), y).item() for a, y in zip(tokens, wanted, strict=True)]
    expected = {"cosine": cosine * sum(similar) / len(similar)}
    if mixing:
        expected["mixing"] = mixing * sum(entropies) / len(entropies)
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(expected, rel=1e-10)


def test_swin_learns_from_it_evaluates_as_before_and_is_left_as_it_was() -> None:
    untouched, model = tiny.swin(), tiny.swin()
    plugin = add_diverse_patch(model, CLASSES, contrastive=0)
    assert torch.equal(model(tiny.images()), untouched(tiny.images()))
    assert not plugin._kept, "nothing is kept in evaluation"
    model.train()(tiny.images())
    sum(plugin(torch.zeros(tiny.IMAGES, 16, dtype=torch.long)).values()).backward()
    learning = {name for name, value in model.named_parameters() if value.grad is not None}
    assert {name for name, _ in model.named_parameters()} - learning == {"head.fc.weight", "head.fc.bias"}
    plugin.remove()
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model.eval()(tiny.images()), untouched(tiny.images()))


def test_the_contrastive_loss_is_refused_for_swin() -> None:
    model = tiny.swin()
    with pytest.raises(InputError, match=r"contrastive=1: it compares each patch .* set contrastive=0"):
        add_diverse_patch(model, CLASSES)
    assert not hasattr(model, "plugins")


def test_a_patch_that_mixing_keeps_whole_is_what_a_last_token_is_made_of() -> None:
    """With identity blocks, a token of Swin depends on all pixels of its patch and on no other pixel."""
    model = tiny.swin()
    for stage in model.layers:
        stage.blocks = torch.nn.Identity()
    assert mixing_patch_size(model) == (8, 8)
    images = tiny.images(1).requires_grad_()
    last = model.norm(model.layers(model.patch_embed(images))).flatten(1, 2)
    for patch in range(16):
        (gradient,) = torch.autograd.grad(last[0, patch, 0], images, retain_graph=True)
        row, column = divmod(patch, 4)
        read = torch.zeros(32, 32, dtype=torch.bool)
        read[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = True
        assert torch.equal((gradient != 0).any(1)[0], read)


def test_mixing_keeps_the_patches_of_every_model_whole() -> None:
    with torch.device("meta"):
        swin = timm.create_model("swin_base_patch4_window7_224")
    assert mixing_patch_size(swin) == (32, 32)
    assert mixing_patch_size(tiny.vit()) == (8, 8)
    with pytest.raises(InputError, match=r"got a ResNet, expected timm's VisionTransformer .* or SwinTransformer"):
        mixing_patch_size(timm.create_model("resnet10t"))


@pytest.mark.parametrize(
    ("build", "size"),
    [
        (lambda: tiny.vit(img_size=36), r"\(8, 8\) pixels do not fill images of \(36, 36\)"),
        (
            lambda: SwinTransformer(
                img_size=24, patch_size=2, window_size=3, embed_dim=8, depths=(1,) * 4, num_heads=(2,) * 4
            ),
            r"\(16, 16\) pixels do not fill images of \(24, 24\)",
        ),
    ],
)
def test_images_that_patches_do_not_fill_are_told_before_the_first_step(build: object, size: str) -> None:
    with pytest.raises(InputError, match=size):
        mixing_patch_size(build())  # type: ignore[operator]


def test_models_without_a_norm_of_every_patch_are_refused() -> None:
    for changes in ({"global_pool": "avg"}, {"final_norm": False}):
        model = tiny.vit(**changes)
        with pytest.raises(InputError, match=r"no final norm.* build it with fc_norm=False"):
            add_diverse_patch(model, CLASSES)
        assert not hasattr(model, "plugins")
    add_diverse_patch(tiny.vit(global_pool="avg", fc_norm=False), CLASSES)


def test_a_single_patch_differs_from_no_other() -> None:
    swin = SwinTransformer(img_size=8, patch_size=4, window_size=2, embed_dim=8, depths=(1, 1), num_heads=(2, 2))
    for model in (tiny.vit(patch_size=32), swin):
        with pytest.raises(InputError, match="each image has a single patch"):
            add_diverse_patch(model, CLASSES, contrastive=0)
    model = tiny.vit(dynamic_img_size=True)
    plugin = add_diverse_patch(model, CLASSES, mixing=0)
    model.train()(tiny.images()[..., :8, :8])
    with pytest.raises(InputError, match="each image has a single patch"):
        plugin()
    with pytest.raises(InputError, match="each image has a single patch"):
        contrastive_loss(patches()[:, :1], patches()[:, :1])


def test_losses_reach_all_blocks_but_the_contrastive_one_not_the_embedding_directly() -> None:
    model = tiny.vit()
    plugin = add_diverse_patch(model, CLASSES, cosine=0, mixing=0)
    for block in model.blocks:  # without contributions of blocks, only the residual path is left
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
    """Images whose pixels all equal their label."""
    labels = torch.tensor([0, 3, 1, 4])
    images = labels.double()[:, None, None, None].expand(-1, 3, 12, 16).clone()
    generator = torch.Generator().manual_seed(seed)
    mix = patch_cutmix(images, labels, patch_size=(3, 4), num_classes=CLASSES, smoothing=smoothing, generator=generator)
    return images, labels, mix


@pytest.mark.parametrize("seed", range(20))
def test_cutmix_keeps_patches_whole_and_counts_what_it_did(seed: int) -> None:
    _, labels, mix = mixed_batch(seed)
    for image, target, patch_labels in zip(mix.images, mix.soft_labels, mix.patch_labels, strict=True):
        assert patch_labels.shape == (16,)
        for patch, label in enumerate(patch_labels.tolist()):
            row, column = divmod(patch, 4)
            assert (image[:, 3 * row : 3 * row + 3, 4 * column : 4 * column + 4] == label).all()
        counts = torch.bincount(patch_labels, minlength=CLASSES) / 16
        torch.testing.assert_close(target, counts)
    foreign = mix.patch_labels != labels[:, None]
    areas = {frozenset(row.nonzero().flatten().tolist()) for row in foreign if row.any()}
    assert len(areas) <= 1, "one rectangle for all images"
    for area in areas:
        rows, columns = {p // 4 for p in area}, {p % 4 for p in area}
        assert len(area) == len(rows) * len(columns), "and it is a rectangle"


def test_cutmix_takes_every_share_of_the_image() -> None:
    shares = torch.tensor([float(mixed_batch(seed)[2].soft_labels[0, 0]) for seed in range(300)])
    assert shares.min() < 0.2
    assert shares.max() == 1
    assert 0.55 < shares.mean() < 0.85, "half, minus clipped rectangles and images paired with themselves"


def test_without_weights_it_has_no_loss() -> None:
    """Control for the losses: the plug-in then leaves patch_cutmix alone."""
    model = tiny.vit()
    plugin = add_diverse_patch(model, CLASSES, cosine=0, contrastive=0, mixing=0)
    model.train()(tiny.images())
    assert plugin(torch.zeros(tiny.IMAGES, 16, dtype=torch.long)) == {}
    assert not list(plugin.parameters())


def test_the_first_patches_do_not_depend_on_their_positions() -> None:
    model = tiny.vit(dynamic_img_size=True)
    plugin = add_diverse_patch(model, CLASSES, mixing=0)
    kept = []
    for change in (0.0, 1.0):
        model.pos_embed.data += change
        model.train()(tiny.images())
        kept.append(plugin._kept["first"].flatten(1, -2))
    assert kept[0].shape == (tiny.IMAGES, 16, tiny.DIM)
    assert torch.equal(*kept)


def test_cutmix_smooths_the_images_targets_only() -> None:
    _, _, sharp = mixed_batch(3)
    _, _, smooth = mixed_batch(3, smoothing=0.1)
    torch.testing.assert_close(smooth.soft_labels, 0.9 * sharp.soft_labels + 0.1 / CLASSES)
    assert torch.equal(smooth.patch_labels, sharp.patch_labels)


def test_cutmix_refuses_patches_that_do_not_fit_and_unknown_labels() -> None:
    images = torch.zeros(2, 3, 12, 16)
    with pytest.raises(InputError, match="do not fill"):
        patch_cutmix(images, torch.tensor([0, 1]), patch_size=(5, 4), num_classes=CLASSES)
    with pytest.raises(InputError, match="from 0 to 4"):
        patch_cutmix(images, torch.tensor([0, 5]), patch_size=(3, 4), num_classes=CLASSES)
