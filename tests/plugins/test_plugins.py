"""Properties of every plug-in: keys, evaluation, copies, averages, recomputation, compilation, processes, removal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from detr_bf.batchformer import StreamLoss
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.engine import load_fitting, load_strict
from detr_bf.plugins import (
    add_batchformer,
    add_batchformer_v2,
    add_context_broadcasting,
    add_diverse_patch,
    add_relative_localization,
    num_streams,
    without_plugins,
)
from detr_bf.plugins.plugin import chosen
from tests.plugins import tiny
from tests.processes import run_together

PLUGINS: dict[str, Callable[[nn.Module], Any]] = {
    "batchformer_v2": lambda model: add_batchformer_v2(model, [1, 2], dropout=0.0),
    "batchformer_v2_after": lambda model: add_batchformer_v2(model, "all", position="after", shared=False, dropout=0.0),
    "batchformer": lambda model: add_batchformer(model, heads=2, dropout=0.0),
    "context_broadcasting": add_context_broadcasting,
    "context_broadcasting_scaled": lambda model: with_scales(add_context_broadcasting(model, "all", scaled=True)),
    "relative_localization": lambda model: add_relative_localization(model, weight=1.0),
    "relative_localization_all": lambda model: add_relative_localization(model, "all", weight=1.0, pool=False),
    "diverse_patch": lambda model: add_diverse_patch(model, tiny.CLASSES),
}
TRAINING_ONLY = [name for name in PLUGINS if "context" not in name]
every_plugin = pytest.mark.parametrize("name", PLUGINS)
in_training_only = pytest.mark.parametrize("name", TRAINING_ONLY)


def with_scales(plugin: Any) -> Any:
    """Set scales, which have no effect at 0, to random values."""
    for scale in plugin.scales.values():
        nn.init.normal_(scale)
    return plugin


def plugged(name: str, **changes: Any) -> Any:
    model = tiny.vit(**changes)
    PLUGINS[name](model)
    return model


def labels() -> Tensor:
    return torch.tensor([0, 3, 4])


class Step(nn.Module):
    """Sum of all losses of a training step in one forward pass; ``call`` replaces the model."""

    def __init__(self, model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self.call = (model if call is None else call,)  # a tuple hides its parameters: they are the model's

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        plugins: Any = self.model.plugins
        streams = num_streams(self.model)
        loss = StreamLoss(F.cross_entropy)(self.call[0](images), labels, streams)
        if "relative_localization" in plugins:
            torch.manual_seed(7)  # the same random pairs in every call
            loss = loss + plugins["relative_localization"]()
        if "diverse_patch" in plugins:
            loss = loss + sum(plugins["diverse_patch"](labels[:, None].expand(-1, 16), streams).values())
        return loss


def gradients(step: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters by their names in the model."""
    step.zero_grad()
    step(images, labels).backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in step.named_parameters()}


@every_plugin
def test_keys_of_timm_stay_and_ours_have_one_prefix(name: str) -> None:
    before = list(tiny.vit().state_dict())
    state = plugged(name).state_dict()
    assert [key for key in state if not key.startswith("plugins.")] == before
    assert list(without_plugins(state)) == before
    assert len(state) > len(before)


@every_plugin
def test_weights_go_both_ways(name: str) -> None:
    plain, model = tiny.vit(), plugged(name)
    own = {key: value.clone() for key, value in model.state_dict().items() if key.startswith("plugins.")}
    other = {key: torch.randn_like(value) for key, value in plain.state_dict().items()}
    model.load_state_dict(other, strict=name in TRAINING_ONLY)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in (other | own).items())
    plain.load_state_dict(without_plugins(model.state_dict()))
    plugged(name).load_state_dict(model.state_dict())


@pytest.mark.parametrize("blocks", ["upper", "all", [0, 1]])
@pytest.mark.parametrize("scaled", [False, True])
def test_context_broadcasting_is_not_gained_or_lost_in_silence(scaled: bool, blocks: Any) -> None:
    """Context Broadcasting changes evaluation, so its weights load only with it and at the same blocks."""
    model, plain, plugged_elsewhere = tiny.vit(), tiny.vit(), tiny.vit()
    add_context_broadcasting(model, blocks, scaled=scaled)
    add_batchformer_v2(model, [1])
    add_context_broadcasting(plugged_elsewhere, [3], scaled=scaled)
    add_batchformer_v2(plugged_elsewhere, [1])
    state = model.state_dict()
    for other in (plain, plugged_elsewhere):
        with pytest.raises(RuntimeError, match=r"Unexpected.*plugins\.context_broadcasting\."):
            other.load_state_dict(state)
        with pytest.raises(InputError, match=r"unknown to the model .*plugins\.context_broadcasting\."):
            load_strict(other, state, "theirs.pt")
        with pytest.raises(RuntimeError, match=r"Missing.*plugins\.context_broadcasting\."):
            model.load_state_dict(other.state_dict())
    assert "freshly initialised" in load_fitting(model, plain.state_dict(), "theirs.pt")
    assert "left out" in load_fitting(plain, state, "ours.pt")


