"""Mixup and CutMix (Zhang et al. 2018, arXiv 1710.09412; Yun et al. 2019, arXiv 1905.04899) of batches, by timm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from timm.data.mixup import Mixup, mixup_target
from torch.utils.data import Dataset

from detr_bf.classification.randomness import seeded
from detr_bf.data.batches import SampleKey, derive_seed
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImage, LabelledImages

Mix = Callable[[LabelledImages, int], LabelledImages]  # a batch and a seed -> the batch mixed
KeyedSample = tuple[SampleKey, LabelledImage]

_MIXING = 1  # sets a batch's random numbers apart from those of its first image


class BatchMix:
    """Each image mixed with the one as far from the end of the batch as it is from the beginning, all in one way.

    An odd last image has no partner and keeps its pixels.

    Args:
        mixup: alpha of the Beta distribution of shares; 0: no mixup.
        cutmix: likewise of CutMix.
        probability: that a batch is mixed at all.
        switch: that it is CutMix, where both are on.
        smoothing: of the targets, mixed or not.

    Raises:
        InputError: mixup and CutMix are both off.
    """

    def __init__(
        self, num_classes: int, *, mixup: float, cutmix: float, probability: float, switch: float, smoothing: float
    ) -> None:
        if not mixup > 0 and not cutmix > 0:
            raise InputError(f"mixup={mixup} and cutmix={cutmix}: expected one of them to be greater than 0")
        self.num_classes = num_classes
        self.smoothing = smoothing
        self.mixup = Mixup(
            mixup, cutmix, prob=probability, switch_prob=switch, label_smoothing=smoothing, num_classes=num_classes
        )

    def __call__(self, batch: LabelledImages, seed: int) -> LabelledImages:
        images, labels = batch.images.clone(), batch.targets.labels
        shares = mixup_target(labels, self.num_classes, smoothing=self.smoothing)
        pairs = len(batch) // 2 * 2
        if pairs:
            with seeded(seed):
                images[:pairs], shares[:pairs] = self.mixup(images[:pairs], labels[:pairs])
        return replace(batch, images=images, targets=replace(batch.targets, soft_labels=shares))


class WithKeys(Dataset[KeyedSample]):
    """A data set that gives the key with the sample."""

    def __init__(self, dataset: Dataset[LabelledImage]) -> None:
        self.dataset = dataset

    def __getitem__(self, key: SampleKey) -> KeyedSample:
        return key, self.dataset[key]


@dataclass(frozen=True)
class MixedBatch:
    """Collates samples with their keys, and mixes the batch: a function of (seed, the first image's key, images)."""

    mix: Mix
    seed: int

    def __call__(self, samples: list[KeyedSample]) -> LabelledImages:
        batch = LabelledImages.collate([sample for _, sample in samples])
        first = samples[0][0]
        return self.mix(batch, derive_seed(first.sample_seed(self.seed), _MIXING))
