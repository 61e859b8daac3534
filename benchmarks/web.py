"""Time packs in Node.js: the module for browsers and onnxruntime-web with float32. Time the example page in Chromium.

    python benchmarks/web.py --module build/web --ort node_modules/onnxruntime-web
        [--model timm:deit_tiny_patch16_224] [--bits w4a4 w8a8] [--calls 30] [--scalar-calls 2]
        [--page demo deit_tiny:FOLDER] [--realbench DIR] [--pictures 100] [--visits 5] [--work DIR] [--json F]

--module: the folder with adalog.mjs and adalog.wasm, which CMake builds. --ort: the folder of the npm package
onnxruntime-web. A timm model has random weights, and is quantized as in `runtime.py`.

Every way runs one image at a time, on one thread, in one process per model. The ways take turns. The level "scalar"
runs in a process of its own, because it takes many times longer. "milliseconds" has the least and the median time of a
call. V8 compiles better code during the first calls, so the least time is the time after that. "bytes" has the size of
each file.

--page: models for the page at the first of --bits; a folder and its images (--realbench) are those of `realbench.py`.
Each visit is a new browser with an empty profile, which opens the page and gets a picture as soon as the page is
loaded. "first_answer" has the milliseconds from the navigation to the answer. The last visit goes on with more
pictures: "answer" is the median of the milliseconds that the page shows, and "same_class" is the number of pictures
whose first class is that of `adalog.run`, which resizes with Pillow. --work keeps the artifacts for later runs.

The script prints one JSON object and saves it as benchmarks/results/web.json, or as F.
"""

from benchmarks.browser import Browser, example_site, served
from benchmarks.publish import RESULTS, publish
from benchmarks.realbench import RealBench
from benchmarks.runtime import SEED, Files, load_case, quantized

import argparse
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

import adalog.run
from adalog import Calibration, Config, Preprocessing, demo, export
from adalog.inputs import zoo
from adalog.study.doctor import machine

SCRIPT = Path(__file__).with_suffix(".mjs")


def measure(ways: list[dict[str, Any]], calls: int, module: Path, ort: Path) -> dict[str, dict[str, float]]:
    """Return the least and the median milliseconds of each way."""
    command = ["node", str(SCRIPT), str(module / "adalog.mjs"), str(ort), str(calls)]
    done = subprocess.run(command, input=json.dumps(ways), capture_output=True, text=True, check=True)
    return {
        name: {"least": round(min(times), 2), "median": round(median(times), 2)}
        for name, times in json.loads(done.stdout).items()
    }


