"""References given to a predictor: one for all images, one for each, and files of the images' names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import detr_bf
from detr_bf.common.errors import InputError
from detr_bf.common.files import read_json
from detr_bf.common.structures import Batch, Detections
from detr_bf.data import coco
from detr_bf.data.references import files_by_stem
from detr_bf.data.transforms import eval_sample
from detr_bf.data.video import VideoFrame, read_frames
from detr_bf.inference import predictor
from detr_bf.inference.backends import TorchBackend
from detr_bf.inference.predictor import Predictor
from tests.data.test_video import HEIGHT, WIDTH, clip
from tests.tools.test_convert_checkpoint import checkpoint

SIZES = ["data.transforms.eval_short_side=64", "data.transforms.max_size=128"]
ATTENDS = ["batch_former.references=true", "batch_former.mode=single_stream_inference", "data.reference=own"]
COMPARES = ["batch_former.enabled=false", "model.backbone.reference=difference", "data.reference=own"]
SIZE = (48, 64)  # height and width


def loaded(folder: Path, *changes: str) -> Predictor:
    checkpoint(*SIZES, *changes, average=False).save(folder / "tiny.pt")
    return detr_bf.load(folder / "tiny.pt", "cpu")


@pytest.fixture(scope="module", params=[ATTENDS, COMPARES], ids=["attends", "compares"])
def detector(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return loaded(tmp_path_factory.mktemp("weights"), *request.param)


@pytest.fixture(scope="module")
def attending(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return loaded(tmp_path_factory.mktemp("weights"), *ATTENDS)


def pixels(number: int, size: tuple[int, int] = SIZE) -> Tensor:
    return torch.randint(256, (3, *size), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)


def save(path: Path, image: Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return path


def expected(detector: Predictor, image: Tensor, reference: Tensor) -> Detections:
    """Return the detections of the model for a batch of one image and its reference."""
    sample, target = eval_sample(detector.transform, image, 0)
    other, _ = eval_sample(detector.transform, reference, 0)
    with torch.no_grad():
        outputs = detector.model(Batch.collate([(sample, target, other)]))
    return detector.postprocess(outputs, [target])[0]


def assert_equal(found: Any, other: Any) -> None:
    assert len(found.scores) > 0
    for name in ("boxes", "scores", "labels"):
        assert torch.equal(getattr(found, name), getattr(other, name)), name


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Write images ``a/x.png`` and ``b/x.png`` and their references, of which one has another suffix."""
    for number, name in enumerate(("a/x", "b/x")):
        save(tmp_path / "images" / f"{name}.png", pixels(number))
        save(tmp_path / "references" / f"{name}.{('png', 'bmp')[number]}", pixels(number + 10))
    return tmp_path / "images", tmp_path / "references"


def test_the_reference_of_an_image_is_seen(detector: Predictor, tmp_path: Path) -> None:
    image, reference = pixels(0), pixels(1)
    found = detector(image, 0.0, reference=reference)
    assert_equal(found, expected(detector, image, reference))
    assert not torch.equal(found.scores, detector(image, 0.0, reference=image).scores)
    array = reference.permute(1, 2, 0).numpy()
    for given in (
        save(tmp_path / "r.png", reference),
        Image.fromarray(array),
        (tmp_path / "r.png").read_bytes(),
        array,
    ):
        assert_equal(detector(image, 0.0, reference=given), found)
    swapped = array[:, :, ::-1]
    assert_equal(detector(image.flip(0), 0.0, bgr=True, reference=swapped), found)


def test_each_image_has_the_reference_at_its_place(detector: Predictor) -> None:
    images, references = [pixels(number) for number in range(3)], [pixels(number) for number in range(10, 13)]
    each = [expected(detector, *pair) for pair in zip(images, references, strict=True)]
    for given in (references, tuple(references), iter(references), torch.stack(references)):
        for found, one in zip(detector(images, 0.0, reference=given), each, strict=True):
            assert_equal(found, one)
    for reference in (references[0], repeat(references[0])):
        for found, image in zip(detector.predict(iter(images), 1, 0.0, reference=reference), images, strict=True):
            assert_equal(found, expected(detector, image, references[0]))


def test_images_of_a_batch_keep_their_references(detector: Predictor) -> None:
    images, references = [pixels(number) for number in range(4)], [pixels(number) for number in range(10, 14)]
    for found, image, reference in zip(
        detector.predict(images, 3, 0.0, reference=references), images, references, strict=True
    ):
        torch.testing.assert_close(found.scores, expected(detector, image, reference).scores, rtol=1e-4, atol=1e-5)


def test_files_have_the_reference_of_their_name(detector: Predictor, folders: tuple[Path, Path]) -> None:
    images, references = folders
    each = [expected(detector, pixels(number), pixels(number + 10)) for number in range(2)]
    for found, one in zip(detector(images, 0.0, reference=references), each, strict=True):
        assert_equal(found, one)
    assert_equal(detector(images / "b" / "x.png", 0.0, reference=references / "b"), each[1])


