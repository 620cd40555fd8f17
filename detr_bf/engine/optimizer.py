"""Parameter groups, optimizers and the learning rate schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from detr_bf.backbones import Backbone
from detr_bf.backbones.backbone import parameter_stages
from detr_bf.batchformer import BatchFormer, InsertedBatchFormer
from detr_bf.common.errors import InputError
from detr_bf.common.files import check_weights
from detr_bf.common.low_rank import LowRankLinear
from detr_bf.common.text import listed
from detr_bf.transformer import Encoder

_ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}  # of a parameter
SCALE_PARAMETERS = "context_broadcasting.scales"  # last part of the names of their modules


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    backbone_lr: float,
    weight_decay: float,
    point_lr_factor: float = 1.0,
    decay_vectors: bool = True,
    batch_former_lr_factor: float = 1.0,
    batch_former_weight_decay: float | None = None,
    layer_decay: float = 1.0,
    backbone_layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Return the groups of the trainable parameters: transformer, backbone, batch_former, points, scales.

    ``points`` holds the layers that predict reference points and sampling offsets (Zhu et al. 2021, arXiv 2010.04159,
    appendix A.4), ``scales`` the scales of Context Broadcasting, without weight decay. ``batch_former_weight_decay``
    None means ``weight_decay``. Without ``decay_vectors`` the biases and norms of transformer, backbone and points, and
    the positions and class tokens of a vision transformer, are in the groups ``transformer_no_decay`` and so on. With a
    ``layer_decay`` other than 1 the parameters of these three are divided by their depth (:func:`layer_depths`), and
    those of depth 7, in ``transformer_depth7`` and so on, have the learning rate times ``layer_decay ** 7``; batch
    attention and scales, which are always new, keep theirs. ``backbone_layer_decay`` does the same in the backbone
    alone, whose depths then begin with 1.
    """
    bf_decay = weight_decay if batch_former_weight_decay is None else batch_former_weight_decay
    groups: dict[str, dict[str, Any]] = {
        "transformer": {"lr": lr, "weight_decay": weight_decay},
        "backbone": {"lr": backbone_lr, "weight_decay": weight_decay},
        "batch_former": {"lr": lr * batch_former_lr_factor, "weight_decay": bf_decay},
        "points": {"lr": lr * point_lr_factor, "weight_decay": weight_decay},
        "scales": {"lr": lr, "weight_decay": 0.0},
    }
    decaying = ("transformer", "backbone", "points")
    groups |= {f"{name}_no_decay": {**groups[name], "weight_decay": 0.0} for name in decaying}
    special = _special_parameters(model)
    spared = _without_decay(model)
    depths = {} if layer_decay == backbone_layer_decay == 1 else layer_depths(model)
    if depths:
        first = min(depths[key] for key, group in special.items() if group == "backbone") - 1
        groups = {
            name if depth == 0 else f"{name}_depth{depth}": {
                **group,
                "lr": group["lr"]
                * layer_decay**depth
                * (backbone_layer_decay ** max(depth - first, 0) if name.startswith("backbone") else 1),
            }
            for name, group in groups.items()
            for depth in range(max(depths.values()) + 1 if name.startswith(decaying) else 1)
        }

    def group_of(name: str, parameter: nn.Parameter) -> str:
        group = special.get(id(parameter), "transformer")
        divided = decaying if layer_decay != 1 else ("backbone",)
        depth = depths.get(id(parameter), 0) if group in divided else 0
        decays = decay_vectors or (parameter.ndim > 1 and name not in spared) or group not in decaying
        return (group if decays else f"{group}_no_decay") + (f"_depth{depth}" if depth else "")

    return _filled(groups, model, group_of)


def _without_decay(model: nn.Module) -> set[str]:
    """Return the names of the parameters that a part of the model lists in ``no_weight_decay()``."""
    return {
        f"{prefix}.{name}"
        for prefix, part in model.named_modules()
        if hasattr(part, "no_weight_decay")
        for name in part.no_weight_decay()
    }


