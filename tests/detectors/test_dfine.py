"""D-FINE: layers that are not evaluated, first boxes, selection, streams and options of DEIM."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from detr_bf.batchformer import QueryBatchFormer
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Outputs
from detr_bf.detectors import Detector
from detr_bf.detectors.denoising import ContrastiveDenoising
from detr_bf.losses import Focal, HungarianMatcher, MatchabilityAware, SetCriterion, Varifocal
from tests.detectors import tiny
from tests.detectors.tiny import DETECTORS, DIM, IMAGES, QUERIES, batch_former, images, shaken, with_fixed_norms

pytestmark = pytest.mark.usefixtures("float64")


def detector(*, layers: int = 3, std: float = 0.3, changes: dict[str, Any] | None = None, **own: Any) -> Detector:
    """Return a detector with random weights; ``changes`` are those of the shared options."""
    kind = DETECTORS["dfine"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DETECTORS, "dfine", kind._replace(make=partial(kind.make, **own)))
        built = tiny.model("dfine", decoder_layers=layers, dropout=0.0, **(changes or {}))
    return with_fixed_norms(shaken(built, std))


def test_the_first_outputs_are_the_boxes_of_the_tokens() -> None:
    """The box heads start at zero, so that no layer changes a box, but for the limits of logits."""
    torch.manual_seed(0)
    outputs = tiny.model("dfine", decoder_layers=3, dropout=0.0).eval()(images())
    assert outputs.proposals is not None
    for boxes in outputs.boxes:
        torch.testing.assert_close(boxes, outputs.proposals.boxes[0], rtol=0, atol=1e-4)


def test_an_evaluated_layer_needs_a_loss_of_its_own() -> None:
    with pytest.raises(InputError, match="aux_loss=False trains the last layer alone, and eval_layer=1 predicts"):
        detector(eval_layer=1, changes={"aux_loss": False})


def test_layers_after_the_evaluated_one() -> None:
    """They train, are wider if asked for, and evaluation does not compute them."""
    module = detector(layers=4, eval_layer=1, layer_scale=1.5)
    widths = [layer.feed_forward.contract.out_features for layer in module.decoder.layers]
    assert widths == [DIM, DIM, 1.5 * DIM, 1.5 * DIM]
    trained, evaluated = with_fixed_norms(module.train())(images()), module.eval()(images())
    assert len(trained.logits) == 4
    assert len(evaluated.logits) == 2
    torch.testing.assert_close(evaluated.boxes, trained.boxes[:2])
    torch.testing.assert_close(evaluated.logits, trained.logits[:2])
    for parameter in module.decoder.layers[2:].parameters():
        nn.init.constant_(parameter, torch.nan)
    assert torch.equal(module(images()).boxes, evaluated.boxes)


def loss(outputs: Outputs) -> torch.Tensor:
    return SetCriterion(Varifocal(), HungarianMatcher(Focal(), 2.0))(outputs, images().targets).total


@pytest.mark.parametrize("aux_loss", [True, False])
def test_first_boxes_are_trained(aux_loss: bool) -> None:
    module = detector(changes={"aux_loss": aux_loss}).train()
    outputs = module(images())
    assert [(group.name, part.logits.shape[:3]) for group, part in outputs.groups if "pre" in group.name] == [
        ("pre", (1, IMAGES, QUERIES)),
        ("dn_pre", (1, IMAGES, outputs.groups[0][0].size)),
    ]
    loss(outputs).backward()
    assert all(parameter.grad.any() for parameter in module.decoder.heads.first_box.parameters())


def test_a_token_may_become_several_queries() -> None:
    tokens, pairs = (detector(selection=name).eval() for name in ("tokens", "pairs"))
    logits = torch.zeros(1, 9, 3)
    logits[0, 4], logits[0, 7, 1] = torch.tensor([3.0, 2.0, 1.0]), 2.5
    assert tokens.decoder.queries.best(logits)[0, :2].tolist() == [4, 7]
    assert pairs.decoder.queries.best(logits)[0, :4].tolist() == [4, 7, 4, 4]
    assert pairs(images()).boxes.isfinite().all()


@pytest.mark.parametrize("layers", [[1], [2], [1, 2]])
def test_streams_that_fork_between_queries(layers: list[int]) -> None:
    """Boxes and distributions before the fork are those of both streams, and all is trained."""
    former = QueryBatchFormer(DIM, layers=layers, num_decoder_layers=3, dropout=0.0)
    outputs = detector(changes={"query_batch_former": former}).train()(images())
    assert outputs.distributions is not None
    parts = [(outputs, True), *((part, group.name == "pre") for group, part in outputs.groups)]
    for part, is_main in parts:
        clean, second = part.boxes.chunk(2, 1)
        before = layers[0] if len(part.boxes) == 3 else 1
        torch.testing.assert_close(clean[:before], second[:before])
        assert is_main == (part is outputs and not torch.allclose(clean[-1], second[-1])) or len(part.boxes) == 1
    clean, second = outputs.distributions.boxes.chunk(2)
    torch.testing.assert_close(clean, second)
    loss(outputs).backward()


@pytest.mark.parametrize("mode", ["two_stream", "self_only", "duplicate"])
def test_streams_of_the_encoder(mode: str) -> None:
    module = detector(changes={"batch_former": batch_former(mode=mode, dropout=0.0)}).train()
    outputs = module(images())
    assert outputs.distributions is not None
    clean, second = outputs.distributions.logits.chunk(2, 1)
    assert torch.allclose(clean, second) == (mode == "duplicate")
    report = SetCriterion(Varifocal(), HungarianMatcher(Focal(), 2.0))(outputs, images().targets)
    assert {f"stream/{name}/loss_{kind}" for name in ("clean", "batchformer") for kind in ("fgl", "ddf_dn")} <= set(
        report.logged
    )
    assert torch.allclose(report.logged["stream/clean"], report.logged["stream/batchformer"]) == (mode == "duplicate")


def test_deim_has_no_relu() -> None:
    module = detector(head_activation="silu", changes={"activation": "silu"})
    assert not [name for name, part in module.named_modules() if isinstance(part, nn.ReLU)]
    outputs = module.train()(images())
    report = SetCriterion(MatchabilityAware(), HungarianMatcher(Focal(), 2.0))(outputs, images().targets)
    assert report.total.isfinite()


@pytest.mark.parametrize("name", ["rtdetr", "rtdetrv2"])
def test_deim_on_rtdetr(name: str) -> None:
    """No denoising queries without objects, and no ReLU."""
    kind = DETECTORS[name]
    own = {"head_activation": "silu", "deep_position": True, "deim_noise": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DETECTORS, name, kind._replace(make=partial(kind.make, **own)))
        module = shaken(tiny.model(name, activation="silu", dropout=0.0))
    assert not [part for part in module.modules() if isinstance(part, nn.ReLU)]
    assert len(module.decoder.update_queries.head.layers) == 3
    batch = images()
    with_objects = module.train()(batch)
    none = module.detect(module.backbone(batch.images, batch.padding_mask), batch.padding_mask)
    assert [part.groups[0][0].size > 0 for part in (with_objects, none)] == [True, False]


def test_it_trains_under_autocast() -> None:
    torch.set_default_dtype(torch.float32)
    module = detector().float().train()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = module(images())
    assert outputs.boxes.dtype == outputs.distributions.logits.dtype == torch.float32
    total = loss(outputs)
    total.backward()
    assert total.isfinite()


def test_without_denoising() -> None:
    outputs = detector(denoising=ContrastiveDenoising(queries=0)).train()(images())
    assert [group.name for group, _ in outputs.groups] == ["pre"]
    assert loss(outputs).isfinite()
