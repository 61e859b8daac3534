"""Compare the speed of adalog's compiled kernels with other inference engines, on the CPU.

    python benchmarks/runtime.py --model timm:deit_small_patch16_224 --threads 1 --batch 1 8 --bits w4a4 w8a8:uniform
        --peers torch,torch-bf16,onnxruntime,onnxruntime-int8,openvino,openvino-int8,openvino-int8-bf16 [--json F]
    python benchmarks/runtime.py --model demo | --model realbench:DIR [--work DIR]

All engines take turns on the same images, so that other load on the machine affects all of them alike. Each row has the
median CPU time of the whole process, the median wall time, the bytes of the weights, the CPU time from loading to the
first output, and the relative error of the logits against the float model. For `realbench` it is the error of the
features. "ratios" has the time of adalog over the time of each other engine. The field "by" names the clock: CPU time
on one thread, wall time on several.

`demo` and `realbench` (see `realbench.py`) have trained weights. adalog and the engines that need calibration images
get the same 32 images, and adalog runs its default search. "accuracy" has the top-1 of each engine and its agreement
with the float model, at the largest batch, on 2,000 images for `demo` and 1,000 for `realbench`. A timm model has
random weights unless --pretrained is given. Its images are noise, the other engines calibrate on eight of them, and
adalog's search is short. Values change the time only through the widths of the tables, which calibration chooses
("tables"). A full search may leave smaller errors.

Install the other engines with `pip install -e ".[timm,peers]"`; "absent" lists the engines that cannot run. With
several threads, the script pauses before each run until the threads of the previous engine stop spinning. PyTorch has
one thread while adalog runs.

The engines are:

- torch, torch-bf16: PyTorch in eager mode.
- onnxruntime: the exported float model.
- onnxruntime-int8: static quantization by ONNX Runtime (QDQ), with one scale per channel of a weight.
- onnxruntime-int8-dynamic: dynamic quantization by ONNX Runtime, with the scales of activations from each input.
- openvino: the same float model, with one stream and the latency hint.
- openvino-bf16: the same, and OpenVINO may compute in bfloat16.
- openvino-int8: static quantization by NNCF for transformers, with float32 for the rest.
- openvino-int8-bf16: the same, with bfloat16 for the rest.

All exported models compute attention as products and a softmax, since OpenVINO takes longer for the fused operation.
--level avx512vnni, avxvnni or avx2 limits the kernels of adalog, and oneDNN in PyTorch and OpenVINO, to the
instructions of an older processor. The level avx512vnni includes bfloat16, which AMD supports since Zen 4. ONNX Runtime
ignores the limit.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.realbench import RealBench

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adalog import Calibration, Config, QuantizedModel, Search, export, library, load
from adalog._quantize import sample_images
from adalog.errors import one_line
from adalog.inputs import demo
from adalog.inputs.zoo import load_model
from adalog.quantizers import LogQuantizer
from adalog.study.bench import REST, in_turn, milliseconds, on_one_thread
from adalog.study.doctor import machine, version_of
from adalog.study.evaluate import predict, score
from adalog.version import source_hash

IMAGES = 8  # number of noise images that calibrate other engines if weights are random
REAL_IMAGES = 32  # number of images that calibrate all engines if weights are trained
SEED = 0
# Levels of adalog's kernels, by oneDNN's names.
LIMITS = {"avx2": "AVX2", "avxvnni": "AVX2_VNNI", "avx512vnni": "AVX512_CORE_BF16"}

Run = Callable[[Any], Any]  # maps images in the form of an engine to logits, as a tensor or an array


@dataclass(frozen=True)
class Made:
    """An engine that is ready to run a model.

    take: maps images to the input of `run`.
    load_cpu_seconds: CPU time from loading to the first output, or None if it was not measured.
    """

    run: Run
    take: Callable[[Tensor], Any]
    load_cpu_seconds: float | None
    weight_bytes: int

    def logits(self, images: Tensor) -> Tensor:
        """Return a copy of the logits, because some engines write all outputs to the same memory."""
        return torch.as_tensor(self.run(self.take(images))).float().clone()


@dataclass(frozen=True)
class Case:
    """A model, the images that calibrate it, (N, 3, H, W), and images to time it on.

    classes: maps a network and a batch size to its predictions for M labelled images, (M,).
    labels: the true classes of these images, (M,).

    Both are None if the weights are random.
    """

    model: nn.Module
    calibration: Tensor
    timed: Tensor
    classes: Callable[[Callable[[Tensor], Tensor], int], Tensor] | None = None
    labels: Tensor | None = None


def load_case(spec: str, *, pretrained: bool) -> Case:
    """Return the case that --model names."""
    kind, _, name = spec.partition(":")
    if kind == "realbench":
        bench = RealBench.of(Path(name))
        timed = bench.queries(IMAGES).load(bench.preprocessing)
        return Case(
            bench.model,
            bench.calibration_images(SEED),
            timed,
            lambda network, batch: bench.classes(network, 1, batch),
            bench.truth,
        )
    if spec == "demo":
        images, labels = demo.test_images()
        calibration = sample_images(demo.calibration_images(), REAL_IMAGES, SEED)
        assert isinstance(calibration, Tensor)
        return Case(
            demo.load_model(),
            calibration,
            images[:IMAGES],
            lambda network, batch: predict(network, images, batch=batch).argmax(dim=1),
            labels,
        )
    loaded = load_model(spec, pretrained=pretrained, seed=SEED)
    size = (224, 224) if loaded.preprocessing is None else loaded.preprocessing.size
    both = torch.randn(2 * IMAGES, 3, *size, generator=torch.Generator().manual_seed(SEED + 1))
    return Case(loaded.module, both[:IMAGES], both[IMAGES:])


class Files:
    """The model in files for other engines; each file is written when it is first used."""

    def __init__(self, model: nn.Module, images: Tensor, folder: Path):
        self.images, self._folder = images, folder
        self._model = deepcopy(model)
        for module in self._model.modules():
            if hasattr(module, "fused_attn"):  # timm's switch for attention in one operation
                module.fused_attn = False

    def _file(self, name: str, make: Callable[[Path], None]) -> Path:
        path = self._folder / name
        if not path.exists():
            make(path)
        return path

    def onnx(self) -> Path:
        def make(path: Path) -> None:
            axes = {"images": {0: "batch"}, "logits": {0: "batch"}}
            names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "dynamic_axes": axes}
            torch.onnx.export(self._model, (self.images[:2],), str(path), dynamo=False, opset_version=17, **names)

        return self._file("float.onnx", make)

    def onnx_int8(self, *, dynamic: bool) -> Path:
        from onnxruntime import quantization
        from onnxruntime.quantization.shape_inference import quant_pre_process

        images = iter(self.images)

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
            def get_next(self) -> Any:
                image = next(images, None)
                return None if image is None else {"images": image[None].numpy()}

        def make(path: Path) -> None:
            ready = self._file("ready.onnx", partial(self._prepare, quant_pre_process))
            signed, unsigned = quantization.QuantType.QInt8, quantization.QuantType.QUInt8
            kinds = {"weight_type": signed, "per_channel": True}
            if dynamic:
                quantization.quantize_dynamic(str(ready), str(path), **kinds)
            else:
                quantization.quantize_static(str(ready), str(path), Reader(), activation_type=unsigned, **kinds)

        return self._file("dynamic.onnx" if dynamic else "static.onnx", make)

    def _prepare(self, prepare: Callable[..., None], path: Path) -> None:
        prepare(str(self.onnx()), str(path), skip_symbolic_shape=True)  # symbolic shape inference fails for some models

    def openvino(self, *, int8: bool) -> Path:
        import openvino

        def make(path: Path) -> None:
            model = openvino.convert_model(
                self._model, example_input=self.images[:2], input=[(-1, *self.images.shape[1:])]
            )
            if int8:
                import nncf

                data = nncf.Dataset(list(self.images), lambda image: image[None].numpy())
                kind = nncf.ModelType.TRANSFORMER
                model = nncf.quantize(model, data, model_type=kind, subset_size=len(self.images))
            openvino.save_model(model, str(path), compress_to_fp16=False)

        return self._file("int8.xml" if int8 else "float.xml", make)


def torch_runs(dtype: torch.dtype, model: nn.Module, files: Files, images: Tensor, threads: int) -> Made:
    network = deepcopy(model).to(dtype)
    count = sum(value.nbytes for value in network.parameters())
    return Made(network, lambda images: images.to(dtype), None, count)


def onnxruntime_runs(kind: str, model: nn.Module, files: Files, images: Tensor, threads: int) -> Made:
    import onnxruntime

    path = files.onnx() if kind == "float" else files.onnx_int8(dynamic=kind == "dynamic")
    start = time.process_time()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_free_dimension_override_by_name("batch", len(images))
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    session.run(None, {"images": images.numpy()})
    seconds = time.process_time() - start
    return Made(
        lambda given: session.run(None, given)[0],
        lambda images: {"images": images.numpy()},
        seconds,
        path.stat().st_size,
    )


def openvino_runs(int8: bool, precision: str, model: nn.Module, files: Files, images: Tensor, threads: int) -> Made:
    import openvino

    path = files.openvino(int8=int8)
    start = time.process_time()
    core = openvino.Core()
    network = core.read_model(str(path))
    network.reshape({network.input(0): list(images.shape)})
    hints = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads}
    request = core.compile_model(
        network, "CPU", {**hints, "INFERENCE_PRECISION_HINT": precision}
    ).create_infer_request()
    request.infer([images.numpy()])
    seconds = time.process_time() - start

    def run(given: Any) -> Any:
        return request.infer([given], share_inputs=True, share_outputs=True)[0]

    return Made(run, lambda images: images.numpy(), seconds, path.with_suffix(".bin").stat().st_size)


# Other engines by name: the packages that an engine needs, and the function that prepares it.
PEERS: dict[str, tuple[tuple[str, ...], Callable[..., Made]]] = {
    "torch": ((), partial(torch_runs, torch.float32)),
    "torch-bf16": ((), partial(torch_runs, torch.bfloat16)),
    "onnxruntime": (("onnx", "onnxruntime"), partial(onnxruntime_runs, "float")),
    "onnxruntime-int8": (("onnx", "onnxruntime"), partial(onnxruntime_runs, "static")),
    "onnxruntime-int8-dynamic": (("onnx", "onnxruntime"), partial(onnxruntime_runs, "dynamic")),
    "openvino": (("openvino",), partial(openvino_runs, False, "f32")),
    "openvino-bf16": (("openvino",), partial(openvino_runs, False, "bf16")),
    "openvino-int8": (("openvino", "nncf"), partial(openvino_runs, True, "f32")),
    "openvino-int8-bf16": (("openvino", "nncf"), partial(openvino_runs, True, "bf16")),
}


def quantized(case: Case, bits: str, path: Path) -> dict[str, int]:
    """Write the model's artifact unless it exists, and return the widths of its tables. bits: as in --bits."""
    if not path.exists():
        width, _, method = bits.partition(":")
        config, images = Config.preset(width, method or "adalog"), case.calibration
        if case.classes is None:
            short = Search(init=(4, 2), parents=1, steps=0, rough_rows=0)
            config, images = replace(config, images=2, search=short), images[:2]
        Calibration(case.model, images, seed=SEED).quantize(config).save(path)
    return widths(load(path))


