"""Class heads indexed by COCO's category ids and by contiguous classes, compared with slow loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.interop.classes import COCO_IDS, NEVER, class_rows, renumbered, renumbered_to
from detr_bf.interop.formats import to_foreign
from detr_bf.interop.weights import under_our_names
from tests.detectors.tiny import model
from tests.interop.states import assert_same, state_of

GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
BOXES, PANOPTIC = COCO_IDS
SIZES = [(91, 80, BOXES), (92, 81, BOXES), (250, 133, PANOPTIC), (251, 134, PANOPTIC)]
every_size = pytest.mark.parametrize(("by_id", "contiguous", "ids"), SIZES)
WITH_LABELS = ["dn_detr", "dino", "dino_shared_heads", "rtdetr", "rtdetrv2"]
HEADS = ("decoder.heads.classes.0.weight", "decoder.heads.classes.0.bias")


def weights(rows: int, name: str = "deformable_detr_refine") -> dict[str, Tensor]:
    return state_of(name, num_logits=rows)


def slow_contiguous(head: Tensor, ids: tuple[int, ...], rows: int) -> Tensor:
    """Copy row after row; the last row is no-object if there is one more row than classes."""
    found = []
    for row in range(rows):
        found.append(head[ids[row]] if row < len(ids) else head[-1])
    return torch.stack(found)


def test_the_ids_are_those_of_coco() -> None:
    assert tuple(number for number in range(1, 91) if number not in GAPS) == BOXES
    assert (len(BOXES), len(PANOPTIC), max(PANOPTIC)) == (80, 133, 200)
    assert PANOPTIC[:80] == BOXES
    assert list(PANOPTIC) == sorted(set(PANOPTIC))


@every_size
def test_rows_of_ids_become_rows_of_classes(by_id: int, contiguous: int, ids: tuple[int, ...]) -> None:
    state = weights(by_id)
    found = renumbered(state, "contiguous")
    assert class_rows(found) == contiguous
    changed = [name for name, tensor in state.items() if found[name] is not tensor]
    assert changed == [f"decoder.heads.classes.{layer}.{kind}" for layer in range(2) for kind in ("weight", "bias")]
    for name in changed:
        assert torch.equal(found[name], slow_contiguous(state[name], ids, contiguous))


@every_size
def test_ids_that_no_class_has_are_never_found(by_id: int, contiguous: int, ids: tuple[int, ...]) -> None:
    state = weights(contiguous)
    found = renumbered(state, "ids")
    weight, bias = (found[name] for name in HEADS)
    assert class_rows(found) == by_id
    for row in range(by_id):
        no_object = row == by_id - 1 and contiguous > len(ids)
        source = len(ids) if no_object else ids.index(row) if row in ids else None
        expected = (0.0, NEVER) if source is None else (state[HEADS[0]][source], state[HEADS[1]][source])
        assert (weight[row] == expected[0]).all()
        assert bias[row] == expected[1]
    logits = torch.randn(1000, weight.shape[1]) @ weight.T + bias
    used = torch.zeros(by_id, dtype=torch.bool)
    used[[*ids, *[by_id - 1] * (contiguous > len(ids))]] = True
    assert logits.softmax(-1)[:, ~used].max() < 1e-30
    assert logits.sigmoid()[:, ~used].max() < 1e-30


@every_size
@pytest.mark.parametrize("name", ["detr", "deformable_detr_two_stage", *WITH_LABELS])
def test_there_and_back_to_the_bit(by_id: int, contiguous: int, ids: tuple[int, ...], name: str) -> None:
    state = weights(contiguous, name)
    assert_same(renumbered(renumbered(state, "ids"), "contiguous"), state)


@every_size
def test_proposals_keep_the_row_of_any_object(by_id: int, contiguous: int, ids: tuple[int, ...]) -> None:
    name = "decoder.queries.class_head.weight"
    for rows, numbering in ((by_id, "contiguous"), (contiguous, "ids")):
        state = weights(rows, "deformable_detr_two_stage")
        found = renumbered(state, numbering)
        assert torch.equal(found[name][0], state[name][0])
        other = slice(1, 80) if numbering == "contiguous" else list(BOXES[1:])
        source = list(BOXES[1:]) if numbering == "contiguous" else slice(1, 80)
        assert torch.equal(found[name][other], state[name][source])


@every_size
@pytest.mark.parametrize("name", WITH_LABELS)
def test_labels_and_proposals_with_classes_follow_the_classes(
    by_id: int, contiguous: int, ids: tuple[int, ...], name: str
) -> None:
    """Only the last label belongs to no class; a head that the tokens share with a layer stays shared."""
    state = weights(by_id, name)
    found = renumbered(state, "contiguous")
    labels = "decoder.queries.labels.weight"
    expected = torch.cat([slow_contiguous(state[labels][:-1], ids, contiguous), state[labels][-1:]])
    assert torch.equal(found[labels], expected)
    for head in ("decoder.queries.class_head.weight", "decoder.queries.class_head.bias", *HEADS):
        assert head not in state or torch.equal(found[head], slow_contiguous(state[head], ids, contiguous))
    model(name, num_logits=contiguous).load_state_dict(found)
    model(name, num_logits=by_id).load_state_dict(renumbered(found, "ids"))
    with pytest.raises(InputError, match=f"labels.weight has {by_id + 2} rows, expected one more than the {by_id}"):
        renumbered({**state, labels: torch.cat([state[labels], state[labels][:1]])}, "contiguous")


def test_labels_beyond_the_classes_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """DINO's label_enc has dn_labelbook_size + 1 rows, often more than there are classes."""
    name, own = "decoder.queries.labels.weight", state_of("dino")
    more = {**own, name: torch.cat([own[name][:-1], torch.randn(7, own[name].shape[1]), own[name][-1:]])}
    assert_same(under_our_names(to_foreign(more, "dino"), "book.pth"), own)
    assert "book.pth: of 12 labels of noised objects, those of the 4 classes and the last are kept" in caplog.text
    caplog.clear()
    assert_same(under_our_names(to_foreign(own, "dino"), "book.pth"), own)
    assert not caplog.text


