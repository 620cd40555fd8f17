"""BatchFormerV2 among the blocks of a ViT, and BatchFormer before classifiers of other libraries."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.data import Mixup
from torch import Tensor, nn

from detr_bf.batchformer import StreamLoss, contrast_streams
from detr_bf.common.errors import InputError
from detr_bf.plugins import add_batchformer, add_batchformer_v2, num_streams
from tests.plugins import tiny


def with_v2(layers: Any, **changes: Any) -> Any:
    model = tiny.vit()
    add_batchformer_v2(model, layers, **{"dropout": 0.0} | changes)
    return model.train()


def mixers(model: Any) -> Any:
    return model.plugins["batchformer_v2"].batch_former.mixers


@pytest.mark.parametrize("layers", [[0], [2], [1, 3], "all"])
@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("shared", [True, False])
def test_as_blocks_called_one_by_one(layers: Any, position: str, shared: bool) -> None:
    """The first insertion creates the second stream, later ones mix it; all other blocks are shared."""
    model = with_v2(layers, position=position, shared=shared)
    where = list(range(tiny.DEPTH)) if layers == "all" else layers
    logits = model(tiny.images())
    mixer = {layer: mixers(model)["shared" if shared else str(layer)] for layer in where}
    plain = tiny.vit().train()
    clean = second = plain._pos_embed(plain.patch_embed(tiny.images()))
    for layer, block in enumerate(plain.blocks):
        second = mixer[layer](second) if layer in mixer and position == "before" else second
        clean, second = block(clean), block(second)
        second = mixer[layer](second) if layer in mixer and position == "after" else second
    torch.testing.assert_close(logits, plain.forward_head(plain.norm(torch.cat([clean, second]))))


@pytest.mark.parametrize("build", [tiny.vit, tiny.deit])
def test_clean_half_of_training_is_evaluation(build: Any) -> None:
    model = build()
    add_batchformer_v2(model, "all", dropout=0.0)
    clean, second = model.train()(tiny.images()).chunk(2)
    evaluated = model.eval()(tiny.images())
    torch.testing.assert_close(clean, evaluated, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(second, evaluated)


@pytest.mark.parametrize("stream", [0, 1])
def test_gradients_cross_images_in_the_second_stream_only(stream: int) -> None:
    images = tiny.images().requires_grad_()
    logits = with_v2([1, 2])(images).unflatten(0, (2, tiny.IMAGES))
    F.cross_entropy(logits[stream, :1], torch.tensor([2])).backward()
    assert images.grad[0].any()
    if stream == 0:
        assert not images.grad[1:].any(), "exactly zero"
    else:
        assert images.grad[1:].flatten(1).any(1).all()


PER_IMAGE = torch.zeros(tiny.IMAGES, 1, 17, 17, dtype=torch.float64)


@pytest.mark.parametrize("position", ["before", "after"])
def test_attention_masks_that_images_share_reach_both_streams(position: str) -> None:
    mask = torch.randn(17, 17, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model = with_v2([1], position=position)
    shared = model(tiny.images(), attn_mask=mask)
    assert not torch.allclose(shared, model(tiny.images()))
    torch.testing.assert_close(model(tiny.images(), attn_mask=mask[None, None]), shared)
    plain = tiny.vit()(tiny.images(), attn_mask=mask)
    torch.testing.assert_close(shared[: tiny.IMAGES], plain)
    assert not torch.allclose(shared[tiny.IMAGES :], plain)


@pytest.mark.parametrize("position", ["before", "after"])
def test_attention_masks_of_each_image_are_refused_where_the_batch_is_doubled(position: str) -> None:
    model = with_v2([1], position=position)
    with pytest.raises(InputError, match=r"attn_mask of shape \(3, 1, 17, 17\) has rows of its own"):
        model(tiny.images(), attn_mask=PER_IMAGE)
    torch.testing.assert_close(model.eval()(tiny.images(), attn_mask=PER_IMAGE), tiny.vit()(tiny.images()))
    single = with_v2([1], position=position, mode="single_stream")
    torch.testing.assert_close(single(tiny.images(), attn_mask=PER_IMAGE), single(tiny.images()))


def test_class_token_is_mixed_too() -> None:
    """After the last block only the class token can carry an image's features to the others."""
    images = tiny.images().requires_grad_()
    with_v2([3], position="after")(images)[tiny.IMAGES].sum().backward()
    assert images.grad[1:].flatten(1).any(1).all()