def test_the_marks_of_context_broadcasting_are_kept_by_safetensors_and_precisions(tmp_path: Path) -> None:
    model = plugged("context_broadcasting")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    plugged("context_broadcasting").load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert list(model.bfloat16().state_dict()) == list(plugged("context_broadcasting").state_dict())
    assert not list(model.plugins.parameters()), "Context Broadcasting has no parameter without scales"


def test_a_plugin_moves_to_the_device_of_the_model() -> None:
    model = tiny.vit().to("meta")
    add_context_broadcasting(model)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def intermediates(model: Any, images: Tensor) -> list[Tensor]:
    return [*model.forward_intermediates(images)[1], *model.get_intermediate_layers(images, n=[0, 3])]


@pytest.mark.parametrize("name", ["batchformer_v2", "batchformer_v2_after"])
def test_intermediate_features_never_mix_two_streams(name: str) -> None:
    """timm expects as many rows after each block as there are images."""
    model, images = plugged(name).train(), tiny.images()
    expected = intermediates(tiny.vit().train(), images)
    for call in (
        model.forward_intermediates,
        model.get_intermediate_layers,
        copy.deepcopy(model).forward_intermediates,
    ):
        with pytest.raises(InputError, match=r"plugins\['batchformer_v2'\]\.eval\(\)"):
            call(images)
    model.plugins["batchformer_v2"].eval()  # as the message says
    assert all(map(torch.equal, intermediates(model, images), expected))
    assert all(map(torch.equal, intermediates(model.train().eval(), images), expected))
    model.plugins["batchformer_v2"].remove()
    assert all(map(torch.equal, intermediates(model.train(), images), expected))
    assert model.forward_intermediates.__func__ is VisionTransformer.forward_intermediates


@every_plugin
def test_features_and_head_make_the_whole_model(name: str) -> None:
    """Also holds in training, where batch attention doubles the rows of both."""
    for model in (plugged(name).train(), plugged(name)):
        assert torch.equal(model.forward_head(model.forward_features(tiny.images())), model(tiny.images()))


@pytest.mark.parametrize("name", ["batchformer_v2", "context_broadcasting_scaled", "diverse_patch"])
def test_half_a_plugin_is_not_loaded_in_silence(name: str) -> None:
    model = plugged(name)
    state = model.state_dict()
    missing = next(key for key in state if key.startswith("plugins."))
    del state[missing]
    with pytest.raises(RuntimeError, match=missing):
        model.load_state_dict(state)


@in_training_only
def test_evaluation_is_that_of_timm_to_the_bit_and_reads_no_parameter_of_ours(name: str) -> None:
    model = plugged(name)
    for key, parameter in model.named_parameters():
        if key.startswith("plugins."):
            nn.init.constant_(parameter, float("nan"))
    assert torch.equal(model(tiny.images()), tiny.vit()(tiny.images()))


@every_plugin
def test_removing_undoes_it_completely(name: str) -> None:
    untouched, model = tiny.vit().train(), tiny.vit()
    plugin = PLUGINS[name](model)
    Step(model.train())(tiny.images(), labels())
    plugin.remove()
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in untouched.named_modules()]
    assert not any(list(hooks_of(module)) for module in model.modules())
    assert torch.equal(model(tiny.images()), untouched(tiny.images()))
    with pytest.raises(InputError, match="already removed"):
        plugin.remove()


def hooks_of(module: nn.Module) -> Iterator[Any]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
        yield from hooks.values()


def test_removing_one_leaves_the_others() -> None:
    model, alone = tiny.vit(), tiny.vit()
    first = add_batchformer_v2(model, [1], dropout=0.0)
    for network in (model, alone):
        add_context_broadcasting(network)
    first.remove()
    assert torch.equal(model.train()(tiny.images()), alone.train()(tiny.images()))


