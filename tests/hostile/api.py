"""Wrong arguments of the Python API: a clear exception, never NaN, never an internal error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.annotations import fifo
from tests.hostile.battery import Build, Case, CaseFiles
from tests.hostile.images import BROKEN

OURS = ("InputError",)
OURS_OR_PLAIN = ("InputError", "TypeError", "ValueError")  # for arguments of a wrong type


def load(argument: Any, kind: str = "load", device: Any = "cpu") -> Build:
    def build(files: CaseFiles) -> Callable[[], Any]:
        import detr_bf

        if argument == "pipe":
            fifo(files.folder / "pipe")
        source = (
            str(files.fixtures / argument[1:]) if isinstance(argument, str) and argument.startswith("@") else argument
        )
        return lambda: getattr(detr_bf, kind)(source, device)

    return build


def with_predictor(
    make: Callable[[Any, CaseFiles], Any], use: Callable[[Any, Any], Any] | None = None, run: str = "detector"
) -> Build:
    """Call a predictor of one of the fixture runs with an input made by the function."""

    def build(files: CaseFiles) -> Callable[[], Any]:
        import torch

        import detr_bf

        kind = detr_bf.load_classifier if run == "classifier" else detr_bf.load
        predictor, argument = kind(files.fixtures / run, "cpu"), make(torch, files)
        return lambda: _finite(use(predictor, argument) if use else predictor(argument))

    return build


def _finite(found: Any) -> Any:
    """Return the result after checking that it is valid."""
    import torch

    for values in (
        (found,) if isinstance(found, torch.Tensor) else (getattr(found, "boxes", None), getattr(found, "scores", None))
    ):
        if values is not None and not torch.as_tensor(values).isfinite().all():
            raise AssertionError("the answer is not finite")
    return found


def _image(name: str) -> Callable[[Any, CaseFiles], Any]:
    def make(torch: Any, files: CaseFiles) -> Any:
        path = files.folder / "bad.jpg"
        BROKEN[name](path)
        return path

    return make


IMAGES: dict[str, Callable[[Any, CaseFiles], Any]] = {
    "null": lambda torch, _: None,
    "a number": lambda torch, _: 5,
    "a list": lambda torch, _: [[1, 2], [3, 4]],
    "an object": lambda torch, _: {"image": 1},
    "a path that is missing": lambda torch, _: "nowhere.jpg",
    "a folder": lambda torch, files: files.folder,
    "an empty path": lambda torch, _: "",
    "a path with NUL": lambda torch, _: "a\0b.jpg",
    "a path of 5,000 letters": lambda torch, _: "p" * 5000,
    "a path with escapes": lambda torch, _: "\x1b[2J.jpg",
    "bytes": lambda torch, _: b"\x89PNG",
    "one dimension": lambda torch, _: torch.zeros(24, dtype=torch.uint8),
    "a scalar": lambda torch, _: torch.tensor(5, dtype=torch.uint8),
    "four dimensions": lambda torch, _: torch.zeros(2, 3, 24, 32, dtype=torch.uint8),
    "no rows": lambda torch, _: torch.zeros(3, 0, 32, dtype=torch.uint8),
    "no pixels": lambda torch, _: torch.zeros(3, 0, 0, dtype=torch.uint8),
    "nothing": lambda torch, _: torch.zeros(0, dtype=torch.uint8),
    "five channels": lambda torch, _: torch.zeros(5, 24, 32, dtype=torch.uint8),
    "two channels": lambda torch, _: torch.zeros(2, 24, 32, dtype=torch.uint8),
    "NaN": lambda torch, _: torch.full((3, 24, 32), float("nan")),
    "one NaN": lambda torch, _: torch.rand(3, 24, 32).index_fill(2, torch.tensor([5]), float("nan")),
    "infinity": lambda torch, _: torch.full((3, 24, 32), float("inf")),
    "floats of 255": lambda torch, _: torch.full((3, 24, 32), 255.0),
    "negative floats": lambda torch, _: torch.full((3, 24, 32), -0.5),
    "booleans": lambda torch, _: torch.ones(3, 24, 32, dtype=torch.bool),
    "8-bit integers with a sign": lambda torch, _: torch.zeros(3, 24, 32, dtype=torch.int8),
    "64-bit integers": lambda torch, _: torch.full((3, 24, 32), 2**40),
    "complex numbers": lambda torch, _: torch.zeros(3, 24, 32, dtype=torch.complex64),
    "on meta": lambda torch, _: torch.zeros(3, 24, 32, dtype=torch.uint8, device="meta"),
    "sparse": lambda torch, _: torch.zeros(3, 24, 32).to_sparse(),
    "quantized": lambda torch, _: torch.quantize_per_tensor(torch.zeros(3, 24, 32), 0.1, 0, torch.quint8),
    "nested": lambda torch, _: torch.nested.nested_tensor([torch.zeros(24, 32)] * 3),
    "expanded to a terabyte": lambda torch, _: torch.zeros(3, 1, 1, dtype=torch.uint8).expand(3, 2**19, 2**19),
    "an array of objects": lambda torch, _: __import__("numpy").array([None, "a"], dtype=object),
    "an array of strings": lambda torch, _: __import__("numpy").array(["a", "b"]),
    "an array of five channels": lambda torch, _: __import__("numpy").zeros((24, 32, 5), "uint8"),
    "an array of NaN": lambda torch, _: __import__("numpy").full((24, 32, 3), float("nan")),
    **{
        f"a file: {name}": _image(name)
        for name in ("empty", "a text", "EPS", "PNG bomb", "a pipe", "30 GB of nothing", "a link to itself")
    },
}
FINE: dict[str, Callable[[Any, CaseFiles], Any]] = {  # unusual but valid
    "one pixel": lambda torch, _: torch.zeros(3, 1, 1, dtype=torch.uint8),
    "one row of 5,000": lambda torch, _: torch.zeros(3, 1, 5000, dtype=torch.uint8),
    "not contiguous": lambda torch, _: torch.zeros(32, 24, 3, dtype=torch.uint8).permute(2, 1, 0),
    "no channels": lambda torch, _: torch.zeros(24, 32, dtype=torch.uint8),
    "floats from 0 to 1": lambda torch, _: torch.rand(3, 24, 32),
    "with gradients": lambda torch, _: torch.rand(3, 24, 32, requires_grad=True),
}
PREDICT: dict[str, Callable[[Any, Any], Any]] = {
    "batch size of 0": lambda predictor, image: list(predictor.predict([image], batch_size=0)),
    "negative batch size": lambda predictor, image: list(predictor.predict([image], batch_size=-1)),
    "batch size of text": lambda predictor, image: list(predictor.predict([image], batch_size="two")),
    "fractional batch size": lambda predictor, image: list(predictor.predict([image], batch_size=1.5)),
    "batch size of NaN": lambda predictor, image: list(predictor.predict([image], batch_size=float("nan"))),
    "a path instead of a list": lambda predictor, image: list(predictor.predict("photo.jpg")),
    "null instead of a list": lambda predictor, image: list(predictor.predict(None)),
    "a number instead of a list": lambda predictor, image: list(predictor.predict(5)),
    "a list with null": lambda predictor, image: list(predictor.predict([image, None])),
}


def create(name: Any, **options: Any) -> Build:
    def build(files: CaseFiles) -> Callable[[], Any]:
        import detr_bf

        return lambda: detr_bf.create_model(name, **options)

    return build


CREATED: dict[str, tuple[Any, dict[str, Any]]] = {
    "no such model": ("toaster", {"num_classes": 2}),
    "an empty name": ("", {"num_classes": 2}),
    "a path": ("../../etc/passwd", {"num_classes": 2}),
    "a name with escapes": ("\x1b[2J", {"num_classes": 2}),
    "a name of 100,000 letters": ("m" * 100_000, {"num_classes": 2}),
    "no classes": ("detr_r50", {"num_classes": 0}),
    "negative classes": ("detr_r50", {"num_classes": -3}),
    "classes of text": ("detr_r50", {"num_classes": "two"}),
    "fractional classes": ("detr_r50", {"num_classes": 2.5}),
    "classes of NaN": ("detr_r50", {"num_classes": float("nan")}),
    "2**62 classes": ("detr_r50", {"num_classes": 2**62}),
    "an unknown override": ("detr_r50", {"num_classes": 2, "overrides": ["wings=4"]}),
    "an override of a wrong type": ("detr_r50", {"num_classes": 2, "overrides": ["model.num_queries=many"]}),
    "overrides in one text": ("detr_r50", {"num_classes": 2, "overrides": "model.num_queries=5"}),
    "an override that is a number": ("detr_r50", {"num_classes": 2, "overrides": [5]}),
    "a name that is a number": (5, {"num_classes": 2}),
    "a name that is null": (None, {"num_classes": 2}),
}


def plugin(name: str, call: Callable[[Any, Any], Any]) -> tuple[str, Build]:
    def build(files: CaseFiles) -> Callable[[], Any]:
        import timm

        from detr_bf import plugins as vit

        settings = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 3}
        model = timm.create_model("vit_tiny_patch16_224", **settings)
        return lambda: call(vit, model)

    return name, build


def _module() -> Any:
    from torch import nn

    return nn.Linear(2, 2)


PLUGINS = dict(
    (
        plugin("batch attention in no model", lambda vit, model: vit.add_batchformer_v2(None)),
        plugin("batch attention in a linear layer", lambda vit, model: vit.add_batchformer_v2(_module())),
        plugin("batch attention beyond the network", lambda vit, model: vit.add_batchformer_v2(model, layers=[9])),
        plugin("batch attention in negative blocks", lambda vit, model: vit.add_batchformer_v2(model, layers=[-1])),
        plugin("batch attention in blocks twice", lambda vit, model: vit.add_batchformer_v2(model, layers=[0, 0])),
        plugin("batch attention in text", lambda vit, model: vit.add_batchformer_v2(model, layers="lower")),
        plugin("batch attention in no blocks", lambda vit, model: vit.add_batchformer_v2(model, layers=[])),
        plugin("batch attention of 3 heads", lambda vit, model: vit.add_batchformer_v2(model, layers=[0], heads=3)),
        plugin("batch attention of 0 heads", lambda vit, model: vit.add_batchformer_v2(model, layers=[0], heads=0)),
        plugin(
            "batch attention of NaN dropout",
            lambda vit, model: vit.add_batchformer_v2(model, layers=[0], dropout=float("nan")),
        ),
        plugin(
            "batch attention of dropout 2", lambda vit, model: vit.add_batchformer_v2(model, layers=[0], dropout=2.0)
        ),
        plugin(
            "batch attention in an unknown mode",
            lambda vit, model: vit.add_batchformer_v2(model, layers=[0], mode="sideways"),
        ),
        plugin(
            "batch attention twice",
            lambda vit, model: [vit.add_batchformer_v2(model, layers=[0]), vit.add_batchformer_v2(model, layers=[0])],
        ),
        plugin("BatchFormer in no model", lambda vit, model: vit.add_batchformer(None)),
        plugin("BatchFormer of 3 heads", lambda vit, model: vit.add_batchformer(model, heads=3)),
        plugin("broadcasting in no model", lambda vit, model: vit.add_context_broadcasting(None)),
        plugin("broadcasting beyond the network", lambda vit, model: vit.add_context_broadcasting(model, layers=[9])),
        plugin(
            "broadcasting twice",
            lambda vit, model: [vit.add_context_broadcasting(model), vit.add_context_broadcasting(model)],
        ),
        plugin("diverse patches in no model", lambda vit, model: vit.add_diverse_patch(None)),
        plugin("localization in no model", lambda vit, model: vit.add_relative_localization(None)),
        plugin(
            "localization of an unknown variant",
            lambda vit, model: vit.add_relative_localization(model, variant="sideways"),
        ),
        plugin("localization of no pairs", lambda vit, model: vit.add_relative_localization(model, pairs=0)),
    )
)


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    group = "api"
    for name, argument in {
        "nothing": "",
        "a missing file": "nowhere.pt",
        "an empty folder": ".",
        "a text": "notes.md",
        "NUL": "a\0b",
        "5,000 letters": "p" * 5000,
        "a pipe": "pipe",
        "a config": "@detector.yaml",
        "an image": "@val/images/0101.png",
        "a capture": "@capture.pt",
        "a masked autoencoder": "@masked",
    }.items():
        for kind in ("load", "load_classifier"):
            yield Case(group, f"{kind}: {name}", load(argument, kind), codes=(), raises=OURS)
    yield Case(group, "load: a classifier", load("@classifier"), codes=(), raises=OURS, says=("load_classifier",))
    yield Case(
        group,
        "load_classifier: a detector",
        load("@detector", "load_classifier"),
        codes=(),
        raises=OURS,
        says=("detr_bf.load",),
    )
    for name, argument in {"null": None, "a number": 5, "a list": ["a"], "an object": {"a": 1}}.items():
        yield Case(group, f"load: {name}", load(argument), codes=(), raises=OURS_OR_PLAIN)
    for device in ("toaster", "cuda:99", "", "meta", "\x1b[2J", 5, None):
        yield Case(group, f"load: device {device!r}", load("@detector", device=device), codes=(), raises=OURS_OR_PLAIN)
    for name, make in IMAGES.items():
        lenient = name in ("expanded to a terabyte",)
        yield Case(group, f"detect: {name}", with_predictor(make), codes=(), raises=OURS, may_return=lenient)
    for name in (
        "null",
        "a number",
        "NaN",
        "floats of 255",
        "negative floats",
        "booleans",
        "four dimensions",
        "no rows",
        "five channels",
        "on meta",
        "a file: a text",
        "a file: PNG bomb",
        "a file: EPS",
        "an array of NaN",
    ):
        yield Case(group, f"classify: {name}", with_predictor(IMAGES[name], run="classifier"), codes=(), raises=OURS)
    for name in ("null", "NaN", "on meta", "no rows", "a file: a text"):
        build = with_predictor(IMAGES[name], lambda predictor, image: predictor.panoptic(image), "masks")
        yield Case(group, f"panoptic: {name}", build, codes=(), raises=OURS)
    for name, make in FINE.items():
        yield Case(group, f"fine: {name}", with_predictor(make), codes=(), raises=OURS, may_return=True)
        yield Case(
            group,
            f"fine for a classifier: {name}",
            with_predictor(make, run="classifier"),
            codes=(),
            raises=OURS,
            may_return=True,
        )
    panoptic = with_predictor(FINE["one pixel"], lambda predictor, image: predictor.panoptic(image))
    yield Case(group, "panoptic maps without masks", panoptic, codes=(), raises=OURS, says=("mask",))
    for name, use in PREDICT.items():
        for run in ("detector", "classifier"):
            yield Case(
                group,
                f"predict, {run}: {name}",
                with_predictor(FINE["floats from 0 to 1"], use, run),
                codes=(),
                raises=OURS_OR_PLAIN,
            )
    for name, (model, options) in CREATED.items():
        raises = OURS if isinstance(model, str) and isinstance(options["num_classes"], int) else OURS_OR_PLAIN
        yield Case(group, f"create_model: {name}", create(model, **options), codes=(), raises=raises)
    for name, build in PLUGINS.items():
        yield Case(group, f"plug-in: {name}", build, codes=(), raises=OURS_OR_PLAIN)
    yield from _lower(group)


def lower(call: Callable[[CaseFiles], Any]) -> Build:
    return lambda files: lambda: call(files)


def _lower(group: str) -> Iterator[Case]:
    """Yield cases of functions in subpackages that users call."""
    for name, call in LOWER.items():
        yield Case(group, name, lower(call), codes=(), raises=OURS_OR_PLAIN)


def _config(files: CaseFiles) -> Any:
    from detr_bf.config import load_config

    return load_config(files.fixtures / "detector.yaml")


def _call(module: str, name: str) -> Any:
    return getattr(__import__(module, fromlist=[name]), name)


LOWER: dict[str, Callable[[CaseFiles], Any]] = {
    "load_config: a number": lambda _: _call("detr_bf.config", "load_config")(5),
    "load_config: overrides in one text": lambda _: _call("detr_bf.config", "load_config")(None, "train.epochs=5"),
    "load_config: missing": lambda _: _call("detr_bf.config", "load_config")(Path("nowhere.yaml")),
    "config_from_dict: an unknown key": lambda _: _call("detr_bf.config", "config_from_dict")({"wings": 4}),
    "config_from_dict: a list": lambda _: _call("detr_bf.config", "config_from_dict")([1, 2]),
    "config_from_dict: an interpolation": lambda _: _call("detr_bf.config", "config_from_dict")(
        {"seed": "${oc.env:HOSTILE_SECRET}"}
    ),
    "build_model: no classes": lambda files: _call("detr_bf.assembly", "build_model")(_config(files), -1),
    "read_annotations: missing": lambda _: _call("detr_bf.data.coco", "read_annotations")(Path("nowhere.json")),
    "read_image: missing": lambda _: _call("detr_bf.data.images", "read_image")(Path("nowhere.png")),
    "read_torch: a text": lambda _: _call("detr_bf.common.files", "read_torch")(Path("notes.md")),
    "load_checkpoint: a text": lambda _: _call("detr_bf.engine", "load_checkpoint")(Path("notes.md")),
    "load_capture: a text": lambda _: _call("detr_bf.engine.recovery", "load_capture")(Path("notes.md"), dict),
}
