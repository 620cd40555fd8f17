"""Reading MODEL.WEIGHTS: checkpoints of the adapter, of the core and of other implementations, and backbones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from torch import Tensor, nn

from detr_bf.backbones.backbone import MEAN, STD
from detr_bf.common.errors import InputError
from detr_bf.common.files import check_weights
from detr_bf.common.weights import read_content, state_in
from detr_bf.engine import checkpoint_of
from detr_bf.interop.classes import class_rows, renumbered_to
from detr_bf.interop.formats import format_of, to_foreign
from detr_bf.interop.weights import under_our_names

RESNET = "detectron2_resnet"
BACKBONES = (".pkl", ".pyth")  # detectron2 matches their tensors by the ends of their names
COUNTER = ".num_batches_tracked"
LABELS = "decoder.queries.labels.weight"  # of denoising; a DN-DETR without it, a DAB-DETR, finds other objects


class DetrBfCheckpointer(DetectionCheckpointer):
    """Detectron2's checkpointer, extended to checkpoints of the core and every format of ``interop``.

    It reads and resumes checkpoints of the adapter, and reads run folders and checkpoints of ``tools/train_net.py``,
    files of the authors and of Hugging Face, and those of DETR's own detectron2 wrapper. Class heads are converted
    between COCO category ids and contiguous classes if the model needs it. Tensors that still have another shape than
    in the model are skipped with a warning, as in detectron2. Names in .pkl and .pyth files, and in files with
    ``?matching_heuristics=True`` after the name, are matched by detectron2.

    Args:
        model: a module whose whole state is in its attribute ``detector``.
        save_dir: folder of the checkpoints; empty: none are written.
        save_to_disk: None: rank 0 writes.
        checkpointables: objects saved and resumed with the model, by name.

    Raises:
        InputError: the state of the model is not that of one of our detectors.
    """

    _parsed_url_during_load: Any

    def __init__(
        self, model: nn.Module, save_dir: str = "", *, save_to_disk: bool | None = None, **checkpointables: Any
    ) -> None:
        super().__init__(model, save_dir, save_to_disk=save_to_disk, **checkpointables)
        form = format_of(self.model.state_dict())
        if form is None or not form.own:
            raise InputError(
                f"{type(self.model).__name__} is not an architecture of detr_bf: set MODEL.META_ARCHITECTURE DetrBf, "
                "or use detectron2's own DetectionCheckpointer"
            )
        self.form = form

    def load(self, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file, or the best (else the last) checkpoint of a run folder of the core.

        Raises:
            InputError: the folder has none, or the file is damaged, of an unknown format or of another architecture.
        """
        if path and Path(path).is_dir():
            found = checkpoint_of(path)
            if not found.is_file():
                raise InputError(f"{path} has no {found.name}, so it is not a run folder of detr_bf: name a file")
            path = str(found)
        try:
            content: dict[str, Any] = super().load(path, *args, **kwargs)
        finally:
            self._parsed_url_during_load = None  # detectron2 keeps it after an error and then refuses to load again
        return content

    def _load_file(self, filename: str) -> dict[str, Any]:
        path = Path(filename)
        if path.suffix in BACKBONES or self._parsed_url_during_load.query:
            content: dict[str, Any] = super()._load_file(filename)
            return content
        content = read_content(path)
        state = state_in(content, path)
        check_weights(state, filename)
        own = under_our_names(self.model.state_dict(), "the model")
        own_rows = class_rows(own)
        form = format_of(state)
        try:
            weights = under_our_names(state, filename)
        except InputError as error:
            raise InputError(
                f"{error}. Weights of a backbone need a .pkl file, or ?matching_heuristics=True after the name"
            ) from error
        rows = class_rows(weights)
        if _decoder(weights) != _decoder(own) or (LABELS in weights and LABELS not in own):
            raise InputError(
                f"{filename} holds another architecture: the tensors of its decoder have other names; set "
                "MODEL.DETR_BF.ARCHITECTURE (model.model.name) to that of the weights"
            )
        if form is self.form and rows == own_rows:
            return content if "model" in content else {"model": state}
        if self.form.name == RESNET and (form is None or form.name != RESNET):
            self._check_resnet(filename)
        self.logger.info(f"{filename} holds weights of {form.title if form else 'detr_bf'}")
        return {"model": self._fitted(weights, rows, own_rows)}

    def _fitted(self, weights: dict[str, Tensor], rows: int, own_rows: int) -> dict[str, Tensor]:
        """Rename the weights for the model, with class heads renumbered if that makes them fit."""
        renumbered = renumbered_to(weights, own_rows)
        if renumbered is not None and rows != own_rows:
            self.logger.warning(f"class heads converted between COCO ids and classes: {rows} rows become {own_rows}")
        named = to_foreign(weights if renumbered is None else renumbered, self.form.name)
        own = self.model.state_dict()
        return {name: x for name, x in named.items() if name in own or not name.endswith(COUNTER)}

    def _check_resnet(self, filename: str) -> None:
        """Check that detectron2's ResNet fits weights of torchvision's; warn of another normalisation.

        Raises:
            InputError: the strides are in other convolutions.
        """
        backbone = self.model.detector.backbone
        if any(hasattr(block, "conv3") and block.conv1.stride != (1, 1) for block in backbone.body.modules()):
            raise InputError(
                f"{filename} holds a ResNet with strides in the 3 x 3 convolutions, the model has them in the 1 x 1 "
                "convolutions: set MODEL.RESNETS.STRIDE_IN_1X1 False"
            )
        expected = 255 * torch.tensor([MEAN, STD])
        found = torch.stack([backbone.mean.flatten(), backbone.std.flatten()]).cpu()
        if not torch.allclose(found, expected, atol=0.5):
            mean, std = ([round(value, 3) for value in row] for row in expected.tolist())
            self.logger.warning(
                f"{filename} holds weights for RGB images with MODEL.PIXEL_MEAN {mean} and MODEL.PIXEL_STD {std}; this "
                f"model has {found[0].tolist()} and {found[1].tolist()} and will detect little: set the former and "
                "INPUT.FORMAT RGB"
            )


def _decoder(weights: Mapping[str, Tensor]) -> set[str]:
    """Tensor names of the first decoder layer and of the queries' update; they differ between architectures."""
    return {name for name in weights if name.startswith(("decoder.layers.0.", "decoder.update_queries."))}
