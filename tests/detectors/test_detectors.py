"""Properties of every detector, end to end with tiny parts: shapes, streams, padding, queries, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, FeatureMap, Outputs, Queries, TokenBatch
from detr_bf.config.detection import WITH_EXTRA_LEVELS
from detr_bf.detectors import DETECTORS as BY_NAME
from detr_bf.detectors import Options
from detr_bf.detectors.dab_detr import AnchorQueries
from detr_bf.transformer import Encoder, LearnedQueries
from detr_bf.transformer.position import LearnedPosition, SinePosition
from tests.detectors.tiny import (
    BLIND_TO_PADDING,
    DETECTORS,
    DIM,
    IMAGES,
    LAYERS,
    LOGITS,
    PATTERNS,
    QUERIES,
    TWO_STAGE,
    batch_former,
    images,
    model,
    shaken,
    with_fixed_norms,
)

every_detector = pytest.mark.parametrize("name", DETECTORS)


def same(actual: Outputs, expected: Outputs) -> None:
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(actual.boxes, expected.boxes)


@every_detector
@pytest.mark.parametrize("aux_loss", [True, False])
@pytest.mark.parametrize("with_batch_former", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_shapes(name: str, aux_loss: bool, with_batch_former: bool, training: bool) -> None:
    module = model(name, aux_loss=aux_loss, batch_former=batch_former() if with_batch_former else None).train(training)
    outputs = module(images())
    streams = 2 if training and with_batch_former else 1
    layers = LAYERS if aux_loss else 1
    assert outputs.num_streams == streams
    queries = QUERIES * (PATTERNS if name.endswith("patterns") else 1)
    assert outputs.logits.shape == (layers, streams * IMAGES, queries, LOGITS)
    assert outputs.boxes.shape == (layers, streams * IMAGES, queries, 4)
    assert ((outputs.boxes > 0) & (outputs.boxes < 1)).all()
    assert (outputs.proposals is not None) == (name in TWO_STAGE)
    if outputs.proposals is not None:
        assert outputs.proposals.logits.shape[:2] == (1, streams * IMAGES)
        assert outputs.proposals.num_streams == streams


@every_detector
@pytest.mark.parametrize("position", ["before", "after"])
def test_clean_stream_is_what_evaluation_gives(name: str, position: str) -> None:
    former = batch_former(layers=[0, 1], position=position)
    module = shaken(model(name, dropout=0.0, batch_former=former))
    trained, evaluated = with_fixed_norms(module.train())(images()), module.eval()(images())
    torch.testing.assert_close(trained.logits[:, :IMAGES], evaluated.logits)
    torch.testing.assert_close(trained.boxes[:, :IMAGES], evaluated.boxes)
    assert not torch.allclose(trained.logits[:, IMAGES:], evaluated.logits)


@every_detector
def test_images_of_a_batch_are_detected_as_if_alone(name: str) -> None:
    module, batch = shaken(model(name, batch_former=batch_former())).eval(), images()
    together = module(batch)
    for image in range(IMAGES):
        alone = module(Batch(batch.images[image, None], batch.padding_mask[image, None]))
        torch.testing.assert_close(together.logits[:, image, None], alone.logits)
        torch.testing.assert_close(together.boxes[:, image, None], alone.boxes)


@every_detector
def test_gradient_reaches_every_parameter(name: str) -> None:
    module = shaken(model(name, dropout=0.0, batch_former=batch_former())).train()
    outputs = module(images())
    predicted = [outputs, *(of_group for _, of_group in outputs.groups)]
    loss = torch.stack([each.logits.square().mean() + each.boxes.square().mean() for each in predicted]).sum()
    if outputs.proposals is not None:
        for each in (outputs.proposals, *(of_group for _, of_group in outputs.proposals.groups)):
            loss = loss + each.logits.square().mean() + each.boxes[..., :2].square().mean()
    loss.backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        values_alike = key.startswith("decoder.layers.0.self_attention.")  # where the content starts at zero
        shift_cancels_in_the_softmax = key.endswith(("key.bias", "content_key.bias", "position_key.bias"))
        assert parameter.grad.any() or values_alike or shift_cancels_in_the_softmax, key


@pytest.mark.parametrize(
    "name", [name for name in DETECTORS if isinstance(model(name).decoder.queries, LearnedQueries)]
)
def test_permuting_the_queries_permutes_the_detections(name: str) -> None:
    module, order = shaken(model(name)).eval(), torch.tensor([4, 2, 0, 1, 3])
    before = module(images())
    queries = module.decoder.queries
    with torch.no_grad():
        for learned in filter(None, (queries.position, queries.content)):
            learned.weight[: len(order)] = learned.weight[order].clone()
    after = module(images())
    same(after, Outputs(before.logits[:, :, order], before.boxes[:, :, order]))
    assert not torch.allclose(after.logits, before.logits)


@pytest.mark.parametrize("name", BLIND_TO_PADDING)
@pytest.mark.parametrize("position_encoding", ["sine", "learned"])
def test_padded_cells_do_not_count(name: str, position_encoding: str) -> None:
    module, batch = shaken(model(name, position_encoding=position_encoding)).eval(), images()
    (feature,) = module.backbone(batch.images, batch.padding_mask)
    filled = replace(feature, tensor=feature.tensor.masked_fill(feature.padding_mask[:, None], 9.0))
    before = module.detect([feature], batch.padding_mask)
    after = module.detect([filled], batch.padding_mask)
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.boxes, before.boxes)


@pytest.mark.parametrize("name", BLIND_TO_PADDING)
def test_more_padding_changes_nothing(name: str) -> None:
    module, batch = shaken(model(name)).eval(), images()
    (feature,) = module.backbone(batch.images, batch.padding_mask)
    margin = (0, 3, 0, 2)
    wider = FeatureMap(
        nn.functional.pad(feature.tensor, margin), nn.functional.pad(feature.padding_mask, margin, value=True)
    )
    wider_mask = nn.functional.pad(batch.padding_mask, (0, 12, 0, 8), value=True)
    same(module.detect([wider], wider_mask), module.detect([feature], batch.padding_mask))


@pytest.mark.parametrize("name", [name for name in DETECTORS if name != "smca_multi_scale"])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_pre_norm(name: str, pre_norm: bool) -> None:
    """Pre-norm layers do not normalise their sum, so a norm follows the last layer."""
    module = model(name, pre_norm=pre_norm)
    (loop,) = (part for part in module.encoder.modules() if isinstance(part, Encoder))
    assert isinstance(loop.norm, nn.LayerNorm if pre_norm and loop.layers else nn.Identity)
    assert isinstance(module.decoder.norm, nn.LayerNorm) or not pre_norm
    assert module.decoder.layers[0].self_residual.pre_norm == pre_norm
    assert module.eval()(images()).boxes.isfinite().all()


@every_detector
def test_class_prior_is_the_score_every_class_starts_with(name: str) -> None:
    for head in model(name, class_prior=0.01).decoder.heads.classes:
        torch.testing.assert_close(head.bias.sigmoid(), torch.full((LOGITS,), 0.01))
    unset = model(name).decoder.heads.classes[0]
    assert len(set(unset.bias.tolist())) == LOGITS, "without a prior the bias is unchanged"


@every_detector
def test_heads_keep_their_precision_under_autocast(name: str) -> None:
    """Boxes rounded to bfloat16 would be wrong by several pixels."""
    network = shaken(model(name)).eval()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(images())
    assert outputs.boxes.dtype == outputs.logits.dtype == torch.float32
    assert (outputs.boxes != outputs.boxes.bfloat16().float()).any()


def test_position_encoding_is_chosen_by_name() -> None:
    assert isinstance(model(position_encoding="sine").tokens.position, SinePosition)
    assert isinstance(model(position_encoding="learned").tokens.position, LearnedPosition)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("detr", {"heads": 3}, "heads=3 must divide the width 32"),
        ("detr", {"position_encoding": "cosine"}, "sine or learned; got 'cosine'"),
        ("detr", {"hidden_dim": 6, "heads": 2}, "dim=6 must be divisible by 4"),
        ("deformable_detr", {"heads": 3}, "heads=3 must divide the width 32"),
        ("deformable_detr", {"hidden_dim": 48}, "divisible by 32, got 48"),
        ("smca_multi_scale", {"pre_norm": True}, "pre_norm=false"),
    ],
)
def test_wrong_settings_are_refused(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(name, **changes)


def test_a_wrong_number_of_feature_maps_is_refused() -> None:
    with pytest.raises(InputError, match="strides: this detector uses one feature map, got 2"):
        DETECTORS["detr"][1](nn.Identity(), [3, 3], _options())
    with pytest.raises(InputError, match=r"strides=\[8, 16, 32\]"):
        DETECTORS["smca_multi_scale"][1](nn.Identity(), [3, 3], _options())
    with pytest.raises(InputError, match="box_refine=true as well"):
        DETECTORS["deformable_detr"][1](nn.Identity(), [3], _options(), two_stage=True)


def test_detectors_with_extra_levels_are_those_that_the_config_names() -> None:
    assert {name for name, kind in BY_NAME.items() if "extra_levels" in kind.settings} == set(WITH_EXTRA_LEVELS)


@pytest.mark.parametrize("name", TWO_STAGE)
def test_two_stage_needs_as_many_tokens_as_queries(name: str) -> None:
    with pytest.raises(InputError, match="takes its 500 queries"):
        model(name, num_queries=500).eval()(images())


def _options() -> Options:
    return Options(num_logits=LOGITS, hidden_dim=32, heads=2)


def test_conditional_detr_compares_places_in_one_encoding() -> None:
    """The encoding of a reference point at a cell equals that of the cell's position, at any temperature."""
    module = model("conditional_detr", position_temperature=20.0)
    mask = torch.zeros(1, 4, 6, dtype=torch.bool)
    cells = module.tokens.position(mask)[0].view(4, 6, -1)
    point = torch.tensor([[[3 / 6, 2 / 4]]])  # x and y of the cell in the second row and third column
    queries = Queries(torch.zeros(1, 1, DIM), torch.zeros(1, 1, DIM), point)
    modulation = module.decoder.update_queries(0, queries, TokenBatch(cells)).modulation
    torch.testing.assert_close(modulation[0, 0], cells[1, 2], atol=1e-4, rtol=0)


