"""Small models of every kind that the plug-ins support, in evaluation mode; images are 32 x 32."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from timm.models.pit import PoolingVisionTransformer
from timm.models.resnet import Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.transformer import Encoder, EncoderLayer, TokenAttention

DIM, DEPTH, HEADS, CLASSES, IMAGES = 16, 4, 2, 5, 3


def vit(name: str = "vit_tiny_patch16_224", **changes: Any) -> VisionTransformer:
    """ViT with 16 patches, 4 x 4, and the class token."""
    settings = {"embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS, "img_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    return _with_large_weights(timm.create_model(name, **{"num_classes": CLASSES} | settings | changes))


def deit() -> VisionTransformer:
    """DeiT with a distillation token and its classifier."""
    return vit("deit_tiny_distilled_patch16_224")


def swin() -> SwinTransformer:
    """Swin with three stages of 8, 16 and 32 channels and 4 blocks in total; 4 x 4 tokens in the last stage."""
    torch.manual_seed(0)
    settings = {"patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (1, 1, 2), "num_heads": (2, 2, 2)}
    return _with_large_weights(SwinTransformer(img_size=32, num_classes=CLASSES, drop_path_rate=0.0, **settings))


def pit() -> PoolingVisionTransformer:
    """PiT with three stages of 1, 2 and 1 blocks and 8, 16 and 16 channels."""
    torch.manual_seed(0)
    settings = {"patch_size": 4, "stride": 4, "base_dims": (4, 8, 8), "depth": (1, 2, 1), "heads": (2, 2, 2)}
    return _with_large_weights(PoolingVisionTransformer(img_size=32, num_classes=CLASSES, **settings))


def resnet() -> ResNet:
    """ResNet with four stages of one block; 4 x 4 cells of 32 channels in the last stage."""
    torch.manual_seed(0)
    channels = (4, 4, 8, 8)
    return _with_large_weights(ResNet(Bottleneck, (1, 1, 1, 1), CLASSES, output_stride=8, channels=channels))


def mixer() -> MlpMixer:
    torch.manual_seed(0)
    settings = {"patch_size": 8, "num_blocks": DEPTH, "embed_dim": DIM}
    return _with_large_weights(MlpMixer(img_size=32, num_classes=CLASSES, **settings))


def encoder(**changes: Any) -> Encoder:
    """Encoder as in our detectors."""
    torch.manual_seed(0)
    layers = [EncoderLayer(TokenAttention(DIM, heads=HEADS), dim=DIM, feedforward_dim=24) for _ in range(DEPTH)]
    return Encoder(layers, **changes).double().eval()


def images(count: int = IMAGES) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _with_large_weights(model: Any) -> Any:
    """Convert to float64 and draw weights large enough to show a mistake in any block."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()