def test_tiles_of_image_and_reference_are_at_one_place(detector: Predictor) -> None:
    image, reference = pixels(0, (64, 128)), pixels(1, (64, 128))
    found = detector(image, 0.0, tile=(64, 0), reference=reference)
    parts = [expected(detector, image[:, :, at], reference[:, :, at]) for at in (slice(64), slice(64, 128))]
    scores = torch.cat([part.scores for part in parts])
    assert torch.equal(found.scores.sort().values, scores.sort().values)


def test_panoptic_maps_see_the_reference(tmp_path: Path) -> None:
    detector = loaded(tmp_path, *ATTENDS, "model.masks=true", "eval.panoptic.threshold=0")
    images, reference = [pixels(0), pixels(2)], pixels(1)
    sample, target = eval_sample(detector.transform, images[0], 0)
    with torch.no_grad():
        outputs = detector.model(Batch.collate([(sample, target, eval_sample(detector.transform, reference, 0)[0])]))
    (one,) = detector.panoptic_postprocess(outputs, [target])
    found = detector.panoptic(images[0], reference=reference)
    assert torch.equal(found.ids, one.ids)
    assert torch.equal(detector.panoptic(images, reference=reference)[0].ids, one.ids)
    assert not torch.equal(detector.panoptic(images[0], reference=images[0]).ids, one.ids)
    with pytest.raises(InputError, match="compares each image with its reference"):
        detector.panoptic(images[0])


def test_each_frame_of_a_video_has_the_one_reference(attending: Predictor, tmp_path: Path) -> None:
    clip(tmp_path / "a.avi")
    reference = pixels(3, (HEIGHT, WIDTH))
    frames = list(read_frames(tmp_path / "a.avi", every=5))
    found = list(attending.predict_video(tmp_path / "a.avi", 5, threshold=0.0, reference=reference))
    for frame, each in zip(frames, found, strict=True):
        assert_equal(each, expected(attending, frame.pixels, reference))
    with pytest.raises(InputError, match="compares each image with its reference"):
        attending.predict_video(tmp_path / "a.avi")
    with pytest.raises(InputError, match=r"is a folder: give one reference image for all frames of a video"):
        attending.predict_video(tmp_path / "a.avi", reference=tmp_path)
    with pytest.raises(InputError, match=rf"^frame 0: the reference given has 9 x 8 .*its image {WIDTH} x {HEIGHT}"):
        list(attending.predict_video(tmp_path / "a.avi", reference=pixels(0, (8, 9))))


