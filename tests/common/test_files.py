"""Files are written completely or not at all, and reading executes no code."""

from __future__ import annotations

import argparse
import json
import os
import socket
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from detr_bf.common.errors import InputError
from detr_bf.common.files import (
    UNFINISHED,
    atomic_write,
    cache_folder,
    check_output_file,
    check_output_folder,
    check_sums,
    check_weights,
    is_file,
    is_folder,
    make_output_folder,
    read_json,
    read_regular,
    read_safetensors,
    read_torch,
    readable_file,
    remove_empty,
    remove_unfinished,
    write_json,
    write_text,
)
from detr_bf.common.text import printable


def test_content_appears_under_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
        assert temporary.parent == path.parent, "a rename within a folder is atomic"
        assert temporary.suffix == ".txt", "writers choose the format by the extension"
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["folder", "FIFO", "device"])
def test_only_files_are_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "target.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root may make a device")
    before = path.stat()
    with pytest.raises(InputError, match=f"{path.name} is a .*{kind}"):
        write_json(path, {})
    assert os.path.samestat(path.stat(), before)
    assert stat.S_IFMT(path.stat().st_mode) == stat.S_IFMT(before.st_mode)
    assert not list(path.parent.glob(f"{UNFINISHED}*"))


def test_a_link_is_replaced_and_its_target_is_not(tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text("theirs")
    (tmp_path / "link.json").symlink_to(tmp_path / "theirs.json")
    write_json(tmp_path / "link.json", [1])
    assert (tmp_path / "theirs.json").read_text() == "theirs"
    assert json.loads((tmp_path / "link.json").read_text()) == [1]


def _write_half(path: Path, error: type[BaseException]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("half")
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error):
        _write_half(path, error)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_becomes_the_previous_one(tmp_path: Path) -> None:
    path, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    for content in ("first", "second", "third"):
        with atomic_write(path, previous) as temporary:
            temporary.write_text(content)
    assert (path.read_text(), previous.read_text()) == ("third", "second")
    with pytest.raises(RuntimeError), atomic_write(path, previous):
        raise RuntimeError
    assert (path.read_text(), previous.read_text()) == ("third", "second")


def killed_while_writing(path: Path) -> Path:
    """Create the files left by a process that is killed within ``atomic_write``."""
    with atomic_write(path) as temporary:
        copy = temporary.with_name(f"{temporary.name}.copy")
        temporary.rename(copy)
        temporary.touch()
    return copy.rename(temporary)


@pytest.mark.parametrize("name", ["last.pt", "metrics.jsonl", "x" * 250, "größe" * 30 + ".json"])
def test_what_killed_processes_have_left_is_removed(tmp_path: Path, name: str) -> None:
    left = killed_while_writing(tmp_path / name)
    assert left.exists()
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_files_of_others_are_never_removed(tmp_path: Path) -> None:
    """An earlier pattern ``.*.*.*`` removed them, ``.terraform.lock.hcl`` for example."""
    names = (".terraform.lock.hcl", ".env.production.local", ".eslintrc.base.json", ".last.ab12_x9z.pt", ".hidden")
    for name in (*names, "last.pt", "log.txt", "detr_bf-unfinished-a.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".a.b.c").mkdir()
    (tmp_path / f"{UNFINISHED}folder.x.pt").mkdir()
    (tmp_path / f"{UNFINISHED}link.x.pt").symlink_to(tmp_path / "last.pt")
    before = sorted(tmp_path.iterdir())
    remove_unfinished(tmp_path)
    remove_unfinished(tmp_path / "missing")
    assert sorted(tmp_path.iterdir()) == before


def saved(path: Path) -> bytes:
    torch.save({"a": torch.arange(1000.0), "b": {"c": torch.ones(3, 5)}, "step": 3}, path)
    return path.read_bytes()


def test_check_sums_of_a_whole_file_agree(tmp_path: Path) -> None:
    saved(tmp_path / "a.pt")
    check_sums(tmp_path / "a.pt")


def test_every_changed_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    """torch.load itself does not verify checksums."""
    path = tmp_path / "a.pt"
    whole = saved(path)
    start = whole.index(torch.arange(1000.0).numpy().tobytes())
    for index in range(start, start + 4000, 97):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(InputError, match=r"a\.pt is (truncated or )?damaged"):
            check_sums(path)


def test_every_changed_bit_of_a_tensor_is_found_by_reading(tmp_path: Path) -> None:
    """Initial weights, backbones and foreign checkpoints are read by read_torch."""
    path = tmp_path / "a.pt"
    whole = saved(path)
    index = whole.index(torch.arange(1000.0).numpy().tobytes()) + 2345
    path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
    torch.load(path, weights_only=True)
    with pytest.raises(InputError, match=r"a\.pt is (truncated or )?damaged"):
        read_torch(path)


def test_files_before_checksums_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(read_torch(tmp_path / "a.pt")["a"], torch.arange(3))


def test_an_archive_that_was_packed_again_is_read(tmp_path: Path) -> None:
    """Other programs compress the parts, and write the permissions of files, folders and folders of macOS."""
    saved(tmp_path / "a.pt")
    before = read_torch(tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for part in old.infolist():
            info = zipfile.ZipInfo(part.filename)
            info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            new.writestr(info, old.read(part))
        new.writestr("archive/data/", "")
        new.writestr("__MACOSX/archive/._data.pkl", "x")
    found = read_torch(tmp_path / "b.pt", own=True)
    assert found.keys() == before.keys()
    assert torch.equal(found["a"], before["a"])


def test_an_archive_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("archive/data.pkl", bytes(2**26 + 1))
    with pytest.raises(InputError, match=r"b\.pt is truncated or damaged \(its .* bytes expand to 67,108,865"):
        read_torch(tmp_path / "b.pt")


@pytest.mark.parametrize("read", [read_torch, read_safetensors, check_sums])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "folder is a folder, expected a file"),
        ("pipe", "pipe is a FIFO, expected a file"),
        ("x" * 300, "file not found: .*xxx"),
        ("nul\0byte", r"file not found: .*nul\\x00byte"),
        ("no/such/file", "file not found"),
    ],
)
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, read: Callable[[Path], object], name: str, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize("url", ["https://example.org/a.pth", "http://a.b/c", "s3://bucket/a.pth"])
def test_a_url_is_no_path(url: str) -> None:
    with pytest.raises(InputError, match="files are not fetched from a URL; download it"):
        readable_file(Path(url))