def layer_depths(model: nn.Module) -> dict[int, int]:
    """Return the distance of each parameter of a detector from its output, by ``id()``, counted in layers and stages.

    It is 0 for the heads, the last norm of the decoder and the mask head; L - i for layer i of L decoder layers; L for
    queries and positions in the decoder; L + E - j for layer j of E encoder layers; L + 1 for other parts of the
    encoder; L + E for the projections of the feature maps; L + E + S - s for stage s of S stages of the backbone, and
    L + E + 1 for what follows them (i, j and s from 0; E at least 1).
    """
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    encoder_layers = [layer for each in encoders for layer in each.layers]
    decoder_layers = list(model.get_submodule("decoder.layers").children())
    last, first = len(decoder_layers) + 1, len(decoder_layers) + max(len(encoder_layers), 1)
    depths = {}
    for name, parameter in model.named_parameters():
        if re.match(r"mask_head\.|decoder\.(heads|norm|queries\.(parts\.\d+\.)?(class|box)_head)\.", name):
            depths[id(parameter)] = 0
        else:
            depths[id(parameter)] = {"decoder": len(decoder_layers), "encoder": last}.get(name.split(".")[0], first)
    for layers, most in ((decoder_layers, len(decoder_layers)), (encoder_layers, first)):
        for index, layer in enumerate(layers):
            depths |= {id(parameter): most - index for parameter in layer.parameters()}
    backbone = model.get_submodule("backbone")
    stages = backbone.stages if isinstance(backbone, Backbone) else ()
    body = backbone.body if isinstance(backbone, Backbone) else backbone
    for key, stage in parameter_stages(body, stages).items():
        depths[key] = first + max(len(stages) - stage, 1)
    return depths


def _special_parameters(model: nn.Module) -> dict[int, str]:
    """Return the group of every parameter outside the transformer group, by ``id()``."""
    special: dict[int, str] = {}
    for name, module in model.named_modules():
        if name == "backbone":
            group = "backbone"
        elif isinstance(module, BatchFormer | InsertedBatchFormer):
            group = "batch_former"
        elif isinstance(module, nn.Linear | LowRankLinear) and re.search(
            r"\.sampling_offsets$|\bqueries\.reference\b", name
        ):
            group = "points"
        elif name.endswith(SCALE_PARAMETERS):
            group = "scales"
        else:
            continue
        special |= {id(parameter): group for parameter in module.parameters()}
    return special


