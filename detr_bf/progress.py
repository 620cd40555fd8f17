"""Progress bars with the time left: live on a terminal, in a log file one refresh every half minute.

Of several processes the main one shows them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from tqdm import tqdm

from detr_bf import distributed
from detr_bf.text import printable

SECONDS_IN_A_LOG = 30.0
_bars: WeakSet[tqdm] = WeakSet()


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """A tqdm bar over ``items``, on standard error; ``options`` are tqdm's own, such as ``total`` and ``unit``."""
    if options.get("desc") is not None:
        options["desc"] = printable(options["desc"])
    pace = {} if sys.stderr.isatty() else {"mininterval": SECONDS_IN_A_LOG, "maxinterval": SECONDS_IN_A_LOG}
    bar = tqdm(items, **{"dynamic_ncols": True, "disable": not distributed.is_main(), **pace, **options})
    _bars.add(bar)
    return bar


def close_bars() -> None:
    """Close the bars that an exception has left open, so that its message gets a line of its own."""
    for bar in list(_bars):
        bar.close()
