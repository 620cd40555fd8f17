"""Images of other channels than RGB and of 16 bits: readers, headers, checks, transforms and pictures."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.tv_tensors import BoundingBoxes
from torchvision.tv_tensors import Image as Pixels

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Target
from detr_bf.data.augment import mosaic, photometrically_distorted, scale_jittered, zoomed_out
from detr_bf.data.checks.annotations import examine
from detr_bf.data.checks.files import ImageRecord, channel_statistics, check_files
from detr_bf.data.coco import Source
from detr_bf.data.image_headers import ORIENTATION, header_size, stored_format
from detr_bf.data.images import PixelFormat, decode_image, displayed, pixel_values, read_image, stored_pixels
from detr_bf.data.inputs import image_pixels
from detr_bf.data.transforms import Sample, SquareResize, eval_sample, mixup

HEIGHT, WIDTH = 13, 17
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # of PNG, by the number of channels


def samples(channels: int, bits: int) -> NDArray[Any]:
    kind = np.uint8 if bits == 8 else np.uint16
    values = np.random.default_rng(channels).integers(0, 2**bits, (HEIGHT, WIDTH, channels), dtype=kind)
    values[0, 0], values[0, 1] = 0, 2**bits - 1
    return values


def tiff(values: NDArray[Any], **options: Any) -> bytes:
    """Return a TIFF file; options that contain ``pages`` make a page of each channel."""
    file, pages = io.BytesIO(), options.pop("pages", False)
    options = options if pages else {"planarconfig": "contig"} | options
    given = np.moveaxis(values, 2, 0) if pages or options["planarconfig"] == "separate" else values
    tifffile.imwrite(file, given, photometric="minisblack", **options)
    return file.getvalue()


def png(values: NDArray[Any]) -> bytes:
    """Return a PNG file of 8 or 16 bits, whose rows are filtered as differences to the pixel at the left or above."""
    height, width, channels = values.shape
    size = values.dtype.itemsize
    lines = values.astype(f">u{size}").reshape(height, -1).view(np.uint8).reshape(height, width * channels * size)
    step, packed = channels * size, b""
    for row, line in enumerate(lines):
        before = np.zeros_like(line)
        if row % 2:
            before[:] = lines[row - 1]
        else:
            before[step:] = line[:-step]
        packed += bytes([2 if row % 2 else 1]) + (line - before).tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8 * size, COLOUR_TYPES[channels], 0, 0, 0)
    return b"".join(
        [b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(packed)), chunk(b"IEND", b"")]
    )


FILES: dict[str, tuple[tuple[int, ...], Callable[[NDArray[Any]], bytes]]] = {
    "png": ((1, 2, 3, 4), png),
    "tiff": ((2, 3, 4, 5, 9), tiff),
    "planes": ((2, 4, 5, 9), lambda values: tiff(values, planarconfig="separate")),
    "pages": ((2, 3, 4, 9), lambda values: tiff(values, pages=True, metadata=None)),
    "big-endian": ((2, 4), lambda values: tiff(values, pages=True, byteorder=">")),
    "BigTIFF": ((2, 4), lambda values: tiff(values, pages=True, bigtiff=True, compression="zlib")),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("bits", [8, 16])
def test_every_bit_of_every_channel_is_read(kind: str, bits: int, tmp_path: Path) -> None:
    counts, write = FILES[kind]
    for channels in counts:
        if (channels, bits) == (3, 8) and kind != "png":  # RGB, as Pillow reads it
            continue
        values, path = samples(channels, bits), tmp_path / f"{channels}.tif"
        path.write_bytes(write(values))
        pixels = read_image(path, pixel_format=PixelFormat(channels, bits))
        assert pixels.dtype == (torch.uint8 if bits == 8 else torch.uint16)
        assert np.array_equal(pixels.numpy(), np.moveaxis(values, 2, 0))
        assert header_size(path) == (HEIGHT, WIDTH)
        assert stored_format(tmp_path, [path.name]) == (None if kind == "png" else (channels, bits))
        with pytest.raises(
            InputError, match=rf"it has {channels} channels?, expected {channels + 3} \(data.channels\)"
        ):
            read_image(path, pixel_format=PixelFormat(channels + 3, bits))


def test_all_values_of_16_bits_stay_different() -> None:
    values = np.arange(2**16, dtype=np.uint16).reshape(256, 256, 1)
    pixels = PixelFormat(1, 16).pixels(values)
    (resized, _) = eval_sample(SquareResize(256), pixels, 0)
    assert resized.dtype == torch.float32
    assert len(resized.unique()) == 2**16
    assert (resized.min(), resized.max()) == (0, 255)
    assert torch.equal((resized[0] * 257).round().to(torch.int32), torch.from_numpy(values[..., 0].astype(np.int32)))


def test_a_mixture_of_depths_and_formats_is_refused(tmp_path: Path) -> None:
    (tmp_path / "8.tif").write_bytes(tiff(samples(5, 8)))
    (tmp_path / "16.tif").write_bytes(tiff(samples(5, 16)))
    with pytest.raises(InputError, match=r"8 bits a channel, expected 16 \(data.depth\)"):
        read_image(tmp_path / "8.tif", pixel_format=PixelFormat(5, 16))
    with pytest.raises(InputError, match=r"16 bits a channel, expected 8 \(data.depth\)"):
        read_image(tmp_path / "16.tif", pixel_format=PixelFormat(5, 8))
    with pytest.raises(InputError, match=r"it has 5 channels of 8 bits, expected RGB or grey: convert it; "):
        read_image(tmp_path / "8.tif")
    assert stored_format(tmp_path, ["8.tif", "16.tif"]) is None
    for values, said in (
        (samples(5, 8).astype(np.float32), "float32"),
        (samples(5, 16).astype(np.uint32), "uint32"),
    ):
        with pytest.raises(ValueError, match=f"^its samples are of the type {said}, expected unsigned ones"):
            decode_image(tiff(values), pixel_format=PixelFormat(5, 16))
    with pytest.raises(ValueError, match=r"17 x 13 pixels \(width x height\), more than data.max_pixels=100"):
        decode_image(tiff(samples(5, 16)), 100, pixel_format=PixelFormat(5, 16))
    with pytest.raises(ValueError, match="it cannot be decoded"):
        decode_image(tiff(samples(5, 16))[:600], pixel_format=PixelFormat(5, 16))
    pages = io.BytesIO()
    Image.new("L", (4, 4)).save(pages, "TIFF", save_all=True, append_images=[Image.new("L", (5, 4))])
    with pytest.raises(ValueError, match="page 1 has another size"):
        decode_image(pages.getvalue(), pixel_format=PixelFormat(2, 8))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow
def test_damaged_files_raise_no_other_error(tmp_path: Path) -> None:
    random, path = np.random.default_rng(0), tmp_path / "a.tif"
    for number in range(50):
        data = bytearray(tiff(samples(4, 16), pages=number % 2 == 0))
        for place in random.integers(0, 500, 3):
            data[place % len(data)] = random.integers(0, 256)
        path.write_bytes(data[: random.integers(1, len(data))] if number % 5 == 0 else data)
        stored_format(tmp_path, [path.name])
        header_size(path)
        for form in (PixelFormat(4, 16), PixelFormat()):
            with contextlib.suppress(ValueError):
                decode_image(path.read_bytes(), pixel_format=form)
    large = tiff(np.zeros((2048, 2048, 9), np.uint8), compression="zlib")
    with pytest.raises(ValueError, match=r"it has 37,748,736 samples, 33,554,432 are allowed with data.max_pixels=5"):
        decode_image(large, 5_000_000, pixel_format=PixelFormat(9, 8))


def test_tifffile_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data checks do not call the file broken, and do not remember it as such."""
    (tmp_path / "a.tif").write_bytes(tiff(samples(5, 16)))
    imported = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name == "tifffile":
            raise ImportError
        return imported(name, *arguments)

    form = PixelFormat(5, 16)
    with monkeypatch.context() as changed:
        changed.setattr(builtins, "__import__", missing)
        for read in (
            lambda: read_image(tmp_path / "a.tif", pixel_format=form),
            lambda: check_files(ImageRecord, tmp_path, ["a.tif"], tmp_path / "cache", 1, pixel_format=form),
        ):
            with pytest.raises(InputError, match=r"^TIFF .* pip install 'detr_bf\[multispectral\]'$"):
                read()
    found = check_files(ImageRecord, tmp_path, ["a.tif"], tmp_path / "cache", 1, pixel_format=form)
    assert not found["a.tif"].problem

    def without_imagecodecs(page: tifffile.TiffPage) -> None:
        raise ValueError("<COMPRESSION.LZW: 5> requires the 'imagecodecs' package")

    monkeypatch.setattr(tifffile.TiffPage, "asarray", without_imagecodecs)
    with pytest.raises(InputError, match=r"^TIFF .* imagecodecs .* pip install 'detr_bf\[multispectral\]'$"):
        check_files(ImageRecord, tmp_path, ["a.tif"], tmp_path / "other cache", 1, pixel_format=form)


