"""Batch attention at a position: pictures and tables of real runs of every detector and of a ViT, and bad input."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.ops import box_convert

from detr_bf.analysis.batch_attention import (
    Place,
    attention_at,
    choose_places,
    draw_reference_attention,
    position_of,
    received_attention,
)
from detr_bf.analysis.inspected import Level, load_inspected
from detr_bf.batchformer import BATCH_MIXERS
from detr_bf.batchformer.inspection import attending, recorded
from detr_bf.commands import command_main
from detr_bf.config import load_config
from detr_bf.engine import RunFolder
from detr_bf.report.figures import picture_grid
from detr_bf.tasks import task_of
from tests.tools.test_analyze import TINY, V2
from tools.train_net import main as train_net

analyze = command_main("analyze")

SETTINGS = """
model:
  hidden_dim: 32
  heads: 2
  encoder_layers: 2
  decoder_layers: 1
  feedforward_dim: 16
  num_queries: 6
  backbone: {{name: resnet18, weights: none, strides: [32], frozen_stages: 0, frozen_norm: false}}
batch_former: {{enabled: true, heads: 2, num_layers: 2}}
data:
  train: {{images: {train.images}, annotations: {train.annotations}}}
  val: {{images: {val.images}, annotations: {val.annotations}}}
  transforms: {{short_sides: [96], max_size: 192, eval_short_side: 96, random_crop: 0.0}}
  workers: 0
