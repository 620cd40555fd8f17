from __future__ import annotations

import os
import random
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from detr_bf.classification.config import ClassifierConfig, ClassifierModelConfig
from detr_bf.common.errors import InputError
from detr_bf.config import (
    SCHEMAS,
    DetectionConfig,
    config_from_dict,
    config_to_dict,
    config_to_yaml,
    known_keys,
    load_config,
    packaged_configs,
    saved_config,
    schema_of,
)


def test_names_other_work_relies_on() -> None:
    batch_former = [
        "enabled",
        "layers",
        "position",
        "shared",
        "mode",
        "num_layers",
        "heads",
        "dropout",
        "mask_padding",
        "gather",
        "lr_factor",
        "weight_decay",
    ]
    names = {f"batch_former.{name}" for name in batch_former} | {
        "output_dir", "init_from", "train.max_steps", "train.epochs", "data.train.images", "data.train.annotations",
        "data.val.images", "data.val.annotations", "model.name",
    }  # fmt: skip
    assert names <= set(known_keys())


def test_inheritance_then_overrides(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("seed: 1\ntrain: {epochs: 5, batch_size: 8}\n")
    (tmp_path / "second.yaml").write_text("base: first.yaml\ntrain: {epochs: 6}\nbatch_former: {layers: [1, 2]}\n")
    config = load_config(tmp_path / "second.yaml", ["train.batch_size=3", "batch_former.layers=[0]"])
    assert (config.seed, config.train.epochs, config.train.batch_size) == (1, 6, 3)
    assert config.batch_former.layers == [0]


@pytest.mark.parametrize("given", ["/data/set #1", "'/data/set #1'", "#1", "/data/set#1"])
def test_a_number_sign_in_an_override_begins_no_comment(given: str) -> None:
    assert load_config(None, [f"data.root={given}"]).data.root == given.strip("'")


def test_a_comment_after_a_number_is_left_out() -> None:
    assert load_config(None, ["train.epochs=3 # short"]).train.epochs == 3


def test_several_bases_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "/somewhere")
    (tmp_path / "a.yaml").write_text("seed: 1\ntrain: {epochs: 5}\n")
    (tmp_path / "b.yaml").write_text("seed: 2\n")
    (tmp_path / "c.yaml").write_text("base: [a.yaml, b.yaml]\noutput_dir: ${oc.env:RUNS}/x\n")
    config = load_config(tmp_path / "c.yaml")
    assert (config.seed, config.train.epochs, config.output_dir) == (2, 5, "/somewhere/x")


