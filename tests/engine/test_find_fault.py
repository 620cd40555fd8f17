"""Search for the first module, parameter, target or gradient that is not finite; the step is left unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detr_bf.common import distributed
from detr_bf.common.structures import Batch, FeatureMap, Outputs, Queries, TokenBatch
from detr_bf.detectors import MaskHead
from detr_bf.engine.checkpoint import rng_state
from detr_bf.engine.recovery import Fault, all_finite, find_fault, tensors_in
from detr_bf.engine.step import TrainingStep, wrap_ddp
from detr_bf.losses import LossReport
from tests.detectors import tiny
from tests.engine.steps import batches, step_of
from tests.processes import run_together

NAN, INF = float("nan"), float("inf")


def weights_of(step: TrainingStep, name: str) -> Tensor:
    """Return a parameter of the detector as a writable tensor."""
    return dict(step.model.named_parameters())[name].data


def fault_of(step: TrainingStep, images: list[Batch] | None = None, **changes: Any) -> Fault:
    return find_fault(step, images or batches(), rng_state(), **changes)


def two_streams() -> TrainingStep:
    return step_of(tiny.model(batch_former=tiny.batch_former()))


@pytest.mark.default_tier("detr", "rtdetr", "deformable_detr_two_stage")
@pytest.mark.parametrize("name", tiny.DETECTORS)
def test_a_healthy_step_has_no_fault(name: str) -> None:
    step = step_of(tiny.shaken(tiny.model(name, batch_former=tiny.batch_former())))
    fault = fault_of(step, batches(2))
    assert not fault.found
    assert (fault.module, fault.bad_gradient_at) == (None, None)
    assert (fault.parameters, fault.targets, fault.gradients) == ([], [], [])
    assert "none" in fault.forward_lines()[-1]


def test_a_healthy_mask_head_has_no_fault() -> None:
    assert str(fault_of(with_masks(), batches(masks=True))).count("none") == 1


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("parameter", "module", "kind"),
    [
        ("tokens.projections.0.weight", "tokens.projections.0", "Conv2d"),
        ("encoder.layers.1.feed_forward.expand.bias", "encoder.layers.1.feed_forward.expand", "Linear"),
        ("decoder.queries.position.weight", "decoder.queries", "LearnedQueries"),
        ("decoder.heads.classes.0.weight", "decoder.heads.classes.0", "Linear"),
    ],
)
def test_a_broken_weight_is_found_in_the_module_that_uses_it(
    parameter: str, module: str, kind: str, value: float
) -> None:
    step = two_streams()
    weights_of(step, parameter).view(-1)[0] = value
    fault = fault_of(step)
    assert fault.module is not None
    assert (fault.module.name, fault.module.kind, fault.module.batch) == (module, kind, 1)
    assert fault.module.finite_inputs
    assert fault.module.state == fault.parameters == [parameter]


def test_a_weight_without_a_module_of_its_own_is_found_in_the_layer_around_it() -> None:
    step = two_streams()
    name = "encoder.batch_former.mixers.shared.layers.0.self_attn.in_proj_weight"
    weights_of(step, name).fill_(NAN)
    fault = fault_of(step)
    assert fault.module is not None
    assert fault.module.name == "encoder.batch_former.mixers.shared.layers.0"
    assert fault.module.state == [name]


@pytest.mark.parametrize(
    "layer", ["encoder.layers.1.feed_forward.contract", "decoder.layers.0.cross_attention.attention.out"]
)
def test_an_overflow_is_found_in_the_layer_where_it_happens(layer: str) -> None:
    step = two_streams()
    weights_of(step, f"{layer}.weight").fill_(3e38)
    fault = fault_of(step)
    assert fault.module is not None
    assert (fault.module.name, fault.module.kind, fault.module.finite_inputs) == (layer, "Linear", True)
    assert fault.module.state == fault.parameters == []
    assert fault.found


def test_an_overflow_of_half_precision_alone_is_found() -> None:
    layer = "encoder.layers.0.feed_forward.expand"
    halved, full = (step_of(tiny.model(), precision) for precision in (torch.float16, torch.float32))
    for step in (halved, full):
        weights_of(step, f"{layer}.weight")[:, : tiny.DIM // 2] = 6e4
    fault = fault_of(halved)
    assert fault.module is not None
    assert fault.module.name == layer
    assert fault_of(full).module is None


def test_a_module_that_layers_share_says_which_call_it_was() -> None:
    step = step_of(tiny.model())
    head, calls = step.model.decoder.heads.classes[0], []

    def spoil_the_second(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        calls.append(output)
        return output / 0 if len(calls) == 4 else output  # the second layer in the second batch

    head.register_forward_hook(spoil_the_second)
    fault = fault_of(step, batches(2))
    assert fault.module is not None
    assert (fault.module.name, fault.module.batch, fault.module.call) == ("decoder.heads.classes.0", 2, 2)
    assert "decoder.heads.classes.0 (Linear), batch 2, call 2: its inputs are finite" in str(fault)


class Spoilt(nn.Module):
    """Backbone whose maps hold an infinity that the images do not have."""

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[FeatureMap]:
        (feature,) = tiny.Averages(1)(images, padding_mask)
        return [FeatureMap(feature.tensor.index_fill(1, torch.tensor([0]), INF), feature.padding_mask)]


def test_a_module_that_passes_infinity_on_is_not_the_source() -> None:
    step = step_of(tiny.model())
    step.model.backbone = Spoilt()
    fault = fault_of(step)
    assert fault.module is not None
    assert (fault.module.name, fault.module.finite_inputs) == ("backbone", True)


class Careless(nn.Module):
    """Detector that passes infinity to a module but returns finite values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.inner(torch.full((1,), INF)).nan_to_num()


