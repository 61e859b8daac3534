"""Measure what the search of large images costs, and how many rows of an operand it has to read.

    python -m benchmarks.large [--realbench DIR] [--size 1024] [--images 8] [--caps 14,15,16,17,18] [--work DIR]

The models are TinyViT-5M with random weights on images of noise of 1024 x 1024, which is the image encoder of MobileSAM
without its neck, and with --realbench also the pretrained TinyViT on 32 of the folder's images of 224 x 224. For each
model the script reports the CPU seconds and the peak memory of capture and of the search of all sites at W6A6, with the
default memory. A search reads at most about `operands._ROWS` rows of an operand: every n-th one, if there are n times
as many. For other limits (`--caps`, as powers of two) the script searches the tenth of the sites with the most rows,
evaluates the quantizers on all rows, and reports by how many decibels they are worse than the quantizers from all rows.
`most_rows` says how many rows the largest operand of other models has.
"""

from benchmarks.measure import measured
from benchmarks.publish import RESULTS, publish
from benchmarks.realbench import IMAGES, RealBench
from benchmarks.records import kept

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any
from unittest import mock

import timm
import torch
import typer
from torch import Tensor, nn

from adalog import Calibration, Config
from adalog.calibration import operands
from adalog.calibration.observe import Observations
from adalog.inputs import demo
from adalog.study.doctor import machine

ARCHITECTURE = "tiny_vit_5m_224"
SHARE = 10  # one in so many sites is compared
# Memory [bytes] in which the operands and the search of every site fit whole, for the comparison.
WIDE = 8 << 30
Case = tuple[nn.Module, Tensor]


def main(
    realbench: Annotated[Path | None, typer.Option(envvar="ADALOG_REALBENCH")] = None,
    size: int = 1024,
    images: int = 8,
    caps: str = "14,15,16,17,18",
    work: Path | None = None,
    json_out: Annotated[Path, typer.Option("--json")] = RESULTS / "large.json",
    seed: int = 0,
) -> None:
    """Measure the search of large images, and save it as benchmarks/results/large.json."""
    torch.set_num_threads(1)
    powers = sorted(map(int, caps.split(",")))
    cases: dict[str, Callable[[], Case]] = {}
    if images:
        cases[f"random weights, {size}"] = partial(random_case, size, images, seed)
    if realbench is not None:
        cases["pretrained, 224"] = partial(pretrained_case, realbench, seed)
    rows = [measure_case(name, make, powers, work, seed) for name, make in cases.items()]
    result = {
        "model": ARCHITECTURE,
        "bits": "w6a6",
        "seed": seed,
        "default_rows": operands._ROWS,
        "rows": rows,
        "most_rows": {name: most_rows(*make()) for name, make in SMALL.items()},
        "machine": machine(),
    }
    publish(result, json_out)


def random_case(size: int, images: int, seed: int) -> Case:
    """Return TinyViT with random weights, and images of noise."""
    torch.manual_seed(seed)
    model = timm.create_model(ARCHITECTURE, num_classes=0).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # timm begins with zeros in some, which leave nothing to measure
    return model, torch.randn(images, 3, size, size, generator=torch.Generator().manual_seed(seed))


def pretrained_case(folder: Path, seed: int) -> Case:
    """Return the pretrained TinyViT, and real images."""
    bench = RealBench.of(folder)
    return bench.model, bench.calibration_images(seed)


SMALL: dict[str, Callable[[], Case]] = {
    "demo": lambda: (demo.load_model(), demo.calibration_images()[:IMAGES]),
    "deit_tiny_patch16_224": lambda: (
        timm.create_model("deit_tiny_patch16_224").eval(),
        torch.zeros(IMAGES, 3, 224, 224),
    ),
}


