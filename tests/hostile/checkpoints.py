"""Checkpoints, weights and captures that are damaged, malicious, or have wrong values."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.annotations import fifo, sparse
from tests.hostile.battery import SECRET, Build, Case, CaseFiles
from tests.hostile.images import predict

Content = dict[str, Any]
LOGGED = ("run/log.txt", "run/detr_bf-run.json", "run/.detr_bf*")  # files that a refused --resume may write
Change = Callable[[Content], Any]


def content_of(files: CaseFiles, name: str = "detector/last.pt") -> Content:
    import torch

    content: Content = torch.load(files.fixtures / name, weights_only=True)
    return content


def save(content: Any, path: Path) -> None:
    import torch

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # so that deep nesting can be saved
    try:
        torch.save(content, path)
    finally:
        sys.setrecursionlimit(before)


def predicting(source: str) -> Callable[[CaseFiles], int]:
    def call(files: CaseFiles) -> int:
        image = files.fixtures / "val" / "images" / "0101.png"
        return predict(source, "--output", "found", image)

    return call


def resuming(files: CaseFiles) -> int:
    from tools.train_net import main

    return main(["--config", str(files.fixtures / "detector.yaml"), "output_dir=run", "train.epochs=2", "--resume"])


def evaluating(source: str) -> Callable[[CaseFiles], int]:
    def call(files: CaseFiles) -> int:
        from tools.train_net import main

        config = str(files.fixtures / "detector.yaml")
        return main(["--config", config, f"init_from={source}", "output_dir=evaluated", "--eval-only"])

    return call


def fine_tuning(source: str) -> Callable[[CaseFiles], int]:
    def call(files: CaseFiles) -> int:
        from tools.train_net import main

        return main(["--config", str(files.fixtures / "detector.yaml"), f"init_from={source}", "output_dir=tuned"])

    return call


def converting(source: str, *options: str) -> Callable[[CaseFiles], int]:
    def call(files: CaseFiles) -> int:
        from tools.convert_checkpoint import main

        return main([source, "out.pt", *options])

    return call


def replaying(source: str) -> Callable[[CaseFiles], int]:
    def call(files: CaseFiles) -> int:
        from tools.replay_capture import main

        return main([source, "--device", "cpu"])

    return call


def loading(source: str) -> Callable[[CaseFiles], Any]:
    def call(files: CaseFiles) -> Any:
        import detr_bf

        return detr_bf.load(source, "cpu")

    return call


def changed(
    change: Change, call: Callable[[CaseFiles], Any], name: str = "detector/last.pt", target: str = "bad.pt"
) -> Build:
    """Save a checkpoint after a change, or the return value of the change."""

    def build(files: CaseFiles) -> Callable[[], Any]:
        content = content_of(files, name)
        replaced = change(content)
        if target.startswith("run/"):
            files.copy("detector", "run")
            for other in ("last.pt", "previous.pt", "best.pt"):
                (files.folder / "run" / other).unlink(missing_ok=True)
        save(content if replaced is None else replaced, files.folder / target)
        return lambda: call(files)

    return build


def made(make: Callable[[Path], Any], call: Callable[[CaseFiles], Any], target: str = "bad.pt") -> Build:
    """A file that is not a checkpoint."""

    def build(files: CaseFiles) -> Callable[[], Any]:
        if target.startswith("run/"):
            files.copy("detector", "run")
            for other in ("last.pt", "previous.pt", "best.pt"):
                (files.folder / "run" / other).unlink(missing_ok=True)
        os.environ["HOSTILE_SOURCE"] = str(files.fixtures / "detector" / "last.pt")
        make(files.folder / target)
        return lambda: call(files)

    return build


def source() -> bytes:
    return Path(os.environ["HOSTILE_SOURCE"]).read_bytes()


class Payload:
    """Object whose unpickling runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch EXECUTED; echo EXECUTED",)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model": Payload()}))


def zipped_pickle(path: Path) -> None:
    save({"model": Payload(), "config": {}, "class_map": {}}, path)


def flip(share: float) -> Callable[[Path], None]:
    """A valid checkpoint with one changed bit in the content of a part; ``torch.save`` pads between the parts."""

    def make(path: Path) -> None:
        data = bytearray(source())
        with zipfile.ZipFile(io.BytesIO(data)) as parts:
            before = [part for part in parts.infolist() if part.file_size and part.header_offset <= len(data) * share]
        name, extra = struct.unpack_from("<HH", data, before[-1].header_offset + 26)
        data[before[-1].header_offset + 30 + name + extra] ^= 0x10
        path.write_bytes(data)

    return make