def test_grey_images_of_one_channel(tmp_path: Path) -> None:
    deep = samples(1, 16) >> 4  # 12 bits
    (tmp_path / "a.png").write_bytes(png(deep))
    pixels = read_image(tmp_path / "a.png", pixel_format=PixelFormat(1, 8, grey_bits=12))
    assert np.array_equal(pixels.numpy()[0], (deep[..., 0] >> 4).astype(np.uint8))
    Image.fromarray(samples(1, 8)[..., 0]).save(tmp_path / "b.png")
    assert read_image(tmp_path / "b.png", pixel_format=PixelFormat(1)).shape == (1, HEIGHT, WIDTH)


def test_the_exif_rotation_turns_all_channels(tmp_path: Path) -> None:
    values = samples(5, 16)
    for orientation, turned in ((1, values), (3, values[::-1, ::-1]), (6, np.rot90(values, -1)), (8, np.rot90(values))):
        (tmp_path / "a.tif").write_bytes(tiff(values, extratags=[(274, "H", 1, orientation, True)]))
        pixels = read_image(tmp_path / "a.tif", pixel_format=PixelFormat(5, 16))
        assert np.array_equal(pixels.numpy(), np.moveaxis(turned, 2, 0))
        assert header_size(tmp_path / "a.tif") == turned.shape[:2]
        stored = read_image(tmp_path / "a.tif", (HEIGHT, WIDTH), pixel_format=PixelFormat(5, 16), as_stored=True)
        assert np.array_equal(stored.numpy(), np.moveaxis(values, 2, 0))


