"""Feature maps, queries and panoptic maps of real runs of every detector, and recorded attention against oracles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from detr_bf.analysis import detection
from detr_bf.analysis.detection import compare_mini_batch_inference, feature_maps_of, look_of_queries
from detr_bf.analysis.inspected import InspectedDetector, load_inspected
from detr_bf.assembly.model import build_postprocess
from detr_bf.batchformer.inspection import attending, attention_between_images
from detr_bf.commands import command_main
from detr_bf.common.structures import Detections
from detr_bf.evaluation import CocoEvaluator
from detr_bf.inference.loading import load
from detr_bf.ops import ms_deform_attn
from detr_bf.transformer.attention import DeformableAttention, MultiHeadAttention, recorded_weights
from tests.analysis.test_batch_attention import config, table, trained

analyze = command_main("analyze")

__all__ = ["config"]  # a fixture


def loaded(run: Path) -> InspectedDetector:
    found = load_inspected("run", run)
    assert isinstance(found, InspectedDetector)
    return found


def test_recorded_weights_are_those_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = MultiHeadAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([m.weight for m in (ours.query, ours.key, ours.value)]))
        theirs.in_proj_bias.zero_()
    query, key = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    bias = torch.randn(2, 4, 3, 5)
    for given in (None, mask):
        with recorded_weights() as records:
            ours(query, key, key, given)
            ours(query, key, key, given, bias)
        _, weights = theirs(query, key, key, key_padding_mask=given, average_attn_weights=False)
        torch.testing.assert_close(records[0].weights, weights)
        value = torch.eye(5).expand(2, 4, 5, 5)
        heads = [x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (ours.query(query), ours.key(key))]
        visible = bias if given is None else bias.masked_fill(given[:, None, None], -math.inf)
        expected = nn.functional.scaled_dot_product_attention(*heads, value, attn_mask=visible)
        torch.testing.assert_close(records[1].weights, expected)
    ours(query, key, key)
    assert len(records) == 2, "nothing is recorded after the block"


def test_recorded_points_reproduce_the_output() -> None:
    torch.manual_seed(0)
    shapes = ((4, 6), (2, 3))
    attention = DeformableAttention(16, heads=2, levels=2, points=3)
    nn.init.normal_(attention.attention_weights.weight)
    query, tokens, reference = torch.randn(1, 5, 16), torch.randn(1, 30, 16), torch.rand(1, 5, 2, 4)
    with recorded_weights() as records:
        found = attention(query, reference, tokens, shapes)
    [(weights, points)] = records
    assert points is not None
    assert weights.shape == (1, 5, 2, 2, 3)
    torch.testing.assert_close(weights.sum((-1, -2)), torch.ones(1, 5, 2))
    again = ms_deform_attn(attention.value(tokens).unflatten(-1, (2, -1)), shapes, None, points, weights)
    torch.testing.assert_close(attention.out(again), found)


DETECTORS = {
    "detr": ("[32]", False, True),
    "conditional_detr": ("[32]", True, True),
    "smca": ("[32]", True, True),
    "smca_multi_scale": ("[8,16,32]", True, True),
    "deformable_detr": ("[16,32]", True, False),
}


@pytest.mark.default_tier("smca_multi_scale")
@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector(config: Path, tmp_path: Path, name: str) -> None:
    strides, has_reference, has_heat = DETECTORS[name]
    run = trained(config, "run", f"model.name={name}", f"model.backbone.strides={strides}")
    plain = trained(config, "off", f"model.name={name}", f"model.backbone.strides={strides}", OFF)
    out = ["--output", str(tmp_path / "out")]
    sources = [str(run), str(plain)]
    assert analyze(["feature-maps", *sources, *out, "--images", "4"]) == 0
    rows = table(tmp_path / "out/feature-maps.csv")
    assert [row["run"] for row in rows] == ["run"] * 4 + ["off"] * 4
    assert all((row["batchformer_mean"] == "") == (row["run"] == "off") for row in rows)
    assert analyze(["queries", *sources, *out, "--image", "0102.png", "--images", "3"]) == 0
    assert len(table(tmp_path / "out/queries.csv")) == 2 * 6
    for picture in ("feature-maps.png", "queries.png"):
        with Image.open(tmp_path / "out" / picture) as image:
            assert min(image.size) > 300
    analysis = look_of_queries(loaded(run), 1, [0, 2])
    assert analysis.name == "0102.png"
    assert analysis.boxes.shape == (2, 6, 4)
    for look in analysis.looks:
        assert (look.reference is not None) == has_reference
        assert (look.heat is not None) == has_heat
        if look.heat is not None and not name.startswith("smca_multi"):
            assert look.heat.sum() == pytest.approx(1, abs=1e-4)
        if look.points is not None:
            assert look.points.shape == (2, 2 * 4, 3)
            assert look.points[..., 2].sum() == pytest.approx(2, abs=1e-4), "1 for each head"
    scores = [look.score for look in analysis.looks]
    assert scores == sorted(scores, reverse=True)


OFF = "batch_former.enabled=false"


def test_feature_maps_are_the_tokens_of_both_streams(config: Path) -> None:
    run = loaded(trained(config, "run", "model.name=deformable_detr", "model.backbone.strides=[16,32]"))
    found = feature_maps_of(run, [0, 3, 1], layer=1, level=1)
    batch = run.load([0, 3, 1])
    with attending(run.model):
        memory = run.model.encoder(
            run.model.tokens(
                run.model.backbone(batch.inputs.images, batch.inputs.padding_mask), batch.inputs.padding_mask
            )
        )
    maps = memory.tokens[:, 48:60].mean(-1).view(2, 3, 3, 4).detach().numpy()
    for row, image in enumerate(found.images):
        np.testing.assert_allclose(image.clean, maps[0, row], rtol=1e-4, atol=1e-6)
        assert image.batchformer is not None
        np.testing.assert_allclose(image.batchformer, maps[1, row], rtol=1e-4, atol=1e-6)
    assert [image.index for image in found.images] == [0, 3, 1]


def test_boxes_of_queries_are_those_of_the_detector(config: Path) -> None:
    run = loaded(trained(config))
    analysis = look_of_queries(run, 0, [4, 2])
    for number, index in enumerate((4, 2)):
        expected = run.model(run.load([index]).inputs).boxes[-1, 0].detach().numpy()
        np.testing.assert_allclose(analysis.boxes[number], expected, atol=1e-6)
    row = analysis.rows()[3]
    assert row["x_mean"] == pytest.approx(analysis.boxes[:, 3, 0].mean())
    assert row["height_std"] == pytest.approx(analysis.boxes[:, 3, 3].std())


class Kept(CocoEvaluator):
    """Evaluator that is kept for the test."""

    made: ClassVar[list[CocoEvaluator]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made.append(self)


def both_arms(run: InspectedDetector, **settings: int) -> tuple[dict[int, Detections], dict[int, Detections]]:
    """Return the detections by image, without and with mini-batch inference."""
    Kept.made.clear()
    compare_mini_batch_inference(run, **settings)
    without, attended = ({each.image_id: each for each in evaluator.detections} for evaluator in Kept.made)
    return without, attended


def distance(first: dict[int, Detections], second: dict[int, Detections]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[i].scores - second[i].scores).abs().max()) for i in first)


QUERIES = ("model.decoder_layers=2", "batch_former.at=queries", "batch_former.layers=[1]")
BACKBONE = (
    "model.backbone.name=timm:vit_tiny_patch16_224",
    "model.backbone.vit.options={patch_size: 16, embed_dim: 16, depth: 3, num_heads: 2, img_size: 96}",
    "batch_former.at=backbone",
    "batch_former.layers=[1]",
)


@pytest.mark.full
@pytest.mark.parametrize("settings", [(), QUERIES, BACKBONE], ids=["tokens", "queries", "backbone"])
def test_both_arms_of_mini_batch_inference_see_the_same_batches(
    settings: tuple[str, ...], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "CocoEvaluator", Kept)
    run = loaded(trained(config, "run", "model.name=deformable_detr", "model.backbone.strides=[16,32]", *settings))
    former, postprocess = attention_between_images(run.model), build_postprocess(run.settings)
    arms = {(size, seed): both_arms(run, batch_size=size, seed=seed) for size in (3, 4, 6) for seed in (0, 1)}
    assert (former.mode, former.group_size, run.model.training) == ("two_stream", None, False)
    again = both_arms(run, seed=1)
    assert [distance(*pair) for pair in zip(again, arms[3, 1], strict=True)] == [0, 0], "the size of the training"
    for (size, seed), (without, attended) in arms.items():
        assert distance(without, arms[3, 0][0]) < 1e-5, "no image depends on the others"
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        parts = order.tensor_split(1 if size == 6 else 2)
        for mode, found in (("two_stream", without), ("mini_batch_inference", attended)):
            for part in parts:
                inputs = run.load(part.tolist()).inputs
                former.mode = mode
                with torch.no_grad():
                    expected = postprocess(run.model(inputs), inputs.targets)
                former.mode = "two_stream"
                own = {each.image_id: each for each in expected}
                assert distance(own, {image_id: found[image_id] for image_id in own}) < 1e-5
    assert distance(arms[3, 0][1], arms[3, 1][1]) > 1e-4, "with it, they depend on the batch"
    assert distance(arms[3, 0][1], arms[3, 0][0]) > 1e-4
    assert distance(arms[6, 0][1], arms[6, 1][1]) < 1e-5, "all images in one batch, in any order"


def test_batch_attention_in_the_backbone(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Feature maps of both streams; positions of the blocks are not drawn; evaluation with and without it."""
    run = trained(config, "run", "model.backbone.strides=[16]", *BACKBONE)
    for image in feature_maps_of(loaded(run), [0, 1]).images:
        assert image.batchformer is not None
        assert not np.allclose(image.clean, image.batchformer)
    capsys.readouterr()
    out = ["--output", str(tmp_path / "out")]
    assert analyze(["batch-attention", str(run), *out]) == 2
    assert "with batch_former.at=backbone the tokens are those of a vision transformer" in capsys.readouterr().err
    assert analyze(["mini-batch-inference", str(run), *out]) == 0


