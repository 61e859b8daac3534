"""What our search costs, and the error it leaves, compared with the released code's search (`direct.py`).

    python benchmarks/search.py --model timm:deit_tiny_patch16_224 --blocks 1 --images 32 [--data DIR] [--work DIR]
    python benchmarks/search.py --model demo | --model realbench:DIR
    python benchmarks/search.py --full | --scaling | --golden DIR
    python benchmarks/search.py --model demo --ablation

Every site is searched by both on the same operands, with the same quantizers to choose from. `direct` makes a whole
product for each candidate, in float32. It runs twice: by PyTorch alone ("direct"), and with the library's compiled
kernels around each product ("direct_fused"). Ours runs four times, and the JSON holds the last at its top level:

    equals    six steps and three rounds, in float32, with compiled kernels: the equal of direct_fused ("equal": true)
    default   as it comes: products in bfloat16 where the processor has instructions for them, and compiled kernels
    unfused   the same search in float32 and by PyTorch alone
    six       six steps and three rounds, else as it comes

`speedup` is the seconds of direct over ours, and `speedup_over_fused` those of direct_fused over ours. Norms are folded
once for all, by the released rule. Seconds are CPU time on one thread, for the search of each site alone; what all need
before it, the forward that observes sites and the folds, is left out. For all, glibc is told to keep freed memory
(M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) instead of returning it to the kernel. A loss is the mean square error of the
site's output, and a ratio is ours over that of direct; held out means the same quantizers on other images.
`peak_rss_bytes` is the largest resident set during a search; it includes the model and what all sites saw on both sets
of images (`before`: without any search).

`candidates` are those of the grids and steps of a search that never stops early. `counts` are what was done:
candidates that were scored on the output, on a sample of the rows or on all, and `evaluations`, candidates times rows.
Rows are tokens, those of all images together. FLOPs are those of all products of matrices that a search makes, and for
direct those of its candidates' products; `bfloat16_share` is the share of ours in bfloat16. Candidates that are scored
by an operand's own error, without a product, are not counted for either.

A timm model has random weights and may be cut to its first blocks; it serves to measure costs. Its images are smooth
noise, or those of --data. `demo` is the bundled model on bundled images; for `realbench` see `realbench.py`.

--full: `adalog.quantize` with its defaults on the whole model, in a process of its own with glibc's default memory, and
the SQNR that it leaves at each site [dB].
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
from benchmarks.beside import SIX, compare
from benchmarks.direct import Direct
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
from adalog.files import write_whole
from adalog.inputs import demo
from adalog.inputs.images import Preprocessing, find_images
from adalog.inputs.zoo import load_model
from adalog.quantize import sample_images
from adalog.search import released
from adalog.study.doctor import machine
from adalog.study.tables import kept

CHEAP = Search(init=(4, 2), parents=1, steps=0, rounds=1)
IMAGES, WIDTHS, POINTS = (8, 16, 32, 64, 128), (192, 384, 768), (32, 64, 128, 256, 512)  # for --scaling
BASE = {"images": 32, "width": 192, "points": 128}


# --- what is measured ------------------------------------------------------------------------------------------------


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
        "capture_cpu_seconds": captured,  # the share of torch.export and the one forward
        "float_forwards": cpu / forward,
        "sqnr": {row.site: round(row.sqnr, 3) for row in quantized.ledger},
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
        "6 steps and 3 rounds": SIX,
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