def artifact_of(model: str, bits: str, work: Path) -> Path:
    """Return the artifact of a model with random weights in a folder, where it is written unless it exists."""
    path = work / f"{model.rpartition(':')[2]}-{bits}-{source_hash()}.safetensors"
    quantized(load_case(model, pretrained=False), bits, path)
    return path


def pack_of(artifact: Path) -> Path:
    """Write the pack of an artifact for batches of one image beside it, and return its path."""
    pack = artifact.with_suffix(".adalog")
    pack.write_bytes(export.to_pack(artifact, (1,)))
    return pack


def widths(model: QuantizedModel) -> dict[str, int]:
    """Return the number of a model's tables of each width."""
    found = [each.width for each in model.program.quantizers.values() if isinstance(each, LogQuantizer)]
    return {f"u{width}" if width else "float": found.count(width) for width in sorted(set(found))}


def native_runs(path: Path, images: Tensor, threads: int, level: str | None) -> Made:
    """Prepare the artifact for adalog's compiled kernels."""
    start = time.process_time()
    compiled = load(path).compile("native", threads=threads, batch=len(images), level=level)
    compiled(images)
    seconds = time.process_time() - start
    return Made(
        lambda given: on_one_thread(lambda: compiled(given))(), lambda images: images, seconds, compiled.weight_bytes
    )


