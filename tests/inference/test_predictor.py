"""Images that the predictors accept, and images that they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap, Detections, Target
from detr_bf.data.inputs import by_size, image_pixels
from detr_bf.evaluation import ScoreThresholds
from detr_bf.inference.backends import TorchBackend
from detr_bf.inference.classifier import ClassifierPredictor
from detr_bf.inference.predictor import Predictor

PIXELS = torch.randint(256, (3, 4, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
ARRAY = PIXELS.permute(1, 2, 0).numpy()


def turned() -> Image.Image:
    picture = Image.fromarray(ARRAY)
    picture.getexif()[0x0112] = 6
    return picture


@pytest.mark.parametrize(
    "image",
    [
        PIXELS,
        PIXELS.float() / 255,
        (PIXELS.double() / 255).requires_grad_(),
        (PIXELS.float() / 255).half(),
        PIXELS.permute(0, 2, 1).contiguous().permute(0, 2, 1),
        torch.cat([PIXELS, PIXELS[:1] // 2]),
        ARRAY,
        ARRAY[:, ::-1][:, ::-1],
        ARRAY.astype(np.float32) / 255,
        ARRAY.astype(np.float64) / 255,
        ARRAY.astype(np.uint16) * 256 + 17,
        (ARRAY.astype(">u2") * 256).astype(">u2"),
        np.dstack([ARRAY, ARRAY[:, :, :1]]),
        Image.fromarray(ARRAY),
        Image.fromarray(np.dstack([ARRAY, ARRAY[:, :, :1]])),
    ],
    ids=[
        "uint8",
        "float",
        "double",
        "half",
        "strides",
        "transparent tensor",
        "numpy",
        "negative strides",
        "numpy float",
        "numpy double",
        "16 bits",
        "big-endian",
        "transparent",
        "pillow",
        "transparent pillow",
    ],
)
def test_the_same_image_in_another_form_has_the_same_pixels(image: Any) -> None:
    given = image_pixels(image, "the image")
    assert given.dtype == torch.uint8
    assert not given.requires_grad
    assert torch.equal(given, PIXELS)


GREY = ARRAY[:, :, 0]


@pytest.mark.parametrize(
    "image",
    [
        GREY,
        GREY[:, :, None],
        GREY / 255,
        torch.from_numpy(GREY.copy()),
        torch.from_numpy(GREY.copy())[None],
        torch.from_numpy(GREY / 255)[None],
        torch.from_numpy(GREY.astype(np.uint16) * 16),
        Image.fromarray(GREY),
        Image.fromarray(np.dstack([GREY, GREY]), "LA"),
    ],
)
def test_a_grey_image_has_three_equal_channels(image: Any) -> None:
    assert torch.equal(image_pixels(image, "the image"), torch.from_numpy(GREY.copy()).expand(3, -1, -1))


def test_bfloat16_is_rounded_to_the_next_value() -> None:
    given = image_pixels((PIXELS.float() / 255).bfloat16(), "the image")
    assert (given.int() - PIXELS.int()).abs().max() <= 1


@pytest.mark.parametrize("image", [ARRAY[:, :, ::-1], np.dstack([ARRAY[:, :, ::-1], GREY]), PIXELS.flip(0)])
def test_blue_may_come_first(image: Any) -> None:
    assert torch.equal(image_pixels(image, "the image", bgr=True), PIXELS)
    assert torch.equal(image_pixels(GREY, "the image", bgr=True)[0], torch.from_numpy(GREY.copy()))


def lossless_files(folder: Path) -> list[Path]:
    """Write lossless files of all kinds: colour, grey, palette, transparent, 16 bits, rotated by EXIF."""
    deep = Image.fromarray(GREY.astype(np.uint16) * 13)
    pictures: dict[str, Image.Image] = {
        "colour.png": Image.fromarray(ARRAY),
        "colour.bmp": Image.fromarray(ARRAY),
        "grey.png": Image.fromarray(GREY),
        "deep.png": deep,
        "deep.tif": deep,
        "palette.png": Image.fromarray(ARRAY).quantize(8),
        "transparent.png": Image.fromarray(np.dstack([ARRAY, GREY])),
        "black and white.png": Image.fromarray(GREY).convert("1"),
        "cmyk.tif": Image.fromarray(ARRAY).convert("CMYK"),
        "rotated.png": turned(),
        "rotated.webp": turned(),
    }
    for name, picture in pictures.items():
        picture.save(folder / name, exif=picture.getexif(), lossless=True)
    return [folder / name for name in pictures]


def test_file_bytes_url_and_pillow_give_the_same_pixels(tmp_path: Path) -> None:
    files = lossless_files(tmp_path)
    with serving(tmp_path) as address:
        for file in files:
            expected = image_pixels(file, "the image")
            url = f"{address}/{file.name}".replace(" ", "%20")
            for given in (str(file), file.read_bytes(), bytearray(file.read_bytes()), url, Image.open(file)):
                assert torch.equal(image_pixels(given, "the image"), expected), (file, type(given))
    assert image_pixels(tmp_path / "rotated.png", "the image").shape == (3, 5, 4)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the files of a folder; ``/moved/NAME`` redirects to NAME, ``/file`` to a file of this machine."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def do_GET(self) -> None:
            target = {"/moved/": f"/{self.path[7:]}", "/file": (folder / "colour.png").as_uri()}
            for start, location in target.items():
                if self.path.startswith(start):
                    self.send_response(302)
                    self.send_header("Location", location)
                    self.end_headers()
                    return
            super().do_GET()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_urls_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lossless_files(tmp_path)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "large.bin").write_bytes(b"x" * 2000)
    monkeypatch.setattr("detr_bf.data.images._SMALLEST_LIMIT", 1000)
    with serving(tmp_path) as address:
        assert torch.equal(image_pixels(f"{address}/moved/colour.png", "the image"), PIXELS)
        for path, said in {
            "nothing.png": "cannot be downloaded: HTTP Error 404",
            "text.png": "cannot be used: it cannot be decoded",
            "file": "cannot be downloaded: .*not allowed",
        }.items():
            with pytest.raises(InputError, match=f"^{address}/{path} {said}"):
                image_pixels(f"{address}/{path}", "the image")
        with pytest.raises(InputError, match="has more than 1,000 bytes"):
            image_pixels(f"{address}/large.bin", "the image", max_pixels=100)
    for wrong in (address, "http://", "https://[", "http://a b/c"):
        with pytest.raises(InputError, match="cannot be downloaded"):
            image_pixels(wrong, "the image")


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_file_is_read(tmp_path: Path, as_path: type) -> None:
    Image.fromarray(ARRAY).save(tmp_path / "a.png")
    assert torch.equal(image_pixels(as_path(tmp_path / "a.png"), "the image"), PIXELS)


def test_a_broken_file_opened_by_pillow(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:5000])
    with pytest.raises(InputError, match="the image is a Pillow image of mode RGB that cannot be used"):
        image_pixels(Image.open(tmp_path / "b.png"), "the image")


def test_an_array_is_not_changed_through_the_tensor() -> None:
    array = ARRAY.copy()
    image_pixels(array, "the image")[:] = 0
    assert np.array_equal(array, ARRAY)


NAN = torch.full((3, 4, 5), 0.5)
NAN[1, 2, 3] = float("nan")

LARGER = torch.zeros(3, 6, 7, dtype=torch.uint8)
REFUSED = [
    (PIXELS.float(), "from .* to .*, expected 0 to 1"),
    (PIXELS.float() / 255 - 0.1, "expected 0 to 1"),
    (ARRAY.astype(np.float32), "from .* to .*, expected 0 to 1"),
    (NAN, "values from nan to nan"),
    (torch.full((3, 4, 5), torch.inf), "from inf to inf"),
    (PIXELS.bool(), r"shape \(3, 4, 5\) and bool, expected uint8"),
    (PIXELS.to(torch.int8), "int8, expected uint8"),
    ((PIXELS / 255).to(torch.float8_e4m3fn), "float8_e4m3fn, expected uint8"),
    (ARRAY.astype(np.uint32), "uint32, expected uint8"),
    (PIXELS.long(), "int64, expected uint8"),
    (PIXELS.to(torch.complex64), "complex64, expected uint8"),
    (ARRAY.astype(np.int32), "int32, expected uint8"),
    (ARRAY.astype(bool), "bool, expected uint8"),
    (np.array([["a", "b"]]), "expected uint8"),
    (np.array([[None, "a"]], dtype=object), "object, expected uint8"),
    (LARGER.permute(1, 2, 0), r"expected \(H, W\) or \(C, H, W\) with 1, 3 or 4 channels: give image.permute"),
    (LARGER.numpy(), r"expected \(H, W\) or \(H, W, C\) with 1, 3 or 4 channels: give image.transpose\(1, 2, 0\)"),
    (PIXELS[None], "give several images to predict"),
    (PIXELS[:2], r"shape \(2, 4, 5\)"),
    (PIXELS[0, 0], r"shape \(5,\)"),
    (torch.tensor(5, dtype=torch.uint8), r"shape \(\)"),
    (torch.empty(3, 0, 5, dtype=torch.uint8), r"shape \(3, 0, 5\)"),
    (PIXELS.float().to_sparse(), "sparse, meta or quantized"),
    (torch.nested.nested_tensor([torch.zeros(4, 5)] * 3), "nested, sparse"),
    (torch.zeros(3, 1, 1).expand(3, 2**19, 2**19), "524288 x 524288 pixels .*, more than max_pixels=178956970"),
    (PIXELS.to("meta"), "sparse, meta or quantized"),
    (ARRAY[:0], r"shape \(0, 5, 3\)"),
    (Image.new("RGB", (0, 4)), "no pixels"),
    (Image.new("F", (5, 4)), "mode F that cannot be used: its pixels are floating-point"),
    ([PIXELS], "of type list, but an image is .*give several images to predict"),
    ((PIXELS, PIXELS), "of type tuple"),
    (None, "of type NoneType"),
    (7, "of type int"),
]


@pytest.mark.parametrize(("image", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_image_is_refused(image: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"image 3 (is|has) .*{said}"):
        image_pixels(image, "image 3")


@pytest.mark.parametrize("image", [PIXELS, ARRAY, Image.fromarray(ARRAY)], ids=["tensor", "numpy", "pillow"])
def test_the_limit_of_pixels_holds_in_every_form(image: Any) -> None:
    image_pixels(image, "the image", 20)
    with pytest.raises(InputError, match=r"^the image is of 5 x 4 pixels \(width x height\), more than max_pixels=19"):
        image_pixels(image, "the image", 19)


def predictors() -> list[Any]:
    """Build a detector that counts its images and a classifier that adds their pixels."""

    class Counting(TorchBackend):
        reads_references = False

        def compute(self, batch: Any, convert: Any, half: bool) -> list[Any]:
            return [Detections(t.image_id, t.boxes, t.boxes[:, 0], t.labels) for t in batch.targets]

    class_map = ClassMap((0, 1), ("a", "b"))
    unchanged: Any = lambda sample: sample  # noqa: E731
    nothing: Any = None
    model: Any = nn.Module()
    model.mask_head = nn.Identity()
    device = torch.device("cpu")
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    return [
        Predictor(Counting(model, device), class_map, unchanged, nothing, nothing),
        ClassifierPredictor(head, class_map, lambda pixels, seed: pixels / 255, device),
    ]


@pytest.mark.parametrize("predictor", predictors(), ids=["detector", "classifier"])
class TestBoth:
    def test_predict_takes_what_can_be_iterated(self, predictor: Any) -> None:
        images = [PIXELS, PIXELS.float() / 255, ARRAY]
        for given in (images, tuple(images), iter(images), torch.stack([PIXELS] * 3), np.stack([ARRAY] * 3)):
            assert len(list(predictor.predict(given, batch_size=2))) == 3
        assert list(predictor.predict([])) == []

    @pytest.mark.parametrize("images", [__file__, Path(__file__), b"abc", bytearray(2), PIXELS, ARRAY, 3, None])
    def test_predict_refuses_a_single_image_at_once(self, predictor: Any, images: Any) -> None:
        with pytest.raises(InputError, match="predict takes several images"):
            predictor.predict(images)

    @pytest.mark.parametrize("images", ["missing/", Path("missing"), "https://nowhere/a.jpg"])
    def test_predict_refuses_a_folder_that_does_not_exist(self, predictor: Any, images: Any) -> None:
        with pytest.raises(InputError, match="there is no folder"):
            predictor.predict(images)

    @pytest.mark.parametrize("size", [0, -1, 1.0, True, None, "2"])
    def test_predict_refuses_a_wrong_batch_size_at_once(self, predictor: Any, size: Any) -> None:
        with pytest.raises(InputError, match="batch_size must be a whole number from 1"):
            predictor.predict([PIXELS], batch_size=size)

    def test_the_message_names_the_image(self, predictor: Any) -> None:
        with pytest.raises(InputError, match=r"^image 1 is a tensor of shape \(3, 4, 5\) and float32 with values"):
            list(predictor.predict([PIXELS, NAN]))
        with pytest.raises(InputError, match=r"^the image is of type set.*predict$"):
            predictor({1, 2})


def test_panoptic_takes_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = predictors()[0]
    with pytest.raises(InputError, match="values from nan"):
        predictor.panoptic(NAN)


class TestThresholds:
    @staticmethod
    def fixed(thresholds: ScoreThresholds | None) -> Any:
        """Build a predictor that finds three objects with masks in every image."""

        class Fixed(TorchBackend):
            reads_references = False

            def compute(self, batch: Any, convert: Any, half: bool) -> list[Any]:
                scores, labels = torch.tensor([0.9, 0.45, 0.3]), torch.tensor([0, 1, 0])
                masks: Any = ("first", "second", "third")
                return [Detections(t.image_id, torch.zeros(3, 4), scores, labels, masks) for t in batch.targets]

        unchanged: Any = lambda sample: sample  # noqa: E731
        nothing: Any = None
        class_map = ClassMap((0, 1), ("a", "b"))
        backend = Fixed(nn.Identity(), torch.device("cpu"))  # type: ignore[arg-type]
        return Predictor(backend, class_map, unchanged, nothing, nothing, thresholds=thresholds)

    @pytest.mark.parametrize(
        ("stored", "threshold", "expected"),
        [
            (None, None, ["first"]),
            (None, "class", ["first"]),
            (ScoreThresholds(0.4, (0.25, 0.5)), None, ["first", "second"]),
            (ScoreThresholds(0.4, (0.25, 0.5)), "class", ["first", "third"]),
            (ScoreThresholds(0.4, (0.25, 0.5)), 0, ["first", "second", "third"]),
            (ScoreThresholds(0.4, (0.25, 0.5)), 0.6, ["first"]),
            (ScoreThresholds(0.4, (0.25, 0.5)), np.float32(0.6), ["first"]),
            (ScoreThresholds(0.4, (0.25, 0.5)), 1.0, []),
        ],
    )
    def test_the_stored_threshold_is_used_unless_another_is_given(
        self, stored: ScoreThresholds | None, threshold: Any, expected: list[str]
    ) -> None:
        predictor = self.fixed(stored)
        found = predictor(PIXELS, threshold)
        assert list(found.masks) == expected
        assert len(found.boxes) == len(found.scores) == len(found.labels) == len(expected)
        assert [list(each.masks) for each in predictor.predict([PIXELS, ARRAY], threshold=threshold)] == [expected] * 2

    @pytest.mark.parametrize(
        "threshold", ["much", "0.5", -0.1, 1.1, float("nan"), True, [0.5], {}, np.array([0.1, 0.2])]
    )
    def test_anything_else_is_refused_at_once(self, threshold: Any) -> None:
        predictor = self.fixed(None)
        for call in (lambda: predictor(PIXELS, threshold), lambda: predictor.predict([PIXELS], threshold=threshold)):
            with pytest.raises(InputError, match="a threshold must be a number from 0 to 1, or 'class'"):
                call()


@pytest.mark.parametrize(("together", "batches"), [(False, [(2, 32, 64), (1, 64, 32)]), (True, [(3, 64, 64)])])
def test_images_of_one_size_are_computed_together(together: bool, batches: list[tuple[int, int, int]]) -> None:
    samples = [
        (torch.full((3, *size), number, dtype=torch.uint8), replace(Target.without_objects(), image_id=number))
        for number, size in enumerate([(32, 64), (64, 32), (32, 64)])
    ]
    computed = []

    def ids(batch: Batch) -> list[int]:
        computed.append((len(batch.images), *batch.images.shape[-2:]))
        return [target.image_id for target in batch.targets]

    assert by_size(samples, ids, together=together) == [0, 1, 2]
    assert computed == batches
