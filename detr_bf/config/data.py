"""Settings of a detector's data: files, transforms, augmentation, references and batches. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from detr_bf.common.errors import InputError
from detr_bf.config.common import (
    WIDTH,
    LoadingConfig,
    below_one,
    choice,
    depth,
    fraction,
    not_negative,
    numbers,
    path,
    positive,
    seed,
    sides,
    sizes,
)

SPLIT_FILES = ("images", "annotations", "panoptic")


@dataclass
class SplitConfig:
    """Files of the training or validation data: a split of data.root, or COCO files."""

    split: str | None = None  # name of a split of data.root; ".", or null for the training data: all images
    images: str = path("")  # folder of the images
    annotations: str = path("")  # COCO JSON file
    panoptic: str = path("")  # folder of panoptic PNG files; annotations is then a COCO panoptic JSON file
    references: str = path("")  # folder of own references (data.reference=own); empty: that of the images

    @property
    def given(self) -> bool:
        """True if a setting is not empty."""
        return bool(self.split or self.images or self.annotations or self.panoptic)


@dataclass
class TransformConfig:
    """Resizing and augmentation; all sizes in pixels."""

    short_sides: list[int] = sizes(480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)  # one is drawn per image
    max_size: int = positive(1333, WIDTH)  # maximum of the longer side; not read with square
    eval_short_side: int = positive(800, WIDTH)  # shorter side in evaluation; not read with square
    square: int | None = positive(None, WIDTH)  # resize to squares of this side instead, in evaluation too; null: off
    size_divisor: int | None = positive(
        None, WIDTH
    )  # round resized sides to multiples of it; null: the coarsest stride of the model; 1: no, as in the COCO recipes
    horizontal_flip: float = fraction(0.5)  # probability of a flip
    random_crop: float = fraction(0.5)  # probability of resize, crop, resize instead of a single resize
    crop_short_sides: list[int] = sizes(400, 500, 600)  # shorter side before the crop, one is drawn per image
    crop_min: int = positive(384, WIDTH)  # minimum side of the crop
    crop_max: int = positive(600, WIDTH)  # maximum side of the crop
    extra: list[str] = field(
        default_factory=list
    )  # additional training transforms, names in detr_bf.data.transforms.TRANSFORMS

    def check_values(self, prefix: str) -> None:
        if self.crop_min > self.crop_max:
            raise InputError(f"{prefix}crop_min={self.crop_min} must not exceed {prefix}crop_max={self.crop_max}")


@dataclass
class MixupConfig:
    """Mixup of detection batches: blend each image with another of its batch, with the objects of both."""

    prob: float = fraction(0.0)  # probability that the images of a batch are blended; 0: never
    spread: float = positive(0.05, 0.5)  # the share of the first image is uniform in 0.5 +- this


@dataclass
class AugmentConfig:
    """Augmentation of images before ``transforms``: probabilities, 0 is off, and their options. Mixup: data.mixup."""

    copy_paste: float = fraction(0.0)  # paste objects of another image; needs data with masks
    mosaic: float = fraction(0.0)  # four images in one, with neither zoom_out nor iou_crop
    mosaic_offsets: list[float] = numbers(0.4, 0.6)  # range of the shares of height and width where the four meet
    mosaic_scale: list[float] = numbers(0.5, 1.5)  # range of the scale of a mosaic
    scale_jitter: float = fraction(0.0)  # another scale on a canvas of the same size
    scale_jitter_range: list[float] = numbers(0.1, 2.0)  # range of that scale
    photometric_distort: float = fraction(
        0.0
    )  # of each change: brightness, contrast; of 8-bit RGB also saturation, hue, order of the channels
    zoom_out: float = fraction(0.0)  # the image on a larger black canvas
    zoom_out_max: float = positive(4.0, 10)  # largest side of the canvas as a multiple of the image's
    iou_crop: float = fraction(0.0)  # crop around objects
    iou_crop_scale: list[float] = numbers(0.3, 1.0)  # range of its sides as shares of the image's
    min_visible: float = fraction(0.0)  # least share of an object that must be left of it, else it is dropped
    until_epoch: int | None = positive(None)  # copy_paste, mosaic and mixup for this many epochs; null: to the end

    def check_values(self, prefix: str) -> None:
        limits = {"mosaic_offsets": 0.99, "mosaic_scale": 10, "scale_jitter_range": 10, "iou_crop_scale": 1}
        for name, most in limits.items():
            values = getattr(self, name)
            if len(values) != 2 or not 0 < values[0] <= values[1] <= most:
                raise InputError(
                    f"{prefix}{name}={list(values)}: expected two numbers, the smaller first, greater than 0 and at "
                    f"most {most}"
                )
        if self.zoom_out_max < 1:
            raise InputError(f"{prefix}zoom_out_max={self.zoom_out_max} must be 1 or more: the image is never cut")

    @property
    def given(self) -> bool:
        """True if an augmentation is on."""
        several = self.copy_paste or self.mosaic
        return bool(several or self.scale_jitter or self.photometric_distort or self.zoom_out or self.iou_crop)


@dataclass
class DataConfig(LoadingConfig):
    """Data sets of a detector: the folder ``root``, or COCO files for each split."""

    root: str = path("")  # folder of a data set in one of the forms of docs/data.md; empty: COCO files, see data.train
    format: str = choice(
        "auto", "coco", "csv", "labelme", "voc", "yolo"
    )  # of root; coco: COCO JSON files, Roboflow's too
    train: SplitConfig = field(default_factory=SplitConfig)
    val: SplitConfig = field(default_factory=SplitConfig)
    skip_unreadable: float = fraction(0.0)  # most images that are left out as unreadable, with a warning: share of all
    val_fraction: float = below_one(0.0)  # share of the training images used for validation instead; 0: see data.val
    folds: int = not_negative(0, 1000)  # parts of the training images for cross-validation; 0: see data.val
    fold: int = not_negative(0, 1000)  # part used for validation, from 0 to data.folds - 1
    split_seed: int = seed(0)  # of val_fraction and folds; independent of seed
    transforms: TransformConfig = field(default_factory=TransformConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    mixup: MixupConfig = field(default_factory=MixupConfig)
    batch_sides: list[int] = sides()  # one for each batch, instead of short_sides or square; empty: off
    plain_first_epochs: int = not_negative(0)  # epochs at the start without data.augment and data.mixup
    plain_last_epochs: int = not_negative(0)  # epochs at the end without data.augment, data.mixup and data.batch_sides
    aspect_buckets: int = positive(1, 10_000)  # groups of images by width / height, to draw batches with less padding
    sampler: str = choice(
        *("random", "similar", "group")
    )  # of training batches; similar: images with similar numbers of objects; group: of one group, see docs/pairs.md
    reference: str = choice("none", "own", "random", "same_group")  # image that is seen beside each image
    reference_shift: int = not_negative(0, WIDTH)  # pixels by which a reference is moved, to test alignment
    channels: int = positive(3, 256)  # of the images; 3: RGB, to which others are converted; 1: grey; else as stored
    depth: int = depth(8)  # bits of a channel: 8 or 16; 16: as stored, with full precision
    mean: list[float] = numbers()  # of each channel, 1 is full brightness; empty: of the backbone or the images
    std: list[float] = numbers()  # standard deviations, likewise; both empty: see docs/data.md

    def check_values(self, prefix: str) -> None:
        for name, paths in (("train", self.train), ("val", self.val)):
            if self.root and (paths.images or paths.annotations or paths.panoptic):
                raise InputError(
                    f"{prefix}root is given, so the images and annotations of {prefix}{name} are its own: give "
                    f"{prefix}{name}.split instead of a path, or {prefix}root=''"
                )
            if paths.split and not self.root:
                raise InputError(f"{prefix}{name}.split={paths.split} is a split of {prefix}root, which is not given")
        if self.folds == 1 or self.fold >= max(1, self.folds):
            raise InputError(
                f"{prefix}folds={self.folds} and {prefix}fold={self.fold}: expected at least 2 folds and a fold from "
                f"0 to {prefix}folds - 1; folds=0 and fold=0 switch them off"
            )
        if self.folds and self.val_fraction:
            raise InputError(f"{prefix}folds and {prefix}val_fraction both choose the validation images: give only one")
        if (self.folds or self.val_fraction) and self.val.given:
            setting = f"{prefix}folds" if self.folds else f"{prefix}val_fraction"
            raise InputError(
                f"{setting} takes the validation images from the training images: give no {prefix}val "
                f"({prefix}val.split=null where a config sets it)"
            )
        if (self.folds or self.val_fraction) and self.val.references:
            raise InputError(
                f"{prefix}val.references is not read: validation images that are taken from the training images have "
                f"their references in {prefix}train.references"
            )
        if self.sampler != "random" and self.aspect_buckets > 1:
            raise InputError(
                f"{prefix}sampler={self.sampler} and {prefix}aspect_buckets both choose the batches: give only one"
            )
        if self.reference == "none" and self.reference_shift:
            raise InputError(f"{prefix}reference_shift={self.reference_shift} moves references: set {prefix}reference")
        if self.reference != "none" and (self.augment.copy_paste or self.mixup.prob):
            name = "augment.copy_paste" if self.augment.copy_paste else "mixup.prob"
            raise InputError(
                f"{prefix}{name} puts objects of other images into an image, but not into its reference: set it to 0 "
                f"with {prefix}reference={self.reference}"
            )
        self._check_channels(prefix)
        if (self.folds or self.val_fraction) and self.train.panoptic:
            raise InputError(f"{prefix}folds and {prefix}val_fraction do not divide panoptic files: give {prefix}val")

    @property
    def is_rgb(self) -> bool:
        """True if the images are read as RGB of 8 bits."""
        return (self.channels, self.depth) == (3, 8)

    def _check_channels(self, prefix: str) -> None:
        """Refuse normalisation of other channels, and the colours of channels that are none."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if (self.mean or self.std) and len(values) != self.channels:
                raise InputError(
                    f"{prefix}{name}={list(values)}: expected one value for each of {prefix}channels="
                    f"{self.channels}: give {prefix}mean and {prefix}std, or neither"
                )
            if not all(0 <= value <= 1 for value in values) or (name == "std" and 0 in values):
                raise InputError(
                    f"{prefix}{name}={list(values)}: expected values from 0 to 1, in which 1 is full brightness (255, "
                    f"or 65535 with {prefix}depth=16){', and no deviation of 0' if name == 'std' else ''}"
                )
        if not self.is_rgb and "photometric_distort" in self.transforms.extra:
            raise InputError(
                f"{prefix}transforms.extra: photometric_distort changes the colours of RGB images of 8 bits, and the "
                f"images have {prefix}channels={self.channels} and {prefix}depth={self.depth}: leave it out; "
                f"{prefix}augment.photometric_distort changes brightness and contrast of such images"
            )

    @property
    def has_val(self) -> bool:
        """True if validation images are given."""
        return bool(self.folds or self.val_fraction) or self.val.given