@pytest.mark.parametrize(
    ("rows", "numbering", "said"),
    [
        (
            5,
            "contiguous",
            "of 5 rows have neither .*'contiguous' is made from 91, 92, 250, 251 rows",
        ),
        (90, "ids", "of 90 rows have neither .*'ids' is made from 80, 81, 133, 134 rows"),
        (81, "contiguous", "class heads of 81 rows have the numbering 'contiguous' already"),
        (91, "ids", "class heads of 91 rows have the numbering 'ids' already"),
        (91, "sorted", "no numbering 'sorted' of classes: expected contiguous or ids"),
    ],
)
def test_other_sizes_are_refused(rows: int, numbering: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        renumbered(weights(rows, "detr"), numbering)


def test_weights_without_one_size_of_class_heads_are_refused() -> None:
    with pytest.raises(InputError, match="no class head"):
        class_rows({"backbone.body.conv1.weight": torch.zeros(91)})
    with pytest.raises(InputError, match=r"class heads of \[80, 91\] rows"):
        class_rows({HEADS[0]: torch.zeros(91, 2), "decoder.heads.classes.1.weight": torch.zeros(80, 2)})


@every_size
def test_heads_are_renumbered_only_where_that_makes_them_fit(by_id: int, contiguous: int, ids: tuple[int, ...]) -> None:
    state, back = weights(by_id, "detr"), weights(contiguous, "detr")
    fitted, returned = renumbered_to(state, contiguous), renumbered_to(back, by_id)
    assert fitted is not None
    assert returned is not None
    assert_same(fitted, renumbered(state, "contiguous"))
    assert_same(returned, renumbered(back, "ids"))
    assert_same(renumbered_to(state, by_id) or {}, state)
    assert renumbered_to(state, contiguous + 1 if contiguous + 1 != by_id else 7) is None
    assert renumbered_to(weights(6, "detr"), contiguous) is None
