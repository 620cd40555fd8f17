"""Files of detectors that read a reference beside each image: the second input, its comparison, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import detr_bf
from detr_bf import export
from detr_bf.backbones.backbone import Backbone, Network
from detr_bf.commands.benchmark import _call as call_of_benchmark
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Outputs
from detr_bf.data.images import PixelFormat
from detr_bf.data.transforms import eval_sample
from detr_bf.export import Exported, ExportSignature, ParityError, parity_table, synthetic_images
from detr_bf.export.runtime import FileDetector
from detr_bf.inference.predictor import Predictor
from tests.detectors.tiny import CHANNELS, batch_former
from tests.docs.test_pages import ROOT
from tests.export.test_export import CLASSES, command, export_command, predictor, reuse, same, stored

READS = (
    "batch_former.enabled=true",
    "batch_former.references=true",
    "batch_former.mode=single_stream_inference",
    "data.reference=own",
)
INPUTS = ["images", "sizes", "references"]


def attending(
    name: str = "detr", mode: str = "single_stream_inference", *settings: str, references: bool = True
) -> Predictor:
    """Return a detector whose images attend to their references."""
    former = batch_former(num_encoder_layers=1, mode=mode, references=references)
    return predictor(name, *READS, f"batch_former.mode={mode}", *settings, batch_former=former)


class Cells(nn.Module):
    """One convolution to cells of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 8, stride=8)

    def forward(self, pixels: Tensor) -> Sequence[Tensor]:
        return [self.conv(pixels)]


def comparing(reference: str) -> Predictor:
    """Return a detector with a backbone that sees image and reference."""
    original = predictor("detr", "data.reference=own", f"model.backbone.reference={reference}")
    torch.manual_seed(4)
    network = Network(Cells(), (CHANNELS,), (8,), ("conv",), mean=(0.5,) * 3, std=(0.2,) * 3)
    original.model.backbone = Backbone(network, reference).eval()
    return original


def batch_of(original: Predictor, images: Sequence[Tensor], *, missing: Sequence[int] = ()) -> Batch:
    """Return a batch of images with their mirror images as references, apart from the ``missing`` ones."""
    samples = []
    for index, image in enumerate(images):
        resized, target = eval_sample(original.transform, image, index)
        samples.append((resized, target, None if index in missing else resized.flip(-1)))
    return Batch.collate(samples)


def outputs(detector: Any, batch: Batch) -> Outputs:
    with torch.no_grad():
        found: Outputs = detector(batch)
    return found


def file_of(path: Path) -> FileDetector:
    found: Any = detr_bf.load(path).model
    return found


def check_the_same(original: Predictor, path: Path, batch: Batch) -> None:
    found, expected = outputs(file_of(path), batch), outputs(original.model, batch)
    torch.testing.assert_close(found.logits[-1], expected.logits[-1], atol=2e-5, rtol=0)
    torch.testing.assert_close(found.boxes[-1], expected.boxes[-1], atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, Path, str]:
    """Export DETR whose images attend to their references; return it with the file and the table."""
    original, path = attending(), tmp_path_factory.mktemp("pairs") / "it.onnx"
    compared = original.export(path)
    assert [each.images for each in compared] == [1, 1, 1, 3, 3]
    assert max(max(each.differences.values()) for each in compared) < 2e-5, parity_table(compared)
    assert all(each.reference_effect and each.reference_effect > 1e-4 for each in compared)
    return original, path, parity_table(compared)


def test_the_file_has_a_second_input_and_says_so(pairs: tuple[Predictor, Path, str]) -> None:
    proto = onnx.load(str(pairs[1]))
    inputs = {
        each.name: [dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim]
        for each in proto.graph.input
    }
    images = ["batch", 3, "height", "width"]
    assert inputs == {"images": images, "sizes": ["batch", 2], "references": images}
    assert list(inputs) == INPUTS
    values = stored(pairs[1])
    assert values["reads_references"] is True
    assert all(each["reference_effect"] > 1e-4 for each in values["parity"]["batches"])
    assert "effect of references" in pairs[2].splitlines()[0]


