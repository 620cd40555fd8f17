"""DETR from end to end on tiny parts: shapes, padding, queries, settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors import Detector, detr
from detr_bf.errors import InputError
from detr_bf.layers import LearnedPosition, SinePosition
from detr_bf.structures import Batch, FeatureMap

IMAGES, CHANNELS, DIM, QUERIES, LOGITS, LAYERS = 2, 3, 8, 5, 4, 2


class Average(nn.Module):
    """A backbone without weights: the mean over cells of 4 x 4 pixels."""

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[FeatureMap]:
        pixels = images.to(torch.get_default_dtype()) / 255 * ~padding_mask[:, None]
        return [FeatureMap(nn.functional.avg_pool2d(pixels, 4), padding_mask[:, ::4, ::4])]


def model(**changes: object) -> Detector:
    torch.manual_seed(0)
    settings = {
        "num_logits": LOGITS,
        "hidden_dim": DIM,
        "heads": 2,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "feedforward_dim": 12,
        "num_queries": QUERIES,
    }
    return detr(Average(), CHANNELS, **(settings | changes))


def batch_former() -> BatchFormerV2:
    return BatchFormerV2(DIM, layers=[0], num_encoder_layers=LAYERS)


def images() -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (IMAGES, CHANNELS, 16, 24), generator=generator, dtype=torch.uint8)
    mask = torch.zeros(IMAGES, 16, 24, dtype=torch.bool)
    mask[1, 8:] = mask[1, :, 12:] = True
    return Batch(pixels, mask)


def features() -> FeatureMap:
    (feature,) = Average()(images().images, images().padding_mask)
    return feature


@pytest.mark.parametrize("aux_loss", [True, False])
@pytest.mark.parametrize("with_batch_former", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_shapes(aux_loss: bool, with_batch_former: bool, training: bool) -> None:
    module = model(aux_loss=aux_loss, batch_former=batch_former() if with_batch_former else None).train(training)
    outputs = module(images())
    streams = 2 if training and with_batch_former else 1
    layers = LAYERS if aux_loss else 1
    assert outputs.num_streams == streams
    assert outputs.logits.shape == (layers, streams * IMAGES, QUERIES, LOGITS)
    assert outputs.boxes.shape == (layers, streams * IMAGES, QUERIES, 4)
    assert ((outputs.boxes > 0) & (outputs.boxes < 1)).all()


@pytest.mark.parametrize("pre_norm", [True, False])
def test_auxiliary_outputs_leave_the_last_layer_as_it_is(pre_norm: bool) -> None:
    all_layers = model(pre_norm=pre_norm).eval()
    last_only = model(pre_norm=pre_norm, aux_loss=False).eval()
    last_only.load_state_dict(all_layers.state_dict())
    expected, actual = all_layers(images()), last_only(images())
    torch.testing.assert_close(actual.logits, expected.logits[-1:])
    torch.testing.assert_close(actual.boxes, expected.boxes[-1:])
    assert not torch.allclose(expected.logits[0], expected.logits[1])


def test_heads_read_every_decoder_layer() -> None:
    module = model().eval()
    states = module.decoder(module.encoder(module.tokens([features()])))
    outputs = module(images())
    torch.testing.assert_close(outputs.logits, states @ module.class_head.weight.T + module.class_head.bias)
    torch.testing.assert_close(outputs.boxes, 1 / (1 + (-module.box_head(states)).exp()))


@pytest.mark.parametrize("position_encoding", ["sine", "learned"])
def test_padded_cells_do_not_count(position_encoding: str) -> None:
    module, feature = model(position_encoding=position_encoding).eval(), features()
    filled = replace(feature, tensor=feature.tensor.masked_fill(feature.padding_mask[:, None], 9.0))
    before, after = module.detect([feature]), module.detect([filled])
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.boxes, before.boxes)


def test_more_padding_changes_nothing() -> None:
    module, feature = model().eval(), features()
    margin = (0, 3, 0, 2)
    mask = nn.functional.pad(feature.padding_mask, margin, value=True)
    wider = FeatureMap(nn.functional.pad(feature.tensor, margin), mask)
    torch.testing.assert_close(module.detect([wider]).boxes, module.detect([feature]).boxes)
    torch.testing.assert_close(module.detect([wider]).logits, module.detect([feature]).logits)


def test_images_of_a_batch_are_detected_as_if_alone() -> None:
    module, feature = model(batch_former=batch_former()).eval(), features()
    together = module.detect([feature])
    for image in range(IMAGES):
        alone = module.detect([FeatureMap(feature.tensor[image, None], feature.padding_mask[image, None])])
        torch.testing.assert_close(together.logits[:, image, None], alone.logits)
        torch.testing.assert_close(together.boxes[:, image, None], alone.boxes)


def test_permuting_the_queries_permutes_the_detections() -> None:
    module, order = model().eval(), torch.tensor([4, 2, 0, 1, 3])
    before = module(images())
    with torch.no_grad():
        module.decoder.query_position.weight.copy_(module.decoder.query_position.weight[order].clone())
    after = module(images())
    torch.testing.assert_close(after.logits, before.logits[:, :, order])
    torch.testing.assert_close(after.boxes, before.boxes[:, :, order])


def test_gradient_reaches_every_parameter() -> None:
    module = model(dropout=0.0, batch_former=batch_former()).train()
    for parameter in module.parameters():  # what starts at zero would hide paths
        nn.init.normal_(parameter, std=0.5)
    outputs = module(images())
    (outputs.logits.square().mean() + outputs.boxes.square().mean()).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        all_values_are_alike = name.startswith("decoder.layers.0.self_attention.")  # the content starts at zero
        shift_cancels_in_the_softmax = name.endswith("key.bias")
        assert parameter.grad.any() or all_values_are_alike or shift_cancels_in_the_softmax, name


def test_class_prior_is_the_score_every_class_starts_with() -> None:
    head = model(class_prior=0.01).class_head
    torch.testing.assert_close(head.bias.sigmoid(), torch.full((LOGITS,), 0.01))
    assert len(set(model().class_head.bias.tolist())) == LOGITS, "without a prior the bias is left alone"


def test_pre_norm_has_a_last_encoder_norm_and_post_norm_has_none() -> None:
    assert isinstance(model(pre_norm=True).encoder.norm, nn.LayerNorm)
    assert isinstance(model().encoder.norm, nn.Identity)
    assert model(pre_norm=True).decoder.layers[0].cross_residual.pre_norm


def test_position_encoding_is_chosen_by_name() -> None:
    assert isinstance(model(position_encoding="sine").tokens.position, SinePosition)
    assert isinstance(model(position_encoding="learned").tokens.position, LearnedPosition)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "model.heads=3 must divide model.hidden_dim=8"),
        ({"position_encoding": "cosine"}, "sine or learned; got 'cosine'"),
        ({"hidden_dim": 6}, "divisible by 4, got 6"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(**changes)


def test_heads_keep_their_precision_under_autocast() -> None:
    """Boxes rounded to bfloat16 would be wrong by whole pixels."""
    network = model().eval()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(images())
    assert outputs.boxes.dtype == outputs.logits.dtype == torch.float32
    assert (outputs.boxes != outputs.boxes.bfloat16().float()).any()