def cut(share: float) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        data = source()
        path.write_bytes(data[: int(len(data) * share)])

    return make


def stored_bomb(path: Path) -> None:
    """A zip whose pickle unpacks to 200 MB."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as parts,
        parts.open("archive/data.pkl", "w", force_zip64=True) as part,
    ):
        for _ in range(12):
            part.write(bytes(16 * 2**20))


def climbing(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as parts:
        parts.writestr("../../../evil.txt", "x")


def plain_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as parts:
        parts.writestr("readme.txt", "x")


def write(data: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data)


FILES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "empty": write(b""),
    "a text": write(b"not a checkpoint"),
    "zeros": write(bytes(10_000)),
    "random bytes": lambda path: path.write_bytes(__import__("random").Random(0).randbytes(10_000)),
    "a pickle with code": pickled,
    "a torch file with code": zipped_pickle,
    "a zip of something else": plain_zip,
    "a zip that climbs": climbing,
    "a zip bomb": stored_bomb,
    "cut at a tenth": cut(0.1),
    "cut at nine tenths": cut(0.9),
    "cut at the last byte": cut(0.9999),
    "a flipped bit in front": flip(0.02),
    "a flipped bit in the middle": flip(0.5),
    "a flipped bit behind": flip(0.9),
    "a folder": lambda path: path.mkdir(),
    "a pipe": fifo,
    "30 GB of nothing": sparse,
    "a link to itself": lambda path: path.symlink_to(path),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
}


def safetensors(header: bytes, length: int | None = None, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + rest


SAFETENSORS = {
    "empty": b"",
    "header of 2**63 bytes": safetensors(b"{}", 2**63),
    "header is no JSON": safetensors(b"{nope"),
    "header is a list": safetensors(b"[]"),
    "header is deep": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "offsets outside": safetensors(json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()),
    "negative shape": safetensors(
        json.dumps({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}).encode(), None, bytes(16)
    ),
    "unknown dtype": safetensors(
        json.dumps({"a": {"dtype": "F128", "shape": [1], "data_offsets": [0, 16]}}).encode(), None, bytes(16)
    ),
    "a pickle": pickle.dumps({"a": 1}),
    "keys with escapes": safetensors(
        json.dumps({"\x1b]0;owned\x07\nFORGED\n": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(),
        None,
        bytes(4),
    ),
    "no tensors": safetensors(b"{}"),
}

WRONG: dict[str, Any] = {
    "null": None,
    "a number": 5,
    "a string": "x",
    "a list": [1, 2],
    "an empty object": {},
    "nested nonsense": {"a": {"b": [None, {"c": "\x1b[2J\nFORGED\n"}]}},
}


def field(name: str, value: Any) -> Change:
    def change(content: Content) -> None:
        content[name] = value

    return change


def within(*path: str, value: Any) -> Change:
    """Set a nested value."""

    def change(content: Content) -> None:
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


def tensor_change(make: Callable[[Any], Any], everywhere: bool = True, number: int = 3) -> Change:
    """Replace one floating-point tensor of the weights."""

    def change(content: Content) -> None:
        for part in ("model", "ema") if everywhere else ("model",):
            if content[part]:
                names = [
                    name for name, value in content[part].items() if value.is_floating_point() and value.numel() > 3
                ]
                content[part][names[number]] = make(content[part][names[number]])

    return change


def with_value(value: float) -> Callable[[Any], Any]:
    def make(tensor: Any) -> Any:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return make


def torch_(function: Callable[[Any], Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Change a tensor with a function of torch, which is imported later."""

    def make(tensor: Any) -> Any:
        import torch

        return function(torch)(tensor)

    return make


