"""Every script of benchmarks/ runs on something tiny, and the code that measures is right."""

from benchmarks import (
    accuracy_tables,
    arm,
    beside,
    budgets,
    capture_tables,
    cost,
    detection,
    detector_cost,
    direct,
    executors,
    export,
    folds,
    gpu,
    large,
    limits,
    load,
    measure,
    page,
    publish,
    realbench,
    reconstruct,
    reconstruct_cost,
    runtime,
    scale,
    search_tables,
    sides,
    speed_tables,
    sweep,
    throughput,
    web,
)
from benchmarks import demo as demo_benchmark
from benchmarks import search as search_benchmark
from benchmarks.browser import find
from benchmarks.roof import Roofs

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from torch import nn

from adalog import Calibration, Config, Correction, Reconstruction, Search, library
from adalog.baselines import ReleasedSearch, TwinFormat, TwinUniformQuantizer
from adalog.calibration.calibration import SearchResult
from adalog.detection import demo as detector_demo
from adalog.inputs import demo
from adalog.inputs.demo.model import DemoViT
from adalog.inputs.zoo import LoadedModel
from adalog.quantizers import Assignment, LogFormat, LogQuantizer, UniformFormat, UniformQuantizer, elementwise
from adalog.search import forms, objective
from adalog.search.operand import Operand
from adalog.search.product import Product
from commands import write_images

