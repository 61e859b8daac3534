"""What our search costs, and the error it leaves, compared with the released code's search (`direct.py`).

    python benchmarks/search.py --model timm:deit_tiny_patch16_224 --blocks 1 --images 32 [--data DIR] [--work DIR]
    python benchmarks/search.py --model demo | --model realbench:DIR
    python benchmarks/search.py --full | --scaling | --golden DIR
    python benchmarks/search.py --model demo --ablation

Every site is searched by both on the same operands, with the same quantizers to choose from. `direct` makes a whole
product for each candidate. Ours runs twice: with as many candidates (6 steps of 128, 3 rounds), and with its defaults
("default"). Norms are folded once for both, by the released rule. Seconds are CPU time on one thread, for the search of
each site alone; what both need before it, the forward that observes sites and the folds, is left out. For both, glibc
is told to keep freed memory (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) instead of returning it to the kernel. A loss is the
mean square error of the site's output, and a ratio is ours over that of direct; held out means the same quantizers on
other images. `peak_rss_bytes` is the largest resident set during a search; it includes the model and what all sites
saw on both sets of images (`before`: without any search).

A timm model has random weights and may be cut to its first blocks; it serves to measure costs. Its images are smooth
noise, or those of --data. `demo` is the bundled model on bundled images; for `realbench` see `realbench.py`.

--full: `adalog.quantize` with its defaults on the whole model, in a process of its own with glibc's default memory.
--scaling: how the cost of our search of a ViT with one block (heads of 64) grows with images, width and candidates per
step; it also draws a figure.
--ablation: what each part of our search is worth: the error of all sites without that part over the default's, on the
calibration images and held out.
--golden: whether the direct search gives the outputs of the released code (see `golden.py`); the exit code is 1 if not.

The floor is what no exact search can save: one float forward and, at the speed of this machine's matrix products, the
second moments of each operand that the other's search needs (or the product itself where that is cheaper) and one
product to judge the result.

Prints one JSON object and saves it as benchmarks/results/search-*.json. --work DIR keeps finished measurements, which
are not repeated; start with an empty folder when the library has changed.
"""

from benchmarks import golden, realbench
from benchmarks.direct import Direct
from benchmarks.measure import (
    floor,
    forward_seconds,
    gemm_gflops,
    irreducible_flops,
    keep_memory,
    measured,
    peak_bytes,
)
from benchmarks.publish import RESULTS, publish

import math
import multiprocessing
import re
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

import adalog
from adalog import Calibration, Config, Search
from adalog.choices import ReleasedSearch
from adalog.files import write_whole
from adalog.inputs import demo
from adalog.inputs.images import Preprocessing, find_images
from adalog.inputs.zoo import load_model
from adalog.quantize import sample_images
from adalog.quantizers import Assignment
from adalog.search import released
from adalog.search.bounds import search_product
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.study.doctor import machine
from adalog.study.tables import kept

# A grid and 5 steps are what the released code counts as 6 steps.
SEARCHES = {"equal": Search(steps=5, rounds=3), "default": Search()}
CHEAP = Search(init=(4, 2), parents=1, steps=0, rounds=1)
IMAGES, WIDTHS, POINTS = (8, 16, 32, 64, 128), (192, 384, 768), (32, 64, 128, 256, 512)  # for --scaling
BASE = {"images": 32, "width": 192, "points": 128}


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, its calibration images, and held-out images."""

    model: nn.Module
    images: Tensor
    held_out: Tensor


def load_case(spec: str, blocks: int, count: int, data: Path | None, seed: int) -> Case:
    """The case that --model names. blocks: how many of the first blocks to keep; 0 keeps all."""
    kind, _, name = spec.partition(":")
    if kind == "realbench":
        model, preprocessing = realbench.load_model(Path(name)), Preprocessing(size=(224, 224), resize=256)
        found = find_images(Path(name))
        support = [index for index, path in enumerate(found.paths) if path.parent.name == "support"]
        query = sorted(set(range(len(found))) - set(support))
        images, held_out = (found.select(part).sample(count, seed).load(preprocessing) for part in (support, query))
    elif spec == "demo":
        model = demo.load_model()
        images, held_out = sample_images(demo.calibration_images(), count, seed), demo.test_images()[0][:200]
    else:
        loaded = load_model(spec, pretrained=False, seed=seed)
        model = loaded.module
        preprocessing = loaded.preprocessing or Preprocessing()
        if data is None:
            both = smooth_noise(2 * count, preprocessing.size, seed)
        else:
            both = find_images(data).sample(2 * count, seed).load(preprocessing)
        images, held_out = both[:count], both[count:]
    if blocks:
        if not isinstance(getattr(model, "blocks", None), nn.Sequential):
            raise typer.BadParameter(f"{spec} has no sequence of `blocks` to cut: leave --blocks out")
        model.blocks = model.blocks[:blocks]
    return Case(model.eval(), images, held_out)


def smooth_noise(count: int, size: tuple[int, int], seed: int) -> Tensor:
    """Images of mean 0 and deviation 1 in which large features are stronger than small ones, as in photographs."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 3, *size)
    side = 2
    while side <= max(size):
        octave = torch.randn(count, 3, side, side, generator=generator)
        images += F.interpolate(octave, size, mode="bilinear", align_corners=False) / side**0.5
        side *= 2
    return (images - images.mean()) / images.std()


