"""What our search costs and leaves, beside the released code's search written down directly (`direct.py`).

    python benchmarks/search.py --model timm:deit_tiny_patch16_224 --blocks 1 --images 32 [--data DIR] [--work DIR]
    python benchmarks/search.py --model demo | --model realbench:DIR
    python benchmarks/search.py --full | --scaling | --golden DIR
    python benchmarks/search.py --model demo --ablation

Every site is searched twice on the same operands, with the same quantizers to choose from: by `direct`, which makes a
whole product for each candidate, and by ours, with as many candidates (6 steps of 128, 3 rounds) and again as it comes
("default"). The norms are folded once, by the released rule, for both. Seconds are of the processor, one thread, of
each site's search alone; what both need first (the forward that sites are seen in, the folds) is in neither. For both,
glibc is told to keep freed memory (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) instead of returning it to the kernel. A loss is
the mean square error of the site's output, a ratio ours over direct's; held out: the same quantizers on other images.
`peak_rss_bytes` is the largest resident set during either, the model and what all sites saw on both sets of images
included (`before`: without any search).

A timm model has random weights and may be cut to its first blocks: it is there for its costs. Its images are smooth
noise, or those of --data. `demo` is the bundled model on bundled images; `realbench` see `realbench.py`.

--full: `adalog.quantize` as it comes, on the whole model, in a process of its own with memory as glibc has it.
--scaling: the cost of our search of a ViT of one block (heads of 64) by images, width and candidates a step; a figure.
--ablation: what each part of our search is worth: without it, the error of all sites over the default's, on the images
that calibrate and held out.
--golden: whether the direct search gives the outputs of the released code; see `golden.py`, exit code 1 where not.

The floor is what no exact search saves: one float forward, and, at the speed of this machine's matrix products, the
second moments of either operand that the other's search needs (or the product itself where that is cheaper) and one
product to judge what was found.

Prints one JSON object and saves it as benchmarks/results/search-*.json. --work DIR keeps finished parts and goes on
from there; start with an empty one where the library has changed.
"""

import ctypes
import math
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, TypeVar
from unittest import mock

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import adalog
import golden
import realbench
from adalog import Calibration, Config, Search
from adalog.choices import ReleasedSearch
from adalog.cli import progress_bar
from adalog.files import write_whole
from adalog.inputs import demo
from adalog.inputs.images import Preprocessing, find_images
from adalog.inputs.zoo import load_model
from adalog.quantize import sample_images
from adalog.search import released
from adalog.search.bounds import search_product
from adalog.search.operand import Operand
from adalog.search.product import Found
from adalog.study.doctor import machine
from adalog.study.tables import kept
from direct import Direct
from publish import RESULTS, publish

SEARCHES = {"equal": Search(steps=5, rounds=3), "default": Search()}  # a grid and 5 steps are the released code's 6
CHEAP = Search(init=(4, 2), parents=1, steps=0, rounds=1)
IMAGES, WIDTHS, POINTS = (8, 16, 32, 64, 128), (192, 384, 768), (32, 64, 128, 256, 512)  # of --scaling
BASE = {"images": 32, "width": 192, "points": 128}

Result = TypeVar("Result")


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, the images that calibrate it, and others."""

    model: nn.Module
    images: Tensor
    held_out: Tensor


def load_case(spec: str, blocks: int, count: int, data: Path | None, seed: int) -> Case:
    """blocks: how many of the first ones are left; 0: all."""
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
    """Images of mean 0 and deviation 1, large features stronger than small ones, as in photographs."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 3, *size)
    side = 2
    while side <= max(size):
        octave = torch.randn(count, 3, side, side, generator=generator)
        images += F.interpolate(octave, size, mode="bilinear", align_corners=False) / side**0.5
        side *= 2
    return (images - images.mean()) / images.std()


# --- how it is measured ----------------------------------------------------------------------------------------------