SCRIPTS = Path(publish.__file__).parent
QUICK = Search(init=(4, 2), parents=1, steps=0, rounds=1)
pytestmark = pytest.mark.usefixtures("captured_once")  # scripts capture the tiny models again and again
needs_kernels = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the package -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_runs_by_its_path_and_hides_no_other_package(tmp_path):
    """A script finds the other ones in the package, and their names are no top-level modules."""
    script = (
        f"import runpy, sys, importlib.util; sys.path[0] = {str(SCRIPTS)!r}; sys.argv = ['search.py', '--help']\n"
        "try:\n    runpy.run_path(sys.path[0] + '/search.py', run_name='__main__')\nexcept SystemExit: pass\n"
        "names = ('search', 'beside', 'demo', 'tables', 'cost', 'runtime', 'publish', 'direct')\n"
        "print([name for name in names if importlib.util.find_spec(name)])"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--ablation" in result.stdout
    assert result.stdout.endswith("[]\n")


# --- every script runs -----------------------------------------------------------------------------------------------


@pytest.fixture
def quick_presets(monkeypatch):
    """Presets with short searches, stages of one iteration, and few images."""
    preset = Config.preset

    def quick(bits, method="adalog"):
        config = preset(bits, method)
        searches = {Search: QUICK, ReleasedSearch: ReleasedSearch(steps=1, rounds=1)}
        return replace(config, search=searches.get(type(config.search), config.search))

    monkeypatch.setattr(Config, "preset", staticmethod(quick))


@pytest.fixture
def tiny_demo(monkeypatch, quick_presets):
    """The bundled model and its images are a model with one block and noise."""
    torch.manual_seed(0)
    model = DemoViT(width=16, depth=1, heads=2).eval()
    images, labels = normal(47, 3, 32, 32, seed=1), torch.arange(7)
    monkeypatch.setattr(demo, "load_model", lambda: model)
    monkeypatch.setattr(demo, "test_images", lambda: (images[40:], labels))
    for name in ("calibration_images", "unlabelled_images"):
        monkeypatch.setattr(demo, name, lambda: images)
    return model


@pytest.fixture
def result_of(monkeypatch, capsys, tmp_path):
    """A function that runs a script with arguments, and returns the JSON object that it prints and saves."""
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    monkeypatch.setattr(publish, "commit", lambda: "0123456789")
    monkeypatch.chdir(tmp_path)

    def run(module, *arguments):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        if "typer" in vars(module):
            with pytest.raises(SystemExit) as stopped:
                typer.run(module.main)
            assert not stopped.value.code
        else:
            module.main()
        out = capsys.readouterr().out
        result = json.loads(out)
        assert result["commit"] == "0123456789"
        assert out.encode() in [path.read_bytes() for path in tmp_path.glob("*.json")]
        return result

    return run


@pytest.fixture(params=[224])
def tiny_timm(monkeypatch, request):
    """Whatever timm is asked for, it makes a narrow ViT with one block, for images of 224 x 224 by default."""
    timm = pytest.importorskip("timm")
    sizes = {"img_size": request.param, "embed_dim": 16, "num_heads": 2, "num_classes": 5, "depth": 1}

    def create(*_, **__):
        model = timm.models.VisionTransformer(**sizes)
        model.pretrained_cfg = {"input_size": (3, request.param, request.param)}
        return model

    monkeypatch.setattr(timm, "create_model", create)


@pytest.mark.slow
def test_budgets(tiny_demo, result_of, monkeypatch):
    monkeypatch.setattr(budgets, "MIXES", 3)
    quick = partial(Config, search=QUICK)
    quick.preset = Config.preset
    monkeypatch.setattr(budgets, "Config", quick)
    result = result_of(budgets, "--bits", "w4a4", "--judged", 8, "--widths", 3, 8, "--counts", 4)
    (row,) = result["demo"]
    assert row["bytes_budget"] <= row["bytes_uniform"]
    assert row["bops_budget"] <= row["bops_uniform"]
    assert len(result["mixes"]) == 3
    assert [each["judged"] for each in result["counts"]] == [4]


def test_cost(tiny_timm, quick_presets, result_of):
    result = result_of(cost)
    assert [row["bits"] for row in result["rows"]] == ["fp32", "w6a6", "w4a4", "w3a3"]
    assert search_tables.cost_table()


@pytest.mark.slow
def test_demo(tiny_demo, result_of, monkeypatch, tmp_path, capsys):
    """The command runs in this process."""

    def inside(command, check):
        from adalog.cli import main

        monkeypatch.setattr(sys, "argv", command[2:])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
        capsys.readouterr()

    monkeypatch.setattr(demo_benchmark, "LEVEL_METHODS", ["adalog", "uniform"])
    monkeypatch.setattr(demo_benchmark.subprocess, "run", inside)
    (tmp_path / "work").mkdir()
    result = result_of(demo_benchmark, "--work", tmp_path / "work", "--seeds", "0")
    assert {row["bits"] for row in result["rows"]} == {"w6a6", "w4a4", "w3a3"}
    assert accuracy_tables.demo_table()


@pytest.mark.slow
def test_detection(result_of, monkeypatch):
    """The float detector stands in for the quantized ones."""
    pytest.importorskip("pycocotools")
    pytest.importorskip("torchvision")
    monkeypatch.setattr(detector_demo, "TESTED", range(1000, 1002))
    monkeypatch.setattr(detection, "RESAMPLED", 3)
    monkeypatch.setattr(
        detection, "quantize_detector", lambda detector, batches, configs, seed: [detector] * len(configs)
    )
    monkeypatch.setattr(detection, "save", lambda detector, file: file.write_bytes(b"12"))
    monkeypatch.setattr(detection, "fastest", lambda detector, jobs: detector)
    result = result_of(detection, "--bits", "w4a4", "--methods", "adalog,minmax")
    assert [row["bytes"] for row in result["rows"]] == [2, 2]
    assert [row["below_adalog"]["box_ap"] for row in result["rows"]] == [[0, 0, 0]] * 2


def test_detector_cost(result_of, monkeypatch):
    pytest.importorskip("torchvision")
    quantized = mock.Mock(parts={"backbone": mock.Mock(float_sites=list, refusals={})})
    monkeypatch.setattr(detector_cost, "quantize_detector", lambda *_, **__: [quantized])
    monkeypatch.setattr(detector_cost, "save", lambda detector, file: 7)
    monkeypatch.setattr(detector_cost, "load", lambda file: lambda batch: [[]])
    monkeypatch.setattr(detector_cost.zoo, "load_detector", lambda name, pretrained: detector_demo.load_detector())
    result = result_of(detector_cost)
    assert (result["bytes"], result["float_sites"]) == (7, {"backbone": []})


@pytest.mark.slow
def test_executors(tiny_demo, tiny_timm, result_of, monkeypatch, tmp_path):
    result = result_of(executors, "--bits", "w4a4", "--images", 8, "--reference-images", 4, "--repeats", 1)
    exact = [row for row in result["rows"] if row["dtype"] == "float64"]
    assert [row["code_flip_fraction"] for row in exact] == [0]
    assert {"fp32", "torch"} == set(result["speed"][0]["images_per_second"])
    monkeypatch.setattr(speed_tables, "RESULTS", tmp_path)
    assert speed_tables.executors_table()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporters
def test_export(tiny_demo, result_of, monkeypatch):
    for package in ("onnxruntime", "onnxscript", "openvino"):
        pytest.importorskip(package)
    monkeypatch.setattr(export, "DAMAGED", 1)
    monkeypatch.setattr(export.export, "to_openvino", lambda content: (b"description", b"weights"))
    result = result_of(export, "--bits", "w4a4", "--images", 4, "--seconds", 0)
    assert len(result["rows"]) == 2 * len(export.export.FORMS)
    assert all(row["passed"] for row in result["rows"])
    assert {row["engine"] for row in result["rows"] if row["bytes"] == len(b"descriptionweights")} == {"openvino"}
    assert result["damaged_caught"] == result["damaged_tried"] > 0


@pytest.mark.slow
def test_folds(tiny_demo, result_of):
    result = result_of(folds, "--json", "folds.json")
    assert [row["bits"] for row in result["rows"]] == [3, 4, 6, 8]
    assert search_tables.folds_table()


@pytest.fixture
def measured_gpu(tiny_timm, tiny_demo, result_of, monkeypatch, tmp_path):
    """A function that measures parts on the processor, which it compares with itself, and returns the result."""
    monkeypatch.setattr(gpu, "Search", partial(Search, init=(4, 2), parents=1))
    monkeypatch.setattr(gpu, "_STEPS", (2, 1))
    monkeypatch.setattr(gpu, "_STEP_IMAGES", 9)
    monkeypatch.setattr(gpu, "_LONG_ENOUGH", 0.0)
    monkeypatch.setattr(gpu, "_SEGMENT", 0.0)
    choices = ("--models", "vit", "--device", "cpu", "--images", 2, "--batch", 2, "--blocks", 1, "--backend", "eager")
    return partial(result_of, gpu, *choices, "--json", tmp_path / "gpu.json")


@pytest.mark.parametrize("tiny_timm", [64], indirect=True)
def test_gpu(measured_gpu):
    result = measured_gpu()
    (row,) = result["rows"]
    assert row["cold"] > 0 < row["search"]
    assert [each["batch"] for each in result["steps"]] == [8, 32]
    assert [(each["bits"], each["batch"]) for each in result["evaluation"]] == [
        (bits, batch) for bits in ("w4a4", "w8a8") for batch in (2, 20)
    ]
    assert all(each["fake_quantization_on_cpu"] == 1 for each in result["agreement"])
    alike = {"mean_db": 0.0, "least_db": 0.0, "most_db": 0.0}
    assert result["sqnr"] == [{"model": "demo"} | alike, {"model": "vit", "blocks": 1} | alike]
    assert result["compiled"]["compiled"] > 0
    for part in ("search", "correction"):
        found = result["kernels"][part]
        assert found["operations"] > found["waits"] > 0
        assert found["launches"] >= sum(each["launches"] for each in found["kernels"]) > 0
    assert "reconstruction" not in result
    assert len(speed_tables.gpu_table().splitlines()) > 20


@pytest.mark.parametrize("tiny_timm", [64], indirect=True)
def test_gpu_adds_parts(measured_gpu, monkeypatch):
    """A part that fails loses none of those before it."""
    measured_gpu("--parts", "agreement")
    monkeypatch.setattr(gpu, "measure_kernels", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        measured_gpu("--parts", "steps", "evaluation", "kernels", "--skip", "evaluation", "--add")
    result = publish.read("gpu")
    assert result.keys() >= {"agreement", "steps"}
    assert result.keys().isdisjoint(("evaluation", "kernels"))
    assert speed_tables.gpu_table()
    with pytest.raises(SystemExit):
        measured_gpu("--parts", "steps", "--add", "--bits", "w3a3")


@pytest.mark.slow
@pytest.mark.parametrize("tiny_timm", [64], indirect=True)
def test_gpu_reconstruction(measured_gpu, monkeypatch):
    short = Config.preset("w3a3", "adalog++")
    few = {Reconstruction: {"iterations": 2, "batch": 2}}
    short = replace(short, stages=tuple(replace(each, **few.get(type(each), {})) for each in short.stages))
    monkeypatch.setattr(Config, "preset", staticmethod(lambda *_: short))
    found = measured_gpu("--parts", "reconstruction", "--fitted", 8)["reconstruction"]
    assert found.keys() == {"model", "bits", "fitted", "search", "correction", "end_to_end"}


def test_large(tiny_timm, tiny_demo, result_of, monkeypatch):
    """Fewer rows never find quantizers that are much better on all rows, and all rows lose nothing."""
    monkeypatch.setattr(large, "SMALL", {"demo": large.SMALL["demo"]})
    arguments = "--size", 224, "--images", 12, "--caps", "10,20", "--json", "large.json"
    result = result_of(large, *arguments, "--work", "work")
    (row,) = result["rows"]
    few, every = row["limits"]
    (site,) = few["sites"].values()
    assert (few["rows"], site["one_in"], every["max_loss_db"]) == (1024, 2, 0)
    assert few["max_loss_db"] > -0.1
    assert row["search"]["peak_rss_bytes"] > 0
    assert result["most_rows"] == {"demo": 4096}
    assert "1,024" in search_tables.large_table()
    monkeypatch.setattr(large.Compared, "search", None)
    assert result_of(large, *arguments, "--work", "work") == result


@needs_kernels
def test_limits(tiny_demo, result_of, monkeypatch):
    roofs = Roofs(library.levels()[-1], 1e11, 2e11, 1e10, 5e9, ((1 << 15, 2e11), (0, 1e10)))
    monkeypatch.setattr(limits.roof, "measure", lambda level: roofs)
    result = result_of(limits, "--model", "demo", "--batch", 1, "--seconds", 0)
    assert result["rows"][0]["over_limit"] > 0


@needs_kernels
def test_load(tiny_demo, result_of, monkeypatch):
    monkeypatch.delitem(load._WAYS, "native")
    monkeypatch.setattr(load, "find_spec", lambda package: None)
    program = shutil.which("true")
    result = result_of(load, "--model", "demo", "--repeats", 1, "--program", program)
    (row,) = result["rows"]
    assert row["ratios"].keys() == {"numpy"}
    assert row["ways"]["c"]["peak_bytes"] > 0
    assert result["program_bytes"] == Path(program).stat().st_size
    assert row["ways"]["run"]["ready_seconds"] > 0


@pytest.mark.parametrize(
    ("table", "bits", "names", "value"),
    [
        ("1", "w4a4", ["adalog"], 63.52),
        ("1", "w3a3", ["adalog-paper"], 31.56),
        ("1", "w6a6", ["repq-vit"], 70.76),
        ("2", "w4a4", ["adalog", "uniform", "alternating, ours"], 58.01),
        ("2", "w4a4", ["uniform", "uniform", "FPCS, ours"], None),
        ("5", "w3a3", ["FPCS, ours", "5 x 128 and a walk", "O(pn)"], 31.56),
        ("5", "w3a3", ["brute force, ours", "64 x 64", "O(n²)"], 32.04),
        ("A", "w4a4s3", ["log2", "ours"], 60.79),
        ("B", "w4a4", ["twin", "no", "ours"], 60.96),
    ],
)
def test_a_measured_row_stands_beside_the_papers_figure(table, bits, names, value):
    """Read from the paper's text by hand."""
    row = {"table": table, "bits": bits, "names": names}
    assert accuracy_tables._published("timm:deit_tiny_patch16_224", row) == value


def llvm_version():
    """The version of llvm-mca here, or 0."""
    mca = shutil.which("llvm-mca-19") or shutil.which("llvm-mca")
    return int(arm.version_of(mca, r"LLVM version (\d+)") or 0) if mca else 0


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, (arm.COMPILER, arm.EMULATOR))), reason="needs a compiler and QEMU for ARM"
)
@pytest.mark.skipif(llvm_version() < 17, reason="needs llvm-mca 17 or later")
def test_arm(tiny_demo, result_of):
    result = result_of(arm, "--model", "demo", "--bits", "w4a4")
    assert [row["processor"] for row in result["rows"]] == list(arm.PROCESSORS)
    assert len({row["macs"] for row in result["rows"]}) == 1
    assert result["rows"][0]["macs"] > 1000
    for row in result["rows"]:
        assert row["unknown"] < row["instructions"] / 100
        assert row["product_cycles"] < row["throughput_cycles"] <= row["cycles"]
        assert {"multiply_rows", "linear"} <= row["kernels"].keys()
    small, large = result["rows"][:2]  # the same instructions
    assert small["instructions"] == large["instructions"]
    assert small["cycles"] > large["cycles"]
    assert speed_tables.arm_table()