def test_equivariant_to_permuting_the_batch() -> None:
    model, order = with_v2([1, 3]), torch.tensor([2, 0, 1])
    streams = model(tiny.images()).unflatten(0, (2, tiny.IMAGES))
    permuted = model(tiny.images()[order]).unflatten(0, (2, tiny.IMAGES))
    torch.testing.assert_close(permuted, streams[:, order])


def test_equal_images_give_what_one_gives() -> None:
    model = with_v2("all")
    one = model(tiny.images(1))
    four = model(tiny.images(1).expand(4, -1, -1, -1))
    torch.testing.assert_close(four, one.repeat_interleave(4, 0))


def test_sharing_and_published_sizes() -> None:
    def added(layers: Any, **changes: Any) -> int:
        model = tiny.vit(embed_dim=384, num_heads=6)
        return sum(p.numel() for p in add_batchformer_v2(model, layers, **changes).parameters())

    assert added([0]) == added("all") == 888_576
    assert added("all", shared=False) == 4 * added([0])


def test_default_is_the_eighth_block_with_the_heads_of_the_model() -> None:
    plugin = add_batchformer_v2(tiny.vit(depth=8, embed_dim=24, num_heads=3))
    assert plugin.batch_former.insertions == (7,)
    assert plugin.batch_former.mixers["shared"].layers[0].self_attn.num_heads == 3
    with pytest.raises(InputError, match="4 blocks"):
        add_batchformer_v2(tiny.vit())


@pytest.mark.parametrize(
    ("mode", "training", "evaluation"),
    [("two_stream", 2, 1), ("duplicate", 2, 1), ("single_stream", 1, 1), ("mini_batch_inference", 2, 1)],
)
def test_number_of_streams_is_what_comes_out(mode: str, training: int, evaluation: int) -> None:
    model = with_v2([1, 2], mode=mode)
    assert num_streams(model) == training
    assert len(model(tiny.images())) == training * tiny.IMAGES
    assert num_streams(model.eval()) == evaluation
    assert len(model(tiny.images())) == evaluation * tiny.IMAGES
    assert num_streams(tiny.vit().train()) == 1


def test_mini_batch_inference_replaces_the_tokens() -> None:
    model = with_v2([1, 2], mode="mini_batch_inference")
    second = model(tiny.images())[tiny.IMAGES :]
    torch.testing.assert_close(model.eval()(tiny.images()), second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("count", "warning"), [(1, "no effect"), (2, "only 2 images"), (3, None)])
@pytest.mark.parametrize("add", [add_batchformer_v2, add_batchformer])
def test_small_batches_are_warned_of_once(
    add: Any, count: int, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.vit()
    add(model, **({"layers": [1]} if add is add_batchformer_v2 else {}))
    with caplog.at_level(logging.WARNING, logger="detr_bf"):
        for _ in range(2):
            model.train()(tiny.images(count))
    assert len(caplog.records) == (warning is not None)
    assert warning is None or warning in caplog.text


def test_targets_are_doubled_behind_mixup() -> None:
    """The loss is the mean of the losses of both streams, with soft targets."""
    model = with_v2([1])
    images, targets = Mixup(num_classes=tiny.CLASSES, cutmix_alpha=1.0)(tiny.images(4), torch.tensor([0, 3, 4, 1]))
    loss = StreamLoss(F.cross_entropy)
    logits, streams = model(images), num_streams(model)
    apart = loss.of_each_stream(logits, targets, streams)
    torch.testing.assert_close(apart[1], -(targets * logits[4:].log_softmax(-1)).sum(-1).mean())
    torch.testing.assert_close(loss(logits, targets, streams), sum(apart) / 2)


def test_two_kinds_of_batch_attention_are_refused() -> None:
    for first, second in ((add_batchformer, add_v2_at_1), (add_v2_at_1, add_batchformer)):
        model = tiny.vit()
        first(model)
        with pytest.raises(InputError, match="both would fork"):
            second(model)


def add_v2_at_1(model: nn.Module) -> Any:
    return add_batchformer_v2(model, [1])


SMALL = {
    "resnet10t": {},
    "mobilenetv3_small_050": {},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)},
}
TORCHVISION = ["resnet18", "mobilenet_v3_small", "mnasnet0_5", "swin_t", "vit"]


