"""Malicious YAML files, and a value out of range for every setting of every schema."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.annotations import fifo, sparse, train
from tests.hostile.battery import SECRET, Build, Case, CaseFiles
from tests.hostile.classifiers import classify


def text(content: str | bytes | Callable[[CaseFiles], str]) -> Build:
    """Train with this config file."""

    def build(files: CaseFiles) -> Callable[[], int]:
        path = files.write("config.yaml", content(files) if callable(content) else content)
        return lambda: train(path)

    return build


def special(make: Callable[[Path], Any]) -> Build:
    def build(files: CaseFiles) -> Callable[[], int]:
        path = files.folder / "config.yaml"
        make(path)
        return lambda: train(path)

    return build


def override(*settings: str, task: str = "detector") -> Build:
    """Train with a config of the fixtures and these settings."""

    def build(files: CaseFiles) -> Callable[[], int]:
        config = files.fixtures / f"{task}.yaml"
        if task in ("masked", "contrastive"):
            from tools.train_net import main

            return lambda: main(["--config", str(config), "output_dir=run", *settings])
        call = train if task == "detector" else classify
        return lambda: call(config, "output_dir=run", *settings)

    return build


def alias_bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    return "\n".join(lines) + "\nmodel: *a11\n"


def inherits(files: CaseFiles, *, times: int = 3000) -> str:
    """A long chain of inherited files."""
    for i in range(times):
        files.write(f"base_{i}.yaml", f"base: base_{i + 1}.yaml\n")
    files.write(f"base_{times}.yaml", "seed: 1\n")
    return "base: base_0.yaml\n"


def circle(files: CaseFiles) -> str:
    files.write("other.yaml", "base: config.yaml\n")
    return "base: other.yaml\n"


BOMBS: dict[str, str | bytes | Callable[[CaseFiles], str]] = {
    "not YAML": "model: [1, 2\n",
    "tabs": "model:\n\tname: detr\n",
    "binary": bytes(range(256)),
    "utf-16": "seed: 1\n".encode("utf-16-le"),
    "NUL": "seed: 1\0\n",
    "a list": "- 1\n- 2\n",
    "a scalar": "detr\n",
    "a number": "42\n",
    "nested lists, 10,000 deep": "seed: " + "[" * 10_000 + "]" * 10_000 + "\n",
    "nested objects, 10,000 deep": "seed: " + "{a: " * 10_000 + "1" + "}" * 10_000 + "\n",
    "an alias bomb": alias_bomb(),
    "an alias of itself": "model: &m {name: *m}\n",
    "python objects": 'seed: !!python/object/apply:os.system ["touch EXECUTED"]\n',
    "an unknown tag": "seed: !wings 4\n",
    "two documents": "seed: 1\n---\nseed: 2\n",
    "a key twice": "seed: 1\nseed: 2\n",
    "a key that is a list": "? [a, b]\n: 1\n",
    "a key that is null": "null: 1\n",
    "a key that is a number": "5: 1\n",
    "a key with an escape": '"\\e]0;owned\\a\\nFORGED\\n": 1\n',
    "a key of 100,000 letters": "k" * 100_000 + ": 1\n",
    "a value of 100,000 letters": "seed: " + "v" * 100_000 + "\n",
    "a value with an escape": 'seed: "\\e]0;owned\\a\\nFORGED\\n"\n',
    "a value of 400 digits": "seed: " + "9" * 400 + "\n",
    "a value of 5,000 digits": "seed: " + "9" * 5000 + "\n",
    "a date": "seed: 2020-01-01\n",
    "a merge of nothing": "<<: 5\n",
    "an interpolation of nothing": "seed: ${nothing.here}\n",
    "an interpolation in a circle": "seed: ${train.epochs}\ntrain: {epochs: ${seed}}\n",
    "an interpolation of no resolver": "seed: ${os.system:ls}\n",
    "an interpolation that is open": "seed: ${oc.env:\n",
    "an interpolation nested": "seed: " + "${oc.env:" * 200 + "x" + "}" * 200 + "\n",
    "a secret where a number stands": "seed: ${oc.env:HOSTILE_SECRET}x\n",
    "mandatory values": "seed: ???\n",
    "base of a number": "base: 5\n",
    "base of an object": "base: {a: b}\n",
    "base that is missing": "base: nowhere.yaml\n",
    "base that is a folder": "base: .\n",
    "base of itself": "base: config.yaml\n",
    "base in a circle": circle,
    "base with NUL": 'base: "a\\0b"\n',
    "base of 300 letters": f"base: {'b' * 300}.yaml\n",
    "base 3,000 deep": inherits,
    "a group that is null": "model:\n",
    "a group that is a list": "model: [1]\n",
    "a group that is text": "data: coco\n",
    "an unknown key": "wings: 4\n",
    "an unknown nested key": "model: {backbone: {wings: 4}}\n",
    "another task": "task: classification\n",
    "an unknown task": "task: robbery\n",
    "a task that is a list": "task: [detection]\n",
}
OVERRIDES: dict[str, tuple[str, ...]] = {
    "no equals sign": ("wings",),
    "an empty key": ("=5",),
    "an empty override": ("",),
    "only a dot": (".=5",),
    "dots": ("a..b=5",),
    "a trailing dot": ("model.=5",),
    "brackets": ("model[0]=5",),
    "open brackets": ("model[=5",),
    "unknown key": ("model.wings=5",),
    "a key within a value": ("seed.x=5",),
    "open YAML": ("seed=[1, 2",),
    "open interpolation": ("seed=${",),
    "a tag": ("seed=!!python/name:os.system",),
    "an escape in a key": ("\x1b]0;owned\x07\nFORGED\n=5",),
    "an escape in a value": ("seed=\x1b]0;owned\x07\nFORGED\n",),
    "NUL in a value": ("seed=\0",),
    "nested 3,000 deep": ("seed=" + "[" * 3000 + "]" * 3000,),
    "a key 3,000 deep": (".".join(["a"] * 3000) + "=1",),
    "a surrogate": ("seed=\udcff",),
    "the same key as group and value": ("model=5",),
    "a list with the wrong types": ("batch_former.layers=[a, b]",),
    "layers beyond the encoder": ("batch_former.layers=[5]",),
    "queries before the first decoder layer": ("batch_former.at=queries",),
    "queries of all ranks": ("batch_former.at=queries", "batch_former.gather=true"),
    "layers twice": ("batch_former.layers=[0, 0]",),
    "negative layers": ("batch_former.layers=[-1]",),
    "no layers": ("batch_former.layers=[]",),
    "layers that are no list": ("batch_former.layers=0",),
    "heads that do not divide": ("model.heads=3",),
    "heads of batch attention that do not divide": ("batch_former.heads=3",),
    "hidden dim of 2**40": ("model.hidden_dim=1099511627776",),
    "a million decoder layers": ("model.decoder_layers=1000000",),
    "2**40 queries": ("model.num_queries=1099511627776",),
    "2**40 workers": ("data.workers=1099511627776",),
    "100,000 workers": ("data.workers=100000",),
    "a model that is a path": ("model.name=../../x",),
    "a model that is os": ("model.name=os",),
    "a model with an escape": ("model.name=\x1b[2J",),
    "a backbone that is none": ("model.backbone.name=resnet9000",),
    "a backbone of timm that is none": ("model.backbone.name=timm:nothing",),
    "strides of none": ("model.backbone.strides=[7]",),
    "strides of 0": ("model.backbone.strides=[0]",),
    "strides empty": ("model.backbone.strides=[]",),
    "two strides for one": ("model.backbone.strides=[8, 16]",),
    "short sides of one": ("data.transforms.short_sides.0=3",),
    "weights that are missing": ("model.backbone.weights=nowhere.pth",),
    "weights of a device": ("model.backbone.weights=/dev/zero",),
    "a device that is none": ("device=toaster",),
    "a device beyond": ("device=cuda:99",),
    "a device that is meta": ("device=meta",),
    "a device with an escape": ("device=\x1b[2J",),
    "drop epochs of text": ("optimizer.drop_epochs=[a]",),
    "drop epochs negative": ("optimizer.drop_epochs=[-1]",),
    "all costs of 0": ("loss.matcher.class_cost=0", "loss.matcher.bbox_cost=0", "loss.matcher.giou_cost=0"),
    "all weights of 0": ("loss.class_weight=0", "loss.bbox_weight=0", "loss.giou_weight=0"),
    "focal alpha of 7": ("loss.classification=focal", "loss.focal_alpha=7"),
    "focal gamma negative": ("loss.classification=focal", "loss.focal_gamma=-1"),
    "dropout of 1": ("model.dropout=1",),
    "batch attention's dropout of 1": ("batch_former.dropout=1",),
    "precision of nothing": ("train.precision=float8",),
    "crops upside down": ("data.transforms.crop_min=500", "data.transforms.crop_max=400"),
    "masks without maps": ("model.masks=true", "data.train.panoptic=nowhere"),
    "no training data": ("data.train.images=",),
    "no training annotations": ("data.train.annotations=",),
    "no validation data": ("data.val.images=", "data.val.annotations="),
    "training data that is a file": ("data.train.images=notes.md",),
    "training data with NUL": ("data.train.images=a\0b",),
    "training data of 5,000 letters": (f"data.train.images={'a' * 5000}",),
    "init_from that is missing": ("init_from=nowhere.pt",),
    "init_from of a web address": ("init_from=https://127.0.0.1:9/weights.pth",),
    "init_from of a folder": ("init_from=.",),
    "init_from with NUL": ("init_from=a\0b",),
    "two stages with fewer tokens than queries": (
        *("model.name=deformable_detr", "model.deformable.two_stage=true", "model.deformable.box_refine=true"),
        "model.hidden_dim=32",
        "model.num_queries=5000",
    ),
    "localization without weight": ("plugins.relative_localization.enabled=true",),
    "broadcasting beyond the encoder": (
        "plugins.context_broadcasting.enabled=true",
        "plugins.context_broadcasting.layers=[9]",
    ),
    "broadcasting of text": ("plugins.context_broadcasting.enabled=true", "plugins.context_broadcasting.layers=lower"),
    "broadcasting of an object": (
        "plugins.context_broadcasting.enabled=true",
        "plugins.context_broadcasting.layers={a: 1}",
    ),
    "a frozen detector without masks": ("freeze.detector=true",),
    "seed of 2**63": ("seed=9223372036854775808",),
}
SAID = {  # by override: word required in addition to the key
    "init_from of a web address": "https://127.0.0.1:9/weights.pth",
    "no validation data": "data.val",
    "no training data": "data.train.images",
    "training data that is a file": "notes.md",
    "training data of 5,000 letters": "aaaa",
    "init_from that is missing": "nowhere.pt",
    "init_from of a folder": "last.pt|init_from",
    "init_from with NUL": "\\x00",
    "localization without weight": "weight",
    "a backbone of timm that is none": "nothing",
    "classifier: a checkpoint as an option": "checkpoint|/dev/zero",
    "classifier: both batch attentions": "batchformer",
    "classifier: an order of other classes": "order",
    "classifier: an order with a class twice": "order",
    "no training annotations": "data.train.annotations",
}
CLASSIFIER_OVERRIDES: dict[str, tuple[str, ...]] = {
    "a model that is none": ("model.name=toaster",),
    "a model of the hub": ("model.name=hf-hub:evil/model",),
    "a model that is a path": ("model.name=../../x",),
    "a model of a local folder": ("model.name=local-dir:/etc",),
    "an option that is none": ("model.options.wings=4",),
    "an option of a wrong type": ("model.options.depth=many",),
    "an option of text": ("model.options=deep",),
    "an option that is huge": ("model.options.embed_dim=1099511627776",),
    "depth of a million": ("model.options.depth=1000000",),
    "a checkpoint as an option": ("model.options.checkpoint_path=/dev/zero",),
    "data that are none": ("data.name=imagenet22k",),
    "an image size of 2**20": ("data.transforms.size=1048576",),
    "an image size of 1": ("data.transforms.size=1",),
    "a mean of two": ("data.transforms.mean=[0, 0]",),
    "a mean of NaN": ("data.transforms.mean=[nan, 0, 0]",),
    "a std of 0": ("data.transforms.std=[1, 0, 1]",),
    "a std of NaN": ("data.transforms.std=[nan, 1, 1]",),
    "an area of NaN": ("data.transforms.area=[nan, 1]",),
    "a policy that is none": ("data.transforms.auto_augment=wild-m9",),
    "betas of 1": ("optimizer.betas=[1, 1]",),
    "betas of NaN": ("optimizer.betas=[nan, 0.9]",),
    "betas of three": ("optimizer.betas=[0.1, 0.2, 0.3]",),
    "min_lr above lr": ("optimizer.schedule=cosine", "optimizer.min_lr=1"),
    "warmup twice": ("optimizer.warmup_epochs=1", "optimizer.warmup_steps=1"),
    "both batch attentions": ("plugins.batchformer.enabled=true", "plugins.batchformer_v2.enabled=true"),
    "batch attention beyond the network": ("plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=[9]"),
    "batch attention in negative blocks": ("plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=[-1]"),
    "batch attention in blocks of text": ("plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=[a]"),
    "batch attention in an object": ("plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers={a: 1}"),
    "an order of other classes": ("data.long_tail.order=[5, 6]", "data.long_tail.imbalance=2"),
    "an order with a class twice": ("data.long_tail.order=[0, 0]", "data.long_tail.imbalance=2"),
    "a probe without network": ("model.linear_probe=true",),
    "few above many": ("eval.few=9", "eval.many=3"),
    "settings of a detector": ("model.num_queries=5",),
}


def numeric_fields(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, type[Any]]]:
    """Yield the full keys of all numbers, each with int or float."""
    hints = typing.get_type_hints(schema)
    for each in dataclasses.fields(schema):
        hint, key = hints[each.name], prefix + each.name
        if dataclasses.is_dataclass(hint):
            yield from numeric_fields(typing.cast(type[Any], hint), f"{key}.")
        kinds = [kind for kind in (hint, *typing.get_args(hint)) if kind in (int, float)]
        if kinds and typing.get_origin(hint) is not list:
            yield key, kinds[0]


def out_of_range(schema: type[Any], task: str, known: set[str]) -> Iterator[Case]:
    """Yield a negative number, NaN, infinity and a text for every number that only this schema has."""
    for key, kind in numeric_fields(schema):
        if (key, kind) in known or key in known:
            continue
        known.add(key)
        values = {"negative": "-1", "a text": "many"}
        if kind is float:
            values |= {"NaN": ".nan", "infinite": ".inf"}
        else:
            values |= {"a fraction": "1.5"}
        on = {"ramp_epochs": "plugins.relative_localization.enabled=true"}
        settings = [value for word, value in on.items() if word in key]
        for name, value in values.items():
            yield Case(
                "settings", f"{task}: {key} is {name}", override(*settings, f"{key}={value}", task=task), says=(key,)
            )


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    from detr_bf.classification.config import ClassifierConfig
    from detr_bf.classification.contrastive_config import ContrastiveConfig
    from detr_bf.classification.masked_config import MaskedConfig
    from detr_bf.config import DetectionConfig

    group = "configs"
    for name, content in BOMBS.items():
        # a mistake corrected by a later key, or no mistake
        says = (
            ()
            if name == "a secret where a number stands"
            else ("config.yaml|nowhere|base|seed|config file|data.train|data.root",)
        )
        never = () if name == "a secret where a number stands" else (SECRET,)
        fine = name in ("base 3,000 deep",)
        case = Case(group, name, text(content), says=says, never=never, codes=(2,) if not fine else (0, 2))
        # a message may show the value of a variable that the config itself names
        yield (
            case
            if name != "a secret where a number stands"
            else dataclasses.replace(case, build=without_secret(text(content)))
        )
    for name, make in {
        "missing": lambda path: None,
        "a folder": lambda path: path.mkdir(),
        "a pipe": fifo,
        "30 GB of nothing": sparse,
        "a link to itself": lambda path: path.symlink_to(path),
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    }.items():
        yield Case(group, f"file is {name}", special(make), says=("config.yaml",))
    for name, settings in OVERRIDES.items():
        key = settings[-1].partition("=")[0]
        plain = key.isascii() and key.replace(".", "").replace("_", "").isalnum() and len(key) < 100
        yield Case(
            "overrides", name, override(*settings), says=(SAID.get(name, _part(key) if plain else "override|unknown"),)
        )
    for name, settings in CLASSIFIER_OVERRIDES.items():
        key = settings[-1].partition("=")[0]
        yield Case(
            "overrides",
            f"classifier: {name}",
            override(*settings, task="classifier"),
            says=(SAID.get(f"classifier: {name}", _part(key)),),
        )
    known = {"seed"}
    schemas = {
        "detector": DetectionConfig,
        "classifier": ClassifierConfig,
        "masked": MaskedConfig,
        "contrastive": ContrastiveConfig,
    }
    for task, schema in schemas.items():
        yield from out_of_range(schema, task, known)
    yield Case("settings", "seed is negative", override("seed=-1"), says=("seed",))
    says = ("data.transforms.square", "not a multiple of")
    yield Case("settings", "squares that cut cells of the model", override("data.transforms.square=100"), says=says)
    yield Case(
        "settings", "warmup longer than the run", override("optimizer.warmup_steps=100000"), codes=(0,), writes=("run",)
    )


def without_secret(build: Build) -> Build:
    def built(files: CaseFiles) -> Callable[[], Any]:
        import os

        os.environ["HOSTILE_SECRET"] = "plain"
        return build(files)

    return built


def _part(key: str) -> str:
    """Return the last part of a key, which a message must name, or the key itself."""
    return key.rpartition(".")[2] or key