def test_listing_of_arm():
    lines = [
        "0000000000406200 <void neon::(anonymous namespace)::multiply_rows<4>(unsigned char const*, long)>:",
        "  406200:\tldr\tq2, [x0, x1]",
        "  406204:\tb.ne\t406200 <void neon::(anonymous namespace)::multiply_rows<4>(long)>  // b.any",
        "  406208:\tcbz\tw0, 40620c <neon::linear(void const*)+0x4>",
        "0000000000406208 <neon::(anonymous namespace)::linear(void const*, long, unsigned char*)>:",
        "  40620c:\tbl\t406200 <neon::linear(void const*)>",
        "  406210:\tadrp\tx0, 500000 <none>",
        "  406214:\tret",
    ]
    assert arm.parse_listing(lines) == {
        0x406200: ("multiply_rows", "ldr q2, [x0, x1]"),
        0x406204: ("multiply_rows", "b.ne 64"),
        0x406208: ("multiply_rows", "cbz w0, 64"),
        0x40620C: ("linear", "b 64"),
        0x406210: ("linear", "adrp x0, 4096"),
        0x406214: ("linear", "b 64"),
    }


@needs_kernels
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_web(tiny_demo, result_of, tmp_path):
    """Stand-ins answer for both modules: tests/test_web.py runs the real one."""
    pytest.importorskip("onnx")
    (tmp_path / "dist").mkdir()
    (tmp_path / "package.json").write_text('{"version": "1.2.3"}')
    (tmp_path / "adalog.wasm").write_bytes(b"four")
    (tmp_path / "adalog.mjs").write_text("export const load = async () => ({ run() {} });")
    (tmp_path / "dist" / "ort.wasm.min.mjs").write_text(
        "export const env = { wasm: {} }, Tensor = class {};"
        "export const InferenceSession = { create: async () => ({ inputNames: ['images'],"
        " run: () => new Promise((done) => setTimeout(done, 1)) }) };"
    )
    folders = ("--module", tmp_path, "--ort", tmp_path)
    result = result_of(web, *folders, "--model", "demo", "--bits", "w4a4", "--calls", 2)
    assert (result["versions"]["onnxruntime-web"], result["module_bytes"]["adalog.wasm"]) == ("1.2.3", 4)
    found = result["models"]["demo"]
    native = {f"native {level} w4a4" for level in ("avx2", library.levels()[-1]) if level in library.levels()}
    assert found["milliseconds"].keys() == {"wasm w4a4", "scalar w4a4", "onnxruntime-web float32", *native}
    assert found["bytes"].keys() == {"w4a4", "onnxruntime-web float32"}
    assert speed_tables.web_table()