def progress_bar() -> Progress:
    """A bar on standard error, and none where that is no terminal."""
    terminal = Console(stderr=True)
    return Progress(console=terminal, transient=True, disable=not terminal.is_terminal)


# --- ours beside direct ----------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_site(calibration: Calibration, held_out: Calibration, config: Config, name: str) -> dict[str, Any]:
    """The costs of both searches of a site's product, and the errors that their quantizers leave."""
    runs: list[tuple[Operand, dict[str, Any]]] = []

    def directly(product: Product, search: ReleasedSearch) -> Assignment:
        direct = Direct()
        cost, found = measured(lambda: direct.search_product(product, search))
        runs.append((product.left, {**cost, "candidates": direct.candidates, "flops": direct.flops}))
        return found

    with mock.patch.object(released, "search_product", directly):
        (reference,) = calibration.search(config, [name])

    def errors(found: Assignment) -> tuple[float, float]:
        searched = replace(reference, assignment=found)
        return searched.mean_square_error(), held_out.judge(searched, config).mean_square_error()

    theirs = errors(reference.assignment)
    row: dict[str, Any] = {
        "sites": [site.name for site in reference.sites],
        "direct": next(
            cost for left, cost in runs if left is reference.product.left
        ),  # the run with the format that won
        "irreducible_flops": irreducible_flops(reference.product.left, reference.product.right),
    }
    for kind, search in SEARCHES.items():
        left, right = (
            replace(reference.product.left),
            replace(reference.product.right),
        )  # copies, whose caches are empty
        product = replace(reference.product, left=left, right=right)
        cost, found = measured(partial(search_product, product, search))
        pairs = zip(errors(found), theirs, strict=True)
        ratios = [1.0 if ours == other else ours / other for ours, other in pairs]
        candidates = configured_candidates(left, right, search)
        row[kind] = {**cost, "candidates": candidates, "loss_ratio": ratios[0], "held_out_ratio": ratios[1]}
    return row


def configured_candidates(left: Operand, right: Operand, search: Search) -> int:
    """How many candidates a search would score on the output if it never stopped early."""
    searches = 0 if right.is_float else 1
    if not left.is_float:
        searches += search.rounds * (1 if right.is_float else 2)
    return searches * math.prod(search.init) * (1 + search.steps)


def compare(case: Case, config: Config, key: dict[str, Any], work: Path | None, seed: int) -> dict[str, Any]:
    """Both searches of all sites, summed up."""
    keep_memory()
    forward, gflops = forward_seconds(case.model, case.images), gemm_gflops()
    calibration, held_out = Calibration(case.model, case.images, seed=seed), Calibration(case.model, case.held_out)
    before, rows, done = measured(lambda: None)[0]["peak_rss_bytes"], {}, set()
    with progress_bar() as progress:
        task = progress.add_task("sites", total=len(calibration.sites))
        for site in calibration.sites:
            progress.update(task, description=site.name, completed=len(done))
            if site.name not in done:
                path = work and work / f"site-{site.name}.json"
                run = partial(measure_site, calibration, held_out, config, site.name)
                rows[site.name] = kept(path, key, run)
                done |= set(rows[site.name]["sites"])
    direct = {name: row["direct"] for name, row in rows.items()}
    flops = sum(row["irreducible_flops"] for row in rows.values())

    def summary(kind: str) -> dict[str, Any]:
        ours = {name: row[kind] for name, row in rows.items()}
        seconds = sum(row["seconds"] for row in ours.values())
        losses, unseen = ([row[name] for row in ours.values()] for name in ("loss_ratio", "held_out_ratio"))
        return {
            "speedup": sum(row["seconds"] for row in direct.values()) / seconds,
            "loss_ratio": {
                "max": max(losses),
                "geomean": geometric_mean(losses),
                "held_out_max": max(unseen),
                "held_out_geomean": geometric_mean(unseen),
            },
            "seconds": {"direct": sum(row["seconds"] for row in direct.values()), "ours": seconds},
            "candidates": {
                "direct": sum(row["candidates"] for row in direct.values()),
                "ours": sum(row["candidates"] for row in ours.values()),
            },
            "peak_rss_bytes": {
                "direct": max(row["peak_rss_bytes"] or 0 for row in direct.values()),
                "ours": max(row["peak_rss_bytes"] or 0 for row in ours.values()),
                "before": before,
            },
            "float_forwards": seconds / forward,
            "floor": floor(flops, forward, gflops, seconds),
            "sites": {
                name: {
                    "direct_seconds": direct[name]["seconds"],
                    "seconds": row["seconds"],
                    "direct_gflops": direct[name]["flops"] / direct[name]["seconds"] / 1e9,
                    "loss_ratio": row["loss_ratio"],
                    "held_out_ratio": row["held_out_ratio"],
                }
                for name, row in ours.items()
            },
        }

    total = sum(row["flops"] for row in direct.values())
    speed = total / sum(row["seconds"] for row in direct.values()) / 1e9
    return {**summary("equal"), "gflops": speed, "direct_flops": total, "default": summary("default")}


