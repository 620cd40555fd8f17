"""Run about 1,900 bad inputs: ``python tests/hostile/bad_inputs.py [--group NAME] [--match TEXT]``.

Prints a table and every failure with its output; exit code 1 if any case failed. ``--every 5`` runs a fifth of them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.hostile import battery  # noqa: E402

MODULES = (
    *("annotations", "panoptic", "images", "classifiers", "checkpoints", "configs", "folders", "commands", "api"),
    *("formats", "operators"),
)
PRELOADED = (
    *("tools.train_net", "tools.predict", "tools.check_data"),
    *("tools.convert_checkpoint", "tools.plan", "tools.replay_capture", "tools.analyze", "tools.make_sample_data"),
    *("matplotlib.pyplot", "pycocotools.cocoeval", "torchvision", "timm", "detr_bf.plugins", "detr_bf.interop"),
    *("tools.convert_data", "detr_bf.data.formats"),
)


def preload() -> None:
    """Import the modules that the cases need before forking, without computations, which would start threads."""
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    from tests.hostile.images import text_bomb
    from tests.hostile.panoptic import bomb

    torch.set_num_threads(1)
    bomb()
    text_bomb()


def make_fixtures(folder: Path) -> None:
    """Make the fixtures in a separate process, because torch's threads do not survive a fork."""
    child = battery.fork()
    if child == 0:
        code = 70
        try:
            from tests.hostile.fixtures import make_fixtures as make

            os.environ["DETR_BF_HOME"] = str(folder.parent / "cache")
            with open(folder.parent / "fixtures.log", "w") as log:  # noqa: PTH123
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            make(folder)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"the fixtures could not be made:\n{(folder.parent / 'fixtures.log').read_text()[-3000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the battery and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", action="append", metavar="NAME", help="only the cases of this group; repeatable")
    parser.add_argument("--match", metavar="TEXT", help="only cases whose title holds this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th case of each module")
    parser.add_argument("--module", action="append", metavar="NAME", help="read the cases from here; default all")
    parser.add_argument("--seconds", type=float, metavar="X", help="time limit of a call, instead of that of each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result of each case")
    parser.add_argument("--list", action="store_true", help="only print the titles")
    parser.add_argument("--verbose", action="store_true", help="print every case as it ends")
    options = parser.parse_args(arguments)
    chosen = list(chosen_cases(options))
    if options.list:
        print("\n".join(case.title for case in chosen))
        return 0
    preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = Path(tempfile.mkdtemp(prefix="bad_inputs_")).resolve()
    try:
        (scratch / "fixtures").mkdir()
        if not options.module or set(options.module) <= set(MODULES):
            make_fixtures(scratch / "fixtures")

        def report(verdict: battery.Verdict) -> None:
            if not verdict.passed:
                print(verdict, flush=True)
            elif options.verbose:
                print(f"passed {verdict.case} ({verdict.outcome}, {verdict.seconds:.2f} s)", flush=True)

        verdicts = battery.run_battery(chosen, scratch / "fixtures", scratch, report)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps([vars(verdict) for verdict in verdicts], indent=1))
    print(battery.table(verdicts))
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def chosen_cases(options: argparse.Namespace) -> Iterator[battery.Case]:
    """Yield the selected cases; titles must be unique."""
    titles: set[str] = set()
    for name in options.module or MODULES:
        for number, case in enumerate(importlib.import_module(f"tests.hostile.{name}").cases()):
            assert case.title not in titles, f"two cases are called {case.title}"
            titles.add(case.title)
            wanted = number % options.every == 0 and (not options.group or case.group in options.group)
            if wanted and (not options.match or options.match in case.title):
                yield case if options.seconds is None else replace(case, seconds=options.seconds)


if __name__ == "__main__":
    sys.exit(main())