@needs_kernels
@pytest.mark.skipif(find() is None, reason="no Chromium here: the Debian package chromium has one")
def test_page(tiny_demo, result_of, tmp_path):
    """A stand-in for the module answers at once: tests/test_web.py runs the real one."""
    wants = {"width": 32, "height": 32, "resizeWidth": 32, "resizeHeight": 32, "fit": "stretch", "position": "center"}
    wants |= {"interpolation": "bilinear", "channels": "rgb", "rescale": 1, "mean": [0, 0, 0], "std": [1, 1, 1]}
    model = {"inputs": [{"shape": [3, 32, 32]}], "outputs": [{"shape": [10]}], "preprocessing": wants, "bits": "w4a4"}
    (tmp_path / "adalog.wasm").write_bytes(b"four")
    (tmp_path / "adalog.mjs").write_text(
        "const run = () => new Float32Array(10);"
        f"export const load = async () => ({{ ...{json.dumps(model)}, run, close() {{}} }});"
    )
    (row,) = result_of(page, "--module", tmp_path, "--pictures", 3, "--visits", 2)["rows"]
    assert (row["model"], row["pictures"]) == ("demo", 3)
    assert row["first_answer"]["least"] > 0
    assert speed_tables.page_table()


@pytest.fixture
def real_folder(tmp_path, monkeypatch):
    """40 images of noise, 4 of them queries, and a model that makes features of them."""
    folder = tmp_path / "real"
    write_images(folder, {f"{'query' if index < 4 else 'support'}/{index}.png": index % 5 for index in range(40)})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 56, 56), torch.nn.Flatten(), torch.nn.Linear(128, 12)).eval()
    monkeypatch.setattr(realbench, "load_model", lambda folder: model)
    loaded = LoadedModel(model, realbench.PREPROCESSING, "own")
    monkeypatch.setattr(realbench, "load_classifier", lambda name: loaded)
    return folder


