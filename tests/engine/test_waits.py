"""Waits of the host for a GPU in a training step: one of a detector, for the matching, and none of an image model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.classification.criterion import ClassifierCriterion, RideLoss, cross_entropy
from detr_bf.classification.masked_autoencoder import reconstruction_loss
from detr_bf.common.devices import HostCopy, tensor_on
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch
from detr_bf.detectors.mask_head import MaskHead
from detr_bf.engine.step import TrainingStep, reduce_flags
from detr_bf.losses import CrossEntropy, Focal, HungarianMatcher, MatchabilityAware, SetCriterion, Varifocal
from detr_bf.plugins import patch_cutmix
from tests.classification.masked import autoencoder, batch_former
from tests.detectors import tiny
from tests.engine.steps import batches
from tests.kernels import A_GPU
from tests.plugins import tiny as tiny_images
from tests.plugins.test_plugins import PLUGINS, plugged
from tests.waits import GpuTensor, waits

MATCHING = ["cpu detr_bf/losses/matcher.py"]
LOSSES = {"focal": Focal(), "varifocal": Varifocal(), "mal": MatchabilityAware(), "cross_entropy": CrossEntropy()}


def marked(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(GpuTensor)


def on_gpu(batch: Batch) -> Batch:
    targets = tuple(
        replace(
            target,
            boxes=marked(target.boxes),
            labels=marked(target.labels),
            masks=None if target.masks is None else marked(target.masks),
        )
        for target in batch.targets
    )
    return replace(batch, images=marked(batch.images), padding_mask=marked(batch.padding_mask), targets=targets)


def detector_step(
    name: str, *, masks: bool = False, loss: str = "", device: torch.device | str = "cpu"
) -> TrainingStep:
    head = {}
    if masks:
        head = {"mask_head": MaskHead(tiny.DIM, heads=2, finer_channels=[3] * max(0, tiny.DETECTORS[name].maps - 1))}
    model = tiny.model(name, dropout=0.1, batch_former=tiny.batch_former(), **head).to(device)
    usual = "focal" if "loss.classification=focal" in tiny.DETECTORS[name].settings else "cross_entropy"
    criterion = SetCriterion(LOSSES[loss or usual], HungarianMatcher(LOSSES[loss or usual]))
    return TrainingStep(model.train(), criterion, torch.device(device), torch.float32)


def places(found: list[str]) -> list[str]:
    """Return operation and file of each wait, without checks of labels that the losses only make on a CPU."""
    return [each.split(":")[0] for each in found if "losses/classification.py" not in each]


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@pytest.mark.parametrize("name", tiny.DETECTORS)
@pytest.mark.parametrize("masks", [False, True])
def test_a_step_of_a_detector_waits_for_the_matching_alone(name: str, masks: bool) -> None:
    training, batch = detector_step(name, masks=masks), batches(masks=masks)[0]
    with waits() as found:
        training(on_gpu(batch)).total.backward()
    assert places(found) == MATCHING, found


@pytest.mark.parametrize("loss", ["varifocal", "mal"])
def test_other_losses_do_not_wait(loss: str) -> None:
    training = detector_step("rtdetr", loss=loss)
    with waits() as found:
        training(on_gpu(batches()[0])).total.backward()
    assert places(found) == MATCHING, found


def image_batch(patch_labels: Tensor | None = None) -> LabelledImages:
    """Return images whose labels the host has read, as before a copy to a GPU."""
    batch = LabelledImages(
        tiny_images.images(), ClassTargets(torch.tensor([0, 3, 4]), patch_labels=patch_labels), torch.arange(3)
    ).to("cpu")
    return replace(batch, images=marked(batch.images), targets=batch.targets.mapped(marked))


def mixed() -> LabelledImages:
    labels = torch.tensor([0, 3, 4])
    return image_batch(patch_cutmix(tiny_images.images(), labels, patch_size=(8, 8), num_classes=5).patch_labels)


@pytest.mark.parametrize("name", ["", *PLUGINS])
def test_a_step_of_a_classifier_does_not_wait(name: str) -> None:
    model = plugged(name).train() if name else tiny_images.vit().train()
    batch = mixed() if name == "diverse_patch" else image_batch()
    criterion = ClassifierCriterion(model, cross_entropy(0.1))
    with waits() as found:
        criterion(model(batch.images), batch.targets).total.backward()
    assert places(found) == []


def test_the_loss_of_ride_does_not_wait() -> None:
    batch = image_batch()
    logits = marked(torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True))
    criterion = ClassifierCriterion(tiny_images.vit().train(), RideLoss([9, 7, 5, 3, 2]).double())
    with waits() as found:
        criterion(logits, batch.targets).total.backward()
    assert places(found) == []


def test_a_step_of_a_masked_autoencoder_does_not_wait() -> None:
    model = autoencoder(batch_former()).train()
    with waits() as found:
        reconstruction_loss(model(marked(tiny_images.images()))).total.backward()
    assert found == []


def test_labels_that_the_host_has_read_are_checked() -> None:
    batch = LabelledImages(tiny_images.images(), ClassTargets(torch.tensor([0, 7, 4])), torch.arange(3)).to("cpu")
    model = tiny_images.vit().train()
    with waits() as found, pytest.raises(InputError, match=r"from 0 to 4 for 5 classes; got \[7\]"):
        ClassifierCriterion(model, cross_entropy())(model(batch.images), batch.targets.mapped(marked))
    assert found == []


def test_the_flags_of_a_step_do_not_wait() -> None:
    with waits() as found:
        reduce_flags(marked(torch.tensor(2.0)), stop=False, save=True, replaced=1)
    assert found == []


@pytest.mark.parametrize("read", [lambda x: x.item(), bool, float, lambda x: x[x > 0], lambda x: x.nonzero()])
def test_the_stand_in_sees_waits(read: Any) -> None:
    with waits() as found:
        read(tensor_on(torch.device("cpu"), [1.0]) + 1)
        read(marked(torch.ones(1)) + 1)
        read(torch.ones(1) + 1)
    assert len(found) == 2, "not that of the tensor on the host"


@pytest.mark.parametrize("device", [A_GPU])
@pytest.mark.parametrize("name", tiny.DETECTORS)
def test_a_step_on_a_gpu_waits_for_the_matching_alone(device: torch.device, name: str) -> None:
    training, batch = detector_step(name, device=device), batches()[0].pin_memory()
    training(batch).total.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as warned:
            training(batch).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in warned if "synchronizing" in str(each.message)]) == 1, [str(w.message) for w in warned]


def test_a_copy_on_the_host_holds_the_numbers() -> None:
    assert HostCopy(torch.tensor([1.0, 2.0], requires_grad=True)).get().tolist() == [1.0, 2.0]