TENSORS: dict[str, Callable[[Any], Any]] = {
    "NaN": with_value(float("nan")),
    "infinite": with_value(float("inf")),
    "minus infinite": with_value(float("-inf")),
    "all NaN": lambda tensor: tensor * float("nan"),
    "sparse": lambda tensor: tensor.reshape(-1, 1).to_sparse(),
    "sparse of the same shape": lambda tensor: tensor.to_sparse(),
    "on meta": lambda tensor: tensor.to("meta"),
    "quantized": torch_(lambda torch: lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
    "complex": torch_(lambda torch: lambda t: t.to(torch.complex64)),
    "of integers": torch_(lambda torch: lambda t: t.to(torch.int64)),
    "of booleans": lambda tensor: tensor > 0,
    "of strings": lambda tensor: "weights",
    "a list": lambda tensor: tensor.tolist(),
    "null": lambda tensor: None,
    "of another shape": torch_(lambda torch: lambda t: torch.zeros(7, 7, 7)),
    "expanded to a terabyte": torch_(lambda torch: lambda t: torch.zeros(1).expand(2**38)),
    "empty": torch_(lambda torch: lambda t: torch.zeros(0)),
    "float8": torch_(lambda torch: lambda t: t.to(torch.float8_e4m3fn)),
    "nested": torch_(lambda torch: lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()[:1]])),
}


def new_key(key: Any, value: Any = None) -> Change:
    def change(content: Content) -> None:
        import torch

        for part in ("model", "ema"):
            content[part][key] = torch.zeros(2) if value is None else value

    return change


def odd_keys(content: Content) -> None:
    for part in ("model", "ema"):
        content[part] = {
            (number if number == 2 else key): value for number, (key, value) in enumerate(content[part].items())
        }


CONFIGS: dict[str, Change] = {  # changes of the stored config
    "decoder layers of a million": within("config", "model", "decoder_layers", value=10**6),
    "hidden dim of a billion": within("config", "model", "hidden_dim", value=2**30),
    "queries of 2**40": within("config", "model", "num_queries", value=2**40),
    "heads of 0": within("config", "model", "heads", value=0),
    "heads that do not divide": within("config", "model", "heads", value=3),
    "a negative setting": within("config", "model", "feedforward_dim", value=-5),
    "a NaN setting": within("config", "model", "dropout", value=float("nan")),
    "a setting of 400 digits": within("config", "model", "hidden_dim", value=int("9" * 400)),
    "an unknown setting": within("config", "model", "wings", value=4),
    "an unknown setting with escapes": within("config", "model", "\x1b]0;owned\x07\nFORGED\n", value=4),
    "a key that is a number": within("config", "model", 5, value=4),  # type: ignore[arg-type]
    "a group that is a value": within("config", "model", value=4),
    "a value that is a group": within("config", "seed", value={"a": 1}),
    "another task": within("config", "task", value="classification"),
    "an unknown task": within("config", "task", value="\x1b[2Jrobbery"),
    "a task that is a list": within("config", "task", value=["detection"]),
    "a model that is a path": within("config", "model", "name", value="../../../etc/passwd"),
    "a model that is os": within("config", "model", "name", value="os"),
    "a private model": within("config", "model", "name", value="__init__"),
    "a backbone of timm that is none": within("config", "model", "backbone", "name", value="timm:hf-hub:evil/model"),
    "a backbone that is a path": within("config", "model", "backbone", "name", value="timm:../../x"),
    "a setting nested 5,000 deep": within("config", "output_dir", value=None),
    "an image size of 2**31": lambda content: content["config"]["data"]["transforms"].update(
        eval_short_side=2**31, max_size=2**31
    ),
    "a mean that is text": within("config", "model", "backbone", "strides", value="all"),
}
INTERPOLATIONS = {
    "in output_dir": ("output_dir",),
    "in init_from": ("init_from",),
    "in data.train.images": ("data", "train", "images"),
    "in model.name": ("model", "name"),
    "in backbone.weights": ("model", "backbone", "weights"),
    "in seed": ("seed",),
    "in an unknown key": ("unknown",),
}


def deep(content: Content) -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = {"a": nested}
    content["config"]["output_dir"] = nested


