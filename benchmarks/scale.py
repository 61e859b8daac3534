"""Measure what several processes of one job gain, and check that they do not change the result.

    python benchmarks/scale.py [PART]... [--times 1] [--rows ROWS] [--kills 10] [--links 50000] [--seed 0]
        [--realbench DIR] [--work DIR] [--json FILE]

The parts are as follows; without PART all of them run:

- `quantize`: `adalog quantize` of DeiT-T with random weights at W4A4, by one process of one thread, and by two ranks
  under `torchrun`. Cores of one machine may share caches and power, so the script first measures the machine's limit L:
  the time of one such run alone over the time of two independent runs at once. `wall_ratio` is the time of two ranks
  over the time of one process, multiplied by L. These times are the seconds that the command reports, from loading to
  the result. `whole` has the seconds of the whole commands, which include the import of PyTorch. `memory` is the
  largest resident set of a rank over the largest one of a single process.
- `evaluate`: compares the counts on the 2,000 test images of the bundled model by 1, 2 and 3 processes.
- `tables`: Table 1 of the bundled model at W4A4 by one process and by two, with all rows or the rows of --rows.
- `kills`: kills a rank of `quantize` or of `tables` at a random moment under --max-restarts 3, and compares the file or
  the rows with an undisturbed run. --kills is the number of runs.
- `stream`: `adalog evaluate` on a folder of 50,000 links to the 2,000 images of --realbench, or to the test images of
  the bundled model. It measures how much the resident set grows from the first tenth of the run to its end. It also
  divides the time left that the progress bar predicted after a tenth by the time that the rest really took.
- `reconstruct`: `adalog quantize` of the bundled model by `qdrop` at W3A3 with 128 images, by one process and by two
  ranks. It compares the seconds of the whole commands, multiplied by L as above, and checks that the bytes are equal.

Everything runs on the CPU, with one thread per process. Parts that do not run now stay in the file of results
unchanged; each part has its own commit.
"""

from benchmarks.publish import RESULTS, ROOT, commit, publish
from benchmarks.records import kept

import argparse
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from adalog.inputs import demo
from adalog.study.doctor import machine