# --- the whole model, and how the cost grows -------------------------------------------------------------------------


def quantize_whole(spec: str, blocks: int, count: int, data: Path | None, seed: int, bits: str) -> dict[str, Any]:
    """The cost of `adalog.quantize` with the method's defaults, beside the floor. Call it in a process of its own."""
    torch.set_num_threads(1)
    case = load_case(spec, blocks, count, data, seed)
    config = replace(Config.preset(bits), images=count)
    cpu, wall = time.process_time(), time.perf_counter()
    with progress_bar() as progress:
        task = progress.add_task("capture")

        def watch(done: int, total: int, site: str) -> None:
            progress.update(task, completed=done, total=total, description=site)

        adalog.quantize(case.model, case.images, config, seed=seed, progress=watch)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = peak_bytes()
    forward = forward_seconds(case.model, case.images)
    start = time.process_time()
    calibration = Calibration(case.model, case.images)
    captured = time.process_time() - start
    operands = calibration.search(replace(config, search=CHEAP))
    flops = sum(irreducible_flops(searched.product.left, searched.product.right) for searched in operands)
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "peak_rss_bytes": peak,
        "capture_cpu_seconds": captured,  # the share of torch.export and the one forward
        "float_forwards": cpu / forward,
        "floor": floor(flops, forward, gemm_gflops(), cpu - forward),  # these seconds include the forward
    }


