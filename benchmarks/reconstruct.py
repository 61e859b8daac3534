"""Measure how much accuracy the stages after the search recover, on the bundled model or on a real pretrained one.

    python benchmarks/reconstruct.py --model demo|realbench|deit_tiny:FOLDER [--realbench DIR] --bits w2a2 w3a3 w4a4
        [--stages search correction end-to-end-alone reconstruction end-to-end] [--images 32 128 1024] [--seeds 3]
        [--first 0] [--training drop=0.5 rate=0.006] [--work DIR] [--json FILE]

The search is the search of `adalog` on 32 images. The further stages are those of `adalog++`, and trainings of blocks:

- correction: runs once for each number of images of --images, and leaves out every eighth of them, which the training
  holds out. The first 32 images are the images of the search.
- end-to-end-alone: the training of `adalog++`. It starts from the correction with the most images, and uses the same
  images.
- reconstruction (of blocks): starts from the same correction. Only if it is asked for.
- end-to-end: the training of `adalog++`, but from the reconstruction of blocks. Only if it is asked for.

The models are:

- demo: the bundled model. The images are a random subset of 1,024 training images. Results are for 2,000 test images.
- realbench: TinyViT (see `realbench.py`). The images are a random subset of the 1,000 support images. Results are for
  the 1,000 queries.
- NAME:FOLDER: a classifier (see `realbench.py`), with the same images.

Labels are used only to evaluate. A row's `error` is the difference of the outputs from the float model's on the
evaluated images, by which a calibration judges its stages too: the KL divergence with the best factor of the logits, or
the relative error of features. --training changes fields of `Reconstruction` for end-to-end-alone. Each row has the CPU
seconds of its stage alone, on one thread. A run that was killed continues in the folder of --work, and the seconds of
its parts add up.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.realbench import RealBench
from benchmarks.records import kept, packed

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adalog import Calibration, Config, Correction, QuantizedModel, Reconstruction, Resources
from adalog.calibration.compensate import correct
from adalog.calibration.importance import row_weights
from adalog.calibration.judge import logit_error, relative_error
from adalog.calibration.partial import Partial, fingerprint
from adalog.calibration.reconstruct import reconstruct, without_held_out
from adalog.calibration.stages import with_mirror_images
from adalog.choices import Fitting, kind_to_json
from adalog.device import default_memory
from adalog.files import write_whole
from adalog.graph.rewrite import Assigned
from adalog.inputs import demo
from adalog.inputs.images import draw_indices
from adalog.model import quickest
from adalog.study.doctor import machine
from adalog.study.evaluate import predict, score
from adalog.version import source_hash

IMAGES = 32  # number of images of the search
_MEMORY = default_memory(torch.device("cpu")) // 2  # bytes that a calibration allows a stage by default
ALONE = "end-to-end-alone"
STAGES = ("search", "correction", ALONE)
BLOCKS = ("reconstruction", "end-to-end")  # a training of blocks, and one of the whole model after it


@dataclass(frozen=True)
class Case:
    """A model with images to fit and labelled images to evaluate it on.

    pool: the number of images that can be fitted.
    drawn: maps a count and a seed to a random subset of these images.
    outputs: maps a network and a number of threads to its outputs for all images.
    classes_of: maps these outputs to predictions for the labelled images. labels: the true classes of these images.
    error: maps these outputs and those of the float model to their difference on the labelled images.
    """

    model: nn.Module
    pool: int
    drawn: Callable[[int, int], Tensor]
    outputs: Callable[[Callable[[Tensor], Any], int], Tensor]
    classes_of: Callable[[Tensor], Tensor]
    error: Callable[[Tensor, Tensor], float]
    labels: Tensor

    def classes(self, network: Callable[[Tensor], Any], jobs: int) -> Tensor:
        return self.classes_of(self.outputs(network, jobs))


class Stage:
    """A stage that is running: the file of its finished parts, and the CPU seconds of all its runs so far."""

    def __init__(self, work: Path, name: str):
        self.path = work / f"{name}-{source_hash()[:12]}.partial"
        self._clock = self.path.with_suffix(".seconds")
        self._size = self._size_now()
        self._before = float(self._clock.read_text()) if self._clock.exists() else 0.0
        self._start = time.process_time()

    def partial(self, images: Tensor) -> Partial:
        """Return the finished parts of this correction or reconstruction on these images."""
        return Partial(self.path, fingerprint(self.path.name, [("images", images)]))

    def seconds(self) -> float:
        return self._before + time.process_time() - self._start

    def progress(self, done: int, total: int, name: str) -> None:
        """Print the progress, and save the seconds whenever the file of finished parts has grown."""
        print(f"{name}: {done} of {total}, {self.seconds():.0f} CPU s", file=sys.stderr)
        if (size := self._size_now()) > self._size:
            self._size = size
            write_whole(self._clock, str(self.seconds()).encode())

    def _size_now(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0


def load_case(name: str, folder: Path | None) -> Case:
    if name == "demo":
        images, labels = demo.test_images()
        pool = demo.unlabelled_images()
        return Case(
            demo.load_model(),
            len(pool),
            lambda count, seed: pool[draw_indices(len(pool), count, seed)],
            lambda network, jobs: predict(network, images, jobs=jobs),
            lambda outputs: outputs.argmax(dim=1),
            logit_error,
            labels,
        )
    assert folder is not None
    bench = RealBench.of(folder, None if name == "realbench" else name)
    measure = logit_error if bench.classifies else relative_error
    return Case(
        bench.model,
        int(bench.support.sum()),
        lambda count, seed: bench.calibration_images(seed, count),
        bench.outputs,
        bench.classes_of,
        lambda outputs, reference: measure(outputs[~bench.support], reference[~bench.support]),
        bench.truth,
    )


def choices_of(stage: str, images: int) -> Fitting:
    """Return the settings of a stage after the search, with this number of images."""
    correction, training = Config.preset("w4a4", "adalog++").with_fitted_images(images).stages
    if stage == "reconstruction":
        return Reconstruction(images=images)
    chosen = correction if stage == "correction" else training
    assert isinstance(chosen, Fitting)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, realbench (TinyViT) or NAME:FOLDER of a classifier")
    parser.add_argument("--realbench", type=Path, default=os.environ.get("ADALOG_REALBENCH"))
    parser.add_argument("--bits", nargs="+", default=["w2a2", "w3a3", "w4a4"])
    parser.add_argument("--stages", nargs="+", choices=(*STAGES, *BLOCKS), default=STAGES)
    parser.add_argument("--images", nargs="+", type=int, default=[32, 128, 1024], help="numbers of images to fit")
    parser.add_argument("--seeds", type=int, default=1, help="number of random subsets of images")
    parser.add_argument("--first", type=int, default=0, help="seed of the first subset")
    parser.add_argument("--training", nargs="+", default=[], help="fields of the training, as NAME=VALUE")
    parser.add_argument("--work", type=Path, help="folder that keeps finished parts for later runs")
    parser.add_argument("--json", type=Path)
    resumably(parser.parse_args(), measure)


def resumably(given: argparse.Namespace, measure: Callable[[argparse.Namespace, Path], None]) -> None:
    """Measure on one thread, with --work or a temporary folder; exit with a message if TinyViT is missing."""
    if given.model != "demo" and (given.realbench is None or not Path(given.realbench).is_dir()):
        print(f"skipped: folder {given.realbench} does not exist; pass --realbench DIR or set ADALOG_REALBENCH")
        sys.exit(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        measure(given, work)


def measure(given: argparse.Namespace, work: Path) -> None:
    """Measure all rows, and publish them. work: the folder of finished rows and of finished parts of a row."""
    case = load_case(given.model, given.realbench and Path(given.realbench))
    model = given.model.partition(":")[0]
    counts = sorted({min(images, case.pool) for images in given.images})

    def finished(name: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        return kept(work / f"{model}-{name}.json", {"model": model, **key}, make)

    reference = case.outputs(case.model, 1)
    predicted = case.classes_of(reference)
    changed = {name: json.loads(value) for name, _, value in (field.partition("=") for field in given.training)}
    suffix = "".join(f"-{name}-{value}" for name, value in changed.items())

    def choose(stage: str, images: int) -> Fitting:
        choices = choices_of(stage, images)
        return replace(choices, **changed) if stage == ALONE else choices

    def staged(name: str) -> Stage:
        return Stage(work, f"{model}-{name}")

    def images_of(choices: Fitting, seed: int) -> Sequence[Tensor]:
        assert choices.images is not None
        images = [case.drawn(choices.images, seed)]
        return with_mirror_images(images) if choices.mirrored else images

    @cache
    def searched(bits: str, seed: int) -> tuple[Calibration, Assigned, float]:
        calibration = Calibration(case.model, case.drawn(IMAGES, seed), seed=seed)
        stage = staged(f"{bits}-search-{IMAGES}-{seed}")
        alone = replace(Config.preset(bits), stages=())
        assigned = calibration.assign(alone, Resources(partial=stage.path, progress=stage.progress))
        return calibration, assigned, stage.seconds()

    @cache
    def fitted(bits: str, seed: int, images: int) -> tuple[Assigned, float]:
        calibration, assigned, _ = searched(bits, seed)
        stage, choices = staged(f"{bits}-correction-{images}-{seed}"), choices_of("correction", images)
        drawn = without_held_out(images_of(choices, seed))
        done = stage.partial(drawn[0])
        assert isinstance(choices, Correction)
        program = calibration.program
        weights = row_weights(program, calibration.images, calibration.groups, choices.importance, seed)
        assigned = correct(
            program, drawn, assigned, choices, weights, memory=_MEMORY, partial=done, progress=stage.progress
        )
        return assigned, stage.seconds()

    @cache
    def trained(bits: str, seed: int, images: int, stage: str) -> tuple[Assigned, float]:
        program = searched(bits, seed)[0].program
        first = stage in ("reconstruction", ALONE)
        start, _ = fitted(bits, seed, images) if first else trained(bits, seed, images, "reconstruction")
        running, choices = staged(f"{bits}-{stage}-{images}-{seed}{suffix}"), choose(stage, images)
        drawn = images_of(choices, seed)
        done = running.partial(drawn[0])
        assert isinstance(choices, Reconstruction)
        assigned = reconstruct(
            *(program, drawn, start, choices, Resources(progress=running.progress)),
            seed=seed,
            memory=_MEMORY,
            partial=done,
        )
        return assigned, running.seconds()

    def measured(bits: str, seed: int, stage: str, images: int) -> dict[str, Any]:
        calibration, assigned, seconds = searched(bits, seed)
        if stage == "correction":
            assigned, seconds = fitted(bits, seed, images)
        elif stage != "search":
            assigned, seconds = trained(bits, seed, images, stage)
        quantized = QuantizedModel(calibration.build_program(assigned, Config.preset(bits)))
        runs, executor, at_once = quickest(quantized, 1)
        outputs = case.outputs(runs, at_once)
        answers = case.classes_of(outputs)
        result = score(answers, case.labels, predicted)
        assert result.top1 is not None
        print(f"{bits} {stage}, {images} images, seed {seed}: {100 * result.top1.value:.2f} %", file=sys.stderr)
        return {
            "bits": bits,
            "stage": stage,
            "images": images,
            "seed": seed,
            "top1": result.top1.value,
            "agreement": result.agreement,
            "error": case.error(outputs, reference),
            "cpu_seconds": round(seconds, 1),
            "executor": executor or "fake quantization",
            "right": packed(answers == case.labels),
        }

    rows = []
    for seed, bits in product(range(given.first, given.first + given.seeds), given.bits):
        kinds = [("search", IMAGES)] if "search" in given.stages else []
        kinds += [("correction", images) for images in counts if "correction" in given.stages]
        kinds += [(stage, counts[-1]) for stage in (ALONE, *BLOCKS) if stage in given.stages]
        for stage, images in kinds:
            key = {"config": Config.preset(bits).to_json(), "stage": stage, "images": images, "seed": seed}
            key |= {"training": changed} if stage == ALONE else {}
            make = partial(measured, bits, seed, stage, images)
            name = f"{bits}-{stage}-{images}-{seed}" + (suffix if stage == ALONE else "")
            rows.append(finished(name, key, make))
        for each in (searched, fitted, trained):
            each.cache_clear()
    fp32 = float((predicted == case.labels).double().mean())
    training = choose(ALONE, counts[-1])
    assert isinstance(training, Reconstruction)
    steps = {"blocks": Reconstruction().iterations, "model": training.iterations}
    result = {"fp32": fp32, "judged": len(predicted), "iterations": steps, "rows": rows}
    result["training"] = kind_to_json(training)
    result["machine"] = machine()
    publish(result, given.json or RESULTS / f"reconstruct-{model}.json")


if __name__ == "__main__":
    main()
