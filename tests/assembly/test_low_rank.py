"""Low-rank fine-tuning of every detector, and of vision transformers as backbones (``freeze.lora``)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from detr_bf.assembly import build_model
from detr_bf.assembly.model import TRAINED_WITH_LOW_RANK, train_low_rank
from detr_bf.assembly.training import build_groups
from detr_bf.common.errors import InputError
from detr_bf.common.low_rank import LowRankLinear, merged
from detr_bf.common.structures import Outputs
from detr_bf.config import load_config
from detr_bf.detectors import Detector
from detr_bf.engine import build_optimizer
from tests.assembly.test_plugins import VIT
from tests.detectors import tiny
from tests.tasks.test_task import SMALL

RANK = 3
FORMS = [*tiny.DETECTORS, "vit"]


def model(form: str) -> Detector:
    """Return a detector with random weights, without dropout, with batch attention where it has an encoder."""
    torch.manual_seed(0)
    if form == "vit":
        config = load_config(None, [*SMALL, *VIT, "model.dropout=0"], task="detection")
        return tiny.shaken(build_model(config, 3), std=0.1)
    former = {"batch_former": tiny.batch_former(dropout=0.0)} if form in tiny.WITH_ENCODER else {}
    return tiny.with_fixed_norms(tiny.shaken(tiny.model(form, dropout=0.0, **former), std=0.1).train())


def low_rank(detector: Detector, std: float) -> Detector:
    """Add low-rank changes of that size (in-place)."""
    train_low_rank(detector, RANK)
    for name, parameter in detector.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=std) if std else None
    return detector


def test_a_layer_with_a_hook_is_refused() -> None:
    """The plug-in would be lost in training and be there again in the loaded detector."""
    plugin = ["plugins.context_broadcasting.enabled=true", "plugins.context_broadcasting.position=mid"]
    detector = build_model(load_config(None, [*SMALL, *plugin], task="detection"), 3)
    with pytest.raises(InputError, match=r"changes the inputs or outputs of encoder\.layers\..*position=mid"):
        train_low_rank(detector, RANK)


def tensors(outputs: Outputs) -> list[Tensor]:
    """Return logits and boxes of the main queries, the groups and the proposals."""
    parts = [outputs, *(part for _, part in outputs.groups)]
    parts += [] if outputs.proposals is None else [outputs.proposals]
    return [tensor for part in parts for tensor in (part.logits, part.boxes)]


def gradients(detector: Detector) -> dict[str, Tensor]:
    found = tensors(tiny.outputs_of(detector))
    sum(tensor.square().sum() for tensor in found).backward()  # type: ignore[union-attr]
    return {name: parameter.grad for name, parameter in detector.named_parameters() if parameter.grad is not None}


@pytest.mark.default_tier("deformable_detr_two_stage", "rtdetr", "vit")
@pytest.mark.parametrize("form", FORMS)
def test_it_starts_as_the_detector_and_learns_as_its_merged_weights_do(form: str) -> None:
    """The oracle is the dense detector of the merged weights W + BA: dB = dW A^T, dA = B^T dW, others are the same."""
    start = tiny.outputs_of(detector := model(form).eval())
    again = tiny.outputs_of(low_rank(detector, std=0.0))
    assert all(torch.equal(a, b) for a, b in zip(tensors(again), tensors(start), strict=True))

    torch.set_default_dtype(torch.float64)
    try:
        changed, dense = low_rank(model(form), std=0.1).double(), model(form).double()
        dense.load_state_dict(merged(changed.state_dict()))
        ours, theirs = (tensors(tiny.outputs_of(each.eval())) for each in (changed, dense))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for each in (changed, dense):
            tiny.with_fixed_norms(each.train())
        ours, theirs = (tensors(tiny.outputs_of(each)) for each in (changed, dense))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        found, expected = gradients(changed), gradients(dense)
    finally:
        torch.set_default_dtype(torch.float32)
    layers = {name: each for name, each in changed.named_modules() if isinstance(each, LowRankLinear)}
    assert any(name.startswith("backbone.") for name in layers) == (form == "vit")
    for name, layer in layers.items():
        gradient = expected[f"{name}.weight"]
        torch.testing.assert_close(found.pop(f"{name}.lora_b"), gradient @ layer.lora_a.T)
        torch.testing.assert_close(found.pop(f"{name}.lora_a"), layer.lora_b.T @ gradient)
    named = changed.named_parameters(remove_duplicate=False)  # SMCA's layers share the last norm
    whole = {id(parameter) for name, parameter in named if re.match(TRAINED_WITH_LOW_RANK, name)}
    assert set(found) == {name for name, each in changed.named_parameters() if name in expected and id(each) in whole}
    assert any("class" in name for name in found)
    assert any("batch_former" in name for name in found) == (form in tiny.WITH_ENCODER)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])


def test_steps_leave_frozen_weights_and_the_groups_keep_their_rates() -> None:
    settings = (*SMALL, *tiny.settings_of("deformable_detr"), "optimizer.layer_decay=0.5")
    config = load_config(None, [*settings, "optimizer.point_lr_factor=0.1"], task="detection")
    torch.manual_seed(0)
    detector = build_model(config, 3).train()
    train_low_rank(detector, RANK)
    before = {name: parameter.clone() for name, parameter in detector.named_parameters()}
    optimizer = build_optimizer(build_groups(config, detector))
    batch, mask = tiny.images(), torch.zeros(2, 64, 96, dtype=torch.bool)
    for _ in range(2):
        outputs = detector(replace(batch, images=batch.images.repeat(1, 1, 2, 2), padding_mask=mask))
        (outputs.logits.square().sum() + outputs.boxes.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, parameter in detector.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in detector.named_parameters() if parameter.requires_grad}
    names = {id(parameter): name for name, parameter in detector.named_parameters()}
    rates = {names[id(each)]: group["lr"] for group in optimizer.param_groups for each in group["params"]}
    assert set(rates) == moved
    last = "decoder.layers.1."
    offsets = next(name for name in rates if name.startswith(last) and "sampling_offsets.lora_a" in name)
    assert rates[offsets] == pytest.approx(0.1 * rates[f"{last}feed_forward.expand.lora_a"])
    assert rates["decoder.layers.0.feed_forward.expand.lora_b"] == 0.5 * rates[f"{last}feed_forward.expand.lora_b"]


def test_it_and_a_frozen_detector_exclude_each_other() -> None:
    with pytest.raises(InputError, match=r"freeze\.detector=true trains only the mask head, and freeze\.lora=8"):
        load_config(None, ["freeze.detector=true", "freeze.lora=8"], task="detection")
    with pytest.raises(InputError, match=r"freeze\.lora.*greater than 0 and at most 1024"):
        load_config(None, ["freeze.lora=0"], task="detection")
