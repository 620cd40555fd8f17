"""Images -> feature maps -> tokens -> memory -> classes and boxes.

Shape legend: B images, R rows (streams x images), L decoder layers, Q queries, K class logits, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from detr_bf.structures import Batch, FeatureMap, Outputs


class Detector(nn.Module):
    """The path every detector of the family takes; the parts are built outside and passed in.

    Args:
        backbone: (images, padding_mask) -> feature maps.
        tokens: (feature maps, padding_mask) -> tokens.
        encoder: tokens -> memory, as :class:`detr_bf.transformer.Encoder`.
        decoder: memory -> outputs, as :class:`detr_bf.transformer.Decoder`.
    """

    def __init__(self, backbone: nn.Module, *, tokens: nn.Module, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokens = tokens
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, batch: Batch) -> Outputs:
        """Padded uint8 images (B, 3, H, W) with their mask -> logits (L, R, Q, K) and boxes (L, R, Q, 4) in [0, 1]."""
        return self.detect(self.backbone(batch.images, batch.padding_mask), batch.padding_mask)

    def detect(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> Outputs:
        """Everything behind the backbone; ``padding_mask`` (B, H, W) is that of the images."""
        outputs: Outputs = self.decoder(self.encoder(self.tokens(features, padding_mask)))
        return outputs