def test_round_trips(tmp_path: Path) -> None:
    config = load_config(None, ["train.max_steps=7", "batch_former.weight_decay=0.5", "init_from=x.pt"])
    (tmp_path / "resolved.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.epoch=3", ["override 'train.epoch=3'", "unknown key 'train.epoch'", "train.epochs"]),
        ("lr=3", ["unknown key 'lr'", "optimizer.lr"]),
        ("train.tensorboard=true", ["unknown key 'train.tensorboard'", "Known in train: ", "loggers"]),
        ("train.loggers=[tensorboard,comet]", ["train.loggers must be", "tensorboard, wandb, mlflow, got", "comet"]),
        ("train.loggers=[wandb,wandb]", ["train.loggers must be", "each at most once", "['wandb', 'wandb']"]),
        ("train.loggers=wandb", ["train.loggers must be list[str]", "got 'wandb'"]),
        ("optimizer.zzzzz=1", ["unknown key 'optimizer.zzzzz'", "backbone_lr"]),
        ("train.epochs=abc", ["train.epochs must be int", "'abc' of type str"]),
        ("train.epochs=1.5", ["train.epochs must be int", "1.5 of type float"]),
        ("train.epochs=null", ["train.epochs must be int", "NoneType"]),
        ("batch_former.layers=[0,x]", ["batch_former.layers[1] must be int", "'x' of type str"]),
        ("batch_former.layers=3", ["batch_former.layers must be list[int]", "3 of type int"]),
        ("train=5", ["override 'train=5': train is a group of settings (epochs, "]),
        ("data.train=foo", ["data.train is a group of settings (split, images, annotations, panoptic, references)"]),
        ("batch_former=null", ["batch_former is a group of settings"]),
        ("optimizer.lr=inf", ["optimizer.lr must be 0 or more and at most 1e30, or auto, got inf"]),
        ("optimizer.drop_factor=nan", ["optimizer.drop_factor must be greater than 0 and at most 1, got nan"]),
        ("seed=99999999999999999999999", ["seed must be"]),
        ("data.transforms.short_sides=[]", ["data.transforms.short_sides must be one or more sizes"]),
        ("data.transforms.crop_short_sides=[0]", ["data.transforms.crop_short_sides must be one or more sizes"]),
        ("data.transforms.crop_min=900", ["crop_min=900 must not exceed", "crop_max=600"]),
        ("train.epochs", ["key=value"]),
        ("train.epochs=0", ["train.epochs must be greater than 0"]),
        ("model.deformable.encoder_points=0", ["model.deformable.encoder_points must be greater than 0"]),
        ("model.extra_levels=-1", ["model.extra_levels must be 0 or more"]),
        ("model.dropout=1.5", ["between 0 and 1"]),
        ("optimizer.lr=-1", ["0 or more"]),
        ("batch_former.mode=three", ["two_stream, single_stream, duplicate, self_only, mini_batch", "'three'"]),
        *(
            (
                f"batch_former={{enabled: true, at: queries, layers: [1], {setting}}}",
                [f"batch_former.{name} is of tokens", "batch_former.at=tokens"],
            )
            for setting, name in (
                ("gather: true", "gather=true"),
                ("position: after", "position=after"),
                ("mask_padding: true", "mask_padding=true"),
                ("neighbours: 2", "neighbours=2"),
                ("log_attention: true", "log_attention=true"),
                ("references: true", "references=true"),
            )
        ),
        ("batch_former.at=images", ["batch_former.at must be", "tokens, queries", "'images'"]),
        ("batch_former.layers=[0,", ["cannot be read"]),
        ("loss.focal_alpha=7", ["loss.focal_alpha must be between 0 and 1, got 7"]),
        ("loss.focal_gamma=-1", ["loss.focal_gamma must be 0 or more"]),
        ("loss.matcher.class_cost=nan", ["loss.matcher.class_cost must be 0 or more"]),
        ("loss.matcher.giou_cost=-2", ["loss.matcher.giou_cost must be 0 or more"]),
        ("loss.bbox_weight=nan", ["loss.bbox_weight must be 0 or more"]),
        ("loss.matcher={class_cost: 0, bbox_cost: 0, giou_cost: 0}", ["loss.matcher.class_cost", "are all 0"]),
        (
            "loss={class_weight: 0, bbox_weight: 0, giou_weight: 0}",
            ["bbox_weight, giou_weight are all 0"],
        ),
        ("model.dropout=1", ["model.dropout must be between 0 and 1, and less than 1, got 1"]),
        ("batch_former.dropout=1", ["batch_former.dropout must be", "less than 1"]),
        ("eval.panoptic.threshold=nan", ["eval.panoptic.threshold must be between 0 and 1, got nan"]),
        ("eval.nms_across_classes=true", ["eval.nms_across_classes=true needs eval.nms, the largest IoU"]),
        ("model.decoder_layers=1000000", ["model.decoder_layers must be greater than 0 and at most 100, got 1000000"]),
        ("data.transforms.short_sides=[100000]", ["data.transforms.short_sides must be one or more sizes"]),
        ("data.transforms.short_sides.0=3", ["data.transforms.short_sides is a list: give the whole list"]),
        ("optimizer.drop_epochs=[-1]", ["optimizer.drop_epochs must be integers from 0"]),
        ("init_from=https://example.org/a.pth", ["init_from must be a path on this machine", "download it first"]),
        ("model.backbone.weights=http://a.b/c", ["model.backbone.weights must be a path", "download it first"]),
        ("output_dir=s3://bucket/run", ["output_dir must be a path on this machine"]),
        ("output_dir=runs/" + "é" * 128, ["output_dir must be a path on this machine with names of at most 255 bytes"]),
        ("output_dir=" + "a/" * 3000, ["output_dir must be a path on this machine"]),
        ('output_dir="a\\0b"', ["output_dir must be a path on this machine", r"a\x00b"]),
        ("train.epochs=" + "9" * 400, ["train.epochs must be greater than 0 and at most 1e6, got 999"]),
        ("optimizer.lr=" + "9" * 400, ["optimizer.lr"]),
        ("train.epochs=" + "9" * 5000, ["train.epochs=999", "cannot be read"]),
        ("batch_former.layers=" + "[" * 5000, ["cannot be read"]),
        ("a." * 3000 + "b=1", ["cannot be read"]),
        ("output_dir=${", ["cannot be read"]),
        ("output_dir=${nosuch}", ["output_dir", "nosuch"]),
        ("task=[1]", ["task must be one of detection"]),
        ("task=\x1b]0;x", [r"override 'task=\x1b]0;x' cannot be read"]),
        ("task=\n", ["task must be one of"]),
        ("output_dir=&a [*a]", ["its aliases (*name) expand to more than"]),
        ("model.backbone.strides=[[1]]", ["model.backbone.strides must be one or more sizes"]),
        ("train.epochs\n=3", [r"unknown key 'train.epochs\n'"]),
        ("3=4", ["unknown key '3'"]),
    ],
)
def test_wrong_overrides(override: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_config(None, [override])
    for part in parts:
        assert part in str(caught.value)


def test_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("batch_former: {layer: [0]}\n")
    with pytest.raises(InputError, match=r"mine\.yaml: unknown key 'batch_former\.layer'.*batch_former\.layers"):
        load_config(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "key: value"),
        ("train: [1\n", "not valid YAML"),
        ("base: missing.yaml\n", "not found"),
        ("base: 5\n", "base must name"),
        ("base:\n", "base must name"),
        ("5\n", "key: value"),
        ("just text\n", "key: value"),
        ("3: 4\n", "the key 3 must be a string"),
        ("train:\n  epochs: ???\nseed: ???\n", r"seed, train\.epochs is '\?\?\?': give a value"),
        ("null: 4\n", "Incompatible key type"),
        ("[1]: 4\n", "not valid YAML"),
        ("task: [detection]\n", "task must be one of"),
        ("train: &a [*a]\n", r"aliases \(\*name\) expand to more than 100000 values"),
        ("seed: !!python/object/apply:os.system [true]\n", "not valid YAML"),
        ("seed: " + "9" * 5000 + "\n", "not valid YAML"),
        ("output_dir: " + "[" * 5000 + "\n", "not valid YAML"),
        ("output_dir: " + "x" * 300_000 + "\n", "more than 262144 bytes"),
        ("base: ${nosuch}\n", "base cannot be read"),
        ("output_dir: ${\n", "not valid YAML"),
    ],
)
def test_broken_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        load_config(path)


