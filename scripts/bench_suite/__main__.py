"""`scripts/bench`: runs the cases one after another, prints a table and writes JSON."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_suite.cases import CASES, ROOT, Row, Task, run

OUT = ROOT / "docs" / "data" / "bench.json"
HOSTS = ("hooked", "bridge")
# The lengths at which each case is measured on each host, and those that `--quick` leaves.
_ON_EACH_HOST = {
    "report": (128, 512, 2048),
    "report-interventions": (128, 512),
    "report-memory": (2048,),
    "report-peak": (8192,),
}
# Cases that one host is enough for: they are of captured arrays, or only one host allows them.
_ONCE = {
    "dense-time": ("hooked", 512),
    "dense-memory": ("hooked", 512),
    "shift": ("hooked", 4096),
    "growth": ("bridge", 8192),
    "long": ("bridge", 32768),
    "help": ("hooked", 0),
    "inspect": ("hooked", 0),
}
_QUICK = {"report": 512, "report-interventions": 512, "shift": 1024, "growth": 2048}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; 1 where a case failed."""
    asked = _parser().parse_args(arguments)
    if asked.child is not None:
        print(json.dumps(run(Task(**json.loads(asked.child)))))  # noqa: T201
        return 0
    on = {"machine": machine(), "versions": versions()}
    kept: list[Row] = []
    if asked.update and asked.out.exists():
        before = json.loads(asked.out.read_text(encoding="utf-8"))
        kept = before["rows"]
        if any(before[name] != here for name, here in on.items()):
            print(  # noqa: T201
                f"bench: {asked.out} was measured on another machine or with other versions, so "
                "its rows cannot stand beside new ones; leave --update out, or give another --out",
                file=sys.stderr,
            )
            return 1
    rows: list[Row] = []
    for task in tasks(asked):
        print(f"{task.case} {task.tokens or ''} {task.host} ...", file=sys.stderr)  # noqa: T201
        rows.append(_in_fresh_process(task))
        print(line(rows[-1]), flush=True)  # noqa: T201
    if not rows:
        print("bench: nothing to run; see --help", file=sys.stderr)  # noqa: T201
        return 1
    measured = {_key(row) for row in rows}
    content = {**on, "rows": [row for row in kept if _key(row) not in measured] + rows}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in row for row in rows))


def tasks(asked: argparse.Namespace) -> Iterator[Task]:
    """The cases to run, in the order of the table."""
    common = {"model": asked.model, "rounds": asked.rounds}
    if asked.shortest:
        common["shortest"] = asked.shortest
    if asked.layers:
        common["layers"] = asked.layers
    for case in CASES:
        if asked.only and case not in asked.only:
            continue
        if case in _ON_EACH_HOST:
            hosts, lengths = asked.hosts, _ON_EACH_HOST[case]
        else:
            host, length = _ONCE[case]
            hosts, lengths = [host] if host in asked.hosts else asked.hosts[:1], (length,)
        if asked.quick:
            if case not in _QUICK and lengths != (0,) and not case.startswith("dense"):
                continue
            lengths = (_QUICK.get(case, lengths[-1]),)
        if asked.lengths and lengths != (0,):
            lengths = tuple(asked.lengths)
        for tokens in lengths:
            for host in hosts:
                yield Task(case, host, tokens, **common)


def _in_fresh_process(task: Task) -> Row:
    """The row of a case; where it fails, what it said last."""
    command = [sys.executable, "-m", "bench_suite", "--child", json.dumps(dataclasses.asdict(task))]
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        row = {"case": task.case, "host": task.host, "tokens": task.tokens, "error": said[-1]}
    else:
        row = json.loads(done.stdout.splitlines()[-1])
    return {**row, "date": date, "revision": revision()}


def _environment() -> dict[str, str]:
    scripts = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": scripts, "HF_HUB_OFFLINE": "1"}


def machine() -> dict[str, Any]:
    """What it was measured on."""
    import torch

    cpu, memory = platform.processor() or platform.machine(), None
    info, sizes = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if info.exists():
        named = [row for row in info.read_text().splitlines() if row.startswith("model name")]
        cpu = named[0].split(":", 1)[1].strip() if named else cpu
    if sizes.exists():
        memory = round(int(sizes.read_text().split()[1]) * 1024 / 1e9, 1)
    return {
        "cpu": cpu, "cores": os.cpu_count(), "memory_gb": memory, "system": platform.system(),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """What was measured, and with what."""
    packages = ("lens-rope", "torch", "transformers", "transformer-lens", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **found}


def revision() -> str | None:
    """The commit that is checked out; with `+` where files other than results differ from it."""

    def git(*arguments: str) -> str | None:
        said = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return said.stdout.strip() if said.returncode == 0 else None

    commit = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", ".", f":!{OUT.parent.relative_to(ROOT)}")
    return f"{commit}+" if commit and changed else commit


def line(row: Row) -> str:
    """One row for the terminal."""
    head = f"{row['case']:<21} {row['host']:<7} {row['tokens'] or '':>6}  "
    if "error" in row:
        return head + row["error"]
    other = "" if row["other"] is None else f" over {row['other']:.4g}"
    judged = "" if row["limit"] is None else f" limit {row['limit']:.3g}"
    verdict = {True: " met", False: " NOT MET", None: ""}[row["met"]]
    return f"{head}{row['value']:.4g} ({row['measure']}: {row['ours']:.4g}{other}){judged}{verdict}"


def _key(row: Row) -> tuple[Any, ...]:
    return row["case"], row["host"], row["tokens"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures lens_rope against what a user would do instead. Run it on an idle "
        "machine: each case is a process of its own, and all of it takes about an hour.",
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="run these cases only")
    parser.add_argument("--lengths", nargs="+", type=int, help="prompts of this many tokens")
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--rounds", type=int, default=3, help="times that each side runs (3)")
    parser.add_argument("--quick", action="store_true", help="short prompts, the main cases")
    parser.add_argument("--model", default="smollm2-135m", help="what load_model takes")
    parser.add_argument("--shortest", type=int, help="shortest prompt of growth (512)")
    parser.add_argument("--layers", type=int, help="layers that long reads (6)")
    parser.add_argument("--update", action="store_true", help="keep the other rows of the file")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file (docs/data/bench.json)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