def test_the_file_computes_what_torch_does(pairs: tuple[Predictor, Path, str]) -> None:
    """Batches with padding, and images without reference, which attend to themselves."""
    original, path, _ = pairs
    batch = batch_of(original, synthetic_images())
    assert batch.padding_mask.any()
    check_the_same(original, path, batch)
    check_the_same(original, path, batch_of(original, synthetic_images(), missing=[1]))
    check_the_same(original, path, batch_of(original, synthetic_images()[:1], missing=[0]))
    alone = outputs(file_of(path), replace(batch, references=batch.images))
    assert (alone.logits - outputs(file_of(path), batch).logits).abs().max() > 1e-4


def test_references_that_are_missing_or_not_read(pairs: tuple[Predictor, Path, str], tmp_path: Path) -> None:
    original, path, _ = pairs
    batch = batch_of(original, synthetic_images())
    with pytest.raises(InputError, match=r"it\.onnx reads a reference of each image, and none is given"):
        file_of(path)(replace(batch, references=None))
    with pytest.raises(InputError, match="3 images and 1 references"):
        original.export(tmp_path / "it.onnx", images=synthetic_images(), references=synthetic_images()[:1])
    with pytest.raises(InputError, match="3 images and 0 references"):
        original.export(tmp_path / "it.onnx", images=synthetic_images())
    images = synthetic_images()
    with pytest.raises(InputError, match=r"image 0: the reference given has 480 x 640 .* its image 640 x 480"):
        original.export(tmp_path / "it.onnx", images=images[:1], references=images[1:2])
    files = [save(each, tmp_path / "files" / f"{number}.png") for number, each in enumerate(images[:2])]
    with pytest.raises(InputError, match=r"0\.png: the reference .*1\.png has 480 x 640 .* its image 640 x 480"):
        original.export(tmp_path / "it.onnx", images=files[:1], references=files[1:])
    shutil.rmtree(tmp_path / "files")
    plain = predictor()
    with pytest.raises(InputError, match="reads no references in evaluation"):
        plain.export(tmp_path / "it.onnx", images=images, references=images)
    with pytest.raises(InputError, match="calibration_references are for int8"):
        plain.export(tmp_path / "it.onnx", calibration_references=tmp_path)
    for detector, other, said in (
        (original, None, r"reads a reference in evaluation, and image 1 has none"),
        (plain, images[1], r"reads no references in evaluation, and image 0 has one"),
    ):
        first = images[0] if other is None else other
        given = Exported(
            detector.model, detector.class_map, detector.transform, detector.postprocess, None, detector.origin.config
        )
        with pytest.raises(InputError, match=said):
            export.export_detector(
                tmp_path / "it.onnx",
                given,
                ExportSignature(None, None, False),
                [(images[0], first), (images[1], other)],
                source="given",
            )
    assert not list(tmp_path.iterdir())


def test_the_model_card_shows_a_call_with_a_reference(pairs: tuple[Predictor, Path, str], tmp_path: Path) -> None:
    pairs[0].save(tmp_path / "mine")
    assert 'detr_bf.load("FOLDER")("photo.jpg", reference="reference.jpg")' in (tmp_path / "mine/README.md").read_text()


def test_the_loaded_file_predicts_with_references(pairs: tuple[Predictor, Path, str]) -> None:
    original, path, _ = pairs
    loaded, images = detr_bf.load(path), synthetic_images()
    references = [image.flip(-1) for image in images]
    for image, reference in zip(images, references, strict=True):
        same(loaded(image, 0.0, reference=reference), original(image, 0.0, reference=reference))
    for found in (
        loaded.predict(images, 3, 0.0, reference=references),
        call_of_benchmark(loaded, images, half=False)(),
    ):
        assert len(list(found)) == 3  # type: ignore[call-overload]
    with pytest.raises(InputError, match="none is given"):
        loaded(images[0])