def nested_tensor() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "sparse"),
        (lambda: torch.ones(2, device="meta"), "without numbers"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(2, dtype=torch.complex64), "complex"),
        (lambda: torch.ones(1).expand(10**9, 10**9), "overlapping memory"),
        (nested_tensor, "nested"),
        (lambda: 3, "a value of type int"),
        (lambda: None, "a value of type NoneType"),
    ],
)
def test_what_cannot_be_weights_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=rf"a\.pt holds what cannot be weights: b \({said}\)\. Expected"):
        check_weights({"a": torch.ones(2), "b": make()}, "a.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_weights_that_are_not_finite_are_named(value: float, dtype: torch.dtype) -> None:
    weights = {"a": torch.ones(2), "b\x1b": torch.tensor([1.0, value]).to(dtype), "c": torch.tensor(3)}
    with pytest.raises(InputError, match=r"a\.pt holds NaN or infinite weights, .* in b\\x1b\. Use an earlier"):
        check_weights(weights, "a.pt")
    check_weights(weights, "a.pt", finite=False)


def test_ordinary_weights_pass() -> None:
    shared = torch.randn(4, 6)
    check_weights(
        {
            "a": shared,
            "b": shared,  # tied
            "transposed": shared.T,
            "part": shared[1:, ::2],
            "empty": torch.ones(0, 3),
            "large": torch.tensor([-3e38, 3e38]),
            "counter": torch.tensor(2**62),
            "mask": torch.tensor([True]),
            "half": torch.ones(2, dtype=torch.bfloat16),
        },
        "a.pt",
    )
    with pytest.raises(InputError, match=r"3 \(a name of type int\)"):
        check_weights({3: shared}, "a.pt")


def test_a_changed_bit_anywhere_is_found_or_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    whole = saved(path)
    found = 0
    for index in range(0, len(whole), 11):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 16]) + whole[index + 1 :])
        try:
            check_sums(path)
            content = read_torch(path)
        except InputError:
            found += 1
            continue
        assert torch.equal(content["a"], torch.arange(1000.0))
        assert torch.equal(content["b"]["c"], torch.ones(3, 5))
        assert content["step"] == 3
    assert found > len(range(0, len(whole), 11)) / 2


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.99])
def test_a_file_that_was_cut_is_found(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.pt"
    whole = saved(path)
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InputError, match="truncated or damaged"):
        check_sums(path)