def compare(spec: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model."""
    case = load_case(spec, pretrained=False)
    shape = list(case.timed.shape[1:])
    with TemporaryDirectory() as name:
        folder = Path(name)
        float32 = Files(case.model, case.timed, folder).onnx()
        ways: list[dict[str, Any]] = []
        for bits in options.bits:
            artifact = folder / f"{bits}.safetensors"
            quantized(case, bits, artifact)
            pack = artifact.with_suffix(".adalog")
            pack.write_bytes(export.to_pack(artifact, (1,)))
            ways.append({"name": f"wasm {bits}", "file": str(pack), "level": "wasm", "shape": shape})
        scalar = [{**way, "name": way["name"].replace("wasm", "scalar"), "level": "scalar"} for way in ways]
        ways.append({"name": "onnxruntime-web float32", "file": str(float32), "level": None, "shape": shape})
        milliseconds = measure(ways, options.calls, options.module, options.ort)
        milliseconds |= measure(scalar, options.scalar_calls, options.module, options.ort)
        sizes = {way["name"].removeprefix("wasm "): Path(way["file"]).stat().st_size for way in ways}
    return {"milliseconds": milliseconds, "bytes": sizes}


def page_case(
    spec: str, bits: str, options: argparse.Namespace, folder: Path
) -> tuple[Path, Preprocessing, list[Path]]:
    """Write a model's pack, and return it with its preprocessing and the pictures to classify."""
    artifact = (options.work or folder) / f"page-{spec.partition(':')[0]}-{bits}.safetensors"
    if spec == "demo":
        preprocessing = zoo.load_model("demo", pretrained=True).prepared
        if not artifact.exists():
            images = demo.calibration_images()[:32]
            Calibration(demo.load_model(), images, seed=SEED).quantize(Config.preset(bits)).save(artifact)
        names = [f"class {number}" for number in range(10)]
        pixels = demo.test_images()[0][: options.pictures].permute(0, 2, 3, 1)
        pixels = (pixels * torch.tensor(preprocessing.std) + torch.tensor(preprocessing.mean)) / preprocessing.rescale
        pictures = [folder / f"{number}.png" for number in range(len(pixels))]
        for path, values in zip(pictures, pixels.round().to(torch.uint8), strict=True):
            Image.fromarray(values.numpy()).save(path)
    else:
        bench = RealBench.of(options.realbench, spec)
        preprocessing = bench.preprocessing
        if not artifact.exists():
            images = bench.calibration_images(SEED)
            Calibration(bench.model, images, seed=SEED).quantize(Config.preset(bits)).save(artifact)
        names = [f"class {number}" for number in range(1000)]
        queries = torch.nonzero(~bench.support).flatten()[: options.pictures].tolist()
        pictures = [Path(path) for path in bench.images.select(queries).paths]
    pack = folder / "model.adalog"
    pack.write_bytes(export.to_pack(artifact, (1,), asdict(preprocessing), names))
    return pack, preprocessing, pictures


def visit(spec: str, bits: str, options: argparse.Namespace) -> dict[str, Any]:
    """Open the example page with one model, and classify pictures there."""
    rows = "document.querySelectorAll('tbody tr')"
    shown = "[document.querySelector('tbody td').textContent, parseFloat(document.getElementById('time').textContent)]"
    with TemporaryDirectory() as name:
        folder = Path(name)
        pack, preprocessing, pictures = page_case(spec, bits, options, folder)
        site = example_site(options.module, folder / "site")
        for path in (pack, *pictures):
            shutil.copy(path, site)
        first_answers: list[float] = []
        answers: list[tuple[str, float]] = []
        with served(site) as address:
            for number in range(options.visits):
                browser = Browser(folder / f"profile-{number}")
                try:
                    browser.open(address)
                    for path in pictures if number == options.visits - 1 else pictures[:1]:
                        browser.value("document.querySelector('tbody').replaceChildren()")
                        browser.drop(path.name)
                        elapsed = browser.wait(f"{rows}.length || document.getElementById('error').textContent")
                        if path == pictures[0]:
                            first_answers.append(elapsed)
                        answers.append(tuple(browser.value(shown)))
                    text = browser.value("document.getElementById('model').textContent")
                finally:
                    browser.close()
        wanted = wanted_classes(pack, preprocessing, pictures)
        answers = answers[options.visits - 1 :]
        same = sum(answer == f"class {number}" for (answer, _), number in zip(answers, wanted, strict=True))
        return {
            "first_answer": {"least": min(first_answers), "median": median(first_answers), "most": max(first_answers)},
            "answer": median(time for _, time in answers),
            "pictures": len(pictures),
            "same_class": same,
            "text": text,
            "bits": bits,
            "bytes": pack.stat().st_size,
        }


def wanted_classes(pack: Path, preprocessing: Preprocessing, pictures: Sequence[Path]) -> list[int]:
    """Return the first class that `adalog.run` gives each picture."""
    model = adalog.run.load(pack)
    return [int(model(preprocessing(Image.open(path))[None].numpy()).argmax()) for path in pictures]


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", type=Path, required=True)
    parser.add_argument("--ort", type=Path, required=True)
    parser.add_argument("--model", nargs="+", default=["timm:deit_tiny_patch16_224"])
    parser.add_argument("--bits", nargs="+", default=["w4a4", "w8a8"])
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--scalar-calls", type=int, default=2)
    parser.add_argument("--page", nargs="*", default=[])
    parser.add_argument("--realbench", type=Path, help="folder of images for --page NAME:FOLDER")
    parser.add_argument("--pictures", type=int, default=100, help="pictures that the page classifies")
    parser.add_argument("--visits", type=int, default=5, help="new browsers that open each page")
    parser.add_argument("--work", type=Path, help="folder that keeps the artifacts of the pages")
    parser.add_argument("--json", type=Path, default=RESULTS / "web.json")
    options = parser.parse_args()
    options.module, options.ort = options.module.resolve(), options.ort.resolve()
    versions = {
        "node": subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip(),
        "onnxruntime-web": json.loads((options.ort / "package.json").read_text())["version"],
    }
    module = {name: (options.module / name).stat().st_size for name in ("adalog.mjs", "adalog.wasm")}
    result = {"machine": machine(), "versions": versions, "seed": SEED, "module_bytes": module}
    models = {spec: compare(spec, options) for spec in options.model}
    pages = {spec.partition(":")[0]: visit(spec, options.bits[0], options) for spec in options.page}
    publish({**result, "models": models, "pages": pages}, options.json)


if __name__ == "__main__":
    main()
