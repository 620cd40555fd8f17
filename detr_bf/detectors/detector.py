"""Images -> feature maps -> tokens -> memory -> classes and boxes.

Shape legend: B images, R rows (streams x images), L decoder layers, Q queries, K class logits, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors.mask_head import MaskHead
from detr_bf.structures import Batch, FeatureMap, Outputs


class Detector(nn.Module):
    """The path every detector of the family takes; the parts are built outside and passed in.

    Args:
        backbone: (images, padding_mask) -> feature maps.
        tokens: (feature maps, padding_mask) -> tokens.
        encoder: tokens -> memory, as :class:`detr_bf.transformer.Encoder`.
        decoder: memory -> outputs, as :class:`detr_bf.transformer.Decoder`.
        mask_head: a mask for every query, or None.
        levels: how many of the backbone's maps, the deepest, become tokens; the mask head sees them all.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tokens: nn.Module,
        encoder: nn.Module,
        decoder: nn.Module,
        mask_head: MaskHead | None = None,
        levels: int = 1,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokens = tokens
        self.encoder = encoder
        self.decoder = decoder
        self.mask_head = mask_head
        self.levels = levels
        self._settled = False

    def forward(self, batch: Batch) -> Outputs:
        """Padded uint8 images (B, 3, H, W) with their mask -> logits (L, R, Q, K) and boxes (L, R, Q, 4) in [0, 1]."""
        return self.detect(self.backbone(batch.images, batch.padding_mask), batch.padding_mask)

    def detect(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> Outputs:
        """Everything behind the backbone; ``padding_mask`` (B, H, W) is that of the images."""
        tokens = self.tokens(features[-self.levels :], padding_mask)
        memory = self.encoder(tokens)
        outputs: Outputs = self.decoder(memory)
        if self.mask_head is None:
            return outputs
        assert outputs.states is not None, "a decoder gives its states"
        return replace(outputs, masks=self.mask_head(outputs.states, outputs.boxes[-1], tokens, memory, features))

    def freeze_all_but_masks(self, *, keep_dropout: bool = False) -> None:
        """Train the mask head alone from here on; the rest keeps every parameter and buffer.

        Args:
            keep_dropout: leave the rest in training mode, as DETR's code does; else it stays in evaluation mode, but
                for batch attention, which goes on giving its second stream, without dropout.
        """
        for part in self._detecting():
            part.requires_grad_(False)
        self._settled = not keep_dropout
        self.train(self.training)

    def train(self, mode: bool = True) -> Detector:
        """As of every module; what is frozen stays in evaluation mode."""
        super().train(mode)
        if self._settled:
            for part in self._detecting():
                part.eval()
            for module in self.encoder.modules():
                if isinstance(module, BatchFormerV2):
                    module.training = mode  # the switch of its streams alone, not of its layers
        return self

    def _detecting(self) -> tuple[nn.Module, ...]:
        return self.backbone, self.tokens, self.encoder, self.decoder