def test_file_can_be_read_by_others(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "x")
    assert (tmp_path / "a.txt").stat().st_mode & 0o444 == 0o444


def test_text_and_json(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "größer\n")
    assert (tmp_path / "a.txt").read_bytes() == "größer\n".encode()
    value = {"ap": 0.25, "classes": ["a", None], "n": 3}
    write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text()) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_numbers_it_does_not_have(tmp_path: Path, value: float) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"loss": value})
    assert json.loads(path.read_text()) == {"loss": 1.0}
    assert list(tmp_path.iterdir()) == [path]


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path))
    assert cache_folder("x") == tmp_path / "x"
    monkeypatch.delenv("DETR_BF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("x") == tmp_path / ".cache" / "detr_bf" / "x"


class Payload:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_torch_file_that_would_execute_something_is_refused(tmp_path: Path) -> None:
    torch.save({"model": Payload(tmp_path / "executed")}, tmp_path / "a.pth")
    with pytest.raises(InputError, match=r"a\.pth was refused.*nothing was executed"):
        read_torch(tmp_path / "a.pth")
    assert not (tmp_path / "executed").exists()
    torch.load(tmp_path / "a.pth", weights_only=False)
    assert (tmp_path / "executed").exists(), "a plain load runs the code"


def test_command_lines_beside_the_weights_are_read(tmp_path: Path) -> None:
    """The checkpoints of DETR and its successors hold their arguments."""
    arguments = argparse.Namespace(lr=1e-4, masks=False, lr_drop_epochs=None, insert_idx=[0], backbone="resnet50")
    torch.save({"model": {"weight": torch.arange(3)}, "args": arguments, "epoch": 4}, tmp_path / "a.pth")
    loaded = read_torch(tmp_path / "a.pth")
    assert loaded["args"] == arguments
    assert torch.equal(loaded["model"]["weight"], torch.arange(3))


def test_command_lines_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    for name, content in {
        "executing": argparse.Namespace(lr=Payload(tmp_path / "executed")),
        "nested": argparse.Namespace(inner=argparse.Namespace(path=tmp_path)),
        "similar": SimpleNamespace(lr=1e-4),
    }.items():
        torch.save({"args": content}, tmp_path / f"{name}.pth")
        with pytest.raises(InputError, match=rf"{name}\.pth was refused.*nothing was executed"):
            read_torch(tmp_path / f"{name}.pth")
    assert not (tmp_path / "executed").exists()


def test_reading_allows_nothing_to_others(tmp_path: Path) -> None:
    torch.save(argparse.Namespace(), tmp_path / "a.pth")
    read_torch(tmp_path / "a.pth")
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_safetensors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"file not found: .*a\.safetensors"):
        read_safetensors(tmp_path / "a.safetensors")
    save_file({"weight": torch.arange(3)}, tmp_path / "a.safetensors")
    assert torch.equal(read_safetensors(tmp_path / "a.safetensors")["weight"], torch.arange(3))
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    with pytest.raises(InputError, match=r"b\.safetensors: not a readable"):
        read_safetensors(tmp_path / "b.safetensors")


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_truncated_torch_file_is_refused(tmp_path: Path, kept: float) -> None:
    torch.save({"weight": torch.randn(1000)}, tmp_path / "whole.pth")
    content = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    with pytest.raises(InputError, match=r"cut\.pth.*damaged"):
        read_torch(tmp_path / "cut.pth")


def test_torch_file_round_trip_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"file not found: .*a\.pth"):
        read_torch(tmp_path / "a.pth")
    torch.save({"weight": torch.arange(3), "step": 4}, tmp_path / "a.pth")
    loaded = read_torch(tmp_path / "a.pth")
    assert loaded["step"] == 4
    assert torch.equal(loaded["weight"], torch.arange(3))