def test_realbench(real_folder, quick_presets, result_of):
    result = result_of(realbench, "--realbench", real_folder, "--bits", "w4a4", "--methods", "adalog", "minmax")
    compared = {row["method"]: row["mcnemar_p_adalog"] is not None for row in result["rows"]}
    assert compared == {"adalog": False, "minmax": True}
    assert result["queries"] == 4
    assert accuracy_tables.real_table()


def test_realbench_with_a_classifier(real_folder, quick_presets, result_of):
    """A classifier is evaluated by its outputs, and on support images that did not calibrate."""
    result = result_of(
        realbench, "--realbench", real_folder, "--model", "own:folder", "--bits", "w8a8", "--methods", "minmax"
    )
    (row,) = result["rows"]
    assert result["model"] == "own"
    assert row["kl"] >= 0
    assert row["support"]["images"] == 4
    assert row["cpu_seconds"] >= 0


def test_executors_with_a_classifier(real_folder, quick_presets, result_of, tmp_path):
    result = result_of(
        *(executors, "--model", f"own:{tmp_path}", "--realbench", real_folder),
        *("--bits", "w8a8", "--images", 4, "--reference-images", 2),
    )
    assert [row["images"] for row in result["rows"] if row["dtype"] == "float32"][:2] == [4, 4]
    assert (result["model"], result["speed"]) == ("own", [])
    assert (tmp_path / "executors-own.json").exists()


@pytest.mark.slow
def test_reconstruct(tiny_demo, result_of, monkeypatch):
    few = {"images": 8, "batch": 4, "iterations": 2}
    stages = {
        "correction": Correction(images=8),
        reconstruct.ALONE: Reconstruction(**few, scope="model"),
        "reconstruction": Reconstruction(**few),
        "end-to-end": Reconstruction(**few, scope="model"),
    }
    monkeypatch.setattr(reconstruct, "choices_of", lambda stage, images: stages[stage])
    words = ("--bits", "w3a3", "--images", 8, "--training", "drop=0.5", "rate=0.006", "--stages", *stages)
    result = result_of(reconstruct, *words)
    assert [row["stage"] for row in result["rows"]] == list(stages)
    assert all(row["error"] > 0 for row in result["rows"])
    assert (result["training"]["drop"], result["training"]["rate"]) == (0.5, 0.006)


def test_reconstruct_cost(tiny_timm, quick_presets, result_of):
    result = result_of(reconstruct_cost, "--steps", 1, "--images", 2, "--json", "cost.json")
    assert result["ratio"] > 0
    model, noise = reconstruct_cost.timm.create_model("any").eval(), torch.randn(5, 3, 224, 224)
    timed = reconstruct_cost.time_steps(model, noise, 2, lambda: None, steps=1, warm=1)
    assert timed["ms_per_step"] > 0
    assert not timed["recorded"]  # on the CPU


def test_runtime(tiny_demo, result_of):
    """The images that judge do not fill the last batch."""
    result = result_of(
        runtime, "--model", "demo", "--bits", "w4a4", "--batch", 1, 4, "--peers", "torch", "--seconds", 0
    )
    names = ["torch", *["native/w4a4"] * bool(library.levels())]
    assert [row["name"] for row in result["rows"]] == 2 * names
    assert result["rows"][0]["logit_error"] == 0
    assert result["accuracy"]["torch"]["agreement"] == 1
    assert result["accuracy"].keys() == {"fp32", *names}


def test_scale(result_of, monkeypatch):
    counts = dict.fromkeys(("images", "top5", "agreement", "lost", "gained", "p_value", "kl"), 1)

    def run(folder, world, *arguments):
        if "--json" in arguments:
            (folder / arguments[-1]).write_text(json.dumps({**counts, "top1": {"value": 0.5}}))

    monkeypatch.setattr(scale, "run", run)
    result = result_of(scale, "evaluate")
    assert result["evaluate"]["equal_counts"]


def test_sides(tiny_demo, result_of, monkeypatch):
    monkeypatch.setattr(sides, "SEEDS", range(2))
    result = result_of(sides, "--methods", "minmax")
    assert [row["bits"] for row in result["rows"]] == list(sides.BITS)
    assert accuracy_tables.sides_table()


@needs_kernels
def test_throughput(tiny_demo, result_of, monkeypatch):
    monkeypatch.setattr(throughput, "KINDS", {"one": (1, 1, 1), "two": (2, 1, 1), "threads": (1, 2, 1)})
    (row,) = result_of(throughput, "--model", "demo", "--batch", 1, "--rounds", 1, "--seconds", 0.1)["rows"]
    assert row["over_two"].keys() == {"one", "threads"}
    assert min(row["images_per_second"].values()) > 0


@pytest.fixture
def short_searches(monkeypatch, quick_presets):
    """Ways to search that take no time, and this process's memory as it is."""
    monkeypatch.setattr(beside, "OURS", {kind: replace(way, search=QUICK) for kind, way in beside.OURS.items()})
    for module in (beside, search_benchmark):
        monkeypatch.setattr(module, "keep_memory", lambda: None)


@pytest.mark.slow
def test_search(tiny_demo, short_searches, result_of):
    result = result_of(search_benchmark, "--model", "demo")
    for part in (result, *(result[kind] for kind in beside.OURS if kind != "six")):
        ratios = [row["loss_ratio"] for row in part["sites"].values()]
        assert part["loss_ratio"]["max"] == max(ratios)
        assert part["loss_ratio"]["geomean"] == pytest.approx(float(torch.tensor(ratios).log().mean().exp()))
        assert part["speedup"] == pytest.approx(part["seconds"]["direct"] / part["seconds"]["ours"])
    assert result["direct_fused"]["loss_ratio"]["geomean"] == pytest.approx(1, rel=0.01)


