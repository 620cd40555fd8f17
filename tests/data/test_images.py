from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.data.images import ImageSizes, read_image
from detr_bf.errors import InputError

RED, BLUE = (220, 20, 20), (20, 20, 220)


def picture() -> Image.Image:
    """60 x 40, red on the left, blue on the right."""
    image = Image.new("RGB", (60, 40), RED)
    image.paste(BLUE, (30, 0, 60, 40))
    return image


def turned() -> Image.Exif:
    """EXIF that asks for a quarter turn clockwise."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def assert_colour(pixels: torch.Tensor, y: int, x: int, expected: tuple[int, int, int]) -> None:
    assert (pixels[:, y, x].int() - torch.tensor(expected)).abs().max() <= 12, pixels[:, y, x]


@pytest.mark.parametrize(
    ("name", "mode", "save"),
    [
        ("a.jpg", "RGB", {"quality": 95, "subsampling": 0}),
        ("a.png", "RGB", {}),
        ("cmyk.jpg", "CMYK", {"quality": 95, "subsampling": 0}),
        ("png.jpg", "RGB", {"format": "PNG"}),
        ("alpha.png", "RGBA", {}),
        ("palette.png", "P", {}),
        ("a.webp", "RGB", {"lossless": True}),
        ("a.gif", "P", {}),
        ("a.bmp", "RGB", {}),
        ("a.tiff", "RGB", {}),
    ],
)
def test_colour_formats(tmp_path: Path, name: str, mode: str, save: dict[str, object]) -> None:
    picture().convert(mode).save(tmp_path / name, **save)
    pixels = read_image(tmp_path / name)
    assert pixels.shape == (3, 40, 60)
    assert pixels.dtype == torch.uint8
    assert_colour(pixels, 20, 10, picture().convert(mode).convert("RGB").getpixel((10, 20)))
    assert_colour(pixels, 20, 50, picture().convert(mode).convert("RGB").getpixel((50, 20)))
    assert pixels[0, 20, 10] > 150 > pixels[2, 20, 10]  # still red on the left


@pytest.mark.parametrize("name", ["grey.jpg", "grey.png"])
def test_grey_becomes_three_equal_channels(tmp_path: Path, name: str) -> None:
    Image.new("L", (8, 6), 130).save(tmp_path / name)
    assert torch.equal(read_image(tmp_path / name), torch.full((3, 6, 8), 130, dtype=torch.uint8))


def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 300, 0x7FFF, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png")[0].tolist() == [[0, 1, 127, 255]]


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp"])
def test_exif_rotation_is_applied(tmp_path: Path, name: str) -> None:
    picture().save(tmp_path / name, exif=turned())
    for pixels in (read_image(tmp_path / name), read_image(tmp_path / name, annotated=(60, 40))):
        assert pixels.shape == (3, 60, 40)
        assert_colour(pixels, 10, 20, RED)  # the left edge is now at the top
        assert_colour(pixels, 50, 20, BLUE)


def test_exif_rotation_is_not_applied_to_boxes_made_without_it(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png", exif=turned())
    pixels = read_image(tmp_path / "a.png", annotated=(40, 60))
    assert pixels.shape == (3, 40, 60)
    assert_colour(pixels, 20, 10, RED)


def test_square_images_are_rotated() -> None:
    assert ImageSizes((5, 5), (5, 5)).wants_rotation((5, 5))


def test_another_size_is_refused(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a\.png.*annotated for 30 x 20 pixels.*the file has 60 x 40"):
        read_image(tmp_path / "a.png", annotated=(20, 30))


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"hello", b"\xff\xd8\xff\xe0junk"])
def test_unreadable_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.jpg").write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.jpg"):
        read_image(tmp_path / "broken.jpg")


def test_a_truncated_jpeg_is_not_filled_up(tmp_path: Path) -> None:
    picture().resize((600, 400)).save(tmp_path / "whole.jpg")
    data = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"half\.jpg.*decoded"):
        read_image(tmp_path / "half.jpg")


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    Image.new("F", (4, 4), 0.5).save(tmp_path / "float.tiff")
    with pytest.raises(InputError, match="floating-point"):
        read_image(tmp_path / "float.tiff")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.png does not exist"):
        read_image(tmp_path / "none.png")