def absent(peers: Sequence[str]) -> dict[str, str]:
    """Return the engines that cannot run here, with the reasons."""
    found = {name: [package for package in PEERS[name][0] if find_spec(package) is None] for name in peers}
    return {name: f"not installed: {', '.join(missing)}" for name, missing in found.items() if missing}


@torch.no_grad()
def compare(
    case: Case,
    *,
    bits: Sequence[str],
    batches: Sequence[int],
    peers: Sequence[str],
    threads: int,
    seconds: float,
    level: str | None = None,
    work: Path | None = None,
) -> dict[str, Any]:
    """Return rows, ratios, the widths of tables by bits, absent engines, and accuracy if the case has labels.

    work: a folder that keeps the artifacts for later runs.
    """
    torch.set_num_threads(threads)
    missing = absent(peers)
    if not library.levels():
        missing["native"] = library.why()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, dict[str, float]] = {}
    accuracy: dict[str, dict[str, float]] = {}
    by = "cpu" if threads == 1 else "wall"
    with tempfile.TemporaryDirectory() as folder:
        files, place = Files(case.model, case.calibration, Path(folder)), work or Path(folder)
        artifacts = {width: place / f"{width}-{source_hash()}.safetensors" for width in bits if "native" not in missing}
        tables = {width: quantized(case, width, path) for width, path in artifacts.items()}
        for batch in batches:
            given = case.timed[torch.arange(batch) % len(case.timed)]
            expected = case.model(given)
            made: dict[str, Made] = {}
            for name in peers:
                if name not in missing:
                    try:
                        made[name] = PEERS[name][1](case.model, files, given, threads)
                    except Exception as cause:  # engines raise errors of any kind
                        missing[name] = f"fails at batch {batch}: {one_line(cause)}"
            here = list(made)
            made |= {f"native/{width}": native_runs(path, given, threads, level) for width, path in artifacts.items()}
            answers = {name: each.logits(given) for name, each in made.items()}
            errors = {name: float((found - expected).norm() / expected.norm()) for name, found in answers.items()}
            turns = {name: partial(each.run, each.take(given)) for name, each in made.items()}
            times = in_turn(turns, seconds, REST if threads > 1 else 0.0)
            for name, each in made.items():
                row = {"name": name, "batch": batch, **milliseconds(times[name], batch)}
                row |= {"weight_bytes": each.weight_bytes, "load_cpu_seconds": each.load_cpu_seconds}
                rows.append({**row, "logit_error": errors[name]})
            for width in artifacts:
                ours = getattr(times[f"native/{width}"], by)
                ratios[f"native/{width}/b{batch}"] = {name: ours / getattr(times[name], by) for name in here}
            if batch == max(batches):
                accuracy = judged(case, made, batch)
    told = {"rows": rows, "ratios": ratios, "by": by, "tables": tables, "absent": missing}
    return {**told, **({"accuracy": accuracy} if accuracy else {})}


