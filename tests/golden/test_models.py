"""Complete detectors after the backbone: outputs of every layer, gradients of features and parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from detr_bf.batchformer import BatchFormerV2
from detr_bf.interop import to_foreign
from detr_bf.structures import Outputs
from tests.golden.cases import (
    Case,
    assert_close,
    assert_outputs,
    build,
    family,
    features,
    recorded,
    samples_mask,
)


def comparable(case: Case, outputs: Outputs) -> Outputs:
    """Known bug of the reference: multi-scale SMCA weighs the levels of all images like image 0. Ours does not."""
    if family(case) != "smca_multi_scale":
        return outputs
    return replace(outputs, logits=outputs.logits[:, :1], boxes=outputs.boxes[:, :1])


def run(case: Case, mode: str) -> Outputs:
    return build(case).train(mode == "train").detect(features(case), samples_mask(case))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_outputs_of_every_layer(model_case: Case, mode: str) -> None:
    outputs, expected = run(model_case, mode), recorded(model_case, f"{mode}.")
    forked = mode == "train" and model_case.cfg.get("bf") not in (None, 0, 7)
    assert outputs.num_streams == (2 if forked else 1)
    assert_outputs(comparable(model_case, outputs), comparable(model_case, expected))


def test_mini_batch_inference(mini_batch_case: Case) -> None:
    """The Deformable fork's --eval_bf: batch attention replaces the tokens in evaluation, not with one stream."""
    model = build(mini_batch_case).eval()
    former = model.encoder.batch_former
    assert isinstance(former, BatchFormerV2)
    if former.mode == "two_stream":
        former.mode = "mini_batch_inference"
    outputs = model.detect(features(mini_batch_case), samples_mask(mini_batch_case))
    assert_outputs(outputs, recorded(mini_batch_case, "eval_bf."))


def test_gradients(gradient_case: Case) -> None:
    """Compare gradients of a fixed scalar of all outputs, which show where gradients are stopped."""
    model, maps = build(gradient_case).train(), features(gradient_case)
    for feature in maps:
        feature.tensor.requires_grad_()
    total = probe(model.detect(maps, samples_mask(gradient_case)))
    total.backward()
    assert total.item() == pytest.approx(gradient_case.manifest["probe"]["loss"], rel=1e-4, abs=1e-3)
    for level, feature in enumerate(maps):
        assert_close(feature.tensor.grad, gradient_case.tensors[f"grad.features.{level}"], relative=1e-3)
    ours = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert_parameter_gradients(gradient_case, {name: grad for name, grad in ours.items() if grad is not None})


def assert_parameter_gradients(case: Case, ours: dict[str, Tensor]) -> None:
    """Compare norm and weighted sum of each gradient by the reference's names; gradients that it lacks must be zero."""
    theirs = to_foreign(ours, "detr_panoptic" if case.cfg.get("masks") else family(case))
    for name, numbers in case.manifest["probe"]["param_grads"].items():
        gradient = theirs.get(name)
        if numbers is None or gradient is None:
            assert gradient is None or not gradient.any(), name
            assert numbers is None or max(map(abs, numbers)) < 1e-3, name
            continue
        weights = torch.cos(0.7 * torch.arange(gradient.numel(), dtype=torch.float64))
        norm, weighted = gradient.norm().item(), (gradient.flatten().double() * weights).sum().item()
        tolerance = 1e-3 * max(norm, 1.0)
        assert math.isclose(norm, numbers[0], abs_tol=tolerance), name
        assert math.isclose(weighted, numbers[1], abs_tol=tolerance), name


def probe(outputs: Outputs) -> Tensor:
    """Return the recorded scalar: the sum of every named output times cosines of its index in sorted order."""
    named = {}
    for kind, stacked in (("pred_logits", outputs.logits), ("pred_boxes", outputs.boxes)):
        *auxiliary, named[kind] = stacked
        named |= {f"aux_outputs.{layer}.{kind}": x for layer, x in enumerate(auxiliary)}
    if outputs.masks is not None:
        named["pred_masks"] = outputs.masks.all()
    if outputs.proposals is not None:
        named["enc_outputs.pred_logits"] = outputs.proposals.logits[0]
        named["enc_outputs.pred_boxes"] = outputs.proposals.boxes[0]
    terms = []
    for index, name in enumerate(sorted(named)):
        x = named[name].double()
        terms.append((x * torch.cos(0.7 * torch.arange(x.numel(), dtype=torch.float64) + index).view_as(x)).sum())
    return torch.stack(terms).sum()