def classifier_named(library: str, name: str) -> Any:
    torch.manual_seed(0)
    if library == "tiny":
        return getattr(tiny, name)().float()
    if library == "timm":
        return timm.create_model(name, num_classes=tiny.CLASSES, **SMALL[name])
    if name == "vit":
        settings = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_heads": 2}
        return torchvision.models.VisionTransformer(**settings, hidden_dim=8, mlp_dim=8, num_classes=tiny.CLASSES)
    return torchvision.models.get_model(name, num_classes=tiny.CLASSES)


@pytest.mark.parametrize(
    ("library", "name"),
    [
        *(("timm", name) for name in SMALL),
        *(("tiny", name) for name in ("swin", "mixer", "pit", "vit")),
        *(("torchvision", name) for name in TORCHVISION),
    ],
)
def test_before_the_classifier_of_any_model(library: str, name: str) -> None:
    """In training the classifier gets both streams of its features; evaluation is unchanged, to the bit."""
    model = classifier_named(library, name)
    images = torch.randn(2, 3, 32, 32)
    plain = model.eval()(images)
    plugin = add_batchformer(model, dropout=0.0)
    assert torch.equal(model(images), plain)
    plugin.train()
    seen: list[Tensor] = []
    plugin.batch_former.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits = model(images)
    assert seen[0].shape == (2, plugin.batch_former.mixer.layers[0].linear1.in_features)
    torch.testing.assert_close(logits[:2], plain)
    second = plugin.batch_former.mixer(seen[0][:, None])[:, 0]
    classifier = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == tiny.CLASSES][-1]
    torch.testing.assert_close(logits[2:], F.linear(second, classifier.weight, classifier.bias))
    plugin.remove()
    assert torch.equal(model(images), plain)


def freeze(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def test_both_classifiers_of_a_distilled_model() -> None:
    model = tiny.deit()
    plugin = add_batchformer(model, dropout=0.0)
    plain = model(tiny.images())
    plugin.train()
    logits = model(tiny.images())
    torch.testing.assert_close(logits[: tiny.IMAGES], plain)
    assert len(logits) == 2 * tiny.IMAGES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"before": ["classifier"]}, "no module 'classifier'"),
        ({"before": ["head", "blocks.0.mlp.fc2"]}, "one BatchFormer serves one width"),
        ({"before": ["norm"]}, "0: no linear layer"),
        ({"heads": 3}, "must divide"),
    ],
)
def test_unusable_readers_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        add_batchformer(tiny.vit(), **settings)


@pytest.mark.parametrize(
    ("settings", "message"), [({"heads": 0}, "heads=0 must divide"), ({"dropout": float("nan")}, "dropout=nan must be")]
)
@pytest.mark.parametrize("add", [add_batchformer_v2, add_batchformer])
def test_settings_that_mean_nothing_are_refused(add: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        add(tiny.vit(), **({"layers": [1]} if add is add_batchformer_v2 else {}), **settings)


@pytest.mark.parametrize("add", [add_batchformer_v2, add_batchformer])
def test_initial_weights_are_xavier_s_or_those_of_pytorch(add: Any) -> None:
    """Largest values and deviations of each tensor are those of the reference, whose width is the same."""
    torch.manual_seed(0)
    dim = 192
    pytorch, xavier = (nn.TransformerEncoderLayer(dim, 3, dim) for _ in range(2))
    for parameter in xavier.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    layers = {"layers": [0]} if add is add_batchformer_v2 else {}
    for init, reference in (("pytorch", pytorch), ("xavier", xavier)):
        model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=2)
        plugin = add(model, heads=3, init=init, **layers)
        (layer,) = [module for module in plugin.modules() if isinstance(module, nn.TransformerEncoderLayer)]
        expected = dict(reference.named_parameters())
        for name, parameter in layer.named_parameters():
            assert parameter.abs().max().item() == pytest.approx(expected[name].abs().max().item(), rel=0.05), name
            assert parameter.std().item() == pytest.approx(expected[name].std().item(), rel=0.2), name
    assert not torch.allclose(pytorch.linear1.weight.abs().max(), xavier.linear1.weight.abs().max(), rtol=0.2)
    with pytest.raises(InputError, match="init must be one of xavier, pytorch; got 'zeros'"):
        add(tiny.vit(), init="zeros", **layers)