def test_multi_scale_smca_needs_its_own_strides() -> None:
    with pytest.raises(InputError, match=r"strides=\[8, 16, 32\].*got \[4, 8, 16\]"):
        DETECTORS["smca_multi_scale"][1](nn.Identity(), [3, 3, 3], replace(_options(), strides=[4, 8, 16]))


@pytest.mark.parametrize("name", [name for name in DETECTORS if isinstance(model(name).decoder.queries, AnchorQueries)])
def test_permuting_the_anchors_permutes_the_detections(name: str) -> None:
    module, order = shaken(model(name)).eval(), torch.tensor([4, 2, 0, 1, 3])
    before = module(images())
    queries = module.decoder.queries
    with torch.no_grad():
        for learned in filter(None, (queries.anchors, queries.content)):
            learned.weight.copy_(learned.weight[order].clone())
    by_pattern = (x.unflatten(2, (-1, QUERIES))[..., order, :].flatten(2, 3) for x in (before.logits, before.boxes))
    after = module(images())
    same(after, Outputs(*by_pattern))
    assert not torch.allclose(after.logits, before.logits)


def test_random_points_of_anchors_spread_over_the_image() -> None:
    torch.manual_seed(0)
    points, sizes = AnchorQueries(2000, DIM, random_points=True).anchors.weight.sigmoid().split(2, dim=1)
    for point in points.unbind(1):
        counts = torch.histc(point, 10, 0.0, 1.0)
        assert counts.min() > 140
        assert counts.max() < 260
    assert sizes.std() < 0.25, "only the centres"


def test_anchors_need_a_width_of_whole_sines_and_cosines() -> None:
    with pytest.raises(InputError, match="dim=6 must be divisible by 4"):
        AnchorQueries(3, 6)