@every_plugin
def test_a_deep_copy_has_hooks_and_parameters_of_its_own(name: str) -> None:
    """Copy after a step, while its features are kept; then change the original."""
    model = plugged(name).train()
    expected = gradients(Step(model), tiny.images(), labels())
    model(tiny.images())
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    for key, value in gradients(Step(twin), tiny.images(), labels()).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    next(iter(twin.plugins.values())).remove()
    assert not hasattr(twin, "plugins")
    assert hasattr(model, "plugins")
    assert any(list(hooks_of(module)) for module in model.modules())


def averages(model: nn.Module) -> list[tuple[str, nn.Module, Callable[[], None]]]:
    ema, swa = ModelEmaV3(model, decay=0.75), AveragedModel(model, avg_fn=lambda old, new, _: 0.75 * old + 0.25 * new)
    return [
        ("timm", ema.module, lambda: ema.update(model)),
        ("torch", swa.module, lambda: swa.update_parameters(model)),
    ]


@every_plugin
def test_averages_of_weights_include_the_plugin(name: str) -> None:
    model = plugged(name).train()
    Step(model)(tiny.images(), labels())
    kept = averages(model)
    kept[1][2]()  # torch's first call copies the weights
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data += 1
    for source, average, update in kept:
        update()
        for key, value in average.state_dict().items():
            moved = 0.25 if value.is_floating_point() else 0  # the marks of Context Broadcasting do not move
            torch.testing.assert_close(value, start[key] + moved, msg=f"{source}: {key}")
        average.eval()(tiny.images())


@every_plugin
def test_activation_checkpointing_changes_no_gradient(name: str) -> None:
    model = plugged(name).train()
    expected = gradients(Step(model), tiny.images(), labels())
    model.set_grad_checkpointing()
    for key, value in gradients(Step(model), tiny.images(), labels()).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12)


def test_checkpointing_repeats_the_dropout_of_batch_attention() -> None:
    model = tiny.vit()
    add_batchformer_v2(model, [1, 2], dropout=0.5)
    runs = []
    for enable in (False, True):
        model.train().set_grad_checkpointing(enable)
        torch.manual_seed(3)
        runs.append(gradients(Step(model), tiny.images(), labels()))
    for key, value in runs[0].items():
        torch.testing.assert_close(runs[1][key], value, rtol=1e-10, atol=1e-12)


def check_compiled(model: Any, backend: str) -> None:
    """Compare training with all gradients, then evaluation."""
    expected = gradients(Step(model.train()), tiny.images(), labels())
    evaluated = model.eval()(tiny.images())
    torch._dynamo.reset()
    compiled = torch.compile(model.train(), backend=backend)
    assert num_streams(compiled) == num_streams(model)
    for key, value in gradients(Step(model, compiled), tiny.images(), labels()).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-8, atol=1e-10)
    model.eval()
    torch.testing.assert_close(compiled(tiny.images()), evaluated, rtol=1e-8, atol=1e-10)


@pytest.mark.full
def test_all_together_compiled_as_not_compiled() -> None:
    model = tiny.vit()
    for name in ("batchformer_v2", "context_broadcasting_scaled", "relative_localization_all", "diverse_patch"):
        PLUGINS[name](model)
    check_compiled(model, "aot_eager")


@pytest.mark.slow
@every_plugin
def test_compiled_to_kernels_as_not_compiled(name: str) -> None:
    check_compiled(plugged(name), "inductor")


def in_a_group(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients of this rank's images alone, and those that DDP averages over all ranks."""
    model = plugged(name).train()
    mine = slice(distributed.rank(), distributed.rank() + 2)
    images, classes = tiny.images()[mine], labels()[mine]
    alone = gradients(Step(model), images, classes)
    return alone, gradients(DistributedDataParallel(Step(model)), images, classes)


@pytest.mark.default_tier("batchformer_v2")
@every_plugin
def test_processes_take_the_mean_of_their_gradients(name: str) -> None:
    (first, together), (second, also_together) = run_together(2, in_a_group, name)
    for key, value in together.items():
        assert torch.equal(value, also_together[key])
        torch.testing.assert_close(value, (first[key] + second[key]) / 2, rtol=1e-10, atol=1e-12)
    assert any((first[key] != second[key]).any() for key in first), "the ranks saw different images"


GATHERING: dict[str, Callable[[nn.Module], Any]] = {
    "batchformer_v2": lambda model: add_batchformer_v2(model, [1, 3], dropout=0.0, gather=True),
    "batchformer": lambda model: add_batchformer(model, dropout=0.0, gather=True),
}


def with_gathering(name: str, whole: bool, checkpointing: bool) -> dict[str, Tensor]:
    model = tiny.vit()
    GATHERING[name](model)
    model.train().set_grad_checkpointing(checkpointing)
    images, classes = tiny.images(4), torch.tensor([0, 3, 4, 1])
    if whole:
        return gradients(Step(model), images, classes)
    rank = distributed.rank()
    return gradients(DistributedDataParallel(Step(model)), images[rank::2], classes[rank::2])


@pytest.mark.default_tier("True-batchformer_v2")
@pytest.mark.parametrize("name", GATHERING)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gathering_processes_are_as_one_with_all_images(name: str, checkpointing: bool) -> None:
    expected = with_gathering(name, True, checkpointing)
    for part in run_together(2, with_gathering, name, False, checkpointing):
        for key, value in part.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-11)


