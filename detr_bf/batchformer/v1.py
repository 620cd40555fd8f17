"""BatchFormer: attention over the pooled features of a batch (Hou et al. 2022, CVPR, arXiv 2203.01522).

Shape legend: B images, R rows (streams x images, clean stream first), C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from detr_bf.batchformer.gather import Exchange
from detr_bf.batchformer.mixers import BatchFormerLayer
from detr_bf.batchformer.modes import warn_of_short
from detr_bf.common import distributed
from detr_bf.common.errors import InputError

ONE_POSITION = ((1, 1),)  # pooled features are a grid of one cell


class BatchFormer(nn.Module):
    """Batch attention between pooling and classifier, for training; the identity in evaluation.

    Args:
        dim: channels C.
        heads, dropout, num_layers: arguments of :class:`BatchFormerLayer`; the defaults are the published ones.
        shared_classifier: return both streams, the unchanged features and the batch-attended ones. False returns only
            the batch-attended features in training, as the authors do with the experts of RIDE.
        gather: attend over the images of all ranks (:mod:`detr_bf.batchformer.gather`).
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int = 4,
        dropout: float = 0.5,
        num_layers: int = 1,
        shared_classifier: bool = True,
        gather: bool = False,
    ) -> None:
        super().__init__()
        self.mixer = BatchFormerLayer(dim, heads=heads, dropout=dropout, num_layers=num_layers)
        self.shared_classifier = shared_classifier
        self.gather = gather
        self._announced = False

    @property
    def num_streams(self) -> int:
        """Number of streams of the output, in the current mode."""
        return 2 if self.training and self.shared_classifier else 1

    def forward(self, features: Tensor) -> Tensor:
        """(B, C) -> (2B, C) in training with a shared classifier, else (B, C).

        Raises:
            InputError: the features are not pooled.
        """
        if not self.training:
            return features
        if features.dim() != 2:
            raise InputError(
                f"BatchFormer got features of shape {tuple(features.shape)}, expected (images, channels): "
                "apply it after the pooling, or use BatchFormerV2 for feature maps"
            )
        exchange = self._exchange(len(features))
        self._announce(sum(exchange.images) if exchange else len(features))
        mixed = self.mixer(features[:, None], exchange=exchange)[:, 0]
        return torch.cat([features, mixed]) if self.shared_classifier else mixed

    def _exchange(self, images: int) -> Exchange | None:
        """Return the exchange between the ranks, or None."""
        if not self.gather or distributed.world_size() == 1:
            return None
        return Exchange.agree(images, ONE_POSITION)

    def _announce(self, images: int) -> None:
        """Warn once if the batch is small."""
        if not self._announced:
            self._announced = True
            warn_of_short("BatchFormer", images)


def repeat_targets(targets: Tensor, num_streams: int) -> Tensor:
    """Repeat targets (B, ...) for each stream: (R, ...). For labels, soft labels and masks, after mixup and CutMix."""
    return targets if num_streams == 1 else torch.cat([targets] * num_streams)


class StreamLoss(nn.Module):
    """Loss over all streams; the targets of every image are given once.

    Args:
        criterion: (logits (R, K), targets (R, ...)) -> mean over the rows, which is the mean of the streams' losses.
    """

    def __init__(self, criterion: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, logits: Tensor, targets: Tensor, num_streams: int = 1) -> Tensor:
        """Logits (R, K) and targets (B, ...) after mixup and CutMix -> ().

        Raises:
            InputError: R is not B times ``num_streams``.
        """
        self._check(logits, targets, num_streams)
        return self.criterion(logits, repeat_targets(targets, num_streams))

    def of_each_stream(self, logits: Tensor, targets: Tensor, num_streams: int) -> list[Tensor]:
        """Return the loss of each stream, clean stream first, for the log."""
        self._check(logits, targets, num_streams)
        return [self.criterion(stream, targets) for stream in logits.chunk(num_streams)]

    def _check(self, logits: Tensor, targets: Tensor, num_streams: int) -> None:
        if len(logits) != len(targets) * num_streams:
            raise InputError(
                f"got {len(logits)} rows of logits for {len(targets)} targets and num_streams={num_streams}: give "
                "the targets of every image once, and the model's current number of streams"
            )


def contrast_streams(
    contrast: Callable[[Tensor, Tensor], Tensor], queries: Tensor, keys: Tensor, *, loss_scale: float = 1.0
) -> Tensor:
    """Return the MoCo-v3 loss of two streams in one direction: the queries of each stream with the keys of each.

    Args:
        contrast: (queries (B, C), keys (B, C)) -> loss, such as InfoNCE.
        queries: (2B, C), outputs of the predictor for one view.
        keys: (2B, C), outputs of the momentum encoder for the other view.
        loss_scale: factor of the mean over the four pairs; 4 gives the sum, as in the authors' code.
    """
    pairs = [contrast(query, key) for query in queries.chunk(2) for key in keys.chunk(2)]
    return loss_scale * torch.stack(pairs).mean()