def block_seconds(images: int, width: int, points: int, seed: int, config: Config) -> float:
    """CPU time of our search of all sites of a ViT with one block on images of 224 x 224."""
    from timm.models import VisionTransformer

    torch.manual_seed(seed)
    model = VisionTransformer(embed_dim=width, depth=1, num_heads=width // 64, num_classes=1000).eval()
    calibration = Calibration(model, smooth_noise(images, (224, 224), seed), seed=seed)
    search = replace(config.search, init=first_points(points), parents=points // 8)
    return measured(lambda: calibration.search(replace(config, search=search)))[0]["seconds"]


def first_points(points: int) -> tuple[int, int]:
    """The sides of a grid of `points` points, a power of 2, as square as possible: 16 x 8 for 128."""
    first = int(2 ** (points.bit_length() // 2))
    return first, points // first


def scale(config: Config, key: dict[str, Any], work: Path | None, seed: int, figure: Path) -> dict[str, Any]:
    """The cost along each axis, with the others as in BASE, and the exponent of the power law that fits best."""
    keep_memory()
    axes = {"images": IMAGES, "width": WIDTHS, "points": POINTS}
    found: dict[str, dict[str, Any]] = {}
    with progress_bar() as progress:
        task = progress.add_task("", total=sum(map(len, axes.values())))
        for axis, values in axes.items():
            seconds = []
            for value in values:
                sizes = BASE | {axis: value}
                name = "-".join(map(str, sizes.values()))
                progress.update(task, description=f"{axis} {value}")
                path = work and work / f"scaling-{name}.json"
                run = partial(block_seconds, **sizes, seed=seed, config=config)
                seconds.append(kept(path, key | sizes, run))
                progress.advance(task)
            found[axis] = {"values": list(values), "seconds": seconds, "exponent": exponent(values, seconds)}
    draw(found, figure)
    return {"base": BASE, "axes": found, "exponents": {axis: row["exponent"] for axis, row in found.items()}}


def exponent(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """The slope of the straight line through the logarithms, fitted by least squares."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, seconds))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def draw(axes: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw one panel per axis with logarithmic scales, and write a PNG, whole or not at all."""
    import io

    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(11, 3.6), layout="constrained")
    for axis, (name, row) in zip(figure.subplots(1, len(axes)), axes.items(), strict=True):
        axis.loglog(row["values"], row["seconds"], "o-", color="#0072B2")
        axis.set_xticks(row["values"], [str(value) for value in row["values"]], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_xlabel("candidates a step" if name == "points" else name)
        axis.set_title(f"seconds ~ {name}^{row['exponent']:.2f}", fontsize=12)
    figure.axes[0].set_ylabel("CPU seconds of one block's search")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_whole(path, picture.getvalue())


# --- what its parts are worth ----------------------------------------------------------------------------------------


def variants(bits: str) -> dict[str, Config]:
    """The default, the default without or with more of one part, and the search as the paper describes it."""
    usual = Config.preset(bits)
    search = usual.search
    assert isinstance(search, Search)
    changed = {
        "default": search,
        "bounds within 0.1 of the values": replace(search, reach=0.1),
        "scales not refitted": replace(search, refit=False),
        "all rows in every step": replace(search, rough_rows=0),
        "6 steps and 3 rounds": SEARCHES["equal"],
    }
    configs = {name: replace(usual, search=choice) for name, choice in changed.items()}
    return {**configs, "adalog-paper": Config.preset(bits, "adalog-paper")}


@torch.no_grad()
def ablate(case: Case, configs: dict[str, Config], key: dict[str, Any], work: Path | None, seed: int) -> dict[str, Any]:
    """The errors of each config over those of the first: {name: {"loss", "held_out", "seconds", "sites"}}."""
    keep_memory()
    calibration, held_out = Calibration(case.model, case.images, seed=seed), Calibration(case.model, case.held_out)

    def run(config: Config) -> dict[str, Any]:
        cost, found = measured(lambda: calibration.search(config))
        sites = {
            each.sites[0].name: (each.mean_square_error(), held_out.judge(each, config).mean_square_error())
            for each in found
        }
        return {"seconds": cost["seconds"], "sites": sites}

    result: dict[str, Any] = {}
    with progress_bar() as progress:
        for name, config in progress.track(configs.items()):
            label = re.sub(r"[^a-z0-9]+", "-", name)
            result[name] = kept(
                work and work / f"ablation-{label}.json", key | {"config": config.to_json()}, partial(run, config)
            )
    usual = next(iter(result.values()))["sites"]
    for row in result.values():
        ratios = [[value / base for value, base in zip(row["sites"][name], usual[name], strict=True)] for name in usual]
        row["loss"], row["held_out"] = (geometric_mean(list(each)) for each in zip(*ratios, strict=True))
    return result


def check_golden(folder: Path) -> dict[str, Any]:
    """Compare the direct search with outputs of the released code."""
    model, images, settings = golden.load_folder(folder)
    calibration, files, ok = Calibration(model, images), {}, True
    with mock.patch.object(released, "search_product", Direct().search_product):
        for name, content in settings.items():
            if "method" in content:  # of another method
                continue
            # A calibration caches results by product and choices, so the direct search runs once for each.
            files[name] = golden.compare(content, calibration.search(golden.released_config(content)))
            ok &= golden.passes(content, files[name])
    return {"ok": ok, "files": files}


def main(
    model: str = "timm:deit_tiny_patch16_224",
    blocks: Annotated[int, typer.Option(help="How many of the first blocks to keep; 0 keeps all.")] = 0,
    images: int = 32,
    bits: str = "w4a4",
    data: Annotated[Path | None, typer.Option(help="Folder of images for a timm model.")] = None,
    seed: int = 0,
    work: Annotated[Path | None, typer.Option(help="Folder that keeps finished measurements.")] = None,
    full: bool = False,
    scaling: bool = False,
    ablation: bool = False,
    golden_files: Annotated[Path | None, typer.Option("--golden")] = None,
    json_out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    torch.set_num_threads(1)
    kind, _, name = model.partition(":")
    label = "golden" if golden_files else "scaling" if scaling else kind if kind != "timm" else name
    out = json_out or RESULTS / f"search-{label}{'-full' * full}{'-ablation' * ablation}.json"
    key = {"adalog": adalog.__version__, "bits": bits, "seed": seed}
    given = {
        "model": kind if kind == "realbench" else model,
        "blocks": blocks,
        "images": images,
        "data": data and data.resolve().name,
        **key,
    }
    result: dict[str, Any]
    if golden_files is not None:
        result = check_golden(golden_files)
    elif scaling:
        result = {**key, **scale(Config.preset(bits), key, work, seed, out.with_suffix(".png"))}
    elif full:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = {**given, **pool.apply(quantize_whole, (model, blocks, images, data, seed, bits))}
    else:
        case = load_case(model, blocks, images, data, seed)
        if ablation:
            result = {**given, "variants": ablate(case, variants(bits), given, work, seed)}
        else:
            config = Config.preset(bits, "adalog-released")
            result = {**given, **compare(case, config, given, work, seed)}
    publish({**result, "machine": machine()}, out)
    sys.exit(0 if result.get("ok", True) else 1)


if __name__ == "__main__":
    typer.run(main)
