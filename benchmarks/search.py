"""Compare adalog's search with the released code's search (`direct.py`): its cost, and the error that it leaves.

    python benchmarks/search.py --model timm:deit_tiny_patch16_224 --blocks 1 --images 32 [--data DIR] [--work DIR]
    python benchmarks/search.py --model demo | --model realbench:DIR
    python benchmarks/search.py --full | --scaling | --golden DIR
    python benchmarks/search.py --model demo --ablation

Both searches run at every site, on the same operands and with the same kinds of quantizers. The direct search computes
a whole product for each candidate in float32. It runs twice: with PyTorch alone ("direct"), and with adalog's compiled
kernels around each product ("direct_fused"). adalog's search runs four times:

    equals    six steps and three rounds, in float32, with compiled kernels, as direct_fused ("equal": true)
    default   the default: products in bfloat16 if the processor has instructions for it, and compiled kernels
    unfused   the default search in float32 and with PyTorch alone
    six       six steps and three rounds, otherwise the default; the top level of the JSON object holds this run

The fields are:

- speedup, speedup_over_fused: the seconds of direct, and of direct_fused, over the seconds of adalog's search. Seconds
  are CPU time on one thread, for the search of each site alone. They exclude the work that all searches share: the
  forward that records the sites, and the folds. Norms are folded once for all searches, by the released rule.
- loss_ratio: the mean squared error of the site's output over direct's error. "held_out" means the same quantizers on
  other images.
- peak_rss_bytes: the largest resident set during a search. It includes the model and the recorded values of all sites
  on both sets of images (`before`: without any search). glibc keeps freed memory (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).
- candidates: the number of candidates in the grids and steps of a search that never stops early.
- counts: the actual numbers. Candidates are scored on the output, on a sample of the rows or on all rows. `evaluations`
  is the sum of candidates times rows, which are the tokens of all images. FLOPs count all matrix products in adalog's
  search, and the candidates' products in direct. `bfloat16_share` is adalog's share in bfloat16. Neither
  search counts candidates that are scored by the operand's own error, without a product.
- floor: the least cost of any exact search. It is one float forward, plus the following FLOPs at the speed of matrix
  products on this machine: the second moments of each operand that the search of the other one needs (or the product
  itself if that is cheaper), and one product to evaluate the result.

A timm model has random weights and may be cut to its first blocks; use it to measure costs. Its images are smooth
noise, or the images of --data. `demo` is the bundled model on bundled images. For `realbench` see `realbench.py`.

Other options measure something else:

- --full: `adalog.quantize` with its defaults on the whole model, in a process of its own with glibc's default settings,
  and the SQNR of each site in dB.
- --scaling: how the cost of the search of a ViT with one block (heads of 64) grows with images, width and candidates
  per step. The script also draws a figure.
- --ablation: the error without each part of the search over the default's error, on the calibration images and on
  held-out images.
- --golden: compares the direct search with outputs of the released code (see `experiments/golden.py`). The exit code is
  1 if they differ too much.

--work DIR keeps finished measurements for later runs. Start with an empty folder after a change of the library.
"""

from benchmarks import realbench
from benchmarks.beside import SIX, compare
from benchmarks.direct import direct_search
from benchmarks.measure import (
    Case,
    floor,
    forward_seconds,
    gemm_gflops,
    irreducible_flops,
    keep_memory,
    measured,
    peak_bytes,
    progress_bar,
)
from benchmarks.publish import RESULTS, publish
from benchmarks.records import kept
from experiments import golden

import multiprocessing
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import adalog
from adalog import Calibration, Config, Search
from adalog._quantize import sample_images
from adalog.baselines import ReleasedSearch
from adalog.files import write_whole
from adalog.inputs import demo
from adalog.inputs.images import Preprocessing, find_images
from adalog.inputs.zoo import load_model
from adalog.study.doctor import machine

CHEAP = Search(init=(4, 2), parents=1, steps=0, rounds=1)
IMAGES, WIDTHS, POINTS = (8, 16, 32, 64, 128), (192, 384, 768), (32, 64, 128, 256, 512)  # for --scaling
BASE = {"images": 32, "width": 192, "points": 128}


# --- what is measured ------------------------------------------------------------------------------------------------


def load_case(spec: str, blocks: int, count: int, data: Path | None, seed: int) -> Case:
    """Return the case that --model names. blocks: the number of first blocks to keep; 0 keeps all."""
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
            raise typer.BadParameter(f"{spec} has no sequence of `blocks` to cut: omit --blocks")
        model.blocks = model.blocks[:blocks]
    return Case(model.eval(), images, held_out)