def test_without_a_source_the_first_module_that_passes_it_on_is_named() -> None:
    fault = fault_of(plain(Careless()))
    assert fault.module is not None
    assert (fault.module.name, fault.module.finite_inputs) == ("inner", False)
    assert "its inputs are not finite either" in str(fault)


def test_an_input_is_checked_before_it_is_overwritten() -> None:
    detector = nn.Sequential(nn.Linear(1, 1), Overwriting())
    detector.forward = lambda batch: detector[1](detector[0](torch.ones(1)).clone()).sum()  # type: ignore[method-assign]
    fault = fault_of(plain(detector))
    assert fault.module is not None
    assert (fault.module.name, fault.module.finite_inputs) == ("1", True)


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(INF)


def test_a_broken_target_is_named_and_so_are_its_losses() -> None:
    first, second = batches(2)
    target = second.targets[1]
    broken = replace(second, targets=(second.targets[0], replace(target, boxes=torch.full_like(target.boxes, NAN))))
    fault = fault_of(two_streams(), [first, broken])
    assert fault.targets == ["11.png"]
    assert (fault.module, fault.parameters) == (None, [])
    assert all_finite(torch.tensor(list(fault.losses[0].values())))
    bad = {name for name, value in fault.losses[1].items() if not torch.tensor(value).isfinite()}
    assert bad == {"total", "loss_bbox", "loss_giou", "loss_bbox_0", "loss_giou_0"}
    assert "data that are not finite in 11.png" in str(fault)


def with_masks() -> TrainingStep:
    head = MaskHead(tiny.DIM, heads=2, finer_channels=[tiny.CHANNELS], see_boxes=False)
    detector = tiny.model(mask_head=head)
    detector.backbone = tiny.Averages(2)
    detector.levels = 1
    return step_of(detector)


def test_masks_that_the_losses_ask_for_are_watched() -> None:
    step = with_masks()
    weights_of(step, "mask_head.convolutions.out.bias").fill_(NAN)
    fault = fault_of(step, batches(masks=True))
    assert fault.module is not None
    assert fault.module.name == "mask_head.convolutions.out"


@dataclass(frozen=True)
class Sum:
    """Criterion of a toy detector."""

    def __call__(self, outputs: Tensor, targets: Any) -> LossReport:
        return LossReport({"loss_sum": outputs.sum()}, {"loss_sum": 1.0})