def test_mini_batch_inference_prints_and_writes_the_differences(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(config, "run", "batch_former.mode=mini_batch_inference")
    capsys.readouterr()
    command = ["mini-batch-inference", str(run), "--batch-size", "5", "--seed", "3"]
    assert analyze([*command, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "run, mini-batch inference, seed 3: 6 images in batches of 3" in printed
    rows = table(tmp_path / "out/mini-batch-inference.csv")
    assert [row["metric"] for row in rows][:6] == ["AP", "AP50", "AP75", "APs", "APm", "APl"]
    for row in rows:
        if row["without"]:
            difference = float(row["with"]) - float(row["without"])
            assert float(row["difference"]) == pytest.approx(difference, abs=1e-12)
            assert f"{float(row['without']):7.4f} {float(row['with']):7.4f}     {difference:+.4f}" in printed
    assert {(row["run"], row["seed"], row["images"], row["batch_size"]) for row in rows} == {("run", "3", "6", "3")}
    assert analyze([*command, "--output", str(tmp_path / "again"), "--images", "4"]) == 0
    assert "4 images in batches of 4" in capsys.readouterr().out


@pytest.mark.full
def test_mini_batch_inference_measures_masks_too(config: Path) -> None:
    for name in ("train", "val"):
        path = config.parent / name / "annotations.json"
        content = json.loads(path.read_text())
        for annotation in content["annotations"]:
            x, y, width, height = annotation["bbox"]
            annotation["segmentation"] = [[x, y, x + width, y, x + width, y + height, x, y + height]]
        path.write_text(json.dumps(content))
    run = loaded(trained(config, "run", "model.masks=true"))
    found = compare_mini_batch_inference(run)
    assert {"AP", "mask/AP"} <= found.without.keys()
    assert found.without.keys() == found.attended.keys()


@pytest.mark.full
def test_without_attention_between_images_there_is_no_mini_batch_inference(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"run": trained(config), "off": trained(config, "off", OFF)}
    capsys.readouterr()
    for arguments, said in {
        "run --batch-size 1": "needs batches of 2 images or more, got 6 images in batches of 1",
        "run --images 1": "needs batches of 2 images or more, got 1 images in batches of 3",
        "run --batch-size 0": "--batch-size must be 1 or more, got 0",
        "run --seed -1": "--seed must be from 0",
        "off": "the model has no BatchFormerV2",
    }.items():
        name, *given = arguments.split()
        command = ["mini-batch-inference", str(runs[name]), *given, "--output", str(tmp_path / "out")]
        assert analyze(command) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_predictor_warns_of_mini_batch_inference(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = trained(config), trained(config, "meeting", "batch_former.mode=mini_batch_inference")
    capsys.readouterr()
    load(runs[0], "cpu")
    assert "mini_batch_inference" not in capsys.readouterr().err
    load(runs[1], "cpu")
    assert "an image that is predicted alone attends to itself" in capsys.readouterr().err


def test_bad_input_is_told(
    config: Path, tmp_path: Path, coco_folder: Callable[..., SimpleNamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(config)
    capsys.readouterr()
    out = [str(run), "--output", str(tmp_path / "out")]
    for arguments, said in {
        "feature-maps --layer 2": "--layer 2: the encoder has the layers 0 to 1",
        "feature-maps --level 1": "--level 1: the model has the levels 0 to 0",
        "feature-maps --images 0": "--images must be 1 or more, got 0",
        "queries --image x.png": "--image x.png is no validation image of run",
        "panoptic": "run has no panoptic validation maps",
        "panoptic --format svg": "panoptic maps are drawn as png",
    }.items():
        assert analyze([*arguments.split(), *out]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