def keep_memory() -> None:
    """Tell glibc not to return freed memory to the kernel, whose pages would be faulted in again and again."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(parameter, 1 << 30)


def peak_bytes() -> int | None:
    """The most that was resident; None where the system does not say."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return None if found is None else 1024 * int(found[1])


def measured(run: Callable[[], Result]) -> tuple[dict[str, Any], Result]:
    """What it costs: {"seconds", "peak_rss_bytes"}, seconds of the processor. Memory kept from before is given back."""
    library, reset = ctypes.CDLL(None), Path("/proc/self/clear_refs")
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    peak = reset.exists()
    if peak:
        reset.write_text("5")  # the most that was resident is counted from here
    start = time.process_time()
    result = run()
    seconds = time.process_time() - start
    return {"seconds": seconds, "peak_rss_bytes": peak_bytes() if peak else None}, result


def least_seconds(run: Callable[[], object], times: int = 3) -> float:
    """Of the processor, after a first time that does not count."""
    run()
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


@torch.no_grad()
def forward_seconds(case: Case) -> float:
    return least_seconds(lambda: case.model(case.images))


def gemm_gflops() -> float:
    """Of the processor on a product of matrices that fit in its cache."""
    left, right, out = torch.ones(1024, 768), torch.ones(768, 512), torch.empty(1024, 512)
    return 2 * left.numel() * 512 / least_seconds(lambda: torch.mm(left, right, out=out), 10) / 1e9


def irreducible_flops(left: Operand, right: Operand) -> int:
    """See the first lines."""
    rows, inner, columns = left.values.shape[-2], left.values.shape[-1], right.values.shape[-2]
    product = rows * inner * columns
    searched = [(left, columns), (right, rows)]
    moments = sum(min(others * inner**2, product) for operand, others in searched if not operand.is_float)
    return 2 * math.prod(left.values.shape[:-2]) * (product + moments)


def floor(flops: int, forward: float, gflops: float, ours: float) -> dict[str, float]:
    """over_floor: our search with the forward that it needs, over the least."""
    products = flops / gflops / 1e9
    return {
        "forward_seconds": forward,
        "product_flops": flops,
        "gemm_gflops": gflops,
        "product_seconds": products,
        "seconds": forward + products,
        "over_floor": (ours + forward) / (forward + products),
    }


# --- ours beside direct ----------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_site(calibration: Calibration, held_out: Calibration, config: Config, name: str) -> dict[str, Any]:
    """Both searches of the product that a site belongs to, and what their quantizers leave."""
    runs: list[tuple[Operand, dict[str, Any]]] = []

    def directly(role: str, left: Operand, right: Operand, search: ReleasedSearch) -> Found:
        direct = Direct()
        cost, found = measured(lambda: direct.search_product(role, left, right, search))
        runs.append((left, {**cost, "candidates": direct.candidates, "flops": direct.flops}))
        return found

    with mock.patch.object(released, "search_product", directly):
        (reference,) = calibration.search(config, [name])

    def errors(found: Found) -> tuple[float, float]:
        searched = replace(reference, found=found)
        return searched.mean_square_error(), held_out.judge(searched, config).mean_square_error()

    theirs = errors(reference.found)
    row: dict[str, Any] = {
        "sites": [site.name for site in reference.sites],
        "direct": next(cost for left, cost in runs if left is reference.left),  # of the format that won
        "irreducible_flops": irreducible_flops(reference.left, reference.right),
    }
    for kind, search in SEARCHES.items():
        left, right = replace(reference.left), replace(reference.right)  # new ones, that know nothing
        cost, found = measured(partial(search_product, left, right, search))
        pairs = zip(errors(found), theirs, strict=True)
        ratios = [1.0 if ours == other else ours / other for ours, other in pairs]
        candidates = configured_candidates(left, right, search)
        row[kind] = {**cost, "candidates": candidates, "loss_ratio": ratios[0], "held_out_ratio": ratios[1]}
    return row