def smooth_noise(count: int, size: tuple[int, int], seed: int) -> Tensor:
    """Return noise of mean 0 and deviation 1 with stronger large features than small ones, as in photographs."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 3, *size)
    side = 2
    while side <= max(size):
        octave = torch.randn(count, 3, side, side, generator=generator)
        images += F.interpolate(octave, size, mode="bilinear", align_corners=False) / side**0.5
        side *= 2
    return (images - images.mean()) / images.std()


# --- the whole model, and how the cost grows -------------------------------------------------------------------------


def quantize_whole(spec: str, blocks: int, count: int, data: Path | None, seed: int, bits: str) -> dict[str, Any]:
    """Return the cost of `adalog.quantize` with its defaults, and the floor. Call this in a process of its own."""
    torch.set_num_threads(1)
    case = load_case(spec, blocks, count, data, seed)
    config = replace(Config.preset(bits), images=count, stages=())
    cpu, wall = time.process_time(), time.perf_counter()
    with progress_bar() as progress:
        task = progress.add_task("capture")

        def watch(done: int, total: int, site: str) -> None:
            progress.update(task, completed=done, total=total, description=site)

        quantized = adalog.quantize(case.model, case.images, config, seed=seed, progress=watch)
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
        "capture_cpu_seconds": captured,  # the part of torch.export and of the one forward
        "float_forwards": cpu / forward,
        "sqnr": {row.site: round(row.sqnr, 3) for row in quantized.ledger},
        "floor": floor(flops, forward, gemm_gflops(), cpu - forward),  # `cpu` includes the forward
    }


def block_seconds(images: int, width: int, points: int, seed: int, config: Config) -> float:
    """Return the CPU time of the search of all sites of a ViT with one block on images of 224 x 224."""
    from timm.models import VisionTransformer

    torch.manual_seed(seed)
    model = VisionTransformer(embed_dim=width, depth=1, num_heads=width // 64, num_classes=1000).eval()
    calibration = Calibration(model, smooth_noise(images, (224, 224), seed), seed=seed)
    search = replace(config.search, init=first_points(points), parents=points // 8)
    return measured(lambda: calibration.search(replace(config, search=search)))[0]["seconds"]


def first_points(points: int) -> tuple[int, int]:
    """Return the sides of the most nearly square grid of `points` points, a power of 2: 16 x 8 for 128."""
    first = int(2 ** (points.bit_length() // 2))
    return first, points // first


def scale(config: Config, key: dict[str, Any], work: Path | None, seed: int, figure: Path) -> dict[str, Any]:
    """Measure the cost along each axis with the others as in BASE, and fit the exponent of a power law."""
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
    """Return the slope of the straight line through the logarithms, fitted by least squares."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, seconds))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def draw(axes: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw one panel per axis with logarithmic scales, and write the figure as a PNG in one step."""
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


# --- the effect of its parts -----------------------------------------------------------------------------------------


def variants(bits: str) -> dict[str, Config]:
    """Return the default, the default with one part changed, and the search as the paper describes it."""
    usual = replace(Config.preset(bits), stages=())
    search = usual.search
    assert isinstance(search, Search)
    changed = {
        "default": search,
        "bounds within 0.1 of the values": replace(search, reach=0.1),
        "scales not refitted": replace(search, refit=False),
        "all rows in every step": replace(search, rough_rows=0),
        "6 steps and 3 rounds": SIX,
    }
    configs = {name: replace(usual, search=choice) for name, choice in changed.items()}
    return {**configs, "adalog-paper": Config.preset(bits, "adalog-paper")}


@torch.no_grad()
def ablate(case: Case, configs: dict[str, Config], key: dict[str, Any], work: Path | None, seed: int) -> dict[str, Any]:
    """Return each config's errors over the first config's: {name: {"loss", "held_out", "seconds", "sites"}}."""
    keep_memory()
    calibration, held_out = Calibration(case.model, case.images, seed=seed), Calibration(case.model, case.held_out)

    def run(config: Config) -> dict[str, Any]:
        cost, found = measured(lambda: calibration.search(config))
        sites = {
            each.sites[0].name: (each.mean_square_error(), held_out.evaluate(each, config).mean_square_error())
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
    """Compare the direct search with the outputs of the released code."""
    model, images, settings = golden.load_folder(folder)
    calibration, files, ok = Calibration(model, images), {}, True
    with mock.patch.object(ReleasedSearch, "search_product", direct_search):
        for name, content in settings.items():
            if "method" in content:  # the file is from another method
                continue
            # The calibration caches results by product and choices, so the direct search runs once for each of them.
            files[name] = golden.compare(content, calibration.search(golden.released_config(content)))
            ok &= golden.passes(content, files[name])
    return {"ok": ok, "files": files}


def main(
    model: str = "timm:deit_tiny_patch16_224",
    blocks: Annotated[int, typer.Option(help="Number of first blocks to keep; 0 keeps all.")] = 0,
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
    """Compare adalog's search with the released code's search: its cost, and the error that it leaves."""
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
        result = {**key, **scale(replace(Config.preset(bits), stages=()), key, work, seed, out.with_suffix(".png"))}
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