def test_pages_of_a_stack_turn_together() -> None:
    values = samples(3, 16)
    for orientations in ((6, 1, 1), (6, 6, 6)):
        with tifffile.TiffWriter(pages := io.BytesIO()) as file:
            for channel, orientation in enumerate(orientations):
                tags = [(274, "H", 1, orientation, False)]
                file.write(values[..., channel], photometric="minisblack", extratags=tags, metadata=None)
        if len(set(orientations)) > 1:
            with pytest.raises(ValueError, match="page 1 has another size, type or rotation"):
                decode_image(pages.getvalue(), pixel_format=PixelFormat(3, 16))
            continue
        expected = torch.from_numpy(np.moveaxis(np.rot90(values, -1), 2, 0).copy())
        assert torch.equal(decode_image(pages.getvalue(), pixel_format=PixelFormat(3, 16)), expected)
        with Image.open(pages) as image:
            image.seek(1)
            assert torch.equal(image_pixels(image, "it", pixel_format=PixelFormat(3, 16)), expected)
            assert image.tell() == 1


def test_a_pillow_image_is_treated_as_its_file(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.fromarray(samples(1, 8)[..., 0]).save(tmp_path / "a.png", exif=exif)
    Image.fromarray(samples(1, 8)[..., 0]).save(tmp_path / "a.tif", exif=exif, compression="tiff_lzw")
    for name in ("a.png", "a.tif"):
        read = read_image(tmp_path / name, pixel_format=PixelFormat(1))
        assert read.shape == (1, WIDTH, HEIGHT)
        with Image.open(tmp_path / name) as image:
            assert torch.equal(image_pixels(image, "it", pixel_format=PixelFormat(1)), read)
    with pytest.raises(ValueError, match="it has 36,000,000 samples"):
        stored_pixels(Image.new("L", (6000, 6000)), 10, PixelFormat(1))


def test_headers_of_files_that_are_read_as_rgb(tmp_path: Path) -> None:
    """Grey with transparency, and samples that are not unsigned."""
    Image.fromarray(samples(2, 8), "LA").save(tmp_path / "a.tif")
    assert stored_format(tmp_path, ["a.tif"]) is None
    assert read_image(tmp_path / "a.tif").shape == (3, HEIGHT, WIDTH)
    for kind in (np.int16, np.float16):
        for pages in (False, True):
            (tmp_path / "b.tif").write_bytes(tiff((samples(4, 16) // 2).astype(kind), pages=pages, metadata=None))
            assert stored_format(tmp_path, ["b.tif"]) is None
    signed = tiff(samples(1, 16).astype(np.int16), pages=True)
    with pytest.raises(ValueError, match="its pixels have values below 0"):
        decode_image(signed)


def test_grey_palettes_have_one_channel() -> None:
    grey = Image.fromarray(samples(1, 8)[..., 0] // 2)
    for kind in ("GIF", "PNG"):
        file = io.BytesIO()
        grey.convert("RGB").quantize(256).save(file, kind)
        expected = torch.from_numpy(np.array(Image.open(file).convert("RGB"))[..., 0])
        assert torch.equal(decode_image(file.getvalue(), pixel_format=PixelFormat(1))[0], expected)


def test_statistics_do_not_come_from_images_scaled_otherwise(tmp_path: Path) -> None:
    """A check without ``data.grey_bits`` fills the cache before a run chooses them."""
    for name, bits in (("a.png", 12), ("b.png", 16)):
        (tmp_path / name).write_bytes(png(samples(1, 16) >> (16 - bits)))

    def found(cache: str, grey_bits: int | None) -> tuple[list[float], list[float]]:
        form = PixelFormat(1, 8, grey_bits)
        return channel_statistics(
            check_files(ImageRecord, tmp_path, ["a.png", "b.png"], tmp_path / cache, 1, pixel_format=form).values()
        )

    expected = found("new", 16)
    assert found("old", None) != expected
    assert found("old", 16) == expected
    size = {"width": WIDTH, "height": HEIGHT}
    images = [{"id": number, "file_name": f"{name}.png"} | size for number, name in enumerate("ab")]
    content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    source, cache = Source(tmp_path, tmp_path / "a.json"), tmp_path / "old"
    report = examine(source, None, num_queries=1, cache_dir=cache, pixel_format=PixelFormat(1))
    [mean], [std] = expected
    assert f"of the channels: 1: {mean:.4g} +- {std:.4g}" in report.contents[0]


def test_statistics_are_those_of_numpy_over_all_pixels(tmp_path: Path) -> None:
    first, second = samples(4, 16), samples(4, 16)[:5] // 3
    for name, values in (("a.tif", first), ("b.tif", second)):
        (tmp_path / name).write_bytes(tiff(values))
    form = PixelFormat(4, 16)
    for _ in range(2):  # the second time from the cache
        records = check_files(ImageRecord, tmp_path, ["a.tif", "b.tif"], tmp_path / "cache", 1, pixel_format=form)
        mean, std = channel_statistics(records.values())
        whole = np.concatenate([first.reshape(-1, 4), second.reshape(-1, 4)]) / 65535
        np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-5)
        np.testing.assert_allclose(std, whole.std(0), rtol=1e-5)
    assert channel_statistics([]) == ([], [])


def sample_of(values: torch.Tensor) -> Sample:
    box = BoundingBoxes([[2.0, 2.0, 9.0, 9.0]], format="XYXY", canvas_size=tuple(values.shape[-2:]))
    return Sample(Pixels(values), box, torch.tensor([0]))


@pytest.mark.parametrize("bits", [8, 16])
def test_augmentations_treat_each_channel_alike(bits: int) -> None:
    """Five equal channels give five times the image that one of them gives."""
    values = pixel_values(PixelFormat(1, bits).pixels(samples(1, bits)))

    def changed(pixels: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        sample = sample_of(pixels)
        return [
            mosaic([sample] * 4, (0.4, 0.6)).image,
            scale_jittered(sample, 0.5).image,
            zoomed_out(sample, 3.0).image,
            photometrically_distorted(sample, 1.0).image,
            mixup(batch_of(pixels), 0.3).images[0],
        ]

    for alone, five in zip(changed(values), changed(values.expand(5, -1, -1).clone()), strict=True):
        assert five.dtype == values.dtype
        assert five.min() >= 0
        assert five.max() <= 255
        torch.testing.assert_close(five.as_subclass(torch.Tensor), alone.as_subclass(torch.Tensor).expand(5, -1, -1))


def batch_of(pixels: torch.Tensor) -> Batch:
    size = (pixels.shape[-2], pixels.shape[-1])
    none = Target(0, torch.empty(0, 4), torch.empty(0, dtype=torch.int64), size, size)
    batch = Batch.collate([(pixels, none), (pixels.flip(-1), none)])
    assert batch.fits(1)
    return batch


def test_brightness_and_contrast_of_other_channels() -> None:
    values = torch.full((2, 4, 4), 100.0)
    values[:, :2] = 50.0
    found = [photometrically_distorted(sample_of(values), 1.0).image.as_subclass(torch.Tensor) for _ in range(200)]
    means = torch.stack([image.mean() / 75 for image in found])
    spreads = torch.stack([(image[0, 3, 3] - image[0, 0, 0]) / image.mean() * 75 / 50 for image in found])
    assert 0.875 <= means.min() < 0.9 < 1.1 < means.max() <= 1.125
    assert 0.5 <= spreads.min() < 0.6 < 1.4 < spreads.max() <= 1.501
    assert photometrically_distorted(sample_of(values), 0.0).image.equal(values)


def test_pictures_show_three_channels_or_grey() -> None:
    five = torch.from_numpy(np.moveaxis(samples(5, 8), 2, 0).copy())
    assert torch.equal(displayed(five), five[:3])
    assert torch.equal(displayed(five[:2]), five[:1].expand(3, -1, -1))
    dark = PixelFormat(5, 16).pixels(samples(5, 16) >> 8)
    picture = displayed(dark)
    assert picture.dtype == torch.uint8
    assert (picture.min(), picture.max()) == (0, 255)
    assert torch.equal(picture, displayed(pixel_values(dark)))


def test_arrays_of_a_predictor() -> None:
    form, values = PixelFormat(5, 16), samples(5, 16)
    expected = torch.from_numpy(np.moveaxis(values, 2, 0).copy())
    for given in (values, expected, values / 65535, tiff(values)):
        assert torch.equal(image_pixels(given, "it", pixel_format=form), expected)
    for given, said in (
        (values[..., :3], "with 5 channels"),
        (expected.permute(1, 2, 0), r"give image.permute\(2, 0, 1\)"),
        (samples(5, 8), r"uint8, and it has 8 bits a channel, expected 16 \(data.depth\)"),
        (values.astype(np.float32), "divide 0 to 255 by 255"),
        (Image.new("RGB", (4, 4)), "it has 3 channels, expected 5"),
    ):
        with pytest.raises(InputError, match=said):
            image_pixels(given, "it", pixel_format=form)
    assert image_pixels(values[..., 0], "it", pixel_format=PixelFormat(1, 16)).shape == (1, HEIGHT, WIDTH)
    for read_only in (values.astype(">u2"), np.broadcast_to(values, values.shape)):
        assert torch.equal(image_pixels(read_only, "it", pixel_format=form), expected)
    grey = values[..., :1].copy()
    pixels = image_pixels(grey, "it", pixel_format=PixelFormat(1, 16))
    grey[:] = 0
    assert torch.equal(pixels, expected[:1])
    for channels, order in ((3, [2, 1, 0]), (4, [2, 1, 0, 3])):
        four = PixelFormat(channels, 16)
        assert torch.equal(
            image_pixels(values[..., :channels], "it", pixel_format=four, bgr=True), expected[:channels][order]
        )
    with pytest.raises(InputError, match="it has 5 channels, and bgr=True is the order of 3"):
        image_pixels(values, "it", pixel_format=form, bgr=True)
