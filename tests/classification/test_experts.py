"""Network of RIDE's experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.batchformer import BatchFormer
from detr_bf.classification.batch import ClassTargets
from detr_bf.classification.criterion import ClassifierCriterion, RideLoss
from detr_bf.classification.experts import SCALE, CosineLinear, ExpertResNet
from detr_bf.classification.network import build_network
from detr_bf.common.errors import InputError
from detr_bf.plugins import add_batchformer, num_streams

CLASSES, SIDE = 5, 32
NETWORKS = {
    "cifar_resnet8": {"width": 8},
    "resnet18": {"layers": [1, 1, 1, 1]},
    "res2net50_26w_4s": {"layers": [1, 1, 1, 1]},
}


def network(name: str = "cifar_resnet8", experts: int = 3) -> ExpertResNet:
    torch.manual_seed(0)
    built = build_network(name, num_classes=CLASSES, image_size=SIDE, experts=experts, options=NETWORKS[name])
    assert isinstance(built, ExpertResNet)
    return built


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "channels", "parts"), [("cifar_resnet8", 24, 4), ("resnet18", 384, 6), ("res2net50_26w_4s", 1536, 6)]
)
def test_training_returns_each_expert_and_evaluation_their_mean(name: str, channels: int, parts: int) -> None:
    """The last two stages are each expert's own and have 3/4 of the channels."""
    model = network(name)
    assert len(model.trunk) == parts
    assert [classifier.in_features for classifier in model.classifiers] == [channels] * 3
    assert model.train()(images()).shape == (4, 3, CLASSES)
    shared = model.eval().trunk(images())
    each = [
        classifier(expert(shared).mean((2, 3)))
        for expert, classifier in zip(model.experts, model.classifiers, strict=True)
    ]
    torch.testing.assert_close(model(images()), (each[0] + each[1] + each[2]) / 3)
    assert not torch.allclose(each[0], each[1])


def test_logits_are_scaled_cosines() -> None:
    classifier, features = CosineLinear(6, CLASSES), torch.randn(3, 6)
    found = classifier(features)
    for row in range(3):
        for label in range(CLASSES):
            cosine = F.cosine_similarity(features[row], classifier.weight[label], dim=0)
            torch.testing.assert_close(found[row, label], SCALE * cosine)
    torch.testing.assert_close(classifier(7 * features), found)


def test_every_weight_of_every_expert_learns_with_one_batchformer_for_all() -> None:
    model = network().train()
    plugin = add_batchformer(model, shared_classifier=False, dropout=0.0)
    seen: list[Tensor] = []
    plugin.batch_former.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert num_streams(model) == 1
    assert sum(isinstance(module, BatchFormer) for module in model.modules()) == 1
    criterion = ClassifierCriterion(model, RideLoss(range(1, CLASSES + 1), reweight_epoch=0))
    report = criterion(model(images()), ClassTargets(torch.tensor([0, 3, 3, 1])))
    report.total.backward()
    assert len(seen) == 3, "the features of every expert"
    assert not [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]


def test_both_streams_of_every_expert_with_a_shared_classifier() -> None:
    model = network()
    add_batchformer(model)
    logits = model.train()(images())
    assert logits.shape == (8, 3, CLASSES)
    report = ClassifierCriterion(model, RideLoss([1] * CLASSES))(logits, ClassTargets(torch.tensor([0, 3, 3, 1])))
    streams = [RideLoss([1] * CLASSES)(rows, torch.tensor([0, 3, 3, 1])) for rows in logits.chunk(2)]
    torch.testing.assert_close(report.total, (streams[0] + streams[1]) / 2)


def test_training_lowers_the_loss_and_learns_the_images() -> None:
    model, labels = network().train(), torch.tensor([0, 1, 2, 3, 4, 0])
    criterion = ClassifierCriterion(model, RideLoss([50, 40, 30, 20, 10], reweight_epoch=5))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for epoch in range(20):
        report = criterion(model(images(6)), ClassTargets(labels, epoch=epoch))
        optimizer.zero_grad()
        report.total.backward()
        optimizer.step()
        losses.append(report.total.item())
    assert losses[-1] < 0.2 * losses[0]
    assert report.logged["accuracy"] == 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "vit_tiny_patch16_224",
            {},
            "model.experts=3 needs a ResNet of timm or of CIFAR .*VisionTransformer.*'channels'",
        ),
        ("resnetv2_50", {}, "model.experts=3 needs a ResNet of timm or of CIFAR .*got a ResNetV2"),
        ("cifar_resnet8", {"dropout": 0.1}, "model.experts has no dropout: set model.dropout=0"),
        ("resnet18", {"pretrained": True}, "model.experts has no pretrained: set model.pretrained=false"),
    ],
)
def test_what_has_no_experts_is_refused(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_network(name, num_classes=CLASSES, image_size=224, experts=3, **settings)  # type: ignore[arg-type]
