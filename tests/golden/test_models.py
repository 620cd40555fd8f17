"""Complete detectors after the backbone: outputs of every layer, gradients of features and parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.structures import Outputs
from tests.golden.cases import (
    Case,
    assert_gradients,
    assert_outputs,
    build,
    family,
    features,
    named_outputs,
    probe,
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
    total = probe(named_outputs(model.detect(maps, samples_mask(gradient_case))))
    total.backward()
    assert total.item() == pytest.approx(gradient_case.manifest["probe"]["loss"], rel=1e-4, abs=1e-3)
    assert_gradients(gradient_case, model, maps, "probe", relative=1e-3)
