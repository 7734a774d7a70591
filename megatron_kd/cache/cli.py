"""`megatron-kd cache inspect | verify | stats | merge | repair`.

Results go to stdout, progress to stderr. The exit code is 1 where a cache is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_kd.cache.inspect import Decode, inspect
from megatron_kd.cache.mend import merge, repair
from megatron_kd.cache.schema import CacheError
from megatron_kd.cache.stats import stats
from megatron_kd.cache.verify import verify

_SECONDS_BETWEEN_LINES = 5.0


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Register the subcommands; each sets `run`, to be called with the parsed arguments."""
    command = _add(commands, "inspect", _inspect, "manifest, completeness, and a few positions with the top entries")
    command.add_argument("--samples", type=int, nargs="*", default=[0], metavar="N", help="samples to show (default 0)")
    command.add_argument("--positions", type=int, default=5, help="positions of each (default 5)")
    command.add_argument("--entries", type=int, default=5, help="entries of each position (default 5)")
    command.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer that turns ids into text")

    command = _add(commands, "verify", _verify, "decode every object and recompute every checksum")
    command.add_argument("--threads", type=int, help="blocks checked at once (default: one a core)")

    command = _add(commands, "stats", _stats, "probability covered, labels, the teacher's loss, bytes by array")
    command.add_argument("--blocks", type=int, help="look at no more than so many blocks (default: all)")
    command.add_argument("--png", type=Path, metavar="FILE", help="where to draw them")

    command = _add(commands, "merge", _merge, "copy blocks from caches of the same manifest", "target")
    command.add_argument("sources", nargs="+", metavar="SOURCE", help="caches to copy from, in order of preference")

    _add(commands, "repair", _repair, "mark damaged blocks missing, so that a resumed writer fills them")


def _add(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], None],
    purpose: str,
    url: str = "url",
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=purpose, description=purpose)
    command.add_argument(url, metavar=url.upper(), help="a folder or any fsspec URL")
    command.add_argument(
        "--storage-options", type=_json_object, default={}, metavar="JSON", help="passed to fsspec, e.g. an endpoint"
    )
    command.set_defaults(run=lambda arguments: _report_errors(run, arguments))
    return command


def _report_errors(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    try:
        run(arguments)
    except (CacheError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error


def _inspect(arguments: argparse.Namespace) -> None:
    decode = _load_decoder(arguments.tokenizer) if arguments.tokenizer else None
    print(
        inspect(
            arguments.url,
            arguments.storage_options,
            arguments.samples,
            arguments.positions,
            arguments.entries,
            decode,
        )
    )


def _verify(arguments: argparse.Namespace) -> None:
    report = verify(arguments.url, arguments.storage_options, arguments.threads, _progress("verify"))
    print(report)
    if not report.ok:
        raise SystemExit(1)


def _stats(arguments: argparse.Namespace) -> None:
    found = stats(arguments.url, arguments.storage_options, arguments.blocks, _progress("stats"))
    print(found)
    if arguments.png:
        found.plot(arguments.png)
        print(f"\n{arguments.png}")


def _merge(arguments: argparse.Namespace) -> None:
    merged = merge(arguments.target, arguments.sources, arguments.storage_options, _progress("merge"))
    print(merged)
    if merged.missing:
        raise SystemExit(1)


def _repair(arguments: argparse.Namespace) -> None:
    report, marked = repair(arguments.url, arguments.storage_options, _progress("repair"))
    print(report)
    print(f"marked missing: {', '.join(map(str, marked)) or 'none'}; leftover files removed: {len(report.leftovers)}")
    if marked or report.missing:
        print("resume the writer to fill what is missing")


def _load_decoder(folder: str) -> Decode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(ids))


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text} is not a JSON object such as {{"anon": true}}')
    return value


def _progress(what: str) -> Callable[[int, int], None]:
    """One `key=value` line every few seconds, and one at the end of long work."""
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES or (done == total and last > started):
            last = now
            left = (now - started) / done * (total - done)
            print(f"{what} blocks={done}/{total} left={left:.0f}s", file=sys.stderr, flush=True)

    return show