def measure_case(
    name: str, make: Callable[[], Case], powers: list[int], work: Path | None, seed: int
) -> dict[str, Any]:
    """Return the cost of a model's search, and the loss of each limit."""
    model, images = make()
    config = replace(Config.preset("w6a6"), images=len(images), stages=())
    key = {"case": name, "images": len(images), "seed": seed}

    def file(part: str) -> Path | None:
        return None if work is None else work / f"large-{name.replace(', ', '-').replace(' ', '-')}-{part}.json"

    cost = kept(file("cost"), {**key, "rows": operands._ROWS}, lambda: cost_of(model, images, config, seed))
    compared = Compared(model, images, config, seed)
    whole = kept(file("all"), key, lambda: compared.search(1 << 62))
    limits = []
    for power in powers:
        sites = kept(file(f"2-{power}"), {**key, "power": power}, lambda power=power: compared.search(1 << power))
        limits.append({"rows": 1 << power, **summary(sites, whole), "sites": sites})
    size = list(images.shape[-2:])
    return {"case": name, "images": len(images), "image_size": size, **cost, "all_rows": whole, "limits": limits}


def cost_of(model: nn.Module, images: Tensor, config: Config, seed: int) -> dict[str, Any]:
    """Return the cost of capture, and of the search of all sites."""
    capture, calibration = measured(lambda: Calibration(model, images, seed=seed))
    search, sites = measured(lambda: {each.group.name: each.seconds for each in calibration.iter_search(config)})
    return {"capture": capture, "search": search, "site_seconds": sites}


def most_rows(model: nn.Module, images: Tensor) -> int:
    """Return the number of rows of the largest operand of a model's sites."""
    return max(rows_of(Calibration(model, images)).values())


def rows_of(calibration: Calibration) -> dict[str, int]:
    """Return the number of rows of each product's left operand."""
    program, shapes = calibration.program, calibration._shapes
    return {group.name: operands._product_rows(program, group, shapes) for group in calibration.groups}


@dataclass(frozen=True)
class Compared:
    """The tenth of a model's sites with the most rows, to be searched on some of their rows."""

    model: nn.Module
    images: Tensor
    config: Config
    seed: int

    @cached_property
    def whole(self) -> Calibration:
        """The calibration whose searches read all rows."""
        with mock.patch.object(operands, "_ROWS", 1 << 62):
            return Calibration(self.model, self.images, seed=self.seed, memory=WIDE)

    def search(self, rows: int) -> dict[str, dict[str, float]]:
        """Search the sites on about this many rows, and evaluate their quantizers on all rows."""
        counts, few, sites = rows_of(self.whole), limited(self.whole, rows), {}
        names = sorted(counts, key=lambda name: -counts[name])[: -(-len(counts) // SHARE)]
        for each in few.iter_search(self.config, names):
            sides = each.assignment.left, each.assignment.right
            sites[each.group.name] = {
                "one_in": few._observed.stride(few._requests[each.group.name].names),
                "sqnr": self.whole.evaluate(each, self.config).product.assign(*sides).sqnr,
                "seconds": each.seconds,
            }
        return sites


def limited(whole: Calibration, rows: int) -> Calibration:
    """Return a calibration of the same capture whose searches read about this many rows."""
    result, program = copy.copy(whole), whole.program
    with mock.patch.object(operands, "_ROWS", rows):
        result._requests = {
            group.name: operands.request_of(program, group, whole.sites, whole._shapes) for group in whole.groups
        }
    result._observed = Observations(program, whole.images, result._requests.values(), WIDE // 2)
    result._shared = copy.copy(whole._shared)  # it keeps the importance of the rows, which is the same
    result._shared.observed = result._observed
    result._searched, result._assigned, result._seconds = {}, {}, {}
    return result


def summary(sites: dict[str, dict[str, float]], whole: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the mean and the largest loss of SQNR over the sites [dB], and the CPU seconds of their searches."""
    losses = [whole[name]["sqnr"] - site["sqnr"] for name, site in sites.items()]
    seconds = sum(site["seconds"] for site in sites.values())
    return {"mean_loss_db": mean(losses), "max_loss_db": max(losses), "seconds": seconds}


if __name__ == "__main__":
    typer.run(main)