def test_models_without_classifier_or_with_two_kinds_of_output_are_refused() -> None:
    with pytest.raises(InputError, match="no linear classifier"):
        add_batchformer(timm.create_model("resnet10t", num_classes=0))
    with pytest.raises(InputError, match="no linear classifier"):
        add_batchformer(torchvision.models.squeezenet1_1())
    with pytest.raises(InputError, match="aux_logits=False"):
        add_batchformer(torchvision.models.googlenet(aux_logits=True, init_weights=False))


def test_features_with_places_are_refused() -> None:
    model = tiny.vit()
    add_batchformer(model, before=["blocks.1"], dim=tiny.DIM, heads=2)
    with pytest.raises(InputError, match="BatchFormerV2"):
        model.train()(tiny.images())


class Experts(nn.Module):
    """Model like RIDE: a trunk, three experts with a classifier each, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3 * 32 * 32, 8) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(8, tiny.CLASSES) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        return torch.stack([linear(expert(x)) for expert, linear in zip(self.experts, self.linears, strict=True)], 1)


@pytest.mark.parametrize("shared_classifier", [False, True])
def test_one_batchformer_for_three_experts(shared_classifier: bool) -> None:
    """Use in RIDE: training replaces each expert's features, or doubles them with a shared classifier."""
    torch.manual_seed(0)
    model = Experts().double()
    before = [f"linears.{expert}" for expert in range(3)]
    plugin = add_batchformer(model, before=before, dropout=0.0, shared_classifier=shared_classifier)
    logits = model.train()(tiny.images())
    mixer = plugin.batch_former.mixer
    assert sum(p.numel() for p in plugin.parameters()) == 6 * 8**2 + 10 * 8, "one classifier for all experts"
    for expert in range(3):
        features = model.experts[expert](tiny.images().flatten(1))
        mixed = mixer(features[:, None])[:, 0]
        expected = F.linear(
            torch.cat([features, mixed]) if shared_classifier else mixed,
            model.linears[expert].weight,
            model.linears[expert].bias,
        )
        torch.testing.assert_close(logits[:, expert], expected)
        if expert == 0:
            clean = F.linear(features, model.linears[0].weight, model.linears[0].bias)
            torch.testing.assert_close(model.eval()(tiny.images())[:, 0], clean)
            model.train()
    assert num_streams(model) == (2 if shared_classifier else 1)


class Moco(nn.Module):
    """Model like MoCo-v3: two encoders with projectors, and a predictor."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.momentum = (self._encoder() for _ in range(2))
        self.momentum.load_state_dict(self.base.state_dict())
        freeze(self.momentum)
        self.predictor = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    @staticmethod
    def _encoder() -> nn.Module:
        projector = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 6))
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), projector)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            keys = [self.momentum(view) for view in (second, first)]
        queries = [self.predictor(self.base(view)) for view in (first, second)]
        return sum(contrast_streams(info_nce, q, k) for q, k in zip(queries, keys, strict=True))


def info_nce(queries: Tensor, keys: Tensor) -> Tensor:
    similarity = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T
    return F.cross_entropy(similarity, torch.arange(len(queries)))


def test_one_batchformer_before_both_projectors_of_moco() -> None:
    torch.manual_seed(0)
    model = Moco().double()
    plugin = add_batchformer(model, before=["base.2", "momentum.2"], dropout=0.0)
    first, second = tiny.images(), tiny.images(6)[3:]
    loss = model.train()(first, second)
    loss.backward()
    mixer = plugin.batch_former.mixer
    assert all(p.grad is not None and p.grad.any() for name, p in mixer.named_parameters() if "bias" not in name)
    expected = torch.zeros((), dtype=torch.float64)
    for here, there in ((first, second), (second, first)):
        features = [network[1](view.flatten(1)) for network, view in ((model.base, here), (model.momentum, there))]
        streams = [[f, mixer(f[:, None])[:, 0]] for f in features]
        project = model.base[2]._modules["0"], model.base[2]._modules["2"]
        queries = [model.predictor(project[1](F.relu(project[0](f)))) for f in streams[0]]
        keys = [model.momentum[2][2](F.relu(model.momentum[2][0](f))) for f in streams[1]]
        for q in queries:
            for k in keys:
                expected = expected + info_nce(q, k) / 4
    torch.testing.assert_close(loss, expected)