@every_plugin
def test_a_plugin_takes_dtype_and_mode_of_its_model(name: str) -> None:
    model = tiny.vit()
    model.bfloat16().train()
    plugin = PLUGINS[name](model)
    assert plugin.training
    assert {parameter.dtype for parameter in plugin.parameters()} <= {torch.bfloat16}


@every_plugin
def test_under_autocast_losses_are_in_full_precision(name: str) -> None:
    model = plugged(name).float().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tiny.images().float())
        assert logits.dtype == torch.bfloat16
        if "relative_localization" in model.plugins:
            assert model.plugins["relative_localization"]().dtype == torch.float32
        if "diverse_patch" in model.plugins:
            losses = model.plugins["diverse_patch"](torch.zeros(tiny.IMAGES, 16, dtype=torch.long))
            assert {loss.dtype for loss in losses.values()} == {torch.float32}


@every_plugin
def test_a_model_has_one_of_each(name: str) -> None:
    with pytest.raises(InputError, match="already"):
        PLUGINS[name](plugged(name))


@pytest.mark.parametrize("name", ["batchformer_v2", "relative_localization", "diverse_patch", "context_broadcasting"])
@pytest.mark.parametrize("unknown", ["mobilenetv3_small_050", "beit_base_patch16_224"])
def test_other_models_are_refused(name: str, unknown: str) -> None:
    model = timm.create_model(unknown, **({"depth": 1} if "beit" in unknown else {}))
    before = list(model.state_dict())
    with pytest.raises(InputError, match="expected timm's VisionTransformer"):
        PLUGINS[name](model)
    assert list(model.state_dict()) == before


@pytest.mark.parametrize("name", ["batchformer_v2", "relative_localization", "diverse_patch"])
def test_images_that_lose_patches_at_random_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="patch_drop_rate=0"):
        plugged(name, patch_drop_rate=0.5)


@pytest.mark.parametrize("name", ["relative_localization", "diverse_patch"])
def test_a_loss_needs_a_forward_pass_of_its_own(name: str) -> None:
    model = plugged(name)
    arguments = (torch.zeros(tiny.IMAGES, 16, dtype=torch.long),) if name == "diverse_patch" else ()
    loss = model.plugins[name]
    with pytest.raises(InputError, match="Call the model in training mode"):
        model(tiny.images()), loss(*arguments)
    model.train()(tiny.images())
    loss(*arguments)
    with pytest.raises(InputError, match="Call the model in training mode"):
        loss(*arguments)


@pytest.mark.parametrize(
    ("layers", "depth", "expected"),
    [("all", 3, (0, 1, 2)), ("upper", 4, (2, 3)), ("upper", 12, (6, 7, 8, 9, 10, 11)), ([0, 2], 3, (0, 2))],
)
def test_layers_in_words_and_numbers(layers: Any, depth: int, expected: tuple[int, ...]) -> None:
    assert chosen(layers, depth) == expected


@pytest.mark.parametrize(
    ("layers", "message"),
    [([], "one or more"), ([4], "from 0 to 3"), ([-1], "from 0 to 3"), ([2, 1], "ascend"), ("lower", "'upper'")],
)
def test_layers_that_do_not_exist_are_refused(layers: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        chosen(layers, 4)


def test_a_chain_of_layers_cannot_have_plugins() -> None:
    chain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, tiny.CLASSES))
    with pytest.raises(InputError, match="would call it like a layer"):
        add_batchformer(chain, before=["1"])
    assert chain(tiny.images().float()).shape == (tiny.IMAGES, tiny.CLASSES)