@pytest.mark.slow
def test_search_without_its_parts(tiny_demo, short_searches, result_of, monkeypatch):
    chosen = {
        "default": Config.preset("w3a3"),
        "fitted": replace(Config.preset("w3a3"), search=replace(QUICK, refit=True)),
    }
    monkeypatch.setattr(search_benchmark, "variants", lambda bits: chosen)
    variants = result_of(search_benchmark, "--model", "demo", "--ablation")["variants"]
    assert variants["default"]["loss"] == variants["default"]["held_out"] == 1


def test_search_of_a_whole_model(tiny_demo, short_searches):
    result = search_benchmark.quantize_whole("demo", 0, 32, None, 0, "w4a4")
    ratio = result["cpu_seconds"] / result["floor"]["forward_seconds"]
    assert result["float_forwards"] == pytest.approx(ratio)


def test_growth_of_a_search(result_of, short_searches, monkeypatch):
    def seconds(images, width, points, **_):
        return 1e-6 * images * width**2.2 * points**0.5

    monkeypatch.setattr(search_benchmark, "block_seconds", seconds)
    result = result_of(search_benchmark, "--scaling")
    assert result["exponents"] == pytest.approx({"images": 1, "width": 2.2, "points": 0.5})


def test_cases_are_cut_and_their_images_apart():
    case = search_benchmark.load_case("demo", 1, 4, None, 0)
    assert len(case.model.blocks) == 1
    assert case.images.shape == (4, 3, 32, 32)
    one, same, other = (search_benchmark.smooth_noise(3, (40, 24), seed) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with pytest.raises(typer.BadParameter, match="no sequence of `blocks`"):
        search_benchmark.load_case("timm:levit_128s", 1, 1, None, 0)


# --- what measures is right ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_released_searches_find_the_same(tiniest, images):
    """The library's search and the one of `direct`, which were written apart."""
    config = replace(Config.preset("w4a4", "adalog-released"), images=4, search=ReleasedSearch(steps=2, rounds=1))
    ours = Calibration(tiniest, images).search(config)
    with mock.patch.object(ReleasedSearch, "search_product", direct.direct_search):
        theirs = Calibration(tiniest, images).search(config)
    assert len(ours) == 10
    for one, other in zip(ours, theirs, strict=True):
        assert one.sites == other.sites
        assert one.mean_square_error() == pytest.approx(other.mean_square_error(), rel=1e-3)
        if isinstance(one.assignment.left, LogQuantizer):
            assert one.assignment.left.q == other.assignment.left.q


def scales(*shape):
    return normal(*shape, seed=2).abs() * 0.3 + 0.05


def operands(kind):
    """Both sides of a product and quantizers of them."""
    weight = Operand(normal(9, 12, seed=1), UniformFormat(4, (0,)))
    uniform, power = UniformFormat(4), LogFormat(4, r=37, beyond="zero", rounding="log", offset=0.17)
    log = LogQuantizer(torch.tensor(0.9), 31, 37, 4, "zero", "log", offset=0.17)

    def of(*shape):
        return UniformQuantizer(scales(*shape), torch.full(shape, 7.0), 4)

    x, heads, scales_of_heads = normal(50, 12), UniformFormat(4, (1,)), of(1, 3, 1, 1)
    if kind == "linear":
        return Operand(x, uniform), weight, of(), of(9, 1)
    if kind == "post-gelu":
        return Operand(x.relu(), power), weight, log, of(9, 1)
    if kind == "twin":
        twin = TwinUniformQuantizer(torch.tensor(0.2), torch.tensor(0.02), 4)
        return Operand(x, TwinFormat(4, offset=0.17)), weight, twin, of(9, 1)
    if kind == "grouped conv":
        mask = (normal(5, 40, 6, seed=3) > 0).float()
        weight = Operand(normal(5, 2, 6, seed=1), UniformFormat(4, (0, 1)))
        return Operand(normal(5, 40, 6).relu() * mask, power, mask), weight, log, of(5, 2, 1)
    if kind == "qk":
        left, right = (Operand(normal(4, 3, 7, 6, seed=seed), heads) for seed in (0, 1))
        return left, right, scales_of_heads, scales_of_heads
    left = Operand(normal(4, 3, 7, 7).softmax(-1), replace(power, offset=0.0))
    return left, Operand(normal(4, 3, 6, 7, seed=1), heads), replace(log, offset=0.0), scales_of_heads


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["linear", "post-gelu", "twin", "grouped conv", "qk", "av"])
@pytest.mark.parametrize("tile", [100, 1 << 19])
def test_direct_losses_are_those_that_found_is_judged_by(kind, tile, fused, monkeypatch):
    """Fused, a value within 0.1 % of a threshold of a logarithm may get the code next to its own."""
    monkeypatch.setattr(direct, "TILE_ELEMENTS", tile)
    left, right, first, second = operands(kind)
    judged = SearchResult(None, Product("linear", left, right), Assignment(first, second)).mean_square_error()
    outputs = left.values[..., 0].numel() * right.values.shape[-2]
    for operand, other, mine, theirs in ((left, right, first, second), (right, left, second, first)):
        losses = direct.Losses(operand, other.values, other.fake_quantize(theirs), fused=fused)
        found = losses([mine, replace(mine, scale=mine.scale * 0.8), mine])
        assert list(found.shape[1:]) == [operand.values.shape[dim] for dim in operand.format.own_dims]
        assert float(found[0].sum()) / outputs == pytest.approx(judged, rel=1e-3 if fused else 1e-5)
        assert torch.equal(found[0], found[2])
        assert not torch.equal(found[0], found[1])
        assert (losses.evaluated, losses.flops) == (3, 6 * outputs * left.values.shape[-1])