def test_the_example_takes_a_reference(pairs: tuple[Predictor, Path, str], folders: Path, tmp_path: Path) -> None:
    original, path, _ = pairs
    files = [folders / "val" / "1.png", tmp_path / "drawn.png", folders / "named" / "1.jpg"]
    done = example(path, *files)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == original(files[0], reference=files[2]).names
    missing, other = example(path, *files[:2]), example(path, *files[:2], folders / "val" / "2.png")
    assert (missing.returncode, missing.stderr) == (1, "this file reads a reference: give one\n")
    assert other.returncode == 1
    assert "the reference has (480, 640) pixels and its image (640, 480)" in other.stderr


def example(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "onnx_numpy.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_references_in_training_alone_change_nothing(tmp_path: Path) -> None:
    original = attending(mode="two_stream")
    compared = original.export(tmp_path / "it.onnx")
    assert [each.images for each in compared] == [1, 1, 1, 3]
    assert "effect" not in parity_table(compared)
    proto = onnx.load(str(tmp_path / "it.onnx"))
    assert [each.name for each in proto.graph.input] == ["images", "sizes"]
    values = stored(tmp_path / "it.onnx")
    assert values["reads_references"] is False
    assert "reference_effect" not in values["parity"]["batches"][0]
    assert not any("batch_former" in each.name for each in proto.graph.initializer)
    with pytest.raises(InputError, match=r"it\.onnx reads no references, and some are given"):
        file_of(tmp_path / "it.onnx")(batch_of(original, synthetic_images()))
    photo = save(synthetic_images(1)[0], tmp_path / "1.png")
    ignored = example(tmp_path / "it.onnx", photo, tmp_path / "drawn.png", photo)
    assert (ignored.returncode, ignored.stderr) == (1, "this file reads no reference: give none\n")


@pytest.mark.parametrize("mode", ["mini_batch_inference", "single_stream_inference"])
def test_images_that_attend_to_each_other_are_still_refused(mode: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"batch_former.mode={mode}: the images of a batch attend to each other"):
        attending(mode=mode, references=False).export(tmp_path / "it.onnx")


@pytest.mark.full
@pytest.mark.parametrize("reference", ["difference", "stack"])
def test_backbones_that_see_the_reference(reference: str, tmp_path: Path) -> None:
    original = comparing(reference)
    if reference == "stack":  # trained
        nn.init.normal_(original.model.backbone.body.conv.weight, std=0.3)  # type: ignore[union-attr, arg-type]
    original.export(tmp_path / "it.onnx", batch=1)
    assert [each.name for each in onnx.load(str(tmp_path / "it.onnx")).graph.input] == ["images", "references"]
    for image in synthetic_images():
        check_the_same(original, tmp_path / "it.onnx", batch_of(original, [image]))
    check_the_same(original, tmp_path / "it.onnx", batch_of(original, [image], missing=[0]))


@pytest.mark.full
def test_a_detector_that_has_not_learnt_to_read_references_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"change no output .* model\.backbone\.reference=stack .* train"):
        comparing("stack").export(tmp_path / "it.onnx", batch=1)
    assert not list(tmp_path.iterdir())


