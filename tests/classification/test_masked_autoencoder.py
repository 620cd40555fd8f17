"""The masked autoencoder and its loss compared with loops, with and without batch attention."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from detr_bf.classification.masked_autoencoder import (
    MaskedAutoencoder,
    Reconstructed,
    initialize_as_published,
    into_images,
    into_patches,
    reconstruction_loss,
    sine_positions,
    visible_indices,
)
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from tests.classification.masked import CLOSE, PATCHES, SIDE, VISIBLE, autoencoder, batch_former
from tests.plugins import tiny
from tests.processes import run_together


def seeded(model: MaskedAutoencoder, images: Tensor) -> Any:
    torch.manual_seed(5)
    return model(images)


def test_patches_are_pixels_row_by_row_with_their_colours() -> None:
    images = torch.randn(2, 3, 6, 8)
    patches = into_patches(images, (3, 2))
    assert patches.shape == (2, 2 * 4, 3 * 2 * 3)
    for row in range(2):
        for column in range(4):
            cut = images[:, :, 3 * row : 3 * row + 3, 2 * column : 2 * column + 2]
            assert torch.equal(patches[:, 4 * row + column], cut.permute(0, 2, 3, 1).flatten(1))
    assert torch.equal(into_images(patches, (3, 2), (2, 4)), images)


@pytest.mark.parametrize("grid", [(3, 5), (4, 4)])
def test_positions_are_sines_of_the_column_then_of_the_row(grid: tuple[int, int]) -> None:
    positions = sine_positions(grid, 16, prefix=1)
    assert not positions[0, 0].any(), "the class token has none"
    for row in range(grid[0]):
        for column in range(grid[1]):
            expected = []
            for coordinate in (column, row):
                angles = [coordinate / 10000 ** (k / 4) for k in range(4)]
                expected += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
            torch.testing.assert_close(positions[0, 1 + row * grid[1] + column], torch.tensor(expected))


@pytest.mark.parametrize(("ratio", "visible"), [(0.75, 4), (0.5, 8), (0.7, 5), (0.9, 2), (0.95, 1)])
def test_every_image_has_exactly_its_share_of_visible_patches(ratio: float, visible: int) -> None:
    result = autoencoder(mask_ratio=ratio).train()(tiny.images(6))
    assert (~result.masked).sum(1).tolist() == [visible] * 6


def test_visible_patches_are_those_of_the_smallest_numbers_as_a_loop_finds_them() -> None:
    numbers = torch.rand(5, PATCHES)
    visible, masked = visible_indices(numbers, VISIBLE)
    for row in range(5):
        found: list[int] = []
        while len(found) < VISIBLE:
            left = [patch for patch in range(PATCHES) if patch not in found]
            found.append(min(left, key=lambda patch: numbers[row, patch].item()))
        assert sorted(visible[row].tolist()) == sorted(found)
        assert masked[row].tolist() == [patch not in found for patch in range(PATCHES)]


def test_masks_are_random_for_each_image_and_every_patch_is_as_likely() -> None:
    model = autoencoder(decoder_depth=1).train()
    masks = torch.cat([model(tiny.images(200)).masked for _ in range(4)])
    assert len(masks.unique(dim=0)) > 200
    torch.testing.assert_close(masks.double().mean(0), torch.full((PATCHES,), 0.75).double(), rtol=0, atol=0.07)
    first, second = (seeded(model, tiny.images()).masked for _ in range(2))
    assert torch.equal(first, second), "from torch's generator"


def slow(model: MaskedAutoencoder, image: Tensor, masked: Tensor) -> Tensor:
    """Decode one image (3, H, W) with mask (P,) to predictions (P, p * q * 3), token by token."""
    vit = model.encoder
    weight, bias = vit.patch_embed.proj.weight.flatten(1), vit.patch_embed.proj.bias
    tokens = [vit.cls_token[0, 0] + vit.pos_embed[0, 0]]
    for patch in range(PATCHES):
        if not masked[patch]:
            row, column = divmod(patch, 4)
            cut = image[:, SIDE * row : SIDE * (row + 1), SIDE * column : SIDE * (column + 1)]
            tokens.append(weight @ cut.flatten() + bias + vit.pos_embed[0, 1 + patch])
    encoded = model.decoder_embed(vit.norm(vit.blocks(torch.stack(tokens)[None])))[0]
    shown, decoded = iter(encoded[1:]), [encoded[0]]
    for patch in range(PATCHES):
        here = model.mask_token[0, 0] if masked[patch] else next(shown)
        decoded.append(here + model.decoder_position[0, 1 + patch])
    x = torch.stack(decoded)[None]
    for layer in model.decoder.layers:
        x = layer.block(x)
    return model.decoder_prediction(model.decoder.norm(x))[0, 1:]


@pytest.mark.parametrize("normalize", [True, False])
def test_as_a_loop_over_images_and_patches(normalize: bool) -> None:
    model, images = autoencoder(norm_pix_loss=normalize).train(), tiny.images()
    result = model(images)
    for index, image in enumerate(images):
        torch.testing.assert_close(result.predicted[index], slow(model, image, result.masked[index]))
        errors = []
        for patch in range(PATCHES):
            row, column = divmod(patch, 4)
            cut = image[:, SIDE * row : SIDE * (row + 1), SIDE * column : SIDE * (column + 1)]
            wanted = cut.permute(1, 2, 0).flatten().tolist()
            if normalize:
                mean = sum(wanted) / len(wanted)
                variance = sum((value - mean) ** 2 for value in wanted) / (len(wanted) - 1)
                wanted = [(value - mean) / math.sqrt(variance + 1e-6) for value in wanted]
            assert result.wanted[index, patch].tolist() == pytest.approx(wanted)
            guesses = result.predicted[index, patch].tolist()
            if result.masked[index, patch]:
                errors.append(sum((g - w) ** 2 for g, w in zip(guesses, wanted, strict=True)) / len(wanted))
        assert result.loss_per_image[index].item() == pytest.approx(sum(errors) / len(errors), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), [("base", 111_907_840), ("large", 329_541_888)])
def test_parameters_are_as_many_as_in_the_papers_code(name: str, parameters: int) -> None:
    encoder = timm.create_model(f"vit_{name}_patch16_224", num_classes=0)
    settings = {"decoder_dim": 512, "decoder_depth": 8, "decoder_heads": 16, "mask_ratio": 0.75}
    model = MaskedAutoencoder(encoder, **settings, norm_pix_loss=True)
    assert sum(p.numel() for p in model.parameters()) + model.decoder_position.numel() == parameters


def test_hidden_pixels_are_not_seen_and_visible_guesses_cost_nothing() -> None:
    model, images = autoencoder().train(), tiny.images()
    result = seeded(model, images)
    hidden = model.unpatchify(result.masked[..., None].expand(-1, -1, 3 * SIDE**2).double())
    torch.testing.assert_close(seeded(model, images + hidden).predicted, result.predicted, **CLOSE)
    assert not torch.allclose(seeded(model, images + 1 - hidden).predicted, result.predicted)
    result.predicted.retain_grad()
    result.loss_per_image.sum().backward()
    assert torch.equal(result.predicted.grad.any(-1), result.masked)


def test_every_parameter_learns_but_the_positions() -> None:
    model = autoencoder(batch_former()).train()
    model(tiny.images()).loss_per_image.sum().backward()
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert fixed == {"encoder.pos_embed"}
    for name, parameter in model.named_parameters():
        if name not in fixed:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    torch.testing.assert_close(model.encoder.pos_embed.detach(), sine_positions((4, 4), tiny.DIM, 1).double())


def test_encoder_loads_into_the_plain_model() -> None:
    model = autoencoder(batch_former())
    prefix = "encoder."
    state = {key.removeprefix(prefix): value for key, value in model.state_dict().items() if key.startswith(prefix)}
    plain = tiny.vit(num_classes=0)
    plain.load_state_dict(state)
    visible = torch.arange(PATCHES)[None].expand(tiny.IMAGES, -1)
    expected = model._encode(tiny.images(), visible)
    torch.testing.assert_close(plain.forward_features(tiny.images()), expected, **CLOSE)


def test_two_streams_as_blocks_called_one_by_one() -> None:
    """Targets and mask are doubled; batch attention is the same module before every block."""
    model, images = autoencoder(batch_former()).train(), tiny.images()
    result = seeded(model, images)
    clean = seeded(autoencoder().train(), images)
    assert result.num_streams == 2
    torch.testing.assert_close(result.predicted[: tiny.IMAGES], clean.predicted, **CLOSE)
    for doubled, single in ((result.wanted, clean.wanted), (result.masked, clean.masked)):
        assert torch.equal(doubled, torch.cat([single, single]))
    assert result.loss_per_image.shape == (2 * tiny.IMAGES,)
    entering: list[Tensor] = []
    plain = autoencoder().train()
    plain.decoder.register_forward_pre_hook(lambda module, args: entering.append(args[0].tokens))
    seeded(plain, images)
    second = entering[0]
    for layer in model.decoder.layers:
        second = layer.block(model.decoder.batch_former.mixers["shared"](second))
    expected = model.decoder_prediction(model.decoder.norm(second))[:, 1:]
    torch.testing.assert_close(result.predicted[tiny.IMAGES :], expected)


@pytest.mark.parametrize("stream", [0, 1])
def test_gradients_cross_images_in_the_second_stream_only(stream: int) -> None:
    images = tiny.images().requires_grad_()
    result = autoencoder(batch_former()).train()(images)
    (gradient,) = torch.autograd.grad(result.predicted.unflatten(0, (2, -1))[stream, 0].sum(), images)
    assert gradient[0].any()
    assert bool(gradient[1:].any()) == (stream == 1)


def test_evaluation_is_that_without_batch_attention_to_the_bit_and_repeats() -> None:
    model, images = autoencoder(batch_former()), tiny.images()
    for parameter in model.decoder.batch_former.parameters():
        nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(8)
    first, second, plain = model(images), model(images), autoencoder()(images)
    assert first.num_streams == 1
    for result in (second, plain):
        assert torch.equal(result.predicted, first.predicted)
        assert torch.equal(result.masked, first.masked)
    alone = torch.cat([model(image[None]).loss_per_image for image in images])
    torch.testing.assert_close(alone, first.loss_per_image, **CLOSE)


def test_pictures_hide_what_is_hidden_and_keep_what_is_seen() -> None:
    for normalize in (True, False):
        model, images = autoencoder(batch_former(), norm_pix_loss=normalize), tiny.images()
        result = seeded(model.train(), images)
        perfect = copy.copy(result)
        object.__setattr__(perfect, "predicted", result.wanted)
        hidden, completed = model.pictures(images, perfect)
        torch.testing.assert_close(completed, images)
        masked = model.unpatchify(result.masked[: tiny.IMAGES, :, None].expand(-1, -1, 3 * SIDE**2)).bool()
        assert torch.equal(hidden, images.masked_fill(masked, 0))
        guessed = model.pictures(images, result)[1]
        assert torch.equal(guessed[~masked], images[~masked])
        assert not torch.allclose(guessed[masked], images[masked])


@pytest.mark.parametrize("settings", [{"no_embed_class": True}, {"reg_tokens": 2}, {"dynamic_img_size": True}])
def test_other_kinds_of_vits(settings: dict[str, Any]) -> None:
    assert autoencoder(encoder=settings).train()(tiny.images()).loss_per_image.isfinite().all()


def test_activation_checkpointing_of_the_encoder_changes_no_gradient() -> None:
    gradients = []
    for enable in (False, True):
        model = autoencoder(batch_former()).train()
        model.encoder.set_grad_checkpointing(enable)
        seeded(model, tiny.images()).loss_per_image.sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0]["encoder.pos_embed"] is None
    for name, value in gradients[0].items():
        if value is not None:
            torch.testing.assert_close(gradients[1][name], value, **CLOSE)


class Step(nn.Module):
    """Mean loss with one mask for all images; ``call`` replaces the model in the forward pass."""

    def __init__(self, model: MaskedAutoencoder, call: Callable[[Tensor], Reconstructed] | None = None) -> None:
        super().__init__()
        self.model = model
        self.call = (model if call is None else call,)  # a tuple hides its parameters: they are the model's
        model._order = lambda images: model.evaluation_order.expand(len(images), -1)  # type: ignore[method-assign]

    def forward(self, images: Tensor) -> Tensor:
        return self.call[0](images).loss_per_image.mean()


def gradients(step: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all trainable parameters by their names in the model."""
    step.zero_grad()
    step(images).backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in step.named_parameters() if p.requires_grad}