@pytest.mark.parametrize("kind", ["linear", "qk", "grouped conv"])
def test_losses_belong_to_their_groups(kind):
    """The loss of one group depends on its own parameters alone, and is that of a product in float64."""
    left, right, first, second = operands(kind)
    other = left.fake_quantize(first)
    losses = direct.Losses(right, left.values, other)
    scale = second.scale.clone()
    scale.view(-1)[1] *= 1.7
    before, after = losses([second, replace(second, scale=scale)])
    assert [int(index) for index in torch.nonzero((before != after).flatten())] == [1]
    hat = replace(second, scale=scale).fake_quantize(right.values).double()
    error = hat @ other.double().transpose(-1, -2) - right.values.double() @ left.values.double().transpose(-1, -2)
    expected = error.square().sum([dim for dim in range(error.ndim) if dim not in right.format.own_dims])
    assert torch.allclose(after, expected, rtol=1e-5)


@pytest.mark.slow
def test_held_out_losses_are_of_other_images(tiniest, images, short_searches):
    config = replace(Config.preset("w4a4", "adalog-released"), images=2)
    row, same = (
        beside.measure_site(Calibration(tiniest, images[:2]), Calibration(tiniest, judge), config, "blocks.0.mlp.fc2")
        for judge in (images[2:], images[:2])
    )
    for kind in beside.OURS:
        assert same[kind]["held_out_ratio"] == same[kind]["loss_ratio"] == row[kind]["loss_ratio"]
        assert row[kind]["held_out_ratio"] != row[kind]["loss_ratio"]


def test_irreducible_products_are_counted():
    left, right = Operand(torch.zeros(50, 12), UniformFormat(4)), Operand(torch.zeros(9, 12), UniformFormat(4))
    # The product, 50 x 12 x 9; weights by 12 x 12 moments of 50 rows or the product, which is cheaper; activations
    # by those of 9 rows.
    assert search_benchmark.irreducible_flops(left, right) == 2 * (5400 + 5400 + 9 * 144)
    image = Operand(torch.zeros(50, 12), UniformFormat(32))
    assert search_benchmark.irreducible_flops(image, right) == 2 * (5400 + 5400)


def test_what_a_search_does_is_counted_and_switched_off(monkeypatch):
    """Products in bfloat16, compiled kernels, and candidates that are scored on a sample of the rows."""
    monkeypatch.setattr(forms, "multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr(objective, "_ROUGH_ELEMENTS", 0)
    search = Search(steps=0, refit=False, rough_rows=128)

    def linear():
        weight = Operand(normal(32, 48, seed=1), UniformFormat(4, (0,)))
        return Product("linear", Operand(normal(1024, 48), UniformFormat(4)), weight)

    def counts_of(way):
        product = linear()
        with way.run(), measure.counted() as counts:
            found = search.search_product(product)
            kernels = elementwise._functions()
        return counts.to_json(measure.site_rows(product)), found, kernels

    counts, found, kernels = counts_of(beside.Ours(search))
    assert counts["flops"]["bfloat16"] > 0
    assert counts["evaluations"] == counts["sampled"]["evaluations"] + counts["all"]["evaluations"]
    assert counts["all"]["evaluations"] == 1024 * counts["all"]["candidates"]
    assert 0 < counts["sampled"]["evaluations"] < 1024 * counts["sampled"]["candidates"]
    plain, _, no_kernels = counts_of(beside.Ours(search, float32=True, unfused=True))
    assert (list(plain["flops"]), no_kernels) == (["float32"], {})
    assert elementwise._functions() == kernels
    assert found.sqnr == search.search_product(linear()).sqnr  # counting changes nothing


def test_engines_that_are_absent_or_fail_are_reported(tiniest, monkeypatch):
    refuse = mock.Mock(side_effect=RuntimeError("takes no image\nat all"))
    monkeypatch.setitem(runtime.PEERS, "torch-bf16", ((), refuse))
    monkeypatch.setattr(runtime, "find_spec", lambda package: None)
    monkeypatch.setattr(runtime.library, "levels", list)
    monkeypatch.setattr(runtime.library, "why", lambda: "no compiler")
    case = runtime.Case(tiniest, normal(8, 3, 32, 32), normal(8, 3, 32, 32, seed=1))
    result = runtime.compare(case, bits=["w4a4"], batches=[1], peers=list(runtime.PEERS), threads=1, seconds=0)
    assert {row["name"] for row in result["rows"]} == {"torch"}
    assert result["absent"].pop("native") == "no compiler"
    assert result["absent"].pop("torch-bf16") == "fails at batch 1: RuntimeError: takes no image"
    assert set(result["absent"]) == set(runtime.PEERS) - {"torch", "torch-bf16"}
    assert result["absent"]["openvino-int8"] == "not installed: openvino, nncf"


def test_answers_that_share_their_memory_are_told_apart(tiniest, monkeypatch):
    """An engine that writes every answer to the same place is judged like one that does not."""
    monkeypatch.setattr(runtime.library, "levels", list)
    place = torch.zeros(1, 10)

    def shares(model, files, images, threads):
        return runtime.Made(lambda given: place.copy_(model(given)), lambda given: given, None, 0)

    monkeypatch.setitem(runtime.PEERS, "openvino", ((), shares))
    images = normal(5, 3, 32, 32, seed=3)

    def classes(network, batch):
        return torch.cat([network(one) for one in images.split(batch)])[:, 0].argsort()  # tells all images apart

    calibrating, timed = normal(8, 3, 32, 32, seed=1), normal(8, 3, 32, 32, seed=2)
    case = runtime.Case(tiniest, calibrating, timed, classes, torch.zeros(5, dtype=torch.long))
    result = runtime.compare(case, bits=["w4a4"], batches=[1], peers=["openvino"], threads=1, seconds=0)
    assert result["accuracy"]["openvino"]["agreement"] == 1


def test_another_method_may_be_measured(tiniest, tmp_path):
    case = runtime.Case(tiniest, normal(8, 3, 32, 32, seed=1), normal(8, 3, 32, 32, seed=2))
    # After softmax; after the GELU of these random weights, a uniform quantizer is better.
    assert runtime.quantized(case, "w4a4", tmp_path / "log.safetensors") == {"u8": 1}
    assert runtime.quantized(case, "w4a4:uniform", tmp_path / "uniform.safetensors") == {}


def test_a_result_names_the_commit_that_made_it(tmp_path, capsys, monkeypatch):
    """Outside a clone there is none to name."""

    def git(*arguments):
        author = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        found = subprocess.run(["git", *author, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return found.stdout.strip()

    monkeypatch.setattr(publish, "ROOT", tmp_path)
    assert publish.commit() is None
    git("init")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    publish.publish({"a": 1}, tmp_path / "result.json")
    told = json.loads((tmp_path / "result.json").read_text())
    assert told == json.loads(capsys.readouterr().out) == {"a": 1, "commit": git("rev-parse", "HEAD")}
    (tmp_path / "src" / "code.py").write_text("2")
    assert publish.commit() == told["commit"] + "-changed"


def test_rows_measured_again_take_the_place_of_earlier_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    rows = [{"bits": bits, "method": "adalog", "seed": 0, "top1": 0.5} for bits in ("w4a4", "w3a3")]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows}))
    assert publish.measured("some")["rows"] == rows
    later = {"rows": [{**rows[1], "top1": 0.25}], "machine": {"processor": "a later one"}}
    (tmp_path / "some-renewed.json").write_text(json.dumps(later))
    assert publish.measured("some")["rows"] == [rows[0], {**rows[1], "top1": 0.25, "renewed": "a later one"}]
    other = {**rows[0], "seed": 9}  # a new one stands by the others of its bits
    (tmp_path / "some-renewed-2.json").write_text(json.dumps({**later, "rows": [other]}))
    assert publish.measured("some")["rows"][1] == {**other, "renewed": "a later one"}
    assert len(publish.measured("some")["rows"]) == 3
    (tmp_path / "some-renewed-3.json").write_text(json.dumps({**later, "rows": [{**rows[0], "bits": "w2a2"}]}))
    with pytest.raises(ValueError, match="have a row of bits that some"):
        publish.measured("some")