def test_frames_before_one_of_another_size_are_detected(
    attending: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frames(video: Path, **options: Any) -> Iterator[VideoFrame]:
        for number in range(5):
            yield VideoFrame(number, number / 25, pixels(number, SIZE if number < 2 else (40, 30)))

    monkeypatch.setattr(predictor, "read_frames", frames)
    before: list[int] = []
    with pytest.raises(InputError, match=r"^frame 2: the reference given has 64 x 48"):
        before.extend(each.frame for each in attending.predict_video("a.avi", batch_size=4, reference=pixels(7)))
    assert before == [0, 1]


def test_a_batch_says_nothing_of_references_that_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = seen(monkeypatch)
    plain = loaded(tmp_path)
    assert len(plain(IMAGES)) == 2
    assert [(each.references, each.has_reference) for each in batches] == [(None, None)] * 2


def seen(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Return the list of the batches that are computed."""
    batches: list[Batch] = []
    compute = TorchBackend.compute

    def recorded(self: TorchBackend, batch: Batch, convert: Any, half: bool) -> Any:
        batches.append(batch)
        return compute(self, batch, convert, half)

    monkeypatch.setattr(TorchBackend, "compute", recorded)
    return batches


IMAGES = [pixels(0), pixels(1)]
OTHER = pixels(2, (40, 30))
DOCS = Path(__file__).parents[2] / "docs"  # has pictures
WRONG: list[tuple[Any, Any, str]] = [
    (IMAGES[0], None, "compares each image with its reference.*none is given: give reference=IMAGE"),
    (IMAGES, None, "none is given"),
    (IMAGES[0], OTHER, r"^the image: the reference given has 30 x 40 pixels \(width x height\) and its image 64 x 48"),
    (IMAGES, [IMAGES[0], OTHER], r"^image 1: the reference given has 30 x 40 pixels"),
    (IMAGES, IMAGES[:1], "^2 images and 1 references: give as many references as images"),
    (IMAGES, [], "^2 images and 0 references"),
    (IMAGES, iter(IMAGES[:1]), "^there is no reference for image 1: give as many references as images"),
    (IMAGES, [IMAGES[0], None], "^the reference of image 1 is of type NoneType, but an image is"),
    (IMAGES[0], IMAGES, "^the reference is of type list, but an image is"),
    (IMAGES, 3, "^the reference is of type int, but an image is"),
    (IMAGES[0], "missing.png", "missing.png does not exist"),
    (IMAGES, DOCS, r"^image 0 is a tensor of shape \(3, 48, 64\) and uint8, which has no file name"),
]


@pytest.mark.parametrize(("image", "reference", "said"), WRONG, ids=range(len(WRONG)))
def test_wrong_references_are_refused(attending: Predictor, image: Any, reference: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        attending(image, reference=reference)


def test_a_missing_reference_is_refused_before_the_first_image(attending: Predictor) -> None:
    def images() -> Iterator[Tensor]:
        pytest.fail("an image was read")
        yield IMAGES[0]

    with pytest.raises(InputError, match="none is given"):
        attending.predict(images())


@pytest.mark.parametrize("mode", ["two_stream", "single_stream", "self_only"])
def test_a_detector_that_sees_references_in_training_alone_needs_none(tmp_path: Path, mode: str) -> None:
    detector = loaded(tmp_path, "batch_former.references=true", "data.reference=own", f"batch_former.mode={mode}")
    assert len(detector(IMAGES[0], 0.0)) > 0
    with pytest.raises(InputError, match="this detector reads none when it predicts: leave it out"):
        detector(IMAGES[0], reference=IMAGES[1])


def test_images_of_a_folder_without_usable_reference_are_left_out(
    attending: Predictor, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    images, references = folders
    save(images / "b" / "y.png", pixels(4))
    save(images / "c.png", pixels(5))
    save(references / "c.png", OTHER)
    with caplog.at_level(logging.WARNING):
        found = list(attending.predict(images, threshold=0.0, reference=references))
    assert [Path(each.source).relative_to(images).as_posix() for each in found] == ["a/x.png", "b/x.png"]
    assert "2 of 4 images or their references cannot be used and were left out" in caplog.text
    assert f"y.png has no reference: in {references} there is no image file b/y, with any suffix" in caplog.text
    assert "c.png: the reference" in caplog.text
    assert "has 30 x 40 pixels (width x height) and its image 64 x 48" in caplog.text


def test_an_image_is_not_its_own_reference(attending: Predictor, folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folders[0])
    for references in (folders[0], tmp_path / "link"):
        with pytest.raises(InputError, match=r"x.png is also the file of that name in .*, its own reference"):
            attending(folders[0] / "a" / "x.png", reference=references / "a")
        with pytest.raises(InputError, match=r"no image can be read:\n.*x.png is also the file"):
            attending(folders[0], reference=references)


def test_a_folder_of_references_of_other_images(attending: Predictor, folders: tuple[Path, Path]) -> None:
    images, references = folders
    with pytest.raises(InputError, match="no file has the name of an image: references have the names"):
        attending(images, reference=references / "a")
    with pytest.raises(InputError, match="is a folder: give one reference for all its images, or a folder"):
        attending(images, reference=IMAGES)
    save(references / "a" / "x.bmp", pixels(0))
    with pytest.raises(InputError, match=r"x.bmp and .*x.png are both the reference of the image of that name"):
        files_by_stem(references)


class TestEvaluate:
    @pytest.fixture
    def data(self, tmp_path: Path, coco_folder: Any) -> Any:
        data = coco_folder(num_images=3, size=(64, 48))
        for category, name in zip(data.content["categories"], ("cat", "dog", "bird"), strict=True):
            category["name"] = name
        for number, image in enumerate(data.content["images"]):
            image["template"] = f"../templates/{number}.png"
            save(tmp_path / "train" / "templates" / f"{number}.png", pixels(number + 10))
        data.save()
        return data

    def assert_seen(self, detector: Predictor, batches: Sequence[Batch], numbers: Sequence[int]) -> None:
        (batch,) = batches
        assert batch.references is not None
        for row, number in zip(batch.references, numbers, strict=True):
            assert torch.equal(row, eval_sample(detector.transform, pixels(number), 0)[0])
        batches.clear()  # type: ignore[attr-defined]

    def test_the_key_or_the_folder_names_the_references(
        self, attending: Predictor, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batches, read = seen(monkeypatch), list[Path]()
        monkeypatch.setattr(coco, "read_json", lambda path: (read.append(path), read_json(path))[1])
        attending.evaluate(data.annotations, data.images)
        assert read == [data.annotations], "the file is read once"
        self.assert_seen(attending, batches, [10, 11, 12])
        for number, image in enumerate(data.content["images"]):
            del image["template"]
            save(tmp_path / "named" / Path(image["file_name"]).with_suffix(".bmp"), pixels(number + 20))
        data.save()
        attending.evaluate(data.annotations, data.images, references=tmp_path / "named")
        self.assert_seen(attending, batches, [20, 21, 22])

    def test_missing_ones_are_told(
        self, attending: Predictor, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        del data.content["images"][1]["template"]
        data.save()
        with caplog.at_level(logging.WARNING):
            attending.evaluate(data.annotations, data.images)
        assert "the images: 1 of 3 images have no reference" in caplog.text
        for image in data.content["images"]:
            image.pop("template", None)
        data.save()
        with pytest.raises(InputError, match="each image needs its own reference, and none is given: give the key"):
            attending.evaluate(data.annotations, data.images)
        plain = loaded(tmp_path)
        with pytest.raises(InputError, match="this detector reads none"):
            plain.evaluate(data.annotations, data.images, references=tmp_path)