def plain(model: nn.Module) -> TrainingStep:
    """Module whose loss is the sum of its outputs."""
    return step_of(model, criterion=Sum())  # type: ignore[arg-type]


class Roots(nn.Module):
    """Module whose values are finite, with an infinite slope at the only square root of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, batch: Batch) -> Tensor:
        x = self.middle(self.first(torch.ones(len(batch), 1)))
        return self.last((0 * x).sqrt())


def test_a_gradient_that_is_not_finite_is_found_where_it_begins() -> None:
    step = plain(Roots())
    fault = fault_of(step)
    assert fault.losses[0]["total"] == pytest.approx(2 * step.model.last.bias.item())
    assert fault.gradients == ["first.weight", "first.bias", "middle.weight", "middle.bias"]
    assert fault.bad_gradient_at == "middle"
    assert fault.module is None
    assert fault.found
    assert str(fault).endswith("the gradient of the output of middle is already not finite")
    assert not fault_of(step, with_backward=False).found


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))

    def forward(self, batch: Batch) -> Tensor:
        return 1e30 * self.slope


def test_gradients_that_are_finite_with_a_norm_that_is_not() -> None:
    fault = fault_of(plain(Steep()))
    assert (fault.gradients, fault.gradient_norm) == ([], INF)
    assert fault.found
    assert "gradient norm inf; not finite: no gradient" in str(fault)


def test_the_scale_of_the_loss_can_be_what_overflows() -> None:
    assert fault_of(plain(Steep()), scale=1e10).gradients == ["slope"]
    assert fault_of(plain(Steep()), scale=1e-20).gradient_norm == pytest.approx(2**0.5 * 1e30, rel=1e-5)


def test_the_gradient_is_that_of_the_mean_over_the_batches() -> None:
    step, images = two_streams(), batches(2)
    rng = rng_state()
    for batch in images:
        (step(batch).total / 2).backward()
    norm = nn.utils.get_total_norm([p.grad for p in step.parameters() if p.grad is not None]).item()
    assert find_fault(step, images, rng).gradient_norm == pytest.approx(norm, rel=1e-6)
    assert find_fault(step, images, rng, scale=1024).gradient_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_step_is_the_same_to_the_bit_with_its_dropout(recompute: bool) -> None:
    former = tiny.batch_former(dropout=0.5)
    step = step_of(tiny.model(dropout=0.3, batch_former=former, activation_checkpointing=recompute))
    rng, images = rng_state(), batches(2)
    reports = [step(batch) for batch in images]
    expected = [{"total": report.total.item(), **_numbers(report.losses)} for report in reports]
    assert find_fault(step, images, rng).losses == expected
    assert fault_of(step, images).losses != expected, "another random state gives another dropout"


def _numbers(losses: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in losses.items()}


def test_compiled_layers_are_watched_without_being_compiled_again() -> None:
    step, graphs, layer = step_of(tiny.model()), [], "encoder.layers.0.feed_forward.expand"

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    weights_of(step, f"{layer}.bias").fill_(NAN)
    for part in step.model.encoder.layers:
        part.compile(backend=backend)
    step(batches()[0])
    compiled = len(graphs)
    assert compiled > 0
    fault = fault_of(step)
    assert fault.module is not None
    assert fault.module.name == layer
    step(batches()[0])
    assert len(graphs) == compiled


def test_everything_is_left_as_it_was() -> None:
    step = two_streams()
    step.model.backbone = nn.Sequential(nn.BatchNorm2d(tiny.CHANNELS))
    step.model.backbone.forward = through(step.model.backbone)  # type: ignore[method-assign]
    step(batches()[0]).total.backward()
    before = {name: value.clone() for name, value in step.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}
    rng, modes = torch.get_rng_state(), [module.training for module in step.modules()]
    fault_of(step, batches(2))
    torch.rand(3)
    torch.set_rng_state(rng)
    fault_of(step, batches(2))
    assert torch.equal(torch.get_rng_state(), rng)
    assert before["model.backbone.0.num_batches_tracked"] == 1
    assert all(torch.equal(value, before[name]) for name, value in step.state_dict().items())
    assert all(torch.equal(value.grad, gradients[name]) for name, value in step.named_parameters() if name in gradients)
    assert [module.training for module in step.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in step.modules())


def through(backbone: nn.Sequential) -> Callable[[Tensor, Tensor], list[FeatureMap]]:
    """Return a backbone: the means of the tiny one, followed by the norm."""

    def forward(images: Tensor, padding_mask: Tensor) -> list[FeatureMap]:
        (feature,) = tiny.Averages(1)(images, padding_mask)
        return [FeatureMap(backbone[0](feature.tensor), feature.padding_mask)]

    return forward


def test_hooks_are_removed_when_a_step_fails() -> None:
    step = two_streams()

    def fail(module: nn.Module, arguments: Any) -> None:
        raise RuntimeError("no memory")

    handle = step.model.decoder.register_forward_pre_hook(fail)
    rng = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no memory"):
        fault_of(step)
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in step.modules())
    assert torch.equal(torch.get_rng_state(), rng)


def test_running_statistics_that_nothing_reads_are_not_blamed() -> None:
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(NAN)
    detector = nn.Sequential(norm)
    detector.forward = lambda batch: norm(torch.tensor([[1.0], [2.0]])).sum()  # type: ignore[method-assign]
    assert fault_of(plain(detector)).parameters == []
    norm.eval()
    fault = fault_of(plain(detector))
    assert fault.parameters == ["0.running_mean"]
    assert fault.module is not None
    assert fault.module.state == ["0.running_mean"]


def test_many_names_are_counted() -> None:
    step = step_of(tiny.model())
    for parameter in step.parameters():
        parameter.data.fill_(NAN)
    count = sum(1 for _ in step.parameters())
    assert f" and {count - 8} more" in str(fault_of(step))


def test_tensors_are_found_in_every_dataclass() -> None:
    parts = [torch.full((), float(number)) for number in range(10)]
    tokens = TokenBatch(parts[0], {"a": parts[1]}, {"shape": (1, 2), "b": (parts[2], "text")})
    queries = Queries(parts[3], parts[4], proposals=Outputs(parts[5], parts[6]))
    value = ((tokens, queries), {"batch": Batch(parts[7], parts[8]), "maps": [FeatureMap(parts[9], parts[0])]})
    assert [int(tensor) for tensor in tensors_in(value)] == [*range(10), 0]
    assert list(tensors_in(("text", b"bytes", None, 3, Queries, lambda: parts[0]))) == []


@pytest.mark.parametrize("value", [NAN, INF, -INF, complex(0, NAN)])
def test_finite_means_every_number(value: complex) -> None:
    assert not all_finite([torch.ones(2), torch.tensor([1.0, value])])
    assert all_finite([torch.ones(2), torch.tensor([2**60]), torch.tensor([True])])


def broken_on_one_rank() -> tuple[Fault, bool]:
    """DDP step whose ranks exchange tokens; only rank 1 has a broken target."""
    step = step_of(tiny.model(dropout=0.0, batch_former=tiny.batch_former(gather=True, dropout=0.0)))
    ddp_step = wrap_ddp(step)
    rng, images = rng_state(), batches(2)
    broken = [*images]
    if distributed.rank() == 1:
        target = replace(images[0].targets[0], boxes=torch.full((3, 4), NAN))
        broken[0] = replace(images[0], targets=(target, images[0].targets[1]))
    ddp_step(broken[0])  # training stops before its backward pass
    fault = find_fault(step, broken, rng)
    assert all(parameter.grad is None for parameter in step.parameters())
    ddp_step(images[1]).total.backward()  # training continues with the next step
    return fault, all_finite([parameter.grad for parameter in step.parameters()])


def test_every_rank_finds_its_own_fault() -> None:
    (first, on), (second, also) = run_together(2, broken_on_one_rank)
    assert on
    assert also
    assert second.targets == ["00.png"]
    assert second.found
    assert first.targets == []
    assert all_finite([torch.tensor(list(losses.values())) for losses in first.losses])
    assert any(name.startswith("tokens") for name in first.gradients), "tokens bring back rank 1's gradient"
    assert not any(name.startswith("decoder") for name in first.gradients)