def judged(case: Case, made: dict[str, Made], batch: int) -> dict[str, dict[str, float]]:
    """Return top-1 of the float model ("fp32") and of each engine, with the engine's agreement with the float model.

    The result is empty if the case has no labels. An engine takes exactly `batch` images, so zeros fill the last batch.
    """
    if case.classes is None:
        return {}

    def padded(run: Made, images: Tensor) -> Tensor:
        missing = images.new_zeros(batch - len(images), *images.shape[1:])
        return run.logits(torch.cat([images, missing]) if len(missing) else images)[: len(images)]

    reference = case.classes(case.model, batch)
    found = {"fp32": {"top1": float((reference == case.labels).double().mean()), "images": len(reference)}}
    for name, run in made.items():
        result = score(case.classes(partial(padded, run), batch), case.labels, reference)
        assert result.top1 is not None
        assert result.agreement is not None
        found[name] = {"top1": result.top1.value, "agreement": result.agreement}
    return found


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="timm:deit_small_patch16_224", help="a model as `adalog quantize` takes it, or realbench:DIR"
    )
    parser.add_argument("--pretrained", action="store_true", help="use the pretrained weights of the model")
    parser.add_argument(
        "--bits", nargs="+", default=["w4a4", "w6a6", "w8a8", "w8a8:uniform"], help="w8a8:METHOD selects another method"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", choices=LIMITS, help="level of the kernels; default: the fastest one that runs here")
    parser.add_argument("--peers", default=",".join(PEERS), help="other engines, separated by commas; default: all")
    parser.add_argument("--seconds", type=float, default=20, help="seconds to spend on each row; at least five runs")
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/runtime-MODEL.json")
    parser.add_argument("--work", type=Path, help="folder that keeps the artifacts for later runs")
    found = parser.parse_args(given)
    found.peers = [name for name in found.peers.split(",") if name]
    odd = [name for name in found.peers if name not in PEERS]
    if odd:
        parser.error(f"--peers {odd[0]!r} is none of {', '.join(PEERS)}")
    return found


def named(model: str) -> str:
    """Return the name of a model in file names."""
    return "realbench" if model.startswith("realbench:") else model.rpartition(":")[2].replace(os.sep, "-")


def folder_of(work: Path | None, name: str) -> Path | None:
    """Return the folder in `work` for this model's artifacts; create it if it does not exist."""
    if work is not None:
        (work / name).mkdir(parents=True, exist_ok=True)
    return None if work is None else work / name


def main(given: Sequence[str] | None = None) -> None:
    asked = arguments(given)
    if asked.level is not None:
        os.environ["ONEDNN_MAX_CPU_ISA"] = LIMITS[asked.level]  # oneDNN reads this at its first use
    case = load_case(asked.model, pretrained=asked.pretrained)
    choices = {"bits": asked.bits, "batches": asked.batch, "peers": asked.peers, "level": asked.level}
    name = named(asked.model)
    with redirect_stdout(sys.stderr):  # exporters print, but standard output must hold only the result
        work = folder_of(asked.work, name)
        result = compare(case, **choices, threads=asked.threads, seconds=asked.seconds, work=work)
    versions = {name: found for name in ("onnx", "onnxruntime", "openvino", "nncf") if (found := version_of(name))}
    model = "realbench" if asked.model.startswith("realbench:") else asked.model
    real = case.classes is not None or asked.pretrained
    told = {"model": model, "pretrained": real, "threads": asked.threads, **result}
    told |= {"level": asked.level or library.about()["level"], "seed": SEED, "machine": {**machine(), **versions}}
    publish(told, asked.json or RESULTS / f"runtime-{name}.json")


if __name__ == "__main__":
    main()
