"""Time the example page in headless Chromium.

    python benchmarks/page.py --module build/web [--model demo deit_tiny:FOLDER] [--realbench DIR] [--bits w4a4]
        [--pictures 200] [--visits 5] [--work DIR] [--json F]

--module: the folder with adalog.mjs and adalog.wasm, which CMake builds. A folder and its images (--realbench) are
those of `realbench.py`. 32 images calibrate each model.

Each visit is a new browser with an empty profile, which opens the page and gets a picture as soon as the page is
loaded; a server on this machine serves the files. "first_answer" has the milliseconds from the navigation to the
answer. The last visit goes on with more pictures: "answer" is the median of the milliseconds that the page shows, and
"same_class" is the number of pictures whose first class is that of `adalog.run`. "load" is the number of processes that
ran or waited. --work keeps the artifacts for later runs.
"""

from benchmarks.browser import Browser, example_site, serve
from benchmarks.publish import RESULTS, publish
from benchmarks.realbench import RealBench

import argparse
import os
import shutil
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

SEED = 0


def load_case(spec: str, options: argparse.Namespace, folder: Path) -> tuple[Path, Preprocessing, list[Path]]:
    """Write a model's pack, and return it with its preprocessing and the pictures to classify."""
    artifact = (options.work or folder) / f"{spec.partition(':')[0]}-page-{options.bits}.safetensors"
    if spec == "demo":
        loaded = zoo.load_model("demo", pretrained=True)
        network, preprocessing, classes = loaded.module, loaded.rgb_preprocessing, 10
        calibrating = demo.calibration_images()[:32]
        pixels = demo.test_images()[0][: options.pictures].permute(0, 2, 3, 1)
        pixels = (pixels * torch.tensor(preprocessing.std) + torch.tensor(preprocessing.mean)) / preprocessing.rescale
        pictures = [folder / f"{number}.png" for number in range(len(pixels))]
        for path, values in zip(pictures, pixels.round().to(torch.uint8), strict=True):
            Image.fromarray(values.numpy()).save(path)
    else:
        bench = RealBench.of(options.realbench, spec)
        network, preprocessing, classes = bench.model, bench.preprocessing, 1000
        calibrating = bench.calibration_images(SEED)
        pictures = [Path(path) for path in bench.queries(options.pictures).paths]
    if not artifact.exists():
        Calibration(network, calibrating, seed=SEED).quantize(Config.preset(options.bits)).save(artifact)
    names = [f"class {number}" for number in range(classes)]
    pack = folder / "model.adalog"
    pack.write_bytes(export.to_pack(artifact, (1,), asdict(preprocessing), names))
    return pack, preprocessing, pictures


def visit(spec: str, options: argparse.Namespace) -> dict[str, Any]:
    """Open the example page with one model, and classify pictures there."""
    rows = "document.querySelectorAll('tbody tr')"
    shown = "[document.querySelector('tbody td').textContent, parseFloat(document.getElementById('time').textContent)]"
    with TemporaryDirectory() as name:
        folder = Path(name)
        pack, preprocessing, pictures = load_case(spec, options, folder)
        site = example_site(options.module, folder / "site")
        for path in (pack, *pictures):
            shutil.copy(path, site)
        first_answers: list[float] = []
        answers: list[tuple[str, float]] = []
        with serve(site) as address:
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
        expected = classify(pack, preprocessing, pictures)
        answers = answers[options.visits - 1 :]
        same = sum(answer == f"class {number}" for (answer, _), number in zip(answers, expected, strict=True))
        return {
            "model": spec.partition(":")[0],
            "bits": options.bits,
            "first_answer": {"least": min(first_answers), "median": median(first_answers), "most": max(first_answers)},
            "answer": median(time for _, time in answers),
            "pictures": len(pictures),
            "same_class": same,
            "text": text,
            "bytes": pack.stat().st_size,
        }


def classify(pack: Path, preprocessing: Preprocessing, pictures: Sequence[Path]) -> list[int]:
    """Return the first class that `adalog.run` gives each picture."""
    model = adalog.run.load(pack)
    return [int(model(preprocessing(Image.open(path))[None].numpy()).argmax()) for path in pictures]


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", type=Path, required=True)
    parser.add_argument("--model", nargs="+", default=["demo"])
    parser.add_argument("--realbench", type=Path, help="folder of images for --model NAME:FOLDER")
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--pictures", type=int, default=200, help="pictures that the page classifies")
    parser.add_argument("--visits", type=int, default=5, help="new browsers that open each page")
    parser.add_argument("--work", type=Path, help="folder that keeps the artifacts")
    parser.add_argument("--json", type=Path, default=RESULTS / "page.json")
    options = parser.parse_args()
    module = {name: (options.module / name).stat().st_size for name in ("adalog.mjs", "adalog.wasm")}
    rows = [visit(spec, options) for spec in options.model]
    result = {"rows": rows, "module_bytes": module, "seed": SEED, "load": os.getloadavg(), "machine": machine()}
    publish(result, options.json)


if __name__ == "__main__":
    main()
