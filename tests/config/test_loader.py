from __future__ import annotations

from pathlib import Path

import pytest

from detr_bf.config import Config, config_from_dict, config_to_dict, config_to_yaml, known_keys, load_config
from detr_bf.errors import InputError


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
        ("optimizer.zzzzz=1", ["unknown key 'optimizer.zzzzz'", "backbone_lr"]),
        ("train.epochs=abc", ["train.epochs must be int", "'abc' of type str"]),
        ("train.epochs=1.5", ["train.epochs must be int", "1.5 of type float"]),
        ("train.epochs=null", ["train.epochs must be int", "NoneType"]),
        ("batch_former.layers=[0,x]", ["batch_former.layers[1] must be int", "'x' of type str"]),
        ("batch_former.layers=3", ["batch_former.layers must be list[int]", "3 of type int"]),
        ("train=5", ["override 'train=5': train is a group of settings (epochs, "]),
        ("data.train=foo", ["data.train is a group of settings (images, annotations, panoptic)"]),
        ("batch_former=null", ["batch_former is a group of settings"]),
        ("optimizer.lr=inf", ["optimizer.lr must be 0 or more and finite"]),
        ("optimizer.drop_factor=nan", ["optimizer.drop_factor must be greater than 0 and finite"]),
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
        ("batch_former.mode=three", ["two_stream, single_stream, duplicate, mini_batch_inference", "'three'"]),
        ("batch_former.layers=[0,", ["cannot be read"]),
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


def test_settings_of_older_checkpoints_are_read_by_their_new_names() -> None:
    saved = config_to_dict(Config())
    del saved["checkpoint"]
    saved["train"] |= {"checkpoint_every": 7, "keep_every": 2}
    config = config_from_dict(saved)
    assert (config.checkpoint.every_steps, config.checkpoint.keep_every) == (7, 2)
    with pytest.raises(InputError, match=r"'train.checkpoint_every' is now called 'checkpoint.every_steps'"):
        load_config(None, ["train.checkpoint_every=3"])