train: {{epochs: 1, batch_size: 3, max_steps: 1}}
eval: {{pictures: 0}}
report: false
"""


@pytest.fixture
def config(tmp_path: Path, coco_folder: Callable[..., SimpleNamespace]) -> Path:
    train, val = coco_folder(num_images=3), coco_folder(num_images=6, name="val", first_image_id=101)
    path = tmp_path / "tiny.yaml"
    path.write_text(SETTINGS.format(train=train, val=val))
    return path


def trained(config: Path, name: str = "run", *settings: str) -> Path:
    folder = config.parent / name
    assert train_net(["--config", str(config), f"output_dir={folder}", *settings]) == 0
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.default_tier("deformable_detr")
@pytest.mark.parametrize(
    ("name", "strides", "levels"),
    [
        ("detr", "[32]", 1),
        ("conditional_detr", "[32]", 1),
        ("smca", "[32]", 1),
        ("smca_multi_scale", "[8,16,32]", 4),
        ("deformable_detr", "[16,32]", 2),
    ],
)
def test_every_detector(config: Path, tmp_path: Path, name: str, strides: str, levels: int) -> None:
    run = trained(config, "run", f"model.name={name}", f"model.backbone.strides={strides}")
    out = ["--output", str(tmp_path / "out"), "--images", "4", "--level", str(levels - 1)]
    assert analyze(["batch-attention", str(run), *out, "--auto", "2", "--untrained"]) == 0
    rows = table(tmp_path / "out/batch-attention.csv")
    assert len(rows) == 2 * 2 * 2 * levels * 2 * 4, "models, places, layers of the mixer, levels, heads, images"
    sums: dict[tuple[str, ...], float] = {}
    for row in rows:
        key = tuple(row[k] for k in ("run", "image", "layer", "mixer_layer", "level", "head"))
        sums[key] = sums.get(key, 0.0) + float(row["weight"])
    assert list(sums.values()) == pytest.approx([1.0] * len(sums), abs=1e-5)
    with Image.open(tmp_path / "out/batch-attention.png") as picture:
        assert picture.width > 1000


def with_references(config: Path) -> tuple[str, ...]:
    """Write upside-down copies of all images; return the settings with which they are the references."""
    settings = ["batch_former.references=true", "batch_former.mode=single_stream_inference", "data.reference=own"]
    for name in ("train", "val"):
        folder = config.parent / f"{name}_references"
        folder.mkdir()
        for file in (config.parent / name / "images").iterdir():
            with Image.open(file) as image:
                ImageOps.flip(image.convert("RGB")).save(folder / file.name)
        settings.append(f"data.{name}.references={folder}")
    return tuple(settings)


def test_a_detector_with_references(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = with_references(config)
    run = trained(config, "run", *settings)
    out = ["--output", str(tmp_path / "out")]
    assert analyze(["batch-attention", str(run), *out, "--image", "0103.png"]) == 0
    rows = table(tmp_path / "out/batch-attention.csv")
    assert {row["attended"] for row in rows} == {"0103.png", "0103.png (reference)"}
    assert len(rows) == 2 * 2 * 2, "layers of the mixer, heads, images"
    subject = load_inspected("run", run)
    shown = subject.with_reference(subject.load([2]))
    np.testing.assert_allclose(shown.images[1].picture, shown.images[0].picture[::-1], atol=0.03)  # resized
    with torch.no_grad(), recorded(subject.model.encoder.batch_former) as recording:
        outputs = subject.model(shown.inputs)
    found = attention_at(subject, Place((2,), None))
    position = position_of(found.point, shown.size, subject.levels(recording.insertions[0].before, shown)[0])
    expected = recording.attention[0].weights[position, :, 0].numpy()
    np.testing.assert_allclose(found.weights[0, 0, 0], expected, atol=1e-6)
    assert expected.shape == (2, 2), "heads, image and reference"
    scores = outputs.logits[-1][0].softmax(-1)[:, :-1].amax(-1)
    best = box_convert(outputs.boxes[-1][0, scores.argmax()], "cxcywh", "xyxy")
    (image, _), (height, width) = found.batch.images, found.batch.images[0].picture.shape[:2]
    assert found.found is not None
    np.testing.assert_allclose(found.found[0], best * torch.tensor([width, height] * 2), rtol=1e-4)
    figure = draw_reference_attention({"a": [found], "b": [found]})
    panels = figure.axes[:5]
    assert [len(panel.patches) for panel in panels] == [len(image.boxes), 0, 0, len(image.boxes), len(image.boxes)]
    np.testing.assert_array_equal(panels[1].images[0].get_array(), found.batch.images[1].picture)
    np.testing.assert_allclose(panels[3].images[1].get_array(), found.received[1] / 2)
    weights = recording.attention[0].weights[:, :, 0, 1].mean(1)
    np.testing.assert_allclose(found.received[1].ravel() / 2, weights, atol=1e-6)
    assert analyze(["batch-attention", str(run), *out, "--auto", "3"]) == 0
    for arguments, message in (
        (["batch-attention", str(run), *out, "--images", "2"], "attends to its reference alone"),
        (["mini-batch-inference", str(run), *out], "attend to their references, not to each other"),
    ):
        assert analyze(arguments) == 2
        assert message in capsys.readouterr().err


def test_feature_maps_and_attention_of_stacked_references(config: Path, tmp_path: Path) -> None:
    own = [setting for setting in with_references(config) if setting.startswith("data.")]
    run = trained(config, "run", *own, "model.backbone.reference=stack")
    out = ["--output", str(tmp_path / "out")]
    assert analyze(["batch-attention", str(run), *out, "--images", "2", "--auto", "1"]) == 0
    assert len({row["attended"] for row in table(tmp_path / "out/batch-attention.csv")}) == 2
    assert analyze(["mini-batch-inference", str(run), *out]) == 0
    assert analyze(["feature-maps", str(run), *out, "--images", "3"]) == 0


def test_feature_maps_of_a_detector_with_references(config: Path, tmp_path: Path) -> None:
    run = trained(config, "run", *with_references(config))
    assert analyze(["feature-maps", str(run), "--output", str(tmp_path / "out"), "--images", "3"]) == 0


def test_an_image_without_a_reference_is_told(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = with_references(config)
    (config.parent / "val_references" / "0103.png").unlink()
    run = trained(config, "run", *settings)
    arguments = ["batch-attention", str(run), "--output", str(tmp_path / "out"), "--image"]
    assert analyze([*arguments, "0102.png"]) == 0
    assert analyze([*arguments, "0103.png"]) == 2
    assert "0103.png has no reference to attend to" in capsys.readouterr().err


def test_references_of_training_alone_are_not_shown(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(config, "run", *with_references(config), "batch_former.mode=two_stream")
    assert analyze(["batch-attention", str(run), "--output", str(tmp_path / "out")]) == 2
    assert "references are read in training only" in capsys.readouterr().err


def test_logged_statistics_of_references(config: Path) -> None:
    run = trained(config, "run", *with_references(config), "batch_former.log_attention=true", "train.log_every=1")
    [record] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "attention" in line]
    assert 0 < record["attention/0/others"] < 1


def test_a_classifier(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    run = trained(tmp_path / "tiny.yaml", "run", *V2)
    out = ["--output", str(tmp_path / "out"), "--images", "3"]
    assert analyze(["batch-attention", str(run), *out, "--image", "image 5", "--point", "3,12"]) == 0
    rows = table(tmp_path / "out/batch-attention.csv")
    assert {(row["image"], float(row["x"]), float(row["y"])) for row in rows} == {("image 5", 3.0, 12.0)}
    assert {row["layer"] for row in rows} == {"1"}


def test_weights_and_map_are_those_of_the_point(config: Path) -> None:
    run = trained(config, "run", "model.name=deformable_detr", "model.backbone.strides=[16,32]")
    subject = load_inspected("run", run)
    place = Place((2, 0, 5), (63.5, 10.0))
    found = attention_at(subject, place, level=1)
    batch = subject.load(place.indices)
    with torch.no_grad(), attending(subject.model) as batch_former, recorded(batch_former) as recording:
        subject.model(batch.inputs)
    assert batch.size == (96, 128)
    # a point at 63.5 of 64 columns and 10 of 48 rows, in maps of 6 x 8 and 3 x 4 cells
    for level, position in ((0, 1 * 8 + 7), (1, 48 + 0 * 4 + 3)):
        for each in recording.attention:
            expected = each.weights[position, :, 0].numpy()
            np.testing.assert_allclose(found.weights[each.insertion, each.depth, level], expected)
    weights = recording.attention[0].weights[48:]
    for image in range(3):
        for cell in range(12):
            others = [
                weights[cell, head, other, image].item() for head in range(2) for other in range(3) if other != image
            ]
            assert found.received[image].ravel()[cell] == pytest.approx(3 * np.mean(others), rel=1e-5)
    [row] = [
        r for r in found.rows() if (r["mixer_layer"], r["level"], r["head"], r["attended"]) == (0, 0, 1, "0101.png")
    ]
    assert row["weight"] == pytest.approx(recording.attention[0].weights[15, 1, 0, 1].item())
    assert (row["image"], row["x"], row["y"]) == ("0103.png", 63.5, 10.0)


def test_positions_and_equal_weights() -> None:
    level = Level(100, 3, 5)
    corners = {(0, 0): 100, (49.9, 0): 104, (0, 29.9): 110, (49.9, 29.9): 114, (25, 15): 107}
    for point, expected in corners.items():
        assert position_of(point, (30, 50), level) == expected
    equal = torch.full((7, 2, 4, 4), 0.25)
    assert received_attention(equal).shape == (4, 7)
    torch.testing.assert_close(received_attention(equal), torch.ones(4, 7))


def test_the_untrained_model_is_that_of_the_first_step(config: Path) -> None:
    run = trained(config, "run", "seed=5")
    saved = load_config([run / "config.yaml"], ["output_dir=x"])
    fresh = task_of(saved).build_trainer(RunFolder(config.parent)).model.state_dict()
    subject = load_inspected("run", run)
    untrained = subject.untrained().state_dict()
    assert all(torch.equal(value, untrained[name]) for name, value in fresh.items())
    trained_weights = subject.model.state_dict()
    assert any(not torch.equal(value, trained_weights[name]) for name, value in untrained.items())


def test_places_are_the_same_every_time_and_distinct(config: Path) -> None:
    subject = load_inspected("run", trained(config))
    first, again = (choose_places(subject, 3, 4) for _ in range(2))
    assert first == again
    assert all(len(set(place.indices)) == 4 for place in first)
    assert len({place.indices[0] for place in first}) == 3


BAD = {
    "--image 0101.png --point 64,0": "--point 64,0 is outside of 0101.png, an image of 64 x 48",
    "--image 0101.png --point a": "--point must be two numbers",
    "--point 1,1": "--point is a point of the image that --image names",
    "--image x.png": "--image x.png is no validation image of run; such as 0101.png",
    "--image 0101.png --auto 2": "give one of them",
    "--images 1": "batch attention is between images: --images must be 2 or more, got 1",
    "--images 7": "run has 6 validation images, fewer than the 7 of --images",
    "--auto 0": "--auto must be 1 or more, got 0",
    "--layer 1": "--layer 1: batch attention is at the layers 0",
    "--level 1": "--level 1: the model has the levels 0 to 0",
}


def test_a_heading_is_not_wider_than_its_figure() -> None:
    """Measure the drawn text of the longest heading over two columns."""
    text = "Weights that the marked position of the first image gives to each image: mean of the heads (each head)"
    figure, _ = picture_grid(f"{text}\nsecond line", 2, 2, 4.0, 5.0)
    figure.draw_without_rendering()
    extent = figure._suptitle.get_window_extent()
    assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width
    assert 0 <= extent.y0 < extent.y1 <= figure.bbox.height
    assert figure.get_figheight() > 5
    assert picture_grid("short", 1, 2, 4.0, 5.0)[0].get_figheight() == 5


class Identity(nn.Module):
    """Mixer without attention."""

    def __init__(self, dim: int, *, heads: int, dropout: float, num_layers: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None, exchange: object) -> Tensor:
        return self.project(tokens)


@pytest.mark.full
def test_bad_input_is_told(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--output", str(tmp_path / "out")]
    run = trained(config)
    cases = [(run, arguments.split(), said) for arguments, said in BAD.items()]
    cases.append((trained(config, "off", "batch_former.enabled=false"), [], "the model has no BatchFormerV2"))
    cases.append((trained(config, "alone", "batch_former.mode=self_only"), [], "no image attends to another"))
    monkeypatch.setitem(BATCH_MIXERS, "identity", Identity)
    cases.append(
        (trained(config, "own", "batch_former.mixer=identity"), [], "its mixer is not the library's attention")
    )
    capsys.readouterr()
    for run, arguments, said in cases:
        assert analyze(["batch-attention", str(run), *out, *arguments]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_with_other_images_are_not_compared(
    config: Path, tmp_path: Path, coco_folder: Callable[..., SimpleNamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    other = coco_folder(num_images=6, name="other", first_image_id=201)
    data = [f"data.val.images={other.images}", f"data.val.annotations={other.annotations}"]
    runs = [trained(config), trained(config, "second", *data)]
    sources = [str(run) for run in runs]
    assert analyze(["batch-attention", *sources, "--output", str(tmp_path / "out")]) == 2
    assert "run and second have different validation images" in capsys.readouterr().err
