"""Examples in the guide to classifiers: they run as printed; contrastive learning is the paper's."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from detr_bf.batchformer import BatchFormer
from detr_bf.plugins import add_batchformer

PAGE = Path(__file__).parents[2] / "docs" / "classifiers.md"


@cache
def example(section: str = "Contrastive learning") -> dict[str, Any]:
    """Return the names defined after the code of a section has run."""
    (block,) = re.findall(rf"## {section}.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_loss_of_pairs_runs_and_trains_its_predictor() -> None:
    names = example("Relative localization in other networks")
    assert names["tokens"].shape == (8, 196, 384)
    assert 0 < names["loss"].item() < 0.1, "distances are shares of the grid"
    names["loss"].backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in names["predict"].parameters())
    grids = []
    names["predict"].register_forward_pre_hook(lambda module, args: grids.append(args[1]))
    names["predict"](*names["pooled"](names["tokens"], (14, 14)))
    assert grids == [(7, 7)]


def test_projector_and_predictor_are_those_of_moco_v3() -> None:
    """The authors' ResNet: batch norm without parameters ends the projector, and the predictor has none at its end."""
    model = small()
    kinds = [torch.nn.Linear, torch.nn.BatchNorm1d, torch.nn.ReLU, torch.nn.Linear]
    assert [type(layer) for layer in model.predictor] == kinds
    for encoder in (model.base_encoder, model.momentum_encoder):
        assert [type(layer) for layer in encoder.fc] == [*kinds, torch.nn.BatchNorm1d]
        assert [layer.affine for layer in (encoder.fc[1], encoder.fc[-1])] == [True, False]
        assert [(layer.in_features, layer.out_features) for layer in encoder.fc if hasattr(layer, "in_features")] == [
            (512, 16),
            (16, 8),
        ]
        assert [layer.bias for layer in encoder.fc if hasattr(layer, "in_features")] == [None, None]


def views(seed: int) -> Tensor:
    return torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def small() -> Any:
    torch.manual_seed(0)
    model = example()["MoCo"](timm.create_model("resnet18"), dim=8, width=16)
    add_batchformer(model, before=["base_encoder.fc", "momentum_encoder.fc"], dropout=0.0)
    return model.train()


def test_the_example_runs_with_one_module_for_both_encoders() -> None:
    model = example()["model"]
    assert example()["loss"].isfinite()
    (former,) = [module for module in model.modules() if isinstance(module, BatchFormer)]
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if not name.startswith("momentum_encoder")}
    assert all(weight.grad is not None and weight.grad.any() for weight in former.mixer.layers[0].linear2.parameters())


def test_the_loss_is_that_of_every_pair_of_streams_in_both_directions() -> None:
    model, seen = small(), {"predictor": [], "momentum_encoder": []}
    for name, outputs in seen.items():
        model.get_submodule(name).register_forward_hook(lambda module, args, out, outputs=outputs: outputs.append(out))
    loss = model(views(1), views(2))
    expected = torch.zeros(())
    for queries, keys in zip(seen["predictor"], seen["momentum_encoder"], strict=True):
        for query in (queries[:6], queries[6:]):
            for key in (keys[:6], keys[6:]):
                expected = expected + example()["info_nce"](query, key)
    torch.testing.assert_close(loss, expected)


def test_queries_meet_keys_of_the_other_view() -> None:
    model, seen = small(), []
    for name in ("base_encoder", "momentum_encoder"):
        model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(views(1), views(2))
    for found, wanted in zip(seen, (views(1), views(2), views(2), views(1)), strict=True):
        assert torch.equal(found, wanted)


def test_training_lowers_the_loss_and_moves_the_second_encoder_slowly() -> None:
    model = small()
    optimizer, losses = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.02, momentum=0.9), []
    before = model.momentum_encoder.conv1.weight.clone()
    for _ in range(12):
        loss = model(views(1), views(1) + 0.1 * views(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = [(new - before).norm() for new in (model.momentum_encoder.conv1.weight, model.base_encoder.conv1.weight)]
    assert 0 < moved[0] < 0.5 * moved[1]


def test_evaluation_of_the_encoder_is_timm_s() -> None:
    model = small().eval()
    plain = timm.create_model("resnet18", num_classes=0).eval()
    weights = {name: value for name, value in model.base_encoder.state_dict().items() if not name.startswith("fc.")}
    plain.load_state_dict(weights)
    features = model.base_encoder.forward_head(model.base_encoder.forward_features(views(1)), pre_logits=True)
    assert torch.equal(features, plain(views(1)))
