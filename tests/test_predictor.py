"""Images that the predictors accept, and images that they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from detr_bf.classification.predictor import ClassifierPredictor
from detr_bf.errors import InputError
from detr_bf.evaluation import ScoreThresholds
from detr_bf.predictor import Predictor, image_pixels
from detr_bf.structures import ClassMap, Detections

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
        ARRAY,
        ARRAY[:, ::-1][:, ::-1],
        Image.fromarray(ARRAY),
    ],
    ids=["uint8", "float", "double", "half", "strides", "numpy", "negative strides", "pillow"],
)
def test_the_same_image_in_another_form_has_the_same_pixels(image: Any) -> None:
    given = image_pixels(image, "the image")
    assert given.dtype == torch.uint8
    assert not given.requires_grad
    assert torch.equal(given, PIXELS)


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_file_is_read(tmp_path: Path, as_path: type) -> None:
    Image.fromarray(ARRAY).save(tmp_path / "a.png")
    assert torch.equal(image_pixels(as_path(tmp_path / "a.png"), "the image"), PIXELS)


def test_an_array_is_not_changed_through_the_tensor() -> None:
    array = ARRAY.copy()
    image_pixels(array, "the image")[:] = 0
    assert np.array_equal(array, ARRAY)


NAN = torch.full((3, 4, 5), 0.5)
NAN[1, 2, 3] = float("nan")

REFUSED = [
    (PIXELS.float(), "from .* to .*, expected 0 to 1"),
    (PIXELS.float() / 255 - 0.1, "expected 0 to 1"),
    (NAN, "values from nan to nan"),
    (torch.full((3, 4, 5), torch.inf), "from inf to inf"),
    (PIXELS.bool(), r"shape \(3, 4, 5\) and bool, expected uint8"),
    (PIXELS.to(torch.int8), "int8, expected uint8"),
    (PIXELS.long(), "int64, expected uint8"),
    (PIXELS.to(torch.complex64), "complex64, expected uint8"),
    (PIXELS.permute(1, 2, 0), r"expected \(3, H, W\), RGB: give image.permute"),
    (PIXELS[None], "give several images to predict"),
    (PIXELS[:2], r"shape \(2, 4, 5\)"),
    (PIXELS[0], r"shape \(4, 5\)"),
    (torch.empty(3, 0, 5, dtype=torch.uint8), r"shape \(3, 0, 5\)"),
    (PIXELS.float().to_sparse(), "sparse, meta or quantized"),
    (torch.nested.nested_tensor([torch.zeros(4, 5)] * 3), "nested, sparse"),
    (torch.zeros(3, 1, 1).expand(3, 2**19, 2**19), "524288 x 524288 pixels .*, more than max_pixels=178956970"),
    (PIXELS.to("meta"), "sparse, meta or quantized"),
    (ARRAY.astype(np.float32) / 255, r"float32, expected \(H, W, 3\) uint8"),
    (PIXELS.numpy(), r"a NumPy array of shape \(3, 4, 5\)"),
    (ARRAY[:0], r"shape \(0, 5, 3\)"),
    (Image.new("L", (5, 4)), "mode L, expected RGB"),
    (Image.new("RGB", (0, 4)), "expected \\(H, W, 3\\)"),
    (turned(), "EXIF rotation"),
    ([PIXELS], "of type list, but an image is .*give several images to predict"),
    ((PIXELS, PIXELS), "of type tuple"),
    (None, "of type NoneType"),
    (7, "of type int"),
    (b"a.png", "of type bytes"),
]


@pytest.mark.parametrize(("image", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_image_is_refused(image: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"image 3 is .*{said}"):
        image_pixels(image, "image 3")


@pytest.mark.parametrize("image", [PIXELS, ARRAY, Image.fromarray(ARRAY)], ids=["tensor", "numpy", "pillow"])
def test_the_limit_of_pixels_holds_in_every_form(image: Any) -> None:
    image_pixels(image, "the image", 20)
    with pytest.raises(InputError, match=r"^the image is of 5 x 4 pixels \(width x height\), more than max_pixels=19"):
        image_pixels(image, "the image", 19)


def predictors() -> list[Any]:
    """Build a detector that counts its images and a classifier that adds their pixels."""

    class Counting(Predictor):
        def _detect(self, samples: Any) -> list[Detections]:
            return [Detections(t.image_id, t.boxes, t.boxes[:, 0], t.labels) for _, t in samples]

    class_map = ClassMap((0, 1), ("a", "b"))
    unchanged: Any = lambda sample: sample  # noqa: E731
    nothing: Any = None
    device = torch.device("cpu")
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    return [
        Counting(nothing, class_map, unchanged, nothing, nothing, device),
        ClassifierPredictor(head, class_map, lambda pixels, seed: pixels / 255, device),
    ]


@pytest.mark.parametrize("predictor", predictors(), ids=["detector", "classifier"])
class TestBoth:
    def test_predict_takes_what_can_be_iterated(self, predictor: Any) -> None:
        images = [PIXELS, PIXELS.float() / 255, ARRAY]
        for given in (images, tuple(images), iter(images), torch.stack([PIXELS] * 3), np.stack([ARRAY] * 3)):
            assert len(list(predictor.predict(given, batch_size=2))) == 3
        assert list(predictor.predict([])) == []

    @pytest.mark.parametrize("images", ["photo.jpg", Path("photo.jpg"), PIXELS, ARRAY, 3, None])
    def test_predict_refuses_a_single_image_at_once(self, predictor: Any, images: Any) -> None:
        with pytest.raises(InputError, match="predict takes several images"):
            predictor.predict(images)

    @pytest.mark.parametrize("size", [0, -1, 1.0, True, None, "2"])
    def test_predict_refuses_a_wrong_batch_size_at_once(self, predictor: Any, size: Any) -> None:
        with pytest.raises(InputError, match="batch_size must be a whole number from 1"):
            predictor.predict([PIXELS], batch_size=size)

    def test_the_message_names_the_image(self, predictor: Any) -> None:
        with pytest.raises(InputError, match=r"^image 1 is a floating-point tensor"):
            list(predictor.predict([PIXELS, NAN]))
        with pytest.raises(InputError, match=r"^the image is of type list.*predict$"):
            predictor([PIXELS])


def test_panoptic_takes_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = predictors()[0]
    object.__setattr__(predictor, "model", nn.Module())
    predictor.model.mask_head = nn.Identity()
    with pytest.raises(InputError, match="values from nan"):
        predictor.panoptic(NAN)


class TestThresholds:
    @staticmethod
    def fixed(thresholds: ScoreThresholds | None) -> Any:
        """Build a predictor that finds three objects with masks in every image."""

        class Fixed(Predictor):
            def _detect(self, samples: Any) -> list[Detections]:
                scores, labels = torch.tensor([0.9, 0.45, 0.3]), torch.tensor([0, 1, 0])
                masks: Any = ("first", "second", "third")
                return [Detections(t.image_id, torch.zeros(3, 4), scores, labels, masks) for _, t in samples]

        unchanged: Any = lambda sample: sample  # noqa: E731
        nothing: Any = None
        class_map = ClassMap((0, 1), ("a", "b"))
        return Fixed(nothing, class_map, unchanged, nothing, nothing, torch.device("cpu"), thresholds=thresholds)

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