def in_a_group() -> dict[str, Tensor]:
    model = autoencoder(batch_former(gather=True)).train()
    return gradients(DistributedDataParallel(Step(model)), tiny.images(4)[distributed.rank() :: 2])


def test_gathering_processes_are_as_one_with_all_images() -> None:
    expected = gradients(Step(autoencoder(batch_former(gather=True)).train()), tiny.images(4))
    for part in run_together(2, in_a_group):
        assert part.keys() == expected.keys()
        for key, value in part.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_compiled_as_not_compiled() -> None:
    model = autoencoder(batch_former()).train()
    expected = gradients(Step(model), tiny.images())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for key, value in gradients(Step(model, compiled), tiny.images()).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-8, atol=1e-10)


def test_under_autocast_the_loss_is_in_full_precision() -> None:
    model = autoencoder(batch_former()).float().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = model(tiny.images().float())
        assert result.predicted.dtype == torch.bfloat16
        assert result.wanted.dtype == result.loss_per_image.dtype == torch.float32


def testinitial_weights_are_the_published_ones() -> None:
    model = tiny.vit(num_classes=0, embed_dim=64)
    initialize_as_published(model)
    bound = math.sqrt(6 / (64 + 3 * SIDE**2))
    largest = model.patch_embed.proj.weight.abs().max().item()
    assert 0.95 * bound < largest <= bound
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.4)
    assert not model.blocks[0].mlp.fc1.bias.any()
    published = autoencoder(decoder_dim=64)
    assert published.decoder.layers[0].block.attn.qkv.weight.abs().max().item() <= math.sqrt(6 / (4 * 64))