MODEL = "timm:deit_tiny_patch16_224"
LINKS = 50_000
ETA = re.compile(r"eta(?:\s|\x1b\[[\d;]*m)*(\d+):(\d\d):(\d\d)")  # the pattern allows the colour codes of a terminal
_POLL = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--times", type=int, default=1, help="number of timed runs, whose medians are reported")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--links", type=int, default=LINKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default="", help="rows of the table, as for `experiments.tables --rows`")
    parser.add_argument("--realbench", type=Path, default=os.environ.get("ADALOG_REALBENCH"))
    parser.add_argument("--work", type=Path, help="folder that keeps finished parts for later runs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if odd := set(given.parts) - PARTS.keys():
        parser.error(f"unknown part: {', '.join(sorted(odd))}")
    path = RESULTS / "scale.json" if given.json is None else given.json
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in given.parts or PARTS:
        key = {"times": given.times, "kills": given.kills, "links": given.links, "seed": given.seed}
        key |= {"rows": given.rows} if given.rows else {}
        work = None if given.work is None else given.work / f"{part}.json"
        with tempfile.TemporaryDirectory() as folder:
            found[part] = kept(work, key, lambda part=part, folder=folder: PARTS[part](Path(folder), given))
        found[part] |= {"seed": given.seed, "machine": machine(), "commit": commit()}
    publish({part: found[part] for part in PARTS if part in found}, path)


# --- processes -------------------------------------------------------------------------------------------------------


def command(world: int, *arguments: object, restarts: int = 0) -> list[str]:
    """Return the command line of `adalog`, or of `experiments.tables`, on `world` processes of one thread each."""
    name, *rest = map(str, arguments)
    plain = ["-m", "experiments.tables", *rest] if name == "tables" else ["-m", "adalog", name, *rest]
    if world == 1:
        return [sys.executable, *plain]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return [sys.executable, *launcher, f"--max-restarts={restarts}", *plain]


def start(folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    packages = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    environment = {**os.environ, **quiet, "PYTHONPATH": packages}
    errors = (folder / "errors.txt").open("w")
    return subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors, text=True)


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that a launcher has started, or the process itself."""
    with suppress(OSError):
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return [int(word) for word in path.read_text().split()] or [process.pid]
    return []


def resident(pid: int, field: str = "VmHWM") -> int:
    """Return the largest resident set of a process so far in bytes, or its present one (VmRSS); 0 if it has ended."""
    with suppress(OSError):
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return 0 if found is None else 1024 * int(found[1])
    return 0


def finish(folder: Path, *processes: subprocess.Popen[str]) -> dict[str, float]:
    """Wait for all processes, and return the seconds until the last one ends and the largest resident set of any."""
    begun, peak = time.perf_counter(), 0
    while any(process.poll() is None for process in processes):
        peak = max([peak, *(resident(pid) for process in processes for pid in workers(process))])
        time.sleep(_POLL)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a run failed: {(folder / 'errors.txt').read_text()[-2000:]}")
    return {"seconds": time.perf_counter() - begun, "peak_rss_bytes": peak}


def run(folder: Path, world: int, *arguments: object) -> dict[str, float]:
    return finish(folder, start(folder, command(world, *arguments)))


def compare(folder: Path, *words: object) -> dict[str, Any]:
    """Run a command by one process, by two independent ones at once, and by two ranks; see L in the docstring above."""
    one = run(folder, 1, *words, "-o", "one")["seconds"]
    beside = finish(folder, *(start(folder, command(1, *words, "-o", name)) for name in ("left", "right")))["seconds"]
    two, limit = run(folder, 2, *words, "-o", "two")["seconds"], one / beside
    return {"wall_ratio": two / one * limit, "L": limit, "seconds": {"one": one, "beside": beside, "two": two}}


# --- parts -----------------------------------------------------------------------------------------------------------


def noise(folder: Path, count: int, seed: int) -> Path:
    """Write noise images to a folder, and return the folder."""
    draw = random.Random(seed)
    (folder / "images").mkdir()
    for number in range(count):
        Image.frombytes("RGB", (256, 256), draw.randbytes(3 * 256 * 256)).save(folder / "images" / f"{number:02}.png")
    return folder / "images"


def quantize(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    images = noise(folder, 32, given.seed)

    def words(world: int, name: str) -> list[str]:
        options = ("--no-pretrained", "--data", images, "--bits", "w4a4", "--threads", 1)
        return command(world, "quantize", MODEL, *options, "-o", f"{name}.st", "--json", f"{name}.json")

    def told(name: str) -> float:
        return float(json.loads((folder / f"{name}.json").read_text())["seconds"])

    rows = []
    for _ in range(given.times):
        alone = finish(folder, start(folder, words(1, "alone")))
        beside = finish(folder, start(folder, words(1, "left")), start(folder, words(1, "right")))
        ranks = finish(folder, start(folder, words(2, "ranks")))
        side = max(told("left"), told("right"))
        rows.append(
            {
                "alone": told("alone"),
                "beside": side,
                "ranks": told("ranks"),
                "limit": told("alone") / side,
                "ratio": told("ranks") / told("alone"),
                "whole": {"alone": alone["seconds"], "beside": beside["seconds"], "ranks": ranks["seconds"]},
                "memory": ranks["peak_rss_bytes"] / alone["peak_rss_bytes"],
                "peak_rss_bytes": ranks["peak_rss_bytes"],
            }
        )
    limit = median(row["limit"] for row in rows)
    files = [(folder / f"{name}.st").read_bytes() for name in ("alone", "left", "right", "ranks")]
    return {
        "model": MODEL,
        "wall_ratio": median(row["ratio"] for row in rows) * limit,
        "L": limit,
        "same_bytes": len(set(files)) == 1,
        "memory": max(row["memory"] for row in rows),
        "runs": rows,
    }


def evaluate(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    run(folder, 1, "quantize", "demo", "--method", "minmax", "--threads", 1, "-o", "model.st")
    found = []
    for world in (1, 2, 3):
        options = ("--executor", "native", "--threads", 1, "--json", f"{world}.json")
        run(folder, world, "evaluate", "model.st", *options)
        found.append(json.loads((folder / f"{world}.json").read_text()))
    counts = [
        {name: each[name] for name in ("images", "top1", "top5", "agreement", "lost", "gained", "p_value")}
        for each in found
    ]
    return {
        "equal_counts": all(each == counts[0] for each in counts),
        "equal_kl": len({e["kl"] for e in found}) == 1,
        "images": found[0]["images"],
        "top1": found[0]["top1"]["value"],
    }


def rows_of(path: Path) -> list[Any]:
    """Return the rows of a table without their seconds."""
    rows = json.loads(path.read_text())["rows"]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


TABLE = ("tables", 1, "--models", "demo", "--bits", "w4a4", "--jobs", 1)


def tables(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    compared = compare(folder, *TABLE, *(("--rows", given.rows) if given.rows else ()))
    equal = [rows_of(folder / f"{name}.json") == rows_of(folder / "one.json") for name in ("two", "left")]
    return {
        "rows": [row["names"][0] for row in json.loads((folder / "one.json").read_text())["rows"]],
        "wall_ratio": compared["wall_ratio"],
        "L": compared["L"],
        "equal_rows": all(equal),
        "seconds": compared["seconds"],
    }


def kills(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Kill ranks of `quantize` and `tables` in turn, and compare the results with undisturbed runs.

    A run that ends before its kill counts too; its field "running" is false.
    """
    draw, moments = random.Random(given.seed), []
    files = ("quantize", "demo", "--threads", 1)
    some = (*TABLE, "--rows", "minmax,percentile,repq-vit")
    seconds = {"quantize": run(folder, 2, *files, "-o", "whole.st")["seconds"]}
    seconds["tables"] = run(folder, 2, *some, "-o", "whole")["seconds"]
    equal = 0
    for number in range(given.kills):
        kind = ("quantize", "tables")[number % 2]
        name = f"killed{number}.st" if kind == "quantize" else f"killed{number}"
        words = command(2, *(files if kind == "quantize" else some), "-o", name, restarts=3)
        process, moment = start(folder, words), draw.uniform(0.1, 0.95) * seconds[kind]
        with suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        running = process.poll() is None
        if running:
            with suppress(ProcessLookupError, IndexError):
                os.kill(workers(process)[draw.randrange(2)], signal.SIGKILL)
        finish(folder, process)
        if kind == "quantize":
            same = (folder / name).read_bytes() == (folder / "whole.st").read_bytes()
        else:
            same = rows_of(folder / f"{name}.json") == rows_of(folder / "whole.json")
        equal += same
        moments.append({"of": kind, "second": round(moment, 2), "running": running, "equal": same})
    return {"tried": given.kills, "equal": equal, "moments": moments, "undisturbed": seconds}


def stream(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the bundled model on links to image files; the files need not be its own test images."""
    (folder / "files").mkdir()
    if given.realbench is None:
        pixels, labels = demo.test_images()
        pixels = ((pixels - pixels.amin()) / (pixels.amax() - pixels.amin()) * 255).to(torch.uint8)
        names = [folder / "files" / f"{number}.png" for number in range(len(pixels))]
        for name, each in zip(names, pixels, strict=True):
            Image.fromarray(each.permute(1, 2, 0).numpy()).save(name)
        classes = labels.tolist()
    else:
        names = sorted(path for kind in ("support", "query") for path in (Path(given.realbench) / kind).iterdir())
        classes = [number % 10 for number in range(len(names))]
    lines = ["file,label"]
    for number in range(given.links):
        source = names[number % len(names)]
        (folder / "files" / f"link{number:05}{source.suffix}").symlink_to(source.resolve())
        lines.append(f"link{number:05}{source.suffix},{classes[number % len(names)]}")
    (folder / "files" / "labels.csv").write_text("\n".join(lines))
    run(folder, 1, "quantize", "demo", "--method", "minmax", "--threads", 1, "-o", "model.st")
    options = ("--data", "files", "--executor", "native", "--threads", 1, "--json", "out.json")
    return watched(folder, command(1, "evaluate", "model.st", *options))


def watched(folder: Path, words: list[str]) -> dict[str, Any]:
    """Run a command on a terminal, and return the growth of its resident set and the prediction of its progress bar."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=follower)
    os.close(follower)
    sizes: list[tuple[float, int]] = []
    told: list[tuple[float, int]] = []  # the moment of each prediction, and the seconds left
    text = ""
    while process.poll() is None:
        sizes.append((time.time(), resident(process.pid, "VmRSS")))
        ready, _, _ = select.select([leader], [], [], 0.2)
        with suppress(OSError):  # the terminal closes with the process
            text = text[-200:] + (os.read(leader, 1 << 16).decode(errors="replace") if ready else "")
        found = ETA.findall(text)
        told += [(time.time(), 3600 * int(found[-1][0]) + 60 * int(found[-1][1]) + int(found[-1][2]))] if found else []
    os.close(leader)
    ended = time.time()
    if process.returncode:
        raise RuntimeError(f"a run failed: {text}")
    begun = told[0][0]
    tenth, foretold = next(each for each in told if each[0] - begun >= (ended - begun) / 10)
    early = max(size for moment, size in sizes if begun <= moment <= tenth)
    late = max(size for moment, size in sizes if moment >= begun)
    return {
        "images": json.loads((folder / "out.json").read_text())["images"],
        "growth_bytes": late - early,
        "peak_rss_bytes": late,
        "eta_after_a_tenth": foretold,
        "eta_over_true": foretold / max(ended - tenth, 1e-9),
        "seconds": ended - begun,
    }


def reconstruct(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Compare one process with two ranks on `qdrop`, whose reconstruction takes most of the time."""
    words = ("quantize", "demo", "--method", "qdrop", "--bits", "w3a3", "--reconstruct-images", 128, "--threads", 1)
    compared = compare(folder, *words)
    files = {(folder / name).read_bytes() for name in ("one", "left", "right", "two")}
    return compared | {"same_bytes": len(files) == 1}


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "quantize": quantize,
    "evaluate": evaluate,
    "tables": tables,
    "kills": kills,
    "stream": stream,
    "reconstruct": reconstruct,
}

if __name__ == "__main__":
    main()