CONFIGS["a setting nested 5,000 deep"] = deep
CLASS_MAPS: dict[str, tuple[Change, bool]] = {  # changes of class_map; True: prediction may accept it
    "names of numbers": (within("class_map", "names", value=[1, 2]), False),
    "names of null": (within("class_map", "names", value=[None, None]), False),
    "names is a string": (within("class_map", "names", value="ab"), False),
    "too few names": (within("class_map", "names", value=["cat"]), False),
    "too many classes": (
        within("class_map", value={"category_ids": [1, 2, 3], "names": ["a", "b", "c"], "is_thing": [True] * 3}),
        False,
    ),
    "no classes": (within("class_map", value={"category_ids": [], "names": [], "is_thing": []}), False),
    "ids of strings": (within("class_map", "category_ids", value=["3", "7"]), False),
    "ids twice": (within("class_map", "category_ids", value=[3, 3]), False),
    "ids of NaN": (within("class_map", "category_ids", value=[float("nan"), 1]), False),
    "no ids": (lambda content: content["class_map"].pop("category_ids") and None, False),
    "is_thing of strings": (within("class_map", "is_thing", value=["yes", "no"]), False),
    "is_thing too short": (within("class_map", "is_thing", value=[True]), False),
    "names with escapes": (within("class_map", "names", value=["\x1b]0;owned\x07\nFORGED\n", "b"]), True),
    "names of 100,000 letters": (within("class_map", "names", value=["m" * 100_000, "b"]), True),
    "names of surrogates": (within("class_map", "names", value=["\ud800", "b"]), True),
    "an unknown key": (within("class_map", "colours", value=["red", "blue"]), True),
}
TRAINING: dict[str, Change] = {  # changes of the state for resuming
    "stripped": field("training", None),
    "is a list": field("training", [1]),
    "is empty": field("training", {}),
    "rng is null": within("training", "rng", value=None),
    "rng is text": within("training", "rng", value="seed"),
    "rng of floats": lambda content: content["training"].update(
        rng=[{"cpu": content["model"][next(iter(content["model"]))], "cuda": None}]
    ),
    "rng without cpu": within("training", "rng", value=[{"cuda": None}]),
    "progress is null": within("training", "progress", value=None),
    "progress is negative": lambda content: content["training"]["progress"].update(
        dict.fromkeys(content["training"]["progress"], -1)
    ),
    "progress of strings": lambda content: content["training"]["progress"].update(
        dict.fromkeys(content["training"]["progress"], "1")
    ),
    "progress of 2**70": lambda content: content["training"]["progress"].update(
        dict.fromkeys(content["training"]["progress"], 2**70)
    ),
    "progress with an unknown key": within("training", "progress", "\x1b[2J", value=1),
    "progress is empty": within("training", "progress", value={}),
    "optimizer is null": within("training", "optimizer", value=None),
    "optimizer is empty": within("training", "optimizer", value={}),
    "optimizer without groups": within("training", "optimizer", "param_groups", value=[]),
    "optimizer of another model": lambda content: content["training"]["optimizer"]["param_groups"][0].update(
        params=[0]
    ),
    "optimizer state of text": lambda content: content["training"]["optimizer"].update(state={0: "x"}),
    "optimizer moments of another shape": lambda content: (
        [
            state.update(exp_avg=state["exp_avg"].new_zeros(3))
            for state in content["training"]["optimizer"]["state"].values()
        ]
        and None
    ),
    "optimizer moments of NaN": lambda content: (
        [state["exp_avg"].fill_(float("nan")) for state in content["training"]["optimizer"]["state"].values()] and None
    ),
    "scaler is text": within("training", "scaler", value="x"),
    "an average of NaN": lambda content: (
        [value.fill_(float("nan")) for value in content["ema"].values() if value.is_floating_point()] and None
    ),
    "no average": field("ema", None),
    "weights of NaN": lambda content: (
        [value.fill_(float("nan")) for value in content["model"].values() if value.is_floating_point()] and None
    ),
    "config of another task": within("config", "task", value="classification"),
    "config of nonsense": field("config", {"x": 1}),
    "class map of nonsense": field("class_map", {"x": 1}),
    "format of the future": field("format", 2),
}


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    yield from _files()
    yield from _fields()
    yield from _resumed()
    yield from _captures()


def _files() -> Iterator[Case]:
    group, never = "checkpoints", ("EXECUTED\n",)
    for name, make in FILES.items():
        says = ("bad.pt",)
        yield Case(group, f"predict: {name}", made(make, predicting("bad.pt")), says=says, never=never)
        yield Case(group, f"init_from: {name}", made(make, fine_tuning("bad.pt")), says=says, never=never)
    for name in ("empty", "a torch file with code", "cut at nine tenths", "a pipe", "a flipped bit in the middle"):
        make = FILES[name]
        yield Case(group, f"convert: {name}", made(make, converting("bad.pt")), says=("bad.pt",), never=never)
        yield Case(group, f"evaluate: {name}", made(make, evaluating("bad.pt")), says=("bad.pt",), never=never)
        yield Case(group, f"replay: {name}", made(make, replaying("bad.pt")), says=("bad.pt",), never=never)
        resumed = made(make, resuming, "run/last.pt")
        yield Case(group, f"resume: {name}", resumed, says=("last.pt",), never=never, rewrites=LOGGED)
        load = made(make, loading("bad.pt"))
        yield Case(group, f"load: {name}", load, codes=(), raises=("InputError",), says=("bad.pt",), never=never)
    for name, data in SAFETENSORS.items():
        for call, build in (
            ("init_from", made(write(data), fine_tuning("bad.safetensors"), "bad.safetensors")),
            ("convert", made(write(data), converting("bad.safetensors"), "bad.safetensors")),
        ):
            # an intact file of unknown tensors may be converted
            codes = (0, 2) if call == "convert" and name in ("keys with escapes", "no tensors") else (2,)
            yield Case(
                group,
                f"{call}: safetensors, {name}",
                build,
                codes=codes,
                says=("bad.safetensors",),
                writes=("out.pt",) if 0 in codes else (),
            )