def test_weight_decay_leaves_out_what_timm_leaves_out() -> None:
    model = autoencoder()
    left_out = model.no_weight_decay() & {name for name, _ in model.named_parameters()}
    assert left_out == {"mask_token", "encoder.pos_embed", "encoder.cls_token"}


def test_it_learns_images_by_heart() -> None:
    torch.manual_seed(0)
    vit = tiny.vit(num_classes=0, embed_dim=32)
    initialize_as_published(vit)
    model = MaskedAutoencoder(
        vit.float(), decoder_dim=32, decoder_depth=1, decoder_heads=2, mask_ratio=0.5, norm_pix_loss=False
    ).train()
    stripes = (torch.arange(32) // 4 % 2).float().expand(4, 3, 32, 32) * torch.tensor([1.0, -1.0, 0.5, 2.0])[
        :, None, None, None
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = model(stripes).loss_per_image.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": {"num_classes": 5}}, "num_classes=0"),
        ({"encoder": {"global_pool": "avg"}}, "num_classes=0"),
        ({"encoder": {"pos_embed": "none"}}, "no position embedding"),
        ({"encoder": {"patch_drop_rate": 0.5}}, "patch_drop_rate=0"),
        ({"mask_ratio": 1.0}, "leaves 0 of 16 patches"),
        ({"mask_ratio": 0.0}, "leaves 16 of 16 patches"),
        ({"decoder_heads": 3}, "must divide"),
        ({"encoder": {"img_size": 33}}, r"patches of \(8, 8\) pixels do not fill images of \(33, 33\)"),
        ({"decoder_dim": 6, "decoder_heads": 1}, "divisible by 4"),
        ({"attention": batch_former([0, 3], num_encoder_layers=4)}, "from 0 to 2"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        autoencoder(**settings)


def test_other_models_and_images_of_other_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="expected timm's VisionTransformer"):
        MaskedAutoencoder(
            tiny.mixer(), decoder_dim=8, decoder_depth=1, decoder_heads=1, mask_ratio=0.5, norm_pix_loss=True
        )
    with pytest.raises(InputError, match=r"images of \(32, 40\) pixels, expected \(32, 32\)"):
        autoencoder()(torch.zeros(1, 3, 32, 40, dtype=torch.float64))


LOSS_PATCHES, NUMBERS = 5, 6


def example(rows: int, num_streams: int = 1) -> Reconstructed:
    generator = torch.Generator().manual_seed(0)
    predicted, wanted = torch.randn(2, rows, LOSS_PATCHES, NUMBERS, generator=generator, dtype=torch.float64)
    masked = torch.zeros(rows, LOSS_PATCHES, dtype=torch.bool)
    masked[:, [1, 4]] = masked[0, 2] = True
    return Reconstructed(predicted.requires_grad_(), wanted, masked, num_streams)


def test_as_the_plain_loop_over_masked_patches() -> None:
    result = example(3)
    for row in range(3):
        errors = [
            sum((float(p) - float(w)) ** 2 for p, w in zip(guess, wanted, strict=True)) / NUMBERS
            for guess, wanted, masked in zip(
                result.predicted[row].detach(), result.wanted[row], result.masked[row], strict=True
            )
            if masked
        ]
        assert result.loss_per_image[row].item() == pytest.approx(sum(errors) / len(errors), rel=1e-12)


def test_a_perfect_guess_costs_nothing_and_one_off_by_one_costs_one() -> None:
    result = example(3)
    for shift in (0.0, 1.0):
        guess = Reconstructed(result.wanted + shift, result.wanted, result.masked)
        torch.testing.assert_close(guess.loss_per_image, torch.full((3,), shift, dtype=torch.float64))


def test_gradients_are_those_of_finite_differences() -> None:
    result = example(2)

    def loss(predicted: torch.Tensor) -> torch.Tensor:
        return reconstruction_loss(Reconstructed(predicted, result.wanted, result.masked)).total

    assert torch.autograd.gradcheck(loss, (result.predicted,))


def test_the_loss_is_the_mean_of_the_streams_and_each_is_logged() -> None:
    result = example(4, num_streams=2)
    report = reconstruction_loss(result, None)
    per_image = result.loss_per_image
    torch.testing.assert_close(report.total, per_image.mean())
    torch.testing.assert_close(report.losses["loss_reconstruction"], per_image.mean())
    assert set(report.logged) == {"stream/clean", "stream/batchformer"}
    torch.testing.assert_close(report.logged["stream/clean"], per_image[:2].mean().detach())
    torch.testing.assert_close(report.logged["stream/batchformer"], per_image[2:].mean().detach())
    assert not any(value.requires_grad for value in report.logged.values())
    assert not reconstruction_loss(example(4)).logged


def test_half_precision_is_computed_in_float32() -> None:
    result = example(3)
    half = Reconstructed(result.predicted.half(), result.wanted.float(), result.masked)
    assert half.loss_per_image.dtype == torch.float32
    torch.testing.assert_close(half.loss_per_image.double(), result.loss_per_image, rtol=1e-2, atol=0)
