"""Inputs of the analysis tests: random labelled images, and models whose results are known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from detr_bf.analysis.classification import Pixels
from detr_bf.classification.batch import ClassTargets, LabelledImages
from tests.plugins import tiny

NAMES = tuple(f"class {label}" for label in range(tiny.CLASSES))
PIXELS = Pixels(mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3))


def batches(*sizes: int, seed: int = 0) -> list[LabelledImages]:
    """Return batches of these sizes with normalised random pixels, black to white, and distinct labels and indices."""
    generator = torch.Generator().manual_seed(seed)
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (PIXELS.mean, PIXELS.std))
    found, start = [], 0
    for size in sizes:
        pixels = torch.rand(size, 3, 32, 32, generator=generator, dtype=torch.float64)
        indices = torch.arange(start, start + size)
        found.append(LabelledImages((pixels - mean) / std, ClassTargets(indices % tiny.CLASSES), indices))
        start += size
    return found


class Convolutional(nn.Module):
    """Classifier with two convolutions (4 channels of 8 x 8 at the end) and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, tiny.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.pool(self.features(images)).flatten(1))


def convolutional() -> Convolutional:
    torch.manual_seed(0)
    return Convolutional().double().eval()


def all_images(of: list[LabelledImages]) -> Tensor:
    return torch.cat([batch.images for batch in of])