@pytest.mark.parametrize(
    "first", [b"base: detr.yaml\n", b"train: {}\n", b"\x00\x01", *(bytes([value]) for value in range(0, 256, 5))]
)
def test_files_that_are_something_else_are_refused(tmp_path: Path, first: bytes) -> None:
    (tmp_path / "a.pth").write_bytes(first + b"anything else")
    with pytest.raises(InputError, match=r"a\.pth"):
        read_torch(tmp_path / "a.pth")


def test_regular_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="5 bytes, more than the limit of 4"):
        read_regular(tmp_path / "a", 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "b", 4)
    with pytest.raises(ValueError, match="Not a directory"):
        read_regular(tmp_path / "a" / "b", 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting"),
        ("1" * 5000, "digit"),
        (b"\xff\xfe\xfa", "decode"),
    ],
)
def test_json_that_cannot_be_read(tmp_path: Path, text: str | bytes, said: str) -> None:
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=said):
        read_json(tmp_path / "a.json")


def test_a_name_that_is_too_long_is_no_file_and_no_folder(tmp_path: Path) -> None:
    for name in ("x" * 300, "a\0b", "\ud800"):
        assert not is_file(tmp_path / name)
        assert not is_folder(tmp_path / name)
    assert is_folder(tmp_path)


def test_lone_surrogates_are_written_escaped(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "caf\udce9")
    assert (tmp_path / "a").read_text(encoding="utf-8") == r"caf\udce9"


HOPELESS = {  # outputs that can be neither file nor folder
    "a\0b": "embedded null byte",
    "\ud800": "surrogates not allowed",
    "n" * 300: "File name too long",
    "notes.md/a/b": "notes.md/a|Not a directory",
    "loop/a": "symbolic links",
    "/proc/a": "No such file|Permission denied",
    "/proc/a/b": "No such file|Permission denied",
    "/dev/null/a": "device|Not a directory",
}


@pytest.fixture
def cluttered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Fill the working directory with special files and one regular file; return all paths."""
    monkeypatch.chdir(tmp_path)
    Path("notes.md").write_text("mine")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    return set(Path().rglob("*"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, f"cannot be written .*({reason}).*: choose another path") for name, reason in HOPELESS.items()),
        ("folder", "is a folder: name the file to write"),
        ("fifo", "is a FIFO and would be replaced"),
        ("socket", "is a socket and would be replaced"),
        ("/dev/null", "is a device and would be replaced"),
        ("fifo/a", "cannot be written .fifo is a FIFO, not a folder"),
    ],
)
def test_an_output_file_that_cannot_be_written(cluttered: set[Path], name: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        check_output_file(name, "--json")
    assert str(caught.value).startswith(f"--json {printable(name)} ")
    assert set(Path().rglob("*")) == cluttered


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *HOPELESS.items(),
        ("notes.md", "notes.md is a file, not a folder"),
        ("fifo", "fifo is a FIFO, not a folder"),
        ("/dev/null", "is a device, not a folder"),
    ],
)
def test_an_output_folder_that_cannot_be_written(cluttered: set[Path], name: str, said: str) -> None:
    with pytest.raises(InputError, match=f"cannot be written .*({said}).*: choose another path") as caught:
        make_output_folder(name, "--output")
    assert str(caught.value).startswith(f"--output {printable(name)} ")
    assert set(Path().rglob("*")) == cluttered


@pytest.mark.parametrize("name", ["notes.md", "new.txt", "folder/new.txt", "a/b/new.txt", "\udcff\x1b\n"])
def test_an_output_file_that_can_be_written_is_not_made_yet(cluttered: set[Path], name: str) -> None:
    check_output_file(name, "--json")
    check_output_folder(f"{name}.d", "--output")
    assert set(Path().rglob("*")) == cluttered
    assert Path("notes.md").read_text() == "mine"


def test_an_output_folder_comes_with_the_parents_that_were_missing(cluttered: set[Path]) -> None:
    assert make_output_folder("folder/a/b", "--output") == [Path("folder/a/b"), Path("folder/a")]
    assert make_output_folder("folder/a", "--output") == []
    Path("folder/a/c").mkdir()
    remove_empty([Path("folder/a/b"), Path("folder/a")])
    assert set(Path().rglob("*")) - cluttered == {Path("folder/a"), Path("folder/a/c")}
