"""Images -> feature maps -> tokens -> memory -> decoder states -> classes and boxes.

Shape legend: B images, R rows (streams x images), L decoder layers, Q queries, K class logits, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from detr_bf.structures import Batch, FeatureMap, Outputs
from detr_bf.transformer import Decoder, Encoder, FeatureTokens


class Detector(nn.Module):
    """The path every detector of the family takes; the parts are built outside and passed in.

    Args:
        backbone: (images, padding_mask) -> feature maps.
        tokens, encoder, decoder: the transformer.
        class_head: (..., C) -> (..., K) logits.
        box_head: (..., C) -> (..., 4) logits of centre x, centre y, width, height.
        aux_loss: predict from every decoder layer, so that each is trained, instead of from the last only.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tokens: FeatureTokens,
        encoder: Encoder,
        decoder: Decoder,
        class_head: nn.Module,
        box_head: nn.Module,
        aux_loss: bool = True,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokens = tokens
        self.encoder = encoder
        self.decoder = decoder
        self.class_head = class_head
        self.box_head = box_head
        self.aux_loss = aux_loss

    def forward(self, batch: Batch) -> Outputs:
        """Padded uint8 images (B, 3, H, W) with their mask -> logits (L, R, Q, K) and boxes (L, R, Q, 4) in [0, 1]."""
        return self.detect(self.backbone(batch.images, batch.padding_mask))

    def detect(self, features: Sequence[FeatureMap]) -> Outputs:
        """Everything behind the backbone."""
        memory = self.encoder(self.tokens(features))
        states: Tensor = self.decoder(memory)
        if not self.aux_loss:
            states = states[-1:]
        with torch.autocast(states.device.type, enabled=False):  # half precision would cost whole pixels
            states = states.to(next(self.box_head.parameters()).dtype)
            return Outputs(self.class_head(states), self.box_head(states).sigmoid(), memory.num_streams)
