from __future__ import annotations

import os
import re
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ImageFile import ImageFile

from detr_bf.common.errors import InputError
from detr_bf.data.image_headers import ImageSizes, boxes_as_stored
from detr_bf.data.images import PixelFormat, check_image, decode_image, read_image
from detr_bf.data.masks import read_ids

RED, BLUE = (220, 20, 20), (20, 20, 220)


def picture() -> Image.Image:
    """Image of 60 x 40 pixels, red on the left, blue on the right."""
    image = Image.new("RGB", (60, 40), RED)
    image.paste(BLUE, (30, 0, 60, 40))
    return image


def png(width: int, height: int, pixels: bytes) -> bytes:
    """Write a PNG of 16-bit colour, which Pillow cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def turned() -> Image.Exif:
    """Return EXIF data that asks for a quarter turn clockwise."""
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
    assert pixels[0, 20, 10] > 150 > pixels[2, 20, 10]  # red is still on the left


@pytest.mark.parametrize("name", ["grey.jpg", "grey.png"])
def test_grey_becomes_three_equal_channels(tmp_path: Path, name: str) -> None:
    Image.new("L", (8, 6), 130).save(tmp_path / name)
    assert torch.equal(read_image(tmp_path / name), torch.full((3, 6, 8), 130, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("values", "shown", "depth"),
    [
        ([0, 300, 0x7FFF, 0xFFFF], [0, 1, 127, 255], 16),
        ([0, 16, 2048, 4095], [0, 1, 128, 255], 12),  # 12-bit values in a 16-bit file: not black
        ([0, 1, 4, 1023], [0, 0, 1, 255], 10),
        ([0, 64, 8192, 16383], [0, 1, 128, 255], 14),
        ([0, 1, 200, 255], [0, 1, 200, 255], 8),
        ([0, 0, 0, 0], [0, 0, 0, 0], 8),
        ([0, 0, 0, 256], [0, 0, 0, 64], 10),
    ],
)
@pytest.mark.parametrize("name", ["deep.png", "deep.tiff"])
def test_16_bit_grey_is_scaled_by_the_bits_it_uses(
    tmp_path: Path, name: str, values: list[int], shown: list[int], depth: int
) -> None:
    Image.fromarray(np.array([values], dtype=np.uint16)).save(tmp_path / name)
    assert read_image(tmp_path / name)[0].tolist() == [shown]
    assert torch.equal(decode_image((tmp_path / name).read_bytes()), read_image(tmp_path / name))
    assert check_image((tmp_path / name).read_bytes())[:2] == (ImageSizes((1, 4), (1, 4)), depth)


def test_a_hot_pixel_does_not_change_the_brightness(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 4096, (50, 60), dtype=np.uint16)
    expected = (values >> 4).astype(np.uint8)
    expected[7, 9] = 255
    values[7, 9] = 0xFFFF
    Image.fromarray(values).save(tmp_path / "hot.png")
    assert np.array_equal(read_image(tmp_path / "hot.png")[0].numpy(), expected)
    assert check_image((tmp_path / "hot.png").read_bytes())[1] == 12


def test_16_bit_grey_is_scaled_by_the_bits_of_the_data_set(tmp_path: Path) -> None:
    values = [0, 16, 1023, 4095, 0xFFFF]
    Image.fromarray(np.array([values], dtype=np.uint16)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    for bits, shown in ((12, [0, 1, 63, 255, 255]), (16, [0, 0, 3, 15, 255]), (8, [0, 16, 255, 255, 255])):
        assert read_image(tmp_path / "a.png", pixel_format=PixelFormat(grey_bits=bits))[0].tolist() == [shown]
        assert decode_image(data, pixel_format=PixelFormat(grey_bits=bits))[0].tolist() == [shown]


def test_16_bit_colour_is_read_by_its_upper_bits(tmp_path: Path) -> None:
    data = png(1, 1, zlib.compress(b"\0" + struct.pack(">HHH", 0x1234, 0xABCD, 0x00FF)))
    assert decode_image(data).flatten().tolist() == [0x12, 0xAB, 0]
    assert check_image(data)[1] == 0
    (tmp_path / "ids.png").write_bytes(data)
    with pytest.raises(InputError, match=r"ids\.png is a RGB image of 16 bits"):
        read_ids(tmp_path / "ids.png")


def test_16_bits_are_warned_of_once_for_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.png", "b.png"):
        Image.fromarray(np.array([[5, 4095]], dtype=np.uint16)).save(tmp_path / name)
        read_image(tmp_path / name)
    [record] = caplog.records
    assert "a.png has 16 bits a channel" in record.getMessage()


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp"])
def test_exif_rotation_is_applied(tmp_path: Path, name: str) -> None:
    picture().save(tmp_path / name, exif=turned())
    for pixels in (read_image(tmp_path / name), read_image(tmp_path / name, annotated=(60, 40))):
        assert pixels.shape == (3, 60, 40)
        assert_colour(pixels, 10, 20, RED)  # the left edge is the top now
        assert_colour(pixels, 50, 20, BLUE)


def test_exif_rotation_is_not_applied_to_boxes_made_without_it(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png", exif=turned())
    pixels = read_image(tmp_path / "a.png", annotated=(40, 60))
    assert pixels.shape == (3, 40, 60)
    assert_colour(pixels, 20, 10, RED)


def test_square_images_are_rotated() -> None:
    assert ImageSizes((5, 5), (5, 5)).wants_rotation((5, 5))
    assert not ImageSizes((5, 5), (5, 5)).wants_rotation((5, 5), as_stored=True)
    assert ImageSizes((5, 9), (9, 5)).wants_rotation((9, 5), as_stored=True)


@pytest.mark.parametrize(
    ("annotated", "expected"),
    [
        ([(40, 60), (40, 60)], True),
        ([(60, 40), (60, 40)], False),
        ([(40, 60), (60, 40)], None),
        ([(40, 60), None], True),
        ([(9, 9), None], None),
        ([], None),
    ],
)
def test_other_images_of_the_file_tell_if_boxes_are_rotated(
    tmp_path: Path, annotated: list[tuple[int, int] | None], expected: bool | None
) -> None:
    mirrored, images = Image.Exif(), [("plain.png", (40, 60)), ("mirrored.png", (40, 60)), ("missing.png", (40, 60))]
    mirrored[0x0112] = 2
    picture().save(tmp_path / "plain.png")
    picture().save(tmp_path / "mirrored.png", exif=mirrored)
    for number, size in enumerate(annotated):
        picture().save(tmp_path / f"{number}.png", exif=turned())
        images.append((f"{number}.png", size))
    assert boxes_as_stored(tmp_path, images) is expected
    pixels = read_image(tmp_path / "mirrored.png", (40, 60), as_stored=bool(expected))
    assert_colour(pixels, 20, 10, RED if expected else BLUE)


def test_another_size_is_refused(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a\.png.*annotated for 30 x 20 pixels.*the file has 60 x 40"):
        read_image(tmp_path / "a.png", annotated=(20, 30))


def test_a_phone_s_picture_of_several_is_its_first(tmp_path: Path) -> None:
    picture().save(tmp_path / "phone.jpg", format="MPO", append_images=[Image.new("RGB", (60, 40))], save_all=True)
    assert Image.open(tmp_path / "phone.jpg").format == "MPO"
    assert_colour(read_image(tmp_path / "phone.jpg"), 20, 10, RED)


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tiff"])
def test_of_an_animation_the_first_frame_is_read(tmp_path: Path, name: str) -> None:
    picture().save(tmp_path / name, append_images=[Image.new("RGB", (60, 40))], save_all=True)
    assert_colour(read_image(tmp_path / name), 20, 10, RED)


@pytest.mark.parametrize("kind", ["EPS", "PPM", "TGA", "ICO", "JPEG2000", "PDF", "PCX", "DDS"])
@pytest.mark.parametrize("name", ["a.jpg", "a.eps"])
def test_no_other_decoder_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    def started(*arguments: object, **options: object) -> None:
        raise AssertionError(f"a program was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(os, "system", started)
    picture().save(tmp_path / name, format=kind)
    message = "it cannot be decoded .none of the formats JPEG, PNG, WEBP, BMP, TIFF, GIF, AVIF"
    with pytest.raises(InputError, match=message):
        read_image(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        check_image((tmp_path / name).read_bytes())
    with pytest.raises(InputError, match=message):
        read_ids(tmp_path / name)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.gif", "a.tiff", "a.webp", "a.bmp"])
def test_the_number_of_pixels_is_limited_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    picture().save(tmp_path / name)
    assert read_image(tmp_path / name, max_pixels=2400).shape == (3, 40, 60)
    monkeypatch.setattr(ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(InputError, match=r"it has 60 x 40 pixels \(width x height\), more than data.max_pixels=2399"):
        read_image(tmp_path / name, max_pixels=2399)


@pytest.mark.parametrize("side", [14_000, 60_000])  # above Pillow's limits for a warning and for an error
def test_pillow_has_no_say_in_the_limit(
    tmp_path: Path, side: int, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huge.png").write_bytes(png(side, side, b""))
    with pytest.raises(InputError, match=rf"it has {side} x {side} pixels .*data.max_pixels=178956970"):
        read_image(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    picture().save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").shape == (3, 40, 60)
    assert not recwarn.list


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Truncated")
@pytest.mark.parametrize("tail", [b"junk", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff"])
def test_broken_exif_rotates_nothing(tmp_path: Path, tail: bytes) -> None:
    picture().save(tmp_path / "a.jpg", exif=b"Exif\0\0" + tail)
    assert read_image(tmp_path / "a.jpg").shape == (3, 40, 60)


def test_images_are_opened_nowhere_else() -> None:
    root = Path(__file__).parents[2]
    files = [path for folder in ("detr_bf", "tools", "benchmarks") for path in (root / folder).rglob("*.py")]
    files = [path for path in files if path.parent.name != "scripts"]  # they are what others would write
    assert len(files) > 100
    opening = [path for path in files if re.search(r"Image\.open\(|pil_loader|imread\(", path.read_text("utf-8"))]
    assert [path.name for path in opening] == []


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    with (tmp_path / "sparse.jpg").open("wb") as file:
        file.truncate(30 * 2**30)
    for name, said in (
        ("pipe.jpg", "it is a FIFO, expected a regular file"),
        ("folder.jpg", "it is a folder"),
        ("device.jpg", "it is a device"),
        ("sparse.jpg", r"32,212,254,720 bytes, 1,431,655,760 are allowed with data\.max_pixels=178956970"),
        ("x" * 300 + ".jpg", "File name too long"),
        ("nul\0.jpg", "no file name can hold a NUL"),
        ("\ud800.jpg", "lone surrogate"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            read_image(tmp_path / name)
        with pytest.raises(InputError, match=said):
            read_ids(tmp_path / name)
        str(caught.value).encode()


def test_a_name_that_is_not_utf_8_is_read_and_shown(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    picture().save(tmp_path / name)
    assert read_image(tmp_path / name).shape == (3, 40, 60)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"caf\\udce9\.png cannot be used"):
        read_image(tmp_path / name)


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
