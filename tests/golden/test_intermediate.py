"""Cases 20 to 25: tensors inside the model: positions, memory, proposals, input of the decoder, its layers' states."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detr_bf.common.structures import Queries
from detr_bf.detectors import Detector
from detr_bf.detectors.denoising import NoiseDraws
from tests.golden.cases import Case, assert_close, build, family, features, samples_mask, targets_of
from tests.golden.test_denoising import rtdetr_draws
from tests.golden.test_successors import noise_of_dino, noise_of_dn_detr

COMPARED = ("aifi", "decoder_", "enc_", "encoder_out", "memory")  # starts of names that must have counterparts
QUERIES_FIRST = ("dab_detr", "dn_detr")  # record boxes (Q, B, 4) and memory (S, B, C)


def replay_noise(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if family(case) == "dn_detr":
        module = import_module("detr_bf.detectors.dn_detr")
        monkeypatch.setattr(module, "draw_noise", lambda shape, *_: noise_of_dn_detr(case, "step", shape))
    elif family(case) == "dino":
        monkeypatch.setattr(NoiseDraws, "draw", lambda *_: noise_of_dino(case, "step"))
    elif family(case) in ("rtdetr", "rtdetrv2"):
        monkeypatch.setattr(NoiseDraws, "draw", lambda *_: rtdetr_draws(case, "step"))


def calls(model: Detector, run: Callable[[], Any]) -> dict[str, tuple[Any, Any]]:
    """Return the first argument and the result of the first call of some modules in ``run``."""
    modules: dict[str, nn.Module] = {"encoder": model.encoder, "queries": model.decoder.queries}
    modules |= {f"layer.{index}": layer for index, layer in enumerate(model.decoder.layers)}
    for name, owner, attribute in (
        ("tokens", model.decoder.queries, "norm"),
        ("logits", model.decoder.queries, "class_head"),
        ("aifi", model.encoder, "encoder"),
        ("fusion", model.encoder, "fusion"),
    ):
        if hasattr(owner, attribute):
            modules[name] = getattr(owner, attribute)
    seen: dict[str, tuple[Any, Any]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, given, result, name=name: seen.setdefault(name, (given[0], result)) and None
        )
        for name, module in modules.items()
    ]
    run()
    for handle in handles:
        handle.remove()
    return seen


def inside(model: Detector, seen: dict[str, tuple[Any, Any]]) -> dict[str, Tensor]:
    """Return our tensors by the references' names, the denoising queries first."""
    queries: Queries = seen["queries"][1]
    size = sum(group.size for group in queries.groups if group.name == "dn")
    layers = [seen[f"layer.{index}"][1].roll(size, 1) for index in range(len(model.decoder.layers))]
    content, position, reference = (x.roll(size, 1) for x in (queries.content, queries.position, queries.reference))
    named = {
        **dict.fromkeys(("decoder_in.tgt", "decoder_in.target"), content),
        **dict.fromkeys(("decoder_in.refpoints_unsigmoid", "decoder_in.ref_points_unact"), reference),
        **dict.fromkeys(("transformer_in.refpoint_embed", "decoder_in.reference_points"), reference),
        "decoder_in.query_pos": position,
        "memory": seen["encoder"][1].tokens,
        "transformer_out.hs": torch.stack([model.decoder.norm(x) for x in layers]),
    } | {f"decoder_layer_out.{index}": x for index, x in enumerate(layers)}
    if queries.blocked is not None:
        blocked = queries.blocked.roll((size, size), (0, 1))
        named |= dict.fromkeys(("transformer_in.attn_mask", "transformer_in.self_attn_mask"), blocked.float())
    if "logits" in seen:
        named |= {"enc_output_memory": seen["tokens"][1]}
        named |= dict.fromkeys(("enc_class", "transformer_out.enc_class"), seen["logits"][1])
    if "fusion" in seen:
        given, result = seen["aifi"]
        named |= {"aifi.0.in": given.tokens, "aifi.0.pos_embed": given.per_sample["position"]}
        named |= {"aifi.0.memory": result.tokens}
        named |= {f"encoder_out.{level}": x for level, x in enumerate(seen["fusion"][1])}
    return named


def as_ours(case: Case, name: str, x: Tensor) -> Tensor:
    """Return a recorded tensor with the images first and boxes in fractions."""
    if family(case) in QUERIES_FIRST and name in ("memory", "transformer_in.refpoint_embed") and x.dim() == 3:
        x = x.transpose(0, 1)
    return x.sigmoid() if name.endswith(("unsigmoid", "unact", "refpoint_embed")) else x.float()


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_inside(inner_case: Case, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare in evaluation and in run ``step``; tensors of tokens at unpadded cells."""
    case, model = inner_case, build(inner_case).train(mode == "train")
    replay_noise(case, monkeypatch)
    targets = targets_of(case, "input.targets.step.") if mode == "train" else []
    seen = calls(model, lambda: model.detect(features(case), samples_mask(case), targets))
    ours, recorded = inside(model, seen), case.below(f"mid.{mode}.")
    names = sorted(set(ours) & set(recorded))
    if mode == "train" and case.cfg.get("two_stage_class_embed_share"):
        names.remove("enc_class")  # recorded at another call of the shared head
    assert names or (mode == "train" and not recorded)
    wanted = {name for name in recorded if name == "transformer_out.hs" or name.startswith(COMPARED)}
    assert wanted - {"enc_class"} <= set(names)
    here = ~seen["encoder"][1].per_sample["padding_mask"]
    for name in names:
        expected, found = as_ours(case, name, recorded[name]), ours[name]
        if name == "memory" or "enc_" in name:
            expected, found = expected[here], found[here]
        if expected.dim() == 2 and "refpoint" in name:  # without images, and before they are repeated for the patterns
            expected = expected.repeat(found.shape[1] // len(expected), 1)
        assert_close(found, expected.expand_as(found))