def test_a_file_that_ignores_its_references_is_refused(
    pairs: tuple[Predictor, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reuse(pairs[1], monkeypatch)
    run = FileDetector.run
    monkeypatch.setattr(FileDetector, "run", lambda self, batch: run(self, replace(batch, references=batch.images)))
    with pytest.raises(ParityError, match=r"differ by more than the tolerance in .*logits"):
        pairs[0].export(tmp_path / "it.onnx")


@pytest.mark.full
def test_a_fixed_form_computes_in_parts(tmp_path: Path) -> None:
    original = attending()
    original.export(tmp_path / "it.onnx", batch=2, size=(64, 96), postprocess=True)
    loaded = file_of(tmp_path / "it.onnx")
    generator = torch.Generator().manual_seed(3)
    images = [torch.randint(256, (3, 64, 96), generator=generator, dtype=torch.uint8) for _ in range(3)]
    batch = batch_of(replace(original, transform=detr_bf.load(tmp_path / "it.onnx").transform), images, missing=[2])
    whole = loaded.run(batch)
    for row, image in enumerate(images):
        one = Batch(image[None], batch.padding_mask[row : row + 1], references=batch.references_or_images[row][None])
        torch.testing.assert_close(loaded.run(one)["scores"][0], whole["scores"][row], atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_openvino(
    precision: str, pairs: tuple[Predictor, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, onnx_file, _ = pairs
    reuse(onnx_file, monkeypatch)
    compared = original.export(tmp_path / "it.xml", precision=precision)
    assert all(each.reference_effect for each in compared)
    found = file_of(tmp_path / "it.xml")
    assert found.reads_references
    if precision == "float32":
        check_the_same(original, tmp_path / "it.xml", batch_of(original, synthetic_images(), missing=[1]))
    with pytest.raises(InputError, match=r"it\.xml reads a reference of each image"):
        found(replace(batch_of(original, synthetic_images()), references=None))


def test_half_precision(pairs: tuple[Predictor, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reuse(pairs[1], monkeypatch)
    pairs[0].export(tmp_path / "it.onnx", precision="float16")
    batch = batch_of(pairs[0], synthetic_images())
    found, expected = outputs(file_of(tmp_path / "it.onnx"), batch), outputs(pairs[0].model, batch)
    assert (found.boxes[-1] - expected.boxes[-1]).abs().max() < 2e-2


def save(pixels: Tensor, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write validation images with the key ``template``, and references with the names of the images."""
    folder = tmp_path_factory.mktemp("data")
    images = []
    for number, pixels in enumerate(synthetic_images(3), 1):
        file = save(pixels, folder / "val" / f"{number}.png")
        save(pixels.flip(-1), folder / "val" / "templates" / f"of{number}.png")
        save(pixels.flip(-2), folder / "named" / f"{number}.jpg")
        size = {"height": pixels.shape[1], "width": pixels.shape[2]}
        images.append({"id": number, "file_name": file.name, **size, "template": f"templates/of{number}.png"})
        save(pixels, folder / "photos" / f"{number}.png")
    names = zip(CLASSES.category_ids, CLASSES.names, strict=True)
    objects = [{"id": 1, "image_id": 2, "category_id": 7, "bbox": [10, 10, 100, 100]}]
    categories = [{"id": number, "name": name} for number, name in names]
    content = {"images": images, "annotations": objects, "categories": categories}
    (folder / "val.json").write_text(json.dumps(content))
    return folder


def of_data(pairs: tuple[Predictor, Path, str], folders: Path, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    """Return the exported detector as if it were trained with the data in ``folders``; do not trace it again."""
    reuse(pairs[1], monkeypatch)
    split = (f"images={folders / 'val'}", f"annotations={folders / 'val.json'}")
    settings = (f"data.{name}.{each}" for name in ("train", "val") for each in split)
    return replace(pairs[0], origin=predictor("detr", *READS, *settings).origin)


def calibrated(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Let int8 leave the model as it is; return the list of the batches that it gets."""
    given: list[Batch] = []
    monkeypatch.setattr(export, "int8_precision", lambda model, batches: (given.extend(batches), model)[1])
    return given


def test_calibration_takes_pairs(
    pairs: tuple[Predictor, Path, str], folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, given = of_data(pairs, folders, monkeypatch), calibrated(monkeypatch)
    own = [file for file in (folders / "val").iterdir() if file.is_file()]
    photos = tmp_path / "linked"
    photos.mkdir()
    for file in own:
        (photos / f"{file.name}").symlink_to(file)
    original.export(tmp_path / "it.onnx", precision="int8", calibration=photos)
    assert len(given) == 3
    for batch in given:  # by the key template of the run's data
        assert batch.references is not None
        assert (batch.references.float() - batch.images.flip(-1).float()).abs().mean() < 3
    given.clear()
    photos, named = folders / "photos", folders / "named"
    original.export(tmp_path / "2.onnx", precision="int8", calibration=photos, calibration_references=named)
    for batch in given:  # by name
        assert batch.references is not None
        assert (batch.references.float() - batch.images.flip(-2).float()).abs().mean() < 8
    given.clear()
    with pytest.raises(InputError, match=r"name no reference of 3 of 3 images.*photos.*Give the folder of the ref"):
        original.export(tmp_path / "3.onnx", precision="int8", calibration=photos)
    with pytest.raises(InputError, match=r"has no reference of 3 of 3 images, such as .*1\.png"):
        original.export(
            tmp_path / "3.onnx",
            precision="int8",
            calibration=photos,
            calibration_references=folders / "val" / "templates",
        )
    with pytest.raises(InputError, match=r"folder of references .*nowhere does not exist"):
        original.export(tmp_path / "3.onnx", precision="int8", calibration=photos, calibration_references="nowhere")
    settings = [*READS[:3], "data.reference=random"]
    random = replace(original, origin=predictor("detr", *settings).origin)
    with pytest.raises(InputError, match=r"data\.reference=random chooses the reference of an image at random"):
        random.export(tmp_path / "3.onnx", precision="int8", calibration=photos)
    assert not (tmp_path / "3.onnx").exists()


def test_bad_pairs_are_left_out_of_the_calibration(
    pairs: tuple[Predictor, Path, str],
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original, given = of_data(pairs, folders, monkeypatch), calibrated(monkeypatch)
    photos, named = (shutil.copytree(folders / name, tmp_path / name) for name in ("photos", "named"))
    for number in (4, 5):
        shutil.copy(photos / "3.png", photos / f"{number}.png")
        shutil.copy(named / "3.jpg", named / f"{number}.jpg")
    (photos / "1.png").write_text("no image")
    (named / "2.jpg").write_text("no image")
    shutil.copy(folders / "named" / "1.jpg", named / "5.jpg")
    references = {"calibration": photos, "calibration_references": named}
    original.export(tmp_path / "it.onnx", precision="int8", **references)  # type: ignore[arg-type]
    assert len(given) == 2
    for batch in given:
        assert batch.references is not None
        assert (batch.references.float() - batch.images.flip(-2).float()).abs().mean() < 8
    assert "3 of 5 images or their references cannot be used and were left out" in caplog.text
    assert "named/2.jpg" in caplog.text
    assert re.search(r"photos/5\.png: the reference .*named/5\.jpg has 640 x 480", caplog.text)


@pytest.mark.parametrize("settings", [("data.reference=random",), ("data.reference_shift=2",)])
def test_the_score_of_other_references_is_not_compared(
    pairs: tuple[Predictor, Path, str], folders: Path, settings: tuple[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = (f"data.val.images={folders / 'val'}", f"data.val.annotations={folders / 'val.json'}")
    other = replace(pairs[0], origin=predictor("detr", *READS, *split, *settings).origin)
    assert settings[0] in command.compared_ap(other, pairs[1], 0)["not_compared"]


def test_references_of_validation_images_need_no_training_data(
    pairs: tuple[Predictor, Path, str], folders: Path
) -> None:
    split = (f"data.val.images={folders / 'val'}", f"data.val.annotations={folders / 'val.json'}")
    original = replace(pairs[0], origin=predictor("detr", *READS, *split).origin)
    _, references, described = command._images(original, None, None)
    assert (described, len(references or ())) == ("validation images", 3)


def test_the_command_reads_16_bit_images_as_the_run_did(pairs: tuple[Predictor, Path, str], tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**12, (48, 64), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "1.png")
    original = replace(pairs[0], pixel_format=PixelFormat(grey_bits=14))
    images, references, _ = command._images(original, tmp_path, tmp_path)
    for found in (images, references):
        assert found is not None
        assert torch.equal(found[0], torch.from_numpy((values >> 6).astype(np.uint8)).expand(3, -1, -1))


@pytest.mark.full
def test_int8(
    pairs: tuple[Predictor, Path, str], folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = of_data(pairs, folders, monkeypatch)
    for name in ("it.onnx", "it.xml"):
        compared = original.export(
            tmp_path / name,
            precision="int8",
            calibration=folders / "photos",
            calibration_references=folders / "named",
        )
        assert all(each.reference_effect for each in compared)
        assert file_of(tmp_path / name).metadata["precision"] == "int8"


def test_the_command_takes_references(
    pairs: tuple[Predictor, Path, str],
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = of_data(pairs, folders, monkeypatch)
    monkeypatch.setattr(command, "load", lambda path, *_: original if path == "run" else detr_bf.load(path))
    photos, named = str(folders / "photos"), str(folders / "named")
    assert export_command(["run", "--output", str(tmp_path / "1.onnx"), "--evaluate", "0"]) == 0
    printed = capsys.readouterr().out
    assert "validation images:" in printed
    assert "AP on 3 validation images: torch 0.000, file 0.000" in printed
    by_name = ["--images", photos, "--references", named]
    assert export_command(["run", "--output", str(tmp_path / "2.onnx"), *by_name]) == 0
    assert f"images of {photos}:" in capsys.readouterr().out
    effects = [
        [each["reference_effect"] for each in stored(tmp_path / name)["parity"]["batches"]]
        for name in ("1.onnx", "2.onnx")
    ]
    assert effects[0][:3] != effects[1][:3]  # other references
    assert export_command(["run", "--output", str(tmp_path / "3.onnx"), "--images", photos]) == 2
    assert "name no reference of 3 of 3 images" in capsys.readouterr().err
    assert export_command(["run", "--output", str(tmp_path / "3.onnx"), "--references", named]) == 2
    assert "--references gives the references of the images of --images or --int8" in capsys.readouterr().err
    monkeypatch.setattr(command, "load", lambda *_: replace(original, origin=None))
    assert export_command(["run", "--output", str(tmp_path / "3.onnx"), "--images", photos]) == 2
    assert "only a detector that detr_bf.load has read from a checkpoint can be exported" in capsys.readouterr().err
    plain = predictor()
    monkeypatch.setattr(command, "load", lambda *_: plain)
    assert export_command(["run", "--output", str(tmp_path / "3.onnx"), *by_name]) == 2
    assert "reads no references in evaluation" in capsys.readouterr().err


@pytest.mark.full
def test_a_package(tmp_path: Path) -> None:
    original = attending()
    compared = original.export(tmp_path / "it.pt2", size=(64, 96))
    assert max(max(each.differences.values()) for each in compared) < 2e-5, parity_table(compared)
    assert all(each.reference_effect for each in compared)
    loaded = detr_bf.load(tmp_path / "it.pt2")
    batch = batch_of(replace(original, transform=loaded.transform), synthetic_images(), missing=[1])
    check_the_same(original, tmp_path / "it.pt2", file_of(tmp_path / "it.pt2").fitted(batch))


@pytest.mark.slow
def test_a_package_for_squares_has_two_inputs(tmp_path: Path) -> None:
    original = attending("rtdetr", "single_stream_inference", "data.transforms.square=64")
    original.export(tmp_path / "it.pt2", batch=1)
    image = torch.randint(256, (3, 64, 64), dtype=torch.uint8)
    check_the_same(original, tmp_path / "it.pt2", batch_of(original, [image]))


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "dab_detr",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("deformable_detr_two_stage", "rtdetr", "smca_multi_scale")
        ),
    ],
)
@pytest.mark.parametrize("mode", ["mini_batch_inference", "single_stream_inference"])
def test_other_detectors(name: str, mode: str, tmp_path: Path) -> None:
    compared = attending(name, mode).export(tmp_path / "it.onnx")
    assert max(max(each.differences.values()) for each in compared) < 2e-5, parity_table(compared)
    assert all(each.reference_effect for each in compared)
