"""Panoptic quality: rules by hand, a naive oracle and hotcoco, splits over ranks, output files, refused input."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap, PanopticMap, Segment
from detr_bf.data.annotation_values import MAX_ID
from detr_bf.data.masks import read_ids
from detr_bf.evaluation import PanopticEvaluator, PanopticSummary, write_panoptic
from tests.references.panoptic_quality import Scene, averages, random_split, scene, tallies

CAT, DOG, SKY, SEA = 3, 7, 90, 200  # sparse category ids
CLASSES = ClassMap((CAT, DOG, SKY, SEA), ("cat", "dog", "sky", "sea"), (True, True, False, False))


def save(folder: Path, scenes: Sequence[Scene]) -> tuple[Path, Path]:
    """Write the ground truth to disk; return the JSON and the folder of its PNG files."""
    folder.mkdir(exist_ok=True)
    annotations, images = [], []
    for one in scenes:
        ids, name = np.asarray(one.truth), f"{one.image_id:06d}.png"
        Image.fromarray(np.stack([ids % 256, ids // 256 % 256, ids // 65536], axis=-1).astype(np.uint8)).save(
            folder / name
        )
        info = [dict(entry) for entry in one.truth_segments]
        annotations.append({"image_id": one.image_id, "file_name": name, "segments_info": info})
        images.append({"id": one.image_id, "file_name": name, "height": ids.shape[0], "width": ids.shape[1]})
    categories = [
        {"id": i, "name": name, "isthing": int(thing), "supercategory": name}
        for i, name, thing in zip(CLASSES.category_ids, CLASSES.names, CLASSES.is_thing, strict=True)
    ]
    path = folder / "panoptic.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path, folder


def prediction(one: Scene) -> PanopticMap:
    segments = tuple(
        Segment(entry["id"], CLASSES.index[entry["category_id"]], entry["area"]) for entry in one.found_segments
    )
    return PanopticMap(one.image_id, torch.tensor(one.found, dtype=torch.int32), segments)


def evaluate(folder: Path, *scenes: Scene) -> PanopticSummary:
    evaluator = PanopticEvaluator(*save(folder, scenes), CLASSES)
    evaluator.update([prediction(one) for one in scenes])
    return evaluator.summarize()


def counts(summary: PanopticSummary, name: str) -> tuple[int, int, int]:
    result = summary.per_class[name]
    return result.tp, result.fp, result.fn


CAT_AND_SKY = scene(["1122", "11.."], {1: CAT, 2: SKY}, ["1122", "1122"], {1: CAT, 2: SKY})


def test_a_match_adds_its_iou(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["1111.22222"], {1: CAT, 2: SKY}, ["3334444444"], {3: CAT, 4: SKY}))
    assert counts(summary, "cat") == (1, 0, 0)
    assert summary.per_class["cat"].PQ == 3 / 4
    assert summary.per_class["sky"].PQ == 5 / 6, "one of the seven pixels is void, one is the cat's"
    assert (summary.PQ_th, summary.PQ_st, summary.PQ) == (3 / 4, 5 / 6, (3 / 4 + 5 / 6) / 2)
    assert (summary.RQ, summary.SQ) == (1.0, summary.PQ)


def test_an_iou_of_one_half_is_no_match(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["11222222"], {1: CAT, 2: SKY}, ["1......."], {1: CAT}))
    assert counts(summary, "cat") == (0, 1, 1)
    assert (summary.per_class["cat"].PQ, summary.per_class["cat"].SQ, summary.per_class["cat"].RQ) == (0.0, 0.0, 0.0)
    summary = evaluate(tmp_path, scene(["11122222"], {1: CAT, 2: SKY}, ["11......"], {1: CAT}))
    assert counts(summary, "cat") == (1, 0, 0)


def test_another_class_is_no_match(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["1111"], {1: CAT}, ["1111"], {1: DOG}))
    assert counts(summary, "cat") == (0, 0, 1)
    assert counts(summary, "dog") == (0, 1, 0)
    assert summary.PQ == 0.0


def test_quality_is_divided_by_matches_and_half_of_the_rest(tmp_path: Path) -> None:
    one = scene(
        ["1111222.33334444"], {1: CAT, 2: CAT, 3: CAT, 4: SEA}, ["1110...033334455"], {1: CAT, 3: CAT, 4: CAT, 5: CAT}
    )
    summary = evaluate(tmp_path, one)
    assert counts(summary, "cat") == (2, 2, 1)
    result = summary.per_class["cat"]
    assert (result.PQ, result.SQ, result.RQ) == (1.75 / 3.5, 1.75 / 2, 2 / 3.5)


def test_predicted_pixels_on_void_do_not_count_in_the_union(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["11......"], {1: CAT}, ["11111111"], {1: CAT}))
    assert summary.per_class["cat"].PQ == 1.0


def test_a_prediction_mostly_on_void_is_not_false(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["...22111"], {1: CAT, 2: SKY}, ["33333111"], {1: CAT, 3: DOG}))
    assert counts(summary, "dog") == (0, 0, 0), "three of five pixels are void"
    summary = evaluate(tmp_path, scene(["..221111"], {1: CAT, 2: SKY}, ["33331111"], {1: CAT, 3: DOG}))
    assert counts(summary, "dog") == (0, 1, 0), "exactly half is not more than half"


def test_void_and_the_crowd_of_the_class_count_together(tmp_path: Path) -> None:
    truth, found = ["..551111"], ["3333331."]
    summary = evaluate(tmp_path, scene(truth, {5: DOG, 1: SKY}, found, {3: DOG, 1: SKY}, crowds={5}))
    assert counts(summary, "dog") == (0, 0, 0)
    summary = evaluate(tmp_path, scene(truth, {5: CAT, 1: SKY}, found, {3: DOG, 1: SKY}, crowds={5}))
    assert counts(summary, "dog") == (0, 1, 0), "the crowd has another class"


def test_a_crowd_is_neither_matched_nor_missed(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["1111"], {1: CAT}, ["1111"], {1: CAT}, crowds={1}))
    assert counts(summary, "cat") == (0, 0, 0)
    summary = evaluate(tmp_path, scene(["1111"], {1: CAT}, ["...."], {}, crowds={1}))
    assert counts(summary, "cat") == (0, 0, 0)
    assert summary.metrics == dict.fromkeys(summary.metrics)


@pytest.mark.parametrize(("order", "false"), [((1, 2), 1), ((2, 1), 0)])
def test_only_the_crowd_listed_last_excuses_predictions(tmp_path: Path, order: tuple[int, int], false: int) -> None:
    categories = dict.fromkeys(order, CAT)
    summary = evaluate(tmp_path, scene(["11112222"], categories, ["3333...."], {3: CAT}, crowds={1, 2}))
    assert counts(summary, "cat") == (0, false, 0)


def test_an_id_that_the_json_does_not_list_is_not_void(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["11199999"], {1: CAT}, ["11113333"], {1: CAT, 3: DOG}))
    assert summary.per_class["cat"].PQ == 3 / 4
    assert counts(summary, "dog") == (0, 1, 0)


def test_a_listed_segment_without_pixels_is_missed(tmp_path: Path) -> None:
    one = scene(["1111"], {1: CAT}, ["1111"], {1: CAT})
    absent = {"id": 8, "category_id": CAT, "area": 5, "iscrowd": 0}
    summary = evaluate(tmp_path, replace(one, truth_segments=[*one.truth_segments, absent]))
    assert counts(summary, "cat") == (1, 0, 1)


def test_areas_of_the_truth_are_the_files_and_those_of_predictions_are_counted(tmp_path: Path) -> None:
    one = scene(["1111"], {1: CAT}, ["1111"], {1: CAT})
    wrong = [{**one.truth_segments[0], "area": 6}]
    lied = [{**one.found_segments[0], "area": 100}]
    summary = evaluate(tmp_path, replace(one, truth_segments=wrong, found_segments=lied))
    assert summary.per_class["cat"].PQ == 4 / 6


def test_a_class_without_segments_enters_no_mean(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["1122"], {1: CAT, 2: CAT}, ["1122"], {1: CAT, 2: CAT}))
    assert (summary.PQ, summary.PQ_th) == (1.0, 1.0)
    assert (summary.PQ_st, summary.SQ_st, summary.RQ_st) == (None, None, None)
    assert summary.per_class["dog"].PQ is None
    assert [result.is_thing for result in summary.per_class.values()] == [True, True, False, False]


def test_the_summary_survives_json(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, scene(["1122"], {1: CAT, 2: DOG}, ["1112"], {1: CAT, 2: DOG}))
    state = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert PanopticSummary.from_dict(state) == summary
    assert list(summary.metrics) == ["PQ", "SQ", "RQ", "PQ_th", "SQ_th", "RQ_th", "PQ_st", "SQ_st", "RQ_st"]
    assert summary.metrics["PQ"] == summary.PQ == 1 / 3, "IoU 2/3; the dog's IoU of 1/2 is no match"


def test_classes_that_share_a_name_stay_apart(tmp_path: Path) -> None:
    path, folder = save(tmp_path, [scene(["12"], {1: CAT, 2: DOG}, ["12"], {1: CAT, 2: DOG})])
    content = json.loads(path.read_text())
    for category in content["categories"][:2]:
        category["name"] = "pet"
    path.write_text(json.dumps(content))
    evaluator = PanopticEvaluator(path, folder, ClassMap.from_categories(content["categories"]))
    assert list(evaluator.summarize(partial=True).per_class) == ["pet (3)", "pet (7)", "sky", "sea"]


def assert_equals_the_oracle(summary: PanopticSummary, scenes: Sequence[Scene]) -> None:
    expected = tallies(scenes, CLASSES.category_ids)
    for category_id, name in zip(CLASSES.category_ids, CLASSES.names, strict=True):
        result, tally = summary.per_class[name], expected[category_id]
        assert counts(summary, name) == (tally.tp, tally.fp, tally.fn)
        assert (tally.quality or (None, None, None)) == (result.PQ, result.SQ, result.RQ)
    groups = (CLASSES.category_ids, (CAT, DOG), (SKY, SEA))
    assert list(summary.metrics.values()) == [value for group in groups for value in averages(expected, group)]


@pytest.mark.parametrize("seed", range(40))
def test_random_maps_give_the_oracles_numbers_bit_for_bit(tmp_path: Path, seed: int) -> None:
    scenes = random_split(seed, CLASSES.category_ids)
    assert_equals_the_oracle(evaluate(tmp_path, *scenes), scenes)


def test_random_maps_hold_all_that_the_rules_speak_of() -> None:
    scenes = [one for seed in range(40) for one in random_split(seed, CLASSES.category_ids)]
    expected = tallies(scenes, CLASSES.category_ids).values()
    assert all(min(tally.tp, tally.fp, tally.fn) > 20 for tally in expected)
    assert any(0 in row for one in scenes for row in one.truth), "void"
    assert any(entry["iscrowd"] for one in scenes for entry in one.truth_segments)
    assert any(not one.found_segments for one in scenes)
    ids = [({value for row in one.truth for value in row} - {0}, listed_ids(one)) for one in scenes]
    assert any(present - listed and listed - present for present, listed in ids), "not listed, and without pixels"


def listed_ids(one: Scene) -> set[int]:
    return {entry["id"] for entry in one.truth_segments}


@pytest.mark.parametrize("seed", range(10))
def test_hotcoco_gives_the_same_numbers(tmp_path: Path, seed: int) -> None:
    """Agreement up to rounding: hotcoco first sums within each image. Its -1 is our None."""
    panoptic = pytest.importorskip("hotcoco.panoptic")
    scenes = random_split(seed, CLASSES.category_ids)
    summary = evaluate(tmp_path / "truth", *scenes)
    maps = [prediction(one) for one in scenes]
    names = {one.image_id: f"{one.image_id}.jpg" for one in scenes}
    write_panoptic(tmp_path / "found.json", tmp_path / "found", maps, CLASSES, names)
    theirs = panoptic.PanopticEval(
        str(tmp_path / "truth" / "panoptic.json"), str(tmp_path / "found.json"), gt_folder=str(tmp_path / "truth")
    )
    theirs.evaluate()
    per_class = theirs.results()["per_class"]
    assert {category: (r["tp"], r["fp"], r["fn"]) for category, r in per_class.items()} == {
        category: counts(summary, name) for category, name in zip(CLASSES.category_ids, CLASSES.names, strict=True)
    }
    expected = [None if value == -1 else value for value in theirs.stats]
    assert list(summary.metrics.values()) == pytest.approx(expected, rel=1e-14)


def own_prediction(one: Scene) -> Scene:
    """Return the ground truth as prediction, with void and crowds as void."""
    present = {value for row in one.truth for value in row}
    segments = [entry for entry in one.truth_segments if entry["id"] in present and not entry["iscrowd"]]
    kept = {entry["id"] for entry in segments}
    found = [[value if value in kept else 0 for value in row] for row in one.truth]
    return replace(
        one, truth_segments=[e for e in one.truth_segments if e["id"] in present], found=found, found_segments=segments
    )


def test_ground_truth_as_prediction_gives_exactly_one(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, *map(own_prediction, random_split(0, CLASSES.category_ids, num_images=20)))
    assert set(summary.metrics.values()) == {1.0}
    assert all(result.tp > 10 and result.fp == result.fn == 0 for result in summary.per_class.values())


@pytest.mark.parametrize("parts", [2, 3])
def test_evaluators_of_several_processes_merge_to_the_numbers_of_one(tmp_path: Path, parts: int) -> None:
    scenes = random_split(1, CLASSES.category_ids, num_images=30)
    paths = save(tmp_path, scenes)
    maps = [prediction(one) for one in scenes]
    np.random.default_rng(0).shuffle(maps)
    one = PanopticEvaluator(*paths, CLASSES)
    one.update(maps)
    for order in permutations(range(parts)):
        evaluators = []
        for part in range(parts):
            evaluators.append(PanopticEvaluator(*paths, CLASSES))
            evaluators[part].update([*maps[part::parts], *maps[part + 1 : part + 2]])  # one image is in two shards
        first, *rest = (pickle.loads(pickle.dumps(evaluators[part])) for part in order)
        for other in rest:
            first.merge(other)
        assert first.summarize() == one.summarize()
    assert one.summarize().num_images == 30


def test_of_an_image_that_both_have_seen_the_first_result_stays(tmp_path: Path) -> None:
    paths = save(tmp_path, [CAT_AND_SKY])
    right, wrong = PanopticEvaluator(*paths, CLASSES), PanopticEvaluator(*paths, CLASSES)
    right.update([prediction(CAT_AND_SKY)])
    wrong.update([PanopticMap(1, torch.zeros(2, 4, dtype=torch.int32), ())])
    right.merge(wrong)
    assert right.summarize().PQ == 1.0
    wrong.merge(right)
    assert wrong.summarize().PQ == 0.0


def test_the_order_of_the_images_does_not_matter(tmp_path: Path) -> None:
    scenes = random_split(2, CLASSES.category_ids, num_images=30)
    paths = save(tmp_path, scenes)
    forward, backward = PanopticEvaluator(*paths, CLASSES), PanopticEvaluator(*paths, CLASSES)
    for one in scenes:
        forward.update([prediction(one)])
    backward.update([prediction(one) for one in reversed(scenes)])
    assert forward.summarize() == backward.summarize()
    assert_equals_the_oracle(backward.summarize(), scenes)


def test_every_image_once(tmp_path: Path) -> None:
    scenes = random_split(3, CLASSES.category_ids, num_images=4)
    evaluator = PanopticEvaluator(*save(tmp_path, scenes), CLASSES)
    maps = [prediction(one) for one in scenes]
    evaluator.update(maps[:2])
    with pytest.raises(InputError, match=f"image id {maps[1].image_id} was given twice"):
        evaluator.update(maps[1:2])
    with pytest.raises(InputError, match="image id 99999, which has no annotation"):
        evaluator.update([replace(maps[2], image_id=99999)])
    with pytest.raises(InputError, match=f"2 of 4 images were not evaluated, the first of image id {maps[2].image_id}"):
        evaluator.summarize()
    partial = evaluator.summarize(partial=True)
    assert partial.num_images == 2
    assert_equals_the_oracle(partial, scenes[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ids": torch.ones(2, 3, dtype=torch.int32)},
            r"of shape \(2, 3\), its ground truth of shape \(2, 4\)",
        ),
        ({"segments": (Segment(1, 0, 4), Segment(2, 4, 4))}, r"labels \[4\], expected class indices from 0 to 3"),
        ({"segments": (Segment(1, 0, 4), Segment(2, -1, 4))}, r"labels \[-1\]"),
        ({"segments": (Segment(1, 0, 4),)}, r"pixels of ids \[2\] that no segment lists"),
        ({"segments": (Segment(1, 0, 4), Segment(2, 2, 4), Segment(3, 2, 4))}, r"segments \[3\] without pixels"),
        ({"segments": (Segment(1, 0, 4), Segment(1, 0, 4), Segment(2, 2, 4))}, r"ids \[1, 1, 2\], expected each once"),
        ({"segments": (Segment(0, 0, 4), Segment(1, 0, 4), Segment(2, 2, 4))}, "from 1 to 16777215"),
        ({"ids": torch.full((2, 4), MAX_ID + 1), "segments": (Segment(MAX_ID + 1, 0, 8),)}, "from 1 to 16777215"),
        ({"ids": torch.full((2, 4), -1), "segments": ()}, r"pixels of ids \[-1\] that no segment lists"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    evaluator = PanopticEvaluator(*save(tmp_path, [CAT_AND_SKY]), CLASSES)
    with pytest.raises(InputError, match=message):
        evaluator.update([replace(prediction(CAT_AND_SKY), **change)])
    assert evaluator.summarize(partial=True).num_images == 0


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ((), "annotations", None, "has no annotations"),
        ((), "annotations", [], "has no annotations, expected one"),
        ((), "annotations", {}, "annotations is {}, expected a list"),
        ((), "categories", None, "has no categories"),
        (("annotations",), 0, 5, r"annotations\[0\] has no image_id, it has int"),
        (
            ("annotations", 0),
            "segments_info",
            None,
            "has no segments_info, it has image_id, file_name; expected a COCO",
        ),
        (("annotations", 0), "file_name", 1, "file_name is 1, expected a string"),
        (("annotations", 0), "image_id", "1", "image_id is '1', expected a whole number"),
        (("annotations", 1), "image_id", 1, r"annotations\[1\] is the second one of image id 1"),
        (("annotations", 0, "segments_info", 1), "id", 1, r"segment ids \[1, 1\] of segments_info, expected each once"),
        (("annotations", 0, "segments_info", 1), "id", 0, r"segments_info\[1\]: id is 0, expected 1 to"),
        (("annotations", 0, "segments_info", 1), "id", MAX_ID + 1, "expected 1 to 16777215"),
        (("annotations", 0, "segments_info", 1), "area", 0, r"segments_info\[1\]: area 0, expected"),
        (("annotations", 0, "segments_info", 1), "area", 2.5, "area 2.5, expected a whole number"),
        (("annotations", 0, "segments_info", 1), "iscrowd", None, "has no iscrowd"),
        (
            ("annotations", 0, "segments_info", 1),
            "category_id",
            8,
            r"category id 8, which .* it knows \[3, 7, 90, 200\]",
        ),
        (("categories", 1), "id", None, r"categories\[1\] has no id"),
        (("categories", 1), "name", "wolf", r"gives category id 7 as \('wolf', True\) .* as \('dog', True\)"),
        (("categories", 2), "isthing", 1, r"gives category id 90 as \('sky', True\) .* as \('sky', False\)"),
    ],
)
def test_a_wrong_annotation_file_is_refused(
    tmp_path: Path, where: tuple[str | int, ...], key: str | int, value: object, message: str
) -> None:
    path, folder = save(tmp_path, [CAT_AND_SKY, replace(CAT_AND_SKY, image_id=2)])
    content = json.loads(path.read_text())
    part = content
    for step in where:
        part = part[step]
    if value is None:
        del part[key]
    else:
        part[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        PanopticEvaluator(path, folder, CLASSES)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    path, folder = save(tmp_path, [CAT_AND_SKY])
    with pytest.raises(InputError, match=r"nowhere\.json cannot be read \(.*No such file"):
        PanopticEvaluator(tmp_path / "nowhere.json", folder, CLASSES)
    with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
        PanopticEvaluator(path, tmp_path / "nowhere", CLASSES)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match=r"bad\.json cannot be read"):
        PanopticEvaluator(tmp_path / "bad.json", folder, CLASSES)
    evaluator = PanopticEvaluator(path, folder, CLASSES)
    (folder / "000001.png").unlink()
    with pytest.raises(InputError, match="no panoptic PNG"):
        evaluator.update([prediction(CAT_AND_SKY)])


def test_categories_that_only_one_side_knows_are_no_fault(tmp_path: Path) -> None:
    path, folder = save(tmp_path, [CAT_AND_SKY])
    classes = ClassMap((CAT, SKY, 300), ("cat", "sky", "new"), (True, False, True))
    evaluator = PanopticEvaluator(path, folder, classes)
    evaluator.update([replace(prediction(CAT_AND_SKY), segments=(Segment(1, 0, 4), Segment(2, 1, 4)))])
    assert list(evaluator.summarize().per_class) == ["cat", "sky", "new"]
    assert evaluator.summarize().PQ == 1.0


def test_evaluators_of_different_data_are_not_merged(tmp_path: Path) -> None:
    evaluator = PanopticEvaluator(*save(tmp_path / "a", [CAT_AND_SKY]), CLASSES)
    other = PanopticEvaluator(*save(tmp_path / "b", [replace(CAT_AND_SKY, image_id=2)]), CLASSES)
    with pytest.raises(InputError, match="different annotation files or classes"):
        evaluator.merge(other)
    swapped = PanopticEvaluator(
        *save(tmp_path / "a", [CAT_AND_SKY]), replace(CLASSES, category_ids=(CAT, DOG, SKY, 201))
    )
    with pytest.raises(InputError, match="different annotation files or classes"):
        evaluator.merge(swapped)


def test_written_results_are_read_back(tmp_path: Path) -> None:
    scenes = random_split(4, CLASSES.category_ids, num_images=5)
    maps = [prediction(one) for one in scenes]
    names = {one.image_id: f"part/{one.image_id}.jpg" for one in scenes}
    write_panoptic(tmp_path / "found.json", tmp_path / "found", iter(maps), CLASSES, names)
    content = json.loads((tmp_path / "found.json").read_text())
    assert [annotation["image_id"] for annotation in content["annotations"]] == [one.image_id for one in maps]
    for annotation, one in zip(content["annotations"], maps, strict=True):
        assert annotation["file_name"] == f"part/{one.image_id}.png"
        ids = read_ids(tmp_path / "found" / annotation["file_name"])
        assert torch.equal(ids, one.ids)
        assert len(annotation["segments_info"]) == len(one.segments)
        for entry, segment in zip(annotation["segments_info"], one.segments, strict=True):
            assert entry["id"] == segment.id
            assert entry["category_id"] == CLASSES.category_ids[segment.label]
            assert entry["area"] == int((ids == segment.id).sum())
    assert ClassMap.from_categories(content["categories"]) == CLASSES
    results = PanopticEvaluator(tmp_path / "found.json", tmp_path / "found", CLASSES)
    results.update(maps)
    assert set(results.summarize().metrics.values()) == {1.0}, "result files are valid ground truth too"


def test_a_written_segment_says_all_that_the_format_asks_for(tmp_path: Path) -> None:
    one = scene(
        ["......", "..11..", "...1..", "2....."], {}, ["......", "..11..", "...1..", "2....."], {1: CAT, 2: SEA}
    )
    write_panoptic(tmp_path / "a.json", tmp_path, [prediction(one)], CLASSES, {1: "a.png"})
    assert json.loads((tmp_path / "a.json").read_text())["annotations"][0] == {
        "image_id": 1,
        "file_name": "a.png",
        "segments_info": [
            {"id": 1, "category_id": CAT, "area": 3, "bbox": [2, 1, 2, 2], "iscrowd": 0, "isthing": 1},
            {"id": 2, "category_id": SEA, "area": 1, "bbox": [0, 3, 1, 1], "iscrowd": 0, "isthing": 0},
        ],
    }


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "image id 1 has no file name"),
        ({1: "../a.jpg"}, "without '..'"),
        ({1: "/a.jpg"}, "expected a relative one"),
        ({1: ""}, "expected a relative one"),
        ({1: "a.jpg", 2: "a.jpeg"}, "image ids 1 and 2 would both be written to a.png"),
    ],
)
def test_names_that_would_spoil_files_are_refused(tmp_path: Path, names: dict[int, str], message: str) -> None:
    maps = [prediction(replace(CAT_AND_SKY, image_id=image_id)) for image_id in (1, 2)]
    with pytest.raises(InputError, match=message):
        write_panoptic(tmp_path / "found.json", tmp_path / "found", maps, CLASSES, names)
    assert not (tmp_path / "found.json").exists()


def test_a_map_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    broken = replace(prediction(CAT_AND_SKY), segments=())
    with pytest.raises(InputError, match="no segment lists"):
        write_panoptic(tmp_path / "found.json", tmp_path / "found", [broken], CLASSES, {1: "a.jpg"})
    assert list(tmp_path.iterdir()) == []
