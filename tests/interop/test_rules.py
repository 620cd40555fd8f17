from __future__ import annotations

import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.interop.rules import Layout, NameRule, rename, to_ours, to_theirs

ATTENTION = NameRule(("attn.in_proj_weight",), ("query.weight", "key.weight", "value.weight"))
HALVES = NameRule(("p",), ("a", "b"), dim=1)
TIED = rename(["head.0", "head.1"], "heads.0")


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], x) for name, x in expected.items())


def test_a_rule_names_a_tensor_or_the_module_it_lies_in() -> None:
    rules = [rename("a", "x"), rename("a.b", "y"), rename("c.weight", "z.w")]
    theirs = {"a.weight": torch.zeros(1), "a.b.bias": torch.ones(1), "c.weight": torch.full((1,), 2.0)}
    ours = {"x.weight": torch.zeros(1), "y.bias": torch.ones(1), "z.w": torch.full((1,), 2.0)}
    assert same(to_ours(theirs, rules)[0], ours)
    assert same(to_theirs(ours, rules)[0], theirs)


def test_names_that_only_start_alike_are_other_names() -> None:
    state = {"layers.10.weight": torch.zeros(1)}
    assert to_ours(state, [rename("layers.1", "x")]) == ({}, ["layers.10.weight"])
    assert to_theirs(state, [rename("x", "layers.1")]) == ({}, ["layers.10.weight"])


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_cut_in_order_and_joined_again(dim: int) -> None:
    rule = NameRule(("packed",), ("first", "second", "third"), dim=dim)
    packed = torch.arange(36.0).view(6, 6)
    ours, unknown = to_ours({"packed": packed}, [rule])
    assert unknown == []
    assert list(ours) == ["first", "second", "third"]
    assert torch.equal(ours["second"], packed.narrow(dim, 2, 2))
    assert same(to_theirs(ours, [rule])[0], {"packed": packed})


@pytest.mark.parametrize(("rule", "shape"), [(ATTENTION, (4, 3)), (ATTENTION, ()), (HALVES, (2,))])
def test_what_has_no_such_parts_is_refused(rule: NameRule, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"'{rule.theirs[0]}' of shape .* cannot be divided"):
        to_ours({rule.theirs[0]: torch.zeros(shape)}, [rule])


@pytest.mark.parametrize("missing", ATTENTION.ours)
def test_parts_are_written_together_or_not_at_all(missing: str) -> None:
    state = {name: torch.zeros(1) for name in ATTENTION.ours if name != missing}
    assert to_theirs(state, [ATTENTION]) == ({}, list(state))


def test_one_tensor_of_several_names() -> None:
    tensor = torch.randn(3)
    both = {"head.0.bias": tensor, "head.1.bias": tensor.clone()}
    for stored in (both, {"head.1.bias": tensor}):
        assert same(to_ours(stored, [TIED])[0], {"heads.0.bias": tensor})
    assert same(to_theirs({"heads.0.bias": tensor}, [TIED])[0], both)


def test_one_tensor_of_several_names_that_differs_is_refused() -> None:
    with pytest.raises(InputError, match=r"'head\.1\.bias' should hold the same tensor"):
        to_ours({"head.0.bias": torch.zeros(3), "head.1.bias": torch.ones(3)}, [TIED])


def test_older_names_are_read_and_not_written() -> None:
    rules = [rename("fc", "expand", older=["linear1"])]
    ours = {"expand.bias": torch.randn(2)}
    assert same(to_ours({"linear1.bias": ours["expand.bias"]}, rules)[0], ours)
    assert same(to_theirs(ours, rules)[0], {"fc.bias": ours["expand.bias"]})


def test_a_module_that_ours_uses_twice() -> None:
    rule = NameRule(("norm4",), ("norm",), copies=("reference.0",))
    weight = torch.randn(2)
    ours = {"norm.weight": weight, "reference.0.weight": weight}
    assert same(to_ours({"norm4.weight": weight}, [rule])[0], ours)
    assert to_theirs(ours, [rule]) == ({"norm4.weight": weight}, [])


def test_heads_are_shared_only_if_those_of_all_layers_are_equal() -> None:
    names = ("class_embed.{}.weight", "bbox_embed.{}.layers.0.weight")
    same = {name.format(layer): torch.ones(2, 2) for name in names for layer in range(3)}
    assert Layout.of(same).shared_heads == {"classes", "boxes"}
    assert not Layout.of(same).refine
    last = Layout.of({**same, names[0].format(2): torch.zeros(2, 2), names[1].format(2): torch.zeros(2, 2)})
    assert last.shared_heads == frozenset()
    assert last.refine