def _fields() -> Iterator[Case]:
    group = "checkpoints"
    harmless = {("ema", "null"), ("model", "an empty object")}  # one of the two is enough for prediction
    for name in ("model", "class_map", "config", "ema", "training", "format"):
        for kind, value in WRONG.items():
            fine = (name, kind) in harmless or name == "training"
            build = changed(field(name, value), predicting("bad.pt"))
            yield Case(
                group,
                f"{name} is {kind}",
                build,
                codes=(0, 2) if fine else (2,),
                says=("bad.pt",),
                writes=("found",) if fine else (),
            )
    for name, value in {"a list": [1], "a tensor": None, "text": "x", "nothing": {}, "a number": 5}.items():
        yield Case(
            group,
            f"all is {name}",
            changed(
                lambda content, value=value: content["model"][next(iter(content["model"]))] if value is None else value,
                predicting("bad.pt"),
            ),
            says=("bad.pt",),
        )
    for name, make in TENSORS.items():
        change = tensor_change(make)
        build = changed(change, predicting("bad.pt"))
        fine = name in ("float8",)
        yield Case(
            group,
            f"a tensor is {name}",
            build,
            codes=(0, 2) if fine else (2,),
            says=("bad.pt",),
            writes=("found",) if fine else (),
        )
    for name in (
        "NaN",
        "infinite",
        "sparse",
        "on meta",
        "quantized",
        "complex",
        "expanded to a terabyte",
        "null",
        "nested",
    ):
        change = tensor_change(TENSORS[name])
        left_out = name in ("sparse", "expanded to a terabyte")  # like tensors of another shape
        tuned = changed(change, fine_tuning("bad.pt"))
        codes, writes = ((0, 2), ("tuned",)) if left_out else ((2,), ())
        yield Case(group, f"init_from: a tensor is {name}", tuned, codes=codes, says=("bad.pt",), writes=writes)
        yield Case(
            group,
            f"load: a tensor is {name}",
            changed(change, loading("bad.pt")),
            codes=(),
            raises=("InputError",),
            says=("bad.pt",),
        )
        yield Case(
            group,
            f"convert: a tensor is {name}",
            changed(change, converting("bad.pt", "--strip-batchformer")),
            says=("bad.pt",),
        )
    for name in ("NaN", "infinite"):
        yield Case(
            group,
            f"evaluate: a tensor is {name}",
            changed(tensor_change(TENSORS[name]), evaluating("bad.pt")),
            says=("bad.pt",),
        )
        yield Case(
            group,
            f"foreign weights are {name}",
            changed(foreign(TENSORS[name]), fine_tuning("bad.pt")),
            says=("bad.pt",),
        )
        yield Case(
            group,
            f"resume: a tensor is {name}",
            changed(tensor_change(TENSORS[name]), resuming, target="run/last.pt"),
            says=("last.pt",),
            rewrites=LOGGED,
        )
        yield Case(
            group,
            f"classify: a tensor is {name}",
            changed(tensor_change(TENSORS[name], number=0), predicting("bad.pt"), "classifier/last.pt"),
            says=("bad.pt",),
        )
    for name, change in {
        "keys with escapes": new_key("\x1b]0;owned\x07\nFORGED\n"),
        "a key of 100,000 letters": new_key("k" * 100_000),
        "a key that is a number": new_key(5),
        "a key that is a tuple": new_key((1, 2)),
        "a number among the keys": odd_keys,
        "10,000 unknown keys": lambda content: (
            [
                content[part].update({f"x{i}": content["model"][next(iter(content["model"]))] for i in range(10_000)})
                for part in ("model", "ema")
            ]
            and None
        ),
        "a field of its own": field("\x1b[2J", 1),
    }.items():
        for call, run in (("predict", predicting("bad.pt")), ("init_from", fine_tuning("bad.pt"))):
            lenient = call == "init_from" and (
                "unknown" in name or "escapes" in name or "letters" in name or "field" in name
            )  # skipped with a message
            yield Case(
                group,
                f"{call}: {name}",
                changed(change, run),
                codes=(0, 2) if lenient else (2,),
                says=("bad.pt",),
                writes=("tuned",) if lenient else (),
            )
    for name, (change, fine) in CLASS_MAPS.items():
        build = changed(change, predicting("bad.pt"))
        yield Case(
            group,
            f"class map: {name}",
            build,
            codes=(0, 2) if fine else (2,),
            says=("bad.pt",),
            writes=("found",) if fine else (),
        )
    for name, change in CONFIGS.items():
        yield Case(group, f"config: {name}", changed(change, predicting("bad.pt")), codes=(2,), says=("bad.pt",))
    for name, path in INTERPOLATIONS.items():
        change = within("config", *path, value="${oc.env:HOSTILE_SECRET}")
        for call, run, target in (
            ("predict", predicting("bad.pt"), "bad.pt"),
            ("convert", converting("bad.pt", "--strip-batchformer"), "bad.pt"),
            ("resume", resuming, "run/last.pt"),
        ):
            yield Case(
                group,
                f"{call}: interpolation {name}",
                changed(change, run, target=target),
                codes=(0, 2),
                never=(SECRET,),
                writes=("found", "out.pt"),
                rewrites=("run",),
            )