def configured_candidates(left: Operand, right: Operand, search: Search) -> int:
    """How many a search would score on the output if no round were the last before its time."""
    searches = 0 if right.is_float else 1
    if not left.is_float:
        searches += search.rounds * (1 if right.is_float else 2)
    return searches * math.prod(search.init) * (1 + search.steps)


def compare(case: Case, config: Config, key: dict[str, Any], work: Path | None, seed: int) -> dict[str, Any]:
    """All sites."""
    keep_memory()
    forward, gflops = forward_seconds(case), gemm_gflops()
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
    """`adalog.quantize` with the method's defaults, and what it is compared with. Meant for a process of its own."""
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
    forward = forward_seconds(case)
    start = time.process_time()
    calibration = Calibration(case.model, case.images)
    captured = time.process_time() - start
    operands = calibration.search(replace(config, search=CHEAP))
    flops = sum(irreducible_flops(searched.product.left, searched.product.right) for searched in operands)
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "peak_rss_bytes": peak,
        "capture_cpu_seconds": captured,  # of them: torch.export and the one forward
        "float_forwards": cpu / forward,
        "floor": floor(flops, forward, gemm_gflops(), cpu - forward),  # the forward is in the seconds
    }


def block_seconds(images: int, width: int, points: int, seed: int, config: Config) -> float:
    """Of our search of all sites of a ViT with one block on images of 224 x 224."""
    from timm.models import VisionTransformer

    torch.manual_seed(seed)
    model = VisionTransformer(embed_dim=width, depth=1, num_heads=width // 64, num_classes=1000).eval()
    calibration = Calibration(model, smooth_noise(images, (224, 224), seed), seed=seed)
    search = replace(config.search, init=first_points(points), keep=points // 8)
    return measured(lambda: calibration.search(replace(config, search=search)))[0]["seconds"]


def first_points(points: int) -> tuple[int, int]:
    """A grid of so many points, a power of 2, as square as they go: 16 x 8 of 128."""
    first = int(2 ** (points.bit_length() // 2))
    return first, points // first


def scale(config: Config, key: dict[str, Any], work: Path | None, seed: int, figure: Path) -> dict[str, Any]:
    """The cost along each axis, the others as in BASE, with the exponent of the power law that fits best."""
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
    """The slope of the straight line through the logarithms, by least squares."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, seconds))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def draw(axes: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel an axis, both scales logarithmic. Writes a PNG, whole or not at all."""
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
    """The default and what it is without one part of it, or with more of it, and the paper's reading."""
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
    configs = {name: replace(usual, search=part) for name, part in changed.items()}
    return {**configs, "adalog-paper": Config.preset(bits, "adalog-paper")}


@torch.no_grad()
def ablate(case: Case, configs: dict[str, Config], key: dict[str, Any], work: Path | None, seed: int) -> dict[str, Any]:
    """configs: the first one is what the others are compared with. {name: {"loss", "held_out", "seconds", "sites"}}."""
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
    """The direct search beside outputs of the released code."""
    model, images, settings = golden.load_folder(folder)
    calibration, files, ok = Calibration(model, images), {}, True
    with mock.patch.object(released, "search_product", Direct().search_product):
        for name, content in settings.items():
            if "method" in content:  # another's
                continue
            # The same product under the same choices is found once, under whatever name the search goes.
            files[name] = golden.compare(content, calibration.search(golden.released_config(content)))
            ok &= golden.passes(content, files[name])
    return {"ok": ok, "files": files}


def main(
    model: str = "timm:deit_tiny_patch16_224",
    blocks: Annotated[int, typer.Option(help="The first ones of a timm model; 0: all.")] = 0,
    images: int = 32,
    bits: str = "w4a4",
    data: Annotated[Path | None, typer.Option(help="A folder of images for a timm model.")] = None,
    seed: int = 0,
    work: Annotated[Path | None, typer.Option(help="Keeps finished parts.")] = None,
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