def image_parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    decay_vectors: bool = False,
    batch_former_lr_factor: float = 1.0,
    batch_former_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return up to four groups of the trainable parameters of an image model.

    They are ``network`` and ``batch_former``, each with ``..._no_decay`` for vectors (biases, norms, scales) and for
    the parameters in the model's ``no_weight_decay()``, such as timm's position embeddings and class tokens.
    ``decay_vectors`` decays those as well, except the scales of Context Broadcasting. ``batch_former_weight_decay``
    None means ``weight_decay``.
    """
    bf_lr = lr * batch_former_lr_factor
    bf_decay = weight_decay if batch_former_weight_decay is None else batch_former_weight_decay
    groups: dict[str, dict[str, Any]] = {
        "network": {"lr": lr, "weight_decay": weight_decay},
        "network_no_decay": {"lr": lr, "weight_decay": 0.0},
        "batch_former": {"lr": bf_lr, "weight_decay": bf_decay},
        "batch_former_no_decay": {"lr": bf_lr, "weight_decay": 0.0},
    }
    attention = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, BatchFormer | InsertedBatchFormer)
        for parameter in module.parameters()
    }
    exempt: Collection[str] = getattr(model, "no_weight_decay", tuple)()

    def group_of(name: str, parameter: nn.Parameter) -> str:
        group = "batch_former" if id(parameter) in attention else "network"
        decays = decay_vectors or (parameter.ndim > 1 and name not in exempt)
        decays = decays and f"{SCALE_PARAMETERS}." not in name
        return group if decays else f"{group}_no_decay"

    return _filled(groups, model, group_of)


def _filled(
    groups: Mapping[str, dict[str, Any]], model: nn.Module, group_of: Callable[[str, nn.Parameter], str]
) -> list[dict[str, Any]]:
    """Return ``groups`` with their trainable parameters, without empty groups."""
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[group_of(name, parameter)].append(parameter)
    return [{"name": name, "params": members[name], **groups[name]} for name in groups if members[name]]


def build_optimizer(
    groups: Sequence[dict[str, Any]],
    name: str = "adamw",
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: Sequence[float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """Build a fused ``adamw`` (Loshchilov & Hutter 2019, arXiv 1711.05101) or ``sgd``, or ``lars``.

    LARS (You et al. 2017, arXiv 1708.03888) is timm's, which adapts only the rates of groups with weight decay.

    Each group keeps its learning rate before the schedule as ``base_lr``.

    Raises:
        InputError: an unknown name, or Nesterov momentum of 0.
    """
    with_base_lr = [{**group, "base_lr": group["lr"]} for group in groups]
    if name == "adamw":
        return torch.optim.AdamW(with_base_lr, betas=(betas[0], betas[1]), fused=True)
    if name not in ("lars", "sgd"):
        raise InputError(f"optimizer.name must be adamw, lars or sgd; got '{name}'")
    if nesterov and momentum == 0:
        raise InputError("optimizer.nesterov=true needs optimizer.momentum greater than 0, such as 0.9")
    if name == "lars":
        from timm.optim.lars import Lars  # a rare setting

        return Lars(with_base_lr, momentum=momentum, nesterov=nesterov)
    return torch.optim.SGD(with_base_lr, momentum=momentum, nesterov=nesterov, fused=True)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], source: str) -> None:
    """Load the moments of ``state``; ``optimizer`` keeps its learning rates and weight decay.

    Raises:
        InputError: the state belongs to other parameters or to another kind of optimizer, or is not finite.
    """
    new, old = (_kind(groups[0]) for groups in (optimizer.param_groups, state["param_groups"]))
    adamw = new == "adamw"
    if new != old:
        raise InputError(
            f"{source} was trained with {old} and optimizer.name is {new}: resume with optimizer.name={old}, or start "
            "a new run with init_from"
        )
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise InputError(
            f"{source} was trained with other parameters frozen, or divided otherwise ({error}): resume with the "
            "model.backbone settings and the layer decays of optimizer it was started with, or start a new run with "
            "init_from"
        ) from error
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # of another structure
        raise InputError(f"{source}: its optimizer state is damaged ({error!r}): use another copy of it") from error
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)
    for number, (parameter, moments) in enumerate(optimizer.state.items()):
        named = {f"optimizer.{number}.{name}": moment for name, moment in moments.items() if moment is not None}
        if adamw and moments and set(moments) != _ADAMW_STATE:
            raise InputError(
                f"{source}: its optimizer state is damaged, it holds {listed(sorted(map(str, moments)))}; expected "
                f"{listed(sorted(_ADAMW_STATE))}. Use another copy of it"
            )
        check_weights(named, source)
        wrong = [name for name, moment in named.items() if moment.dim() and moment.shape != parameter.shape]
        if wrong:
            raise InputError(f"{source}: {listed(wrong)} must have the shape of the parameter: use another copy of it")
        for name, moment in moments.items():  # the fused step checks neither shapes nor layouts
            if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter).copy_(moment)


def _kind(group: Mapping[str, Any]) -> str:
    """Return the name of the optimizer that has such a group."""
    return "adamw" if "betas" in group else "lars" if "trust_coeff" in group else "sgd"


class RunSchedule(NamedTuple):
    """Numbers that follow from the length of a run."""

    learning_rate: LearningRate
    rates: Sequence[float]  # at full rate, of the groups of the optimizer
    ema_decay: float
    ema_warmup_steps: int


@dataclass(frozen=True)
class LearningRate:
    """Learning rate schedule: optimizer step, from 0, perhaps a fraction -> factor of every group's learning rate.

    ``step``: times ``drop_factor`` at each of ``drop_steps``. ``cosine``: half a cosine down to ``min_factor`` at
    ``total_steps``. ``linear``: straight down to 0 at ``total_steps``, from the first step on (mmsegmentation's
    polynomial of power 1). ``flat_cosine``: 1 for ``flat_steps``, then half a cosine down to ``min_factor``, which the
    last ``final_steps`` have (DEIM, Huang et al. 2024, arXiv 2412.04234, section 4.1 and authors' code). All rise over
    ``warmup_steps``, linearly or with an exponent of ``warmup_power``.
    """

    schedule: str
    total_steps: int
    warmup_steps: int = 0
    warmup_power: int = 1
    drop_steps: tuple[float, ...] = ()
    drop_factor: float = 0.1
    min_factor: float = 0.0
    flat_steps: float = 0
    final_steps: float = 0

    def __call__(self, step: float) -> float:
        warmup: float = min(1.0, (step + 1) / (self.warmup_steps + 1)) ** self.warmup_power
        if self.schedule == "step":
            return float(warmup * self.drop_factor ** sum(step >= drop for drop in self.drop_steps))
        if self.schedule == "linear":
            return warmup * max(0.0, 1 - step / max(1, self.total_steps))
        begin = self.flat_steps if self.schedule == "flat_cosine" else self.warmup_steps
        progress = (step - begin) / max(1, self.total_steps - self.final_steps - begin)
        fall = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        return warmup * (self.min_factor + (1 - self.min_factor) * fall)