# --- the sweep of architectures --------------------------------------------------------------------------------------


class ByValue(nn.Module):
    def forward(self, x):
        return x if x.mean() > 0 else -x


class Tokens(nn.Module):
    """Attention without weights, on the pixels of a row."""

    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x


def test_the_sweep_counts_what_is_captured_and_why_not(tmp_path, monkeypatch, capsys):
    models = {"timm:tokens": Tokens(), "transformers:by value": ByValue(), "transformers:none": nn.Identity()}

    def build(target):
        if target not in models:
            raise LookupError("it needs other inputs: input_ids")
        return target, models[target], torch.ones(2, 3, 4, 4)

    monkeypatch.setattr(sweep, "targets", lambda: [*models, "transformers:words"])
    monkeypatch.setattr(sweep, "build", build)
    monkeypatch.setattr(sweep, "examine_apart", lambda target: sweep.examine(target) | {"seconds": 0.0})
    monkeypatch.setattr(sys, "argv", ["sweep", "--work", str(tmp_path), "--json", str(tmp_path / "sweep.json")])
    sweep.main()
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    rows = publish.read("sweep")["rows"]
    assert [row["outcome"] for row in rows] == ["exact", "refused", "no sites", "other inputs"]
    assert [row.get("attention") for row in rows] == [True, False, False, None]
    table = capture_tables.sweep_table()
    assert "| transformers | 2 | 0 | 0 | 1 | 0 | 1 | 0 |" in table
    assert "decides by the values of tensors" in table
    monkeypatch.setattr(sweep, "examine_apart", None)  # finished rows are read
    sweep.main()
    assert publish.read("sweep")["rows"] == rows


@pytest.mark.slow
@pytest.mark.parametrize("target", ["timm:levit", "transformers:Idefics3VisionTransformer"])
def test_the_sweep_captures_a_published_architecture(target):
    pytest.importorskip(target.partition(":")[0])
    row = sweep.examine(target)
    assert row["outcome"] == "exact", row
    assert row["attention"]


@pytest.mark.filterwarnings("ignore:.*fork")  # of a process with threads, as pytest's may be
def test_a_model_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(sweep, "SECONDS", 0.2)
    monkeypatch.setattr(sweep, "examine", lambda target: time.sleep(20))
    assert sweep.examine_apart("timm:slow")["outcome"] == "late"
    monkeypatch.setattr(sweep, "examine", lambda target: sys.exit(1))
    monkeypatch.setattr(sweep, "SECONDS", 20)
    assert sweep.examine_apart("timm:gone")["outcome"] == "other"