def foreign(make: Callable[[Any], Any]) -> Change:
    """Yield cases of weight files as other programs write them."""

    def change(content: Content) -> Any:
        tensor_change(make)(content)
        return {"model": content["model"]}

    return change


def _resumed() -> Iterator[Case]:
    harmless = ("no average", "scaler is text")
    for name, change in TRAINING.items():
        codes = (0, 1, 2) if name in harmless else (2,)
        build = changed(change, resuming, target="run/last.pt")
        yield Case(
            "checkpoints",
            f"resume: {name}",
            build,
            codes=codes,
            says=("last.pt",),
            rewrites=("run",) if 0 in codes else LOGGED,
        )


CAPTURES: dict[str, Change] = {
    **{
        f"{name} is null": field(name, None)
        for name in ("model", "class_map", "config", "batches", "rng", "step", "precision", "scale", "fault")
    },
    "batches are empty": field("batches", []),
    "batches of nonsense": field("batches", [{"kind": "Batch", "x": 1}]),
    "batch of an unknown kind": lambda content: content["batches"][0].update(kind="os.system"),
    "images of floats": lambda content: content["batches"][0].update(images=content["batches"][0]["images"].float()),
    "images are null": lambda content: content["batches"][0].update(images=None),
    "mask of another shape": lambda content: content["batches"][0].update(
        padding_mask=content["batches"][0]["padding_mask"][:, :3]
    ),
    "a target of nonsense": lambda content: content["batches"][0].update(targets=[5, 6]),
    "a label outside": lambda content: content["batches"][0]["targets"][0].update(
        labels=content["batches"][0]["targets"][0]["labels"] + 10_000
    ),
    "scale is text": field("scale", "x"),
    "precision is text": field("precision", "float32"),
    "an interpolation": within("config", "output_dir", value="${oc.env:HOSTILE_SECRET}"),
    "a weight of another shape": tensor_change(TENSORS["of another shape"], everywhere=False),
    "fault of nonsense": field("fault", {"x": "\x1b[2J"}),
    "torch version with escapes": field("torch_version", "\x1b[2J\nFORGED\n"),
    "step is text with escapes": field("step", "\x1b[2J\nFORGED\n"),
    "format of the future": field("format", 99),
}


def _captures() -> Iterator[Case]:
    fine = (
        "an interpolation",
        "torch version with escapes",
        "step is text with escapes",
        "step is null",
        "images of floats",
    )
    for name, change in CAPTURES.items():
        codes = (0, 2, 3) if name in fine else (2,)
        build = changed(change, replaying("bad.pt"), "capture.pt")
        yield Case("captures", name, build, codes=codes, says=() if name in fine else ("bad.pt",))
    detector = made(lambda path: path.write_bytes(source()), replaying("bad.pt"))
    yield Case("captures", "a checkpoint", detector, says=("bad.pt",))