def test_missing_file_and_circles(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(InputError, match="circle"):
        load_config(tmp_path / "a.yaml")


def test_later_files_win_each_after_its_bases(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\ntrain: {epochs: 5, batch_size: 8}\n")
    (tmp_path / "a.yaml").write_text("base: base.yaml\ntrain: {epochs: 6}\n")
    (tmp_path / "b.yaml").write_text("train: {batch_size: 9}\n")
    a, b = tmp_path / "a.yaml", str(tmp_path / "b.yaml")
    config = load_config([a, b], ["train.log_every=7"])
    assert (config.seed, config.train.epochs, config.train.batch_size, config.train.log_every) == (1, 6, 9, 7)
    assert load_config([b, a]).train.batch_size == 8
    assert load_config([a]) == load_config(a) == load_config(str(a))
    assert load_config([]) == load_config(None) == DetectionConfig()


def test_output_dir_is_named_after_the_last_file(tmp_path: Path, secret: str) -> None:
    for name in ("first", "second", secret.replace("oc.env:", "")):
        (tmp_path / f"{name}.yaml").write_text("seed: 1\n")
    files = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    assert load_config(files).output_dir == "runs/second"
    assert load_config(files, ["output_dir=here"]).output_dir == "here"
    assert load_config(tmp_path / "${SECRET}.yaml").output_dir == "runs/${SECRET}", "a file name is plain text"
    (tmp_path / "third.yaml").write_text("base: fourth.yaml\n")
    (tmp_path / "fourth.yaml").write_text("output_dir: there\n")
    assert load_config(tmp_path / "third.yaml").output_dir == "there"
    assert load_config(None).output_dir == "runs/default"


def test_the_files_or_an_override_name_the_task(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("task: classification\n")
    (tmp_path / "child.yaml").write_text("base: base.yaml\n")
    (tmp_path / "none.yaml").write_text("seed: 1\n")
    (tmp_path / "masked.yaml").write_text("task: masked_autoencoding\n")
    child, none, masked = (tmp_path / f"{name}.yaml" for name in ("child", "none", "masked"))
    for task in SCHEMAS:
        schema = schema_of(task)
        assert type(load_config(None, [f"task={task}"])) is schema
        assert type(load_config(none, task=task)) is schema, "a file without a task"
        assert load_config(None, task=task).task == task
    assert type(load_config(child)) is type(load_config([none, child], task="classification")) is ClassifierConfig
    assert type(load_config(none)) is DetectionConfig
    with pytest.raises(InputError, match=r"base.yaml is of the task classification, but a config of the task"):
        load_config(child, task="detection")
    with pytest.raises(InputError, match=r"masked.yaml is of the task masked_.*, but file .*base.yaml is of"):
        load_config([child, masked])
    with pytest.raises(InputError, match="override 'task=detection' is of the task detection, but file"):
        load_config(child, ["task=detection"])


def test_a_setting_of_another_task_names_that_task(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: {name: images}\n")
    with pytest.raises(InputError, match=r"'data.name'.* setting of task=classification and of task=masked_auto"):
        load_config(tmp_path / "a.yaml")


def test_a_file_whose_aliases_stand_for_too_much_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]" for n in range(60))]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"bomb\.yaml: its aliases"):
        load_config(tmp_path / "bomb.yaml")
    (tmp_path / "fine.yaml").write_text("seed: &a 7\ntrain: {epochs: *a}\n")
    assert load_config(tmp_path / "fine.yaml").train.epochs == 7


def test_files_that_inherit_ever_more_are_refused(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text(f"base: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "20.yaml").write_text("seed: 1\n")
    with pytest.raises(InputError, match="inherits from more than 100 files"):
        load_config(tmp_path / "0.yaml")


@pytest.mark.parametrize("name", ["x" * 300, "folder", "pipe", "nul\0"])
def test_what_is_no_config_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="config file"):
        load_config(tmp_path / name)


P5 = ("model.rfdetr.levels=[P4,P5]",)


def texts() -> list[str]:
    """Texts that may or may not look like an interpolation."""
    parts = ["\\", "${", "}", "$", "{", "oc.env:SECRET", ":", "'", " ", "a"]
    numbers = random.Random(0)
    return ["".join(numbers.choices(parts, k=numbers.randint(1, 8))) for _ in range(300)]


def test_strides_of_all_maps() -> None:
    maps = ["model.backbone.strides=[16]", "model.backbone.vit.maps=[2,5]"]
    deformable = load_config(None, ["model.name=deformable_detr", "model.extra_levels=1", *maps])
    assert deformable.model.all_strides == [16, 16, 32]
    assert load_config(None, ["model.name=rfdetr", *maps, *P5]).model.all_strides == [16, 32]


@pytest.mark.parametrize(
    ("settings", "divisor"),
    [
        ([], 32),
        (["model.backbone.strides=[16]", "model.backbone.dilation=true"], 16),
        (["model.name=deformable_detr", "model.backbone.strides=[8,16,32]", "model.extra_levels=1"], 64),
        (["model.name=detr", "model.extra_levels=1"], 32),  # detr does not read it
        (["model.name=smca_multi_scale", "model.backbone.strides=[8,16,32]"], 64),
        (["data.transforms.size_divisor=1"], 1),
        (["model.name=rfdetr", "model.backbone.strides=[16]"], 16),
        (["model.name=rfdetr", "model.backbone.strides=[16]", "model.rfdetr.levels=[P3]"], 16),
        (["model.name=rfdetr", "model.backbone.strides=[14]", "model.backbone.vit.windows=4"], 56),
        (["model.name=rfdetr", "model.backbone.strides=[16]", *P5, "model.backbone.vit.windows=2"], 32),
    ],
)
def test_sides_are_multiples_of_the_coarsest_stride(settings: list[str], divisor: int) -> None:
    config = load_config(None, settings)
    assert config.size_divisor == divisor
    stored = config_to_dict(config)
    assert config_from_dict(stored).size_divisor == divisor
    del stored["data"]["transforms"]["size_divisor"]
    assert config_from_dict(stored).size_divisor == 1, "saved before there was the setting"


def test_squares_that_are_no_multiples_are_refused() -> None:
    with pytest.raises(InputError, match=r"square: 100 is not a multiple of 32 .* give 96 or 128, or .*size_divisor=1"):
        load_config(None, ["data.transforms.square=100"])
    with pytest.raises(InputError, match="batch_sides: 96 is not a multiple of 64 "):
        load_config(
            None,
            [
                "model.name=deformable_detr",
                "model.extra_levels=1",
                "data.transforms.square=128",
                "data.batch_sides=[128,96]",
            ],
        )
    assert load_config(None, ["data.transforms.square=100", "data.transforms.size_divisor=1"]).size_divisor == 1


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SECRET", "hunter2")
    return "${oc.env:SECRET}"


def test_a_stored_config_is_plain_data(secret: str, tmp_path: Path) -> None:
    stored = config_to_dict(DetectionConfig())
    stored["output_dir"] = stored["data"]["train"]["images"] = secret
    config = config_from_dict(stored)
    assert config.output_dir == config.data.train.images == secret
    assert config_to_dict(config) == stored, "a converter writes the same text again"
    (tmp_path / "config.yaml").write_text(f"task: detection\noutput_dir: {secret}\n")
    assert saved_config(tmp_path / "config.yaml").output_dir == secret
    assert load_config(tmp_path / "config.yaml").output_dir == "hunter2", "the user's own files may use it"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "${oc.env:SECRET}"),
        ("task", "${oc.env:SECRET}"),
        ("train", "${oc.env:SECRET}"),
        ("train", {"epochs": "${oc.env:SECRET}"}),
        ("train", {"${oc.env:SECRET}": 1}),
        ("${oc.env:SECRET}", 1),
        ("data", {"transforms": {"short_sides": ["${oc.env:SECRET}"]}}),
        ("batch_former", {"mode": "${oc.env:SECRET}"}),
        ("output_dir", ["${oc.env:SECRET}"]),
        ("train", {"checkpoint_every": "${oc.env:SECRET}"}),
        ("checkpoint", None),
        ("checkpoint", 5),
        ("train", 5),
        ("train", None),
        ("base", "${oc.env:SECRET}"),
        ("output_dir", b"bytes"),
        (3, 4),
    ],
)
@pytest.mark.usefixtures("secret")
def test_errors_about_a_stored_config_resolve_nothing(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        config_from_dict({key: value}, source="a.pt")
    assert "hunter2" not in str(caught.value)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({key: value}))
    with pytest.raises(InputError) as caught:
        saved_config(tmp_path / "config.yaml")
    assert "hunter2" not in str(caught.value)


@pytest.mark.usefixtures("secret")
def test_text_like_an_interpolation_survives_every_round_trip(tmp_path: Path) -> None:
    options = {f"name{number}": text for number, text in enumerate(texts())}
    config = ClassifierConfig(model=ClassifierModelConfig(options=options), output_dir="${oc.env:SECRET}")
    assert config_from_dict(config_to_dict(config)) == config
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert saved_config(tmp_path / "config.yaml") == config
    assert load_config(tmp_path / "config.yaml", task="classification") == config


@pytest.mark.parametrize("tree", [[1, 2], "task", None])
def test_a_stored_config_that_is_no_dictionary(tree: Any) -> None:
    with pytest.raises(InputError, match=r"^a\.pt: expected a dictionary of settings, got "):
        config_from_dict(tree, source="a.pt")


def test_overrides_of_a_stored_config_are_the_users_own(secret: str) -> None:
    assert config_from_dict({}, [f"output_dir={secret}"]).output_dir == "hunter2"


def test_a_home_folder_is_found_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = ("output_dir", "init_from", "data.train.images", "data.val.annotations", "model.backbone.weights")
    config = load_config(None, [f"{key}=~/x" for key in paths])
    assert [attrgetter(key)(config) for key in paths] == ["/home/me/x"] * len(paths)
    assert load_config(None, ["data.root=~/x"], task="classification").data.root == "/home/me/x"
    assert load_config(None, ["output_dir=~nobody-of-that-name/x"]).output_dir == "~nobody-of-that-name/x"
    assert load_config(None, ["output_dir=a~b"]).output_dir == "a~b"


def test_a_missing_base_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: nowhere.yaml\n")
    with pytest.raises(
        InputError, match=r"mine\.yaml: base 'nowhere\.yaml' not found; the path is relative to this file"
    ):
        load_config(tmp_path / "mine.yaml")


def test_a_folder_replaces_the_files_of_earlier_configs_and_the_reverse(tmp_path: Path) -> None:
    files = packaged_configs()
    config = load_config(files["detr_r50"], ["data.root=photos"])
    assert (config.data.root, config.data.train.images, config.data.val.annotations) == ("photos", "", "")
    config = load_config(files["bccd"], ["data.root=photos"])
    assert (config.data.train.split, config.data.val.split) == ("trainval", "test"), "the data set in another place"
    paths = [f"data.{split}.{key}=x" for split in ("train", "val") for key in ("images", "annotations")]
    config = load_config(files["bccd"], paths)
    assert (config.data.root, config.data.train.split, config.data.val.images) == ("", None, "x")
    again = config_from_dict(config_to_dict(load_config(files["bccd"])), paths)
    assert again.data == config.data
    (tmp_path / "mine.yaml").write_text("data: {root: photos}\n")
    assert load_config([files["detr_r50"], tmp_path / "mine.yaml"]).data.train.images == ""
    with pytest.raises(InputError, match=r"data\.root is given, so"):
        load_config(files["bccd"], ["data.root=photos", *paths])


@pytest.mark.parametrize("text", ["data.root=", "data.root=null", "data.root=''"])
def test_no_value_of_a_text_is_the_empty_one(text: str) -> None:
    assert load_config(None, [text]).data.root == ""
    with pytest.raises(InputError, match=r"seed must be int"):
        load_config(None, ["seed="])
    with pytest.raises(InputError, match=r"data\.format must be"):
        load_config(None, ["data.format="])
