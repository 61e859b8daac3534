"""Tables of speed and of what runs: executors, engines, limits of the processor, loading, exports."""

from benchmarks.publish import RESULTS, exists, markdown_table, read, source

import math
from collections.abc import Mapping
from typing import Any

# Engines, by their names in the result files.
ENGINES = {
    "torch": "PyTorch eager, float32",
    "torch-bf16": "PyTorch eager, bfloat16",
    "onnxruntime": "ONNX Runtime, float32",
    "onnxruntime-int8": "ONNX Runtime int8, static",
    "onnxruntime-int8-dynamic": "ONNX Runtime int8, dynamic",
    "openvino": "OpenVINO, float32",
    "openvino-bf16": "OpenVINO, bfloat16",
    "openvino-int8": "OpenVINO int8, float32 elsewhere",
    "openvino-int8-bf16": "OpenVINO int8, bfloat16 elsewhere",
}
LEVELS = {"amx": "AMX", "avx512vnni": "AVX-512-VNNI", "avxvnni": "AVX-VNNI", "avx2": "AVX2"}
MODELS = {"demo": "the bundled ViT", "realbench": "TinyViT", "deit_tiny": "DeiT-T"}


def name_model(model: str) -> str:
    """Return a model's name for people."""
    return MODELS.get(model, model.rpartition(":")[2])


def name_bits(bits: str) -> str:
    """Return our bits for people, with the method if it is not `adalog`."""
    bits, _, method = bits.partition(":")
    return f"{bits.upper()} {method}" if method else bits.upper()


def name_engine(name: str) -> str:
    """Return an engine's name for people."""
    kind, _, bits = name.partition("/")
    return f"adalog {name_bits(bits)}" if kind == "native" else ENGINES[name]


def kernels(result: dict[str, Any]) -> str:
    """Return the kernels' level, marked if a result records no commit: those kernels were earlier ones."""
    return LEVELS[result["level"]] + ("" if "commit" in result else ", earlier kernels")


def runtime_results() -> dict[str, dict[str, Any]]:
    """Return the results of `benchmarks/runtime.py` by the names of their files."""
    return {path.stem: read(path.stem) for path in sorted(RESULTS.glob("runtime-*.json"))}


def runtime_table() -> str:
    """Return our kernels' times over those of other engines, with the errors of all."""
    results = runtime_results()
    others = list(dict.fromkeys(row["name"] for each in results.values() for row in each["rows"]))
    others = [name for name in others if "/" not in name]
    heads = ["model", "kernels", "threads", "bits", "batch", "CPU [ms]", "error", "weights [MB]", "load [CPU s]"]
    lines = []
    for result in results.values():
        errors = {(row["name"], row["batch"]): f"{row['logit_error']:.2f}" for row in result["rows"]}
        for row in (row for row in result["rows"] if row["name"] not in others):
            ratios = result["ratios"][f"{row['name']}/b{row['batch']}"]
            cells = [name_model(result["model"]), kernels(result), str(result["threads"])]
            cells += [name_bits(row["name"].partition("/")[2]), str(row["batch"]), f"{row['cpu_ms']:.1f}"]
            cells += [f"{row['logit_error']:.2f}", f"{row['weight_bytes'] / 1e6:.2f}", f"{row['load_cpu_seconds']:.1f}"]
            cells += [f"{ratios[n]:.2f} ({errors[n, row['batch']]})" if n in ratios else "" for n in others]
            lines.append(cells)
    note = (
        "One column per engine: our time over that of the engine (below 1 adalog is faster), and in brackets the "
        "engine's error. Ratios are of CPU time on one thread and of wall time on several, within one run per file. "
        "Error: the largest relative error of the logits to the float model. Images are noise and weights random "
        "except for the bundled ViT and TinyViT, so most errors come from a short calibration on noise. ONNX Runtime's "
        "static quantization is QDQ, OpenVINO's is that of NNCF for transformers. If a processor has later "
        "instructions than the level named, PyTorch, OpenVINO and adalog do without them; ONNX Runtime does not."
    )
    return f"{markdown_table([*heads, *map(name_engine, others)], lines)}\n\n{note} {source(*results)}"


def deit_small_results() -> dict[str, dict[str, Any]]:
    """Return the results of DeiT-S on one thread, by the level of the kernels."""
    ours = {name: each for name, each in runtime_results().items() if "deit_small" in each["model"]}
    ours = {name: each for name, each in ours.items() if each["threads"] == 1}
    return dict(sorted(ours.items(), key=lambda item: list(LEVELS).index(item[1]["level"])))


def speed_table() -> str:
    """Return the times of all engines on DeiT-S, one thread, with processors side by side."""
    results = deit_small_results()
    times = [{(row["name"], row["batch"]): row["cpu_ms"] for row in result["rows"]} for result in results.values()]
    rows = sorted((row for result in results.values() for row in result["rows"]), key=lambda row: row["logit_error"])
    errors = {row["name"]: row["logit_error"] for row in rows}  # the largest over files
    columns = [(index, batch) for index in range(len(results)) for batch in (1, 8)]
    labels = [kernels(result) for result in results.values()]
    lines = []
    for name in [*(name for name in errors if "/" in name), *(name for name in ENGINES if name in errors)]:
        cells = (times[index].get((name, batch)) for index, batch in columns)
        shown = ["" if value is None else f"{value:.1f}" for value in cells]
        lines.append([f"**{name_engine(name)}**" if "/" in name else name_engine(name), f"{errors[name]:.2f}", *shown])
    heads = ["engine", "error of the logits", *(f"{labels[index]}, batch {batch} [ms]" for index, batch in columns)]
    note = (
        "DeiT-S at 224 x 224, random weights: CPU milliseconds of a batch on one thread (medians of interleaved "
        "calls), and the largest relative error of the logits to the float model after a short calibration on noise. "
        "Compare within a column: columns are different runs. An empty cell was not measured."
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source(*results)}"


def speed_chart() -> str:
    """Return a bar chart (SVG) of the engines on DeiT-S with AVX-512-VNNI, one thread, one image."""
    name, result = next((name, each) for name, each in deit_small_results().items() if each["level"] == "avx512vnni")
    rows = sorted((row for row in result["rows"] if row["batch"] == 1), key=lambda row: row["cpu_ms"])
    scale = 380 / max(row["cpu_ms"] for row in rows)
    parts = []
    for place, row in enumerate(rows):
        y, wide = 34 + 22 * place, row["cpu_ms"] * scale
        colour = "#2f6fdb" if "/" in row["name"] else "#9aa3ad"
        parts += [
            f'<text x="242" y="{y + 12}" text-anchor="end">{name_engine(row["name"])}</text>',
            f'<rect x="250" y="{y}" width="{wide:.1f}" height="16" fill="{colour}"/>',
            f'<text x="{256 + wide:.1f}" y="{y + 12}">{row["cpu_ms"]:.1f} ms (error {row["logit_error"]:.2f})</text>',
        ]
    tall = 34 + 22 * len(rows)
    title = "DeiT-S, one image, one thread, AVX-512-VNNI: CPU time (error of the logits)"
    origin = f"Random weights. Source: benchmarks/results/{name}.json"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 {tall + 26}" role="img" aria-label="{title}"'
        ' font-family="sans-serif" font-size="12" fill="#57606a">\n'
        f'<rect width="780" height="{tall + 26}" fill="#ffffff"/>\n'
        f'<text x="12" y="20" font-size="13" font-weight="bold" fill="#24292f">{title}</text>\n'
        + "".join(f"{part}\n" for part in parts)
        + f'<text x="12" y="{tall + 16}" font-size="10">{origin}</text>\n</svg>\n'
    )


def accuracy_table() -> str:
    """Return accuracy and milliseconds of all engines on models with real weights."""
    results = {name: result for name, result in runtime_results().items() if "accuracy" in result}
    lines, notes = [], []
    for result in results.values():
        model, full = name_model(result["model"]), result["accuracy"]["fp32"]
        times = {(row["name"], row["batch"]): f"{row['cpu_ms']:.2f}" for row in result["rows"]}
        errors = {row["name"]: row["logit_error"] for row in result["rows"] if row["batch"] == 8}
        notes.append(f"{model} has {100 * full['top1']:.2f} % in full precision on {full['images']:,} images")
        for name, accuracy in result["accuracy"].items():
            if name != "fp32":
                engine = f"**{name_engine(name)}**" if "/" in name else name_engine(name)
                cells = [model, engine, f"{100 * accuracy['top1']:.2f} %", f"{100 * accuracy['agreement']:.2f} %"]
                lines.append([*cells, f"{errors[name]:.3f}", times[name, 1], times[name, 8]])
    heads = ["model", "engine", "top-1", "agreement", "error of the logits", "batch 1 [ms]", "batch 8 [ms]"]
    note = (
        "CPU milliseconds of a batch on one thread, medians of interleaved calls, AVX-512-VNNI. All engines that need "
        f"calibration have the same 32 images. {'; '.join(notes)}."
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source(*results)}"


def limits_table() -> str:
    """Return how far `native` is from the limits of the processor."""
    result = read("limits")
    heads = ["model", "bits", "batch", "products", "values", "traffic", "limit", "measured", "over the limit"]
    heads += ["linears and convolutions", "attention"]
    lines = []
    for row in result["rows"]:
        cells = [name_model(row["model"]), row["bits"].upper(), str(row["batch"])]
        cells += [f"{row[f'{name}_ms']:.2f}" for name in ("products", "values", "traffic", "limit")]
        cells += [f"{row['ms']:.2f}", f"**{row['over_limit']:.2f}**"]
        parts = (row["operations"][name] for name in ("linear", "attention"))
        lines.append([*cells, *(f"{part['ms'] / part['limit_ms']:.2f}" for part in parts)])
    roofs = result["roofs"]
    reads = ", ".join(f"{speed:.0f} GB/s from {name}" for name, speed in roofs["reads"].items())
    note = (
        f"CPU milliseconds of a batch on one thread ({LEVELS[roofs['level']]}), the least of many runs; the last three "
        f"columns are times over limits. This processor's roofs: {roofs['dots']:.0f} billion products of bytes, "
        f"{roofs['exps']:.1f} billion values of 2^x and {roofs['erfs']:.1f} billion of erf per second, and {reads}."
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source('limits')}"


def arm_table() -> str:
    """Return the instructions of one image on 64-bit ARM, and estimates of its cycles."""
    result, lines = read("arm"), []
    counts = ("instructions", "macs", "product_cycles", "throughput_cycles", "cycles")
    for row in result["rows"]:
        cells = [name_model(row["model"]), row["bits"].upper(), f"{row['processor']} (`{row['level']}`)"]
        share = row["kernels"]["multiply_rows"]["cycles"] / row["cycles"]
        lines.append([*cells, *(f"{row[name] / 1e6:.1f}" for name in counts), f"{share:.0%}"])
    heads = ["model", "bits", "processor", "instructions", "multiplications", "cycles, products alone"]
    heads += ["cycles without waiting", "**cycles**", "in products"]
    versions = result["versions"]
    note = (
        "Millions for one image on one thread. **Nothing here was timed**: instructions are counted under emulation "
        f"(QEMU {versions['qemu']}), and cycles are estimates from LLVM {versions['llvm']}'s models of the processors, "
        "with all data in the L1 cache. Products alone: if the processor did nothing but its fastest product of bytes. "
        "Without waiting: if no instruction waited for a result. The last column is the share of the loops of products."
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source('arm')}"


def load_table() -> str:
    """Return how long a fresh process takes until a model has given its first output."""
    result = read("load")
    ways = {
        "c": "**a C program**",
        "run": "**`adalog.run`**",
        "native": "`native`, with PyTorch",
        "onnxruntime": "ONNX Runtime, the artifact exported",
        "numpy": "importing NumPy only",
    }
    lines = []
    for row in result["rows"]:
        for way in (way for way in ways if way in row["ways"]):
            cost = row["ways"][way]
            first = "" if way in ("c", "numpy") else f"{cost['first_seconds']:.3f}"
            cells = [name_model(row["model"]), ways[way], f"{cost['ready_seconds']:.3f}", first]
            lines.append([*cells, f"{cost['peak_bytes'] / 2**20:.0f}"])
    heads = ["model", "", "ready [CPU s]", "first output [CPU s]", "memory [MiB]"]
    note = (
        "Fresh processes that start, load and run one image on one thread; medians. The C program is `examples/c` "
        f"as one static file of {result['program_bytes'] / 1e6:.2f} MB; its first column includes the first output. "
        "Packs are made with `--batch 1`; the default pack takes more memory."
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source('load')}"


def throughput_table() -> str:
    """Return images per second of several threads, models and processes on one machine."""
    result = read("throughput")
    ways = {
        "one": "one process, one thread",
        "two": "two processes, one thread each",
        "four": "four processes, one thread each",
        "threads": "one process, two threads on each image",
        "models": "one process with two models, one thread each",
    }
    batches = [row["batch"] for row in result["rows"]]
    lines = []
    for way, words in ways.items():
        cells = [f"{row['images_per_second'][way]:.1f}" for row in result["rows"]]
        lines.append([words, *cells, *(f"{row['over_two'].get(way, 1):.2f}" for row in result["rows"])])
    heads = [
        "",
        *(f"batch {batch} [images/s]" for batch in batches),
        *(f"batch {batch}, over two" for batch in batches),
    ]
    note = (
        f"{name_model(result['model'])}, {result['bits'].upper()}, on a machine with two cores; medians of wall time. "
        '"Over two": over the throughput of two processes in the same round.'
    )
    return f"{markdown_table(heads, lines)}\n\n{note} {source('throughput')}"


def ranks_table() -> str:
    """Return what two processes of one job gain over one."""
    result = read("scale")
    jobs = {
        "quantize": "quantize DeiT-T at W4A4",
        "tables": "ten rows of Table 1 on the bundled ViT",
        "reconstruct": "`qdrop` at W3A3 on the bundled ViT",
    }
    lines = []
    for part, words in jobs.items():
        same = result[part]["equal_rows" if part == "tables" else "same_bytes"]
        ratio, limit = result[part]["wall_ratio"], result[part]["L"]
        lines.append([words, f"{ratio:.2f}", f"{limit:.2f}", "yes" if same else "no", result[part]["commit"][:7]])
    kills = result["kills"]
    note = (
        "Wall time of two ranks over one process of one thread, corrected by the machine's limit: the time of one run "
        "alone over that of two independent runs at once. A rank was killed at a random moment "
        f"{kills['tried']} times under `--max-restarts`; {kills['equal']} results equalled an undisturbed run. Source: "
        "`benchmarks/results/scale.json`."
    )
    return f"{markdown_table(['job', 'two ranks over one', 'limit', 'same result', 'commit'], lines)}\n\n{note}"


def executors_table() -> str:
    """Return executors and tables compared with fake quantization, and speeds on DeiT-S."""
    names = sorted(path.stem for path in RESULTS.glob("executors*.json"))
    results = [read(name) for name in names]
    heads = ["model", "bits", "executor", "tables", "type", "top-1", "loss", "other codes", "error of logits"]
    heads += ["same predictions as fake", "images/s"]
    lines = []
    for model, row in ((each.get("model", "demo"), row) for each in results for row in each["rows"]):
        cells = [name_model(model), row["bits"].upper(), row["executor"], row["table"], row["dtype"]]
        cells.append(f"{100 * row['top1']:.2f} %")
        cells.append(f"{row['loss']:.4g}")
        flips = row["code_flip_fraction"]  # None for a model of its own, whose codes cannot be compared
        differences = ["", "", ""]
        if flips is not None:
            differences = [f"{flips:.1e}", f"{row['median_logit_error']:.1e}", f"{100 * row['agreement']:.2f} %"]
        lines.append([*cells, *differences, f"{row['images_per_second']:.0f}"])
    speeds = [
        [f"{row['bits'].upper()}, images/s"]
        + [f"{row['images_per_second'][name]:.1f} ({row['ratio'][name]:.2f})" for name in ("fp32", "torch")]
        for row in results[0]["speed"]
    ]
    note = (
        "The first rows of each width compare executors with fake quantization under the tables that calibration "
        "chose: the share of activations' codes that differ, the median relative error of the logits, and equal "
        "predictions. The other rows of `fake` are models calibrated with one kind of table only; loss is the mean "
        "squared error of the logits to full precision. The second table has images per CPU second on one thread and, "
        "in brackets, the ratio to PyTorch in float32."
    )
    tables = (markdown_table(heads, lines), markdown_table(["DeiT-S, batch 8", "fp32", "torch"], speeds))
    return "\n\n".join((*tables, f"{note} {source(*names)}"))


def export_table() -> str:
    """Return how exports compare with their artifacts, and their times."""
    results = {path.stem: read(path.stem) for path in sorted(RESULTS.glob("export-*.json"))}
    heads = ["model", "bits", "form", "engine", "accumulators", "other predictions", "median error", "own error"]
    lines = []
    for row in (row for result in results.values() for row in result["rows"]):
        cells = [name_model(row["model"]), row["bits"].upper(), row["form"], ENGINES[row["engine"]].partition(",")[0]]
        cells += [
            "all equal" if row["accumulators_equal"] else "differ",
            f"{row['argmax_changed']} of {row['images']:,}",
        ]
        cells += [f"{row['error']['median']:.0e}", f"{row['own_error']:.0e}" if "own_error" in row else ""]
        lines.append([*cells, f"{row['time_over_fp32']:.2f}", f"{row['bytes'] / 1e6:.2f}"])
    changed, caught = (sum(result[f"damaged_{key}"] for result in results.values()) for key in ("tried", "caught"))
    spent = max(each["cpu_seconds"] for result in results.values() for each in result["exports"])
    executors = " or ".join(f"`{name}`" for name in dict.fromkeys(result["executor"] for result in results.values()))
    note = (
        f"Other predictions: images whose largest output differs from the artifact's, run by {executors}. Median "
        "error: relative, of the outputs. Own error: the artifact's, between its executor and fake quantization with "
        "inputs moved by a millionth; an export's error of this size is rounding noise. Time: CPU time over that of "
        "the float model in the same engine, one image on one thread. OpenVINO computes in float32. All but the "
        "bundled ViT and TinyViT have random weights and images of noise. In each model's first file 20 initialisers "
        f"were changed, one at a time: certificates caught {caught} of {changed} changes. The slowest export took "
        f"{math.ceil(spent)} CPU seconds. The sizes of OpenVINO's rows are those of the ONNX file that it "
        "converts; its own two files are larger."
    )
    return f"{markdown_table([*heads, 'time', 'file [MB]'], lines)}\n\n{note} {source(*results)}"


def web_table() -> str:
    """Return the times of packs in WebAssembly, and of a float32 model and the compiled library in the same run."""
    result, lines, heads = read("web"), [], ["model", "engine", "ms"]
    for model, row in result["models"].items():
        times = {name: each["least"] for name, each in row["milliseconds"].items()}
        float32 = next(time for name, time in times.items() if name.startswith("onnxruntime"))
        for name, time in times.items():
            native = times.get(f"native avx2 {name.rpartition(' ')[2]}")
            ratio = f"{time / native:.2f}" if native else ""
            lines.append([name_model(model), name, f"{time:.1f}", f"{time / float32:.2f}", ratio])
    note = (
        "The least time of a call with one image, on one thread, by kernels and bits. Other programs share the "
        "machine. `native` is the compiled library outside Node.js. The weights are random. "
        f"adalog's module has {sum(result['module_bytes'].values()) / 1e3:.0f} kB. Node.js "
        f"{result['versions']['node']}, onnxruntime-web {result['versions']['onnxruntime-web']}. {source('web')}"
    )
    return f"{markdown_table([*heads, 'of float32', 'of native avx2'], lines)}\n\n{note}"


def page_table() -> str:
    """Return the times of the example page in a browser."""
    result, lines = read("page"), []
    for row in result["rows"]:
        cells = [name_model(row["model"]), row["bits"].upper(), f"{row['bytes'] / 1e6:.2f}"]
        times = [f"{row['first_answer']['median']:.0f}", f"{row['answer']:.1f}"]
        lines.append([*cells, *times, f"{row['same_class']} of {row['pictures']}"])
    heads = ["model", "bits", "pack [MB]", "first answer [ms]", "next answers [ms]", "same class"]
    note = (
        "First answer: from the navigation to the class, medians of new browsers with an empty profile, which get a "
        "picture when the page has loaded. A server on the same machine serves the files. Same class: pictures whose "
        f"first class is also that of `adalog.run`. The machine's load average was {result['load'][0]:.1f}. "
        f"{source('page')}"
    )
    return f"{markdown_table(heads, lines)}\n\n{note}"


def executorch_table() -> str:
    """Return the times of ExecuTorch files beside ExecuTorch's float32, and what their certificates say."""
    names = [name for name in ("executorch", "executorch-w4a8") if exists(name)]
    result, lines, certified, quantized = read("executorch"), [], 0, 0
    for row in (row for name in names for row in read(name)["rows"]):
        ours = "native_cpu_ms" in row
        if not ours:
            plain = row  # the float32 of the same run comes first
        quantized, certified = quantized + ours, certified + row.get("passed", False)
        lines.append([row["bits"].upper(), f"{row['cpu_ms']:.1f}", f"{row['cpu_ms'] / plain['cpu_ms']:.2f}"])
        lines[-1] += [f"{row['native_cpu_ms']:.1f}" if ours else "", f"{row['bytes'] / 1e6:.2f}"]
        lines[-1] += [f"{row['argmax_changed']} of {result['images']}" if ours else ""]
        lines[-1] += [f"{row['error']['median']:.1e}" if ours else "", f"{row['own_error']:.1e}" if ours else ""]
        lines[-1] += [f"{100 * row['top1']:.1f} %"]
    heads = ["bits", "CPU [ms]", "of float32", "adalog's kernels [ms]", "file [MB]", "other predictions"]
    note = (
        f"{result['model']}, method {result['method']}, one image on one thread. The rows below each FP32 are of the "
        "same run, with all ways in turn. CPU: the median CPU time in ExecuTorch. Other predictions: images whose "
        "largest output differs from the artifact's. "
        "Median error: of the outputs, relative to the artifact's. Own error: the artifact's, if its inputs move by a "
        f"millionth. {certified} of {quantized} certificates passed. ExecuTorch "
        f"{result['machine']['executorch']}. {source(*names)}"
    )
    return f"{markdown_table([*heads, 'median error', 'own error', 'top-1'], lines)}\n\n{note}"


def gpu_table() -> str:
    """Return what adalog takes on a GPU; parts of it were measured at an earlier commit."""
    return "\n\n".join(_gpu_table(name) for name in ("gpu", "gpu-search") if exists(name))


def _gpu_table(name: str) -> str:
    """Return what one run of `benchmarks.gpu` measured; a part that was not measured has no row."""
    result = read(name)
    what = f"{result['bits'].upper()}, {result['images']} images"
    lines = []
    for row in result.get("rows", ()):
        measured = {
            "cold": "the first time",
            "capture": "again, capture",
            "search": "again, search",
            "correction": "again, correction",
        }
        lines += [[f"{row['model']}, {what}: {part}", f"{row[key]} s"] for key, part in measured.items() if key in row]
        lines.append([f"{row['model']}, {what}: peak of GPU memory", f"{row['peak_gib']} GiB"])
    lines += _kernel_lines(result.get("kernels", {}), what)
    for row in result.get("steps", ()):
        how = "as one graph" if row["recorded"] else "operation by operation"
        lines.append([f"a training step of one block, {row['batch']} images, {how}", f"{row['ms_per_step']} ms"])
    if stages := result.get("reconstruction"):
        title = f"{stages['model']}, {stages['bits'].upper()}, `adalog++` from {stages['fitted']} images"
        for stage in ("search", "correction", "end_to_end"):
            lines.append([f"{title}: {stage.replace('_', ' ')}", f"{stages[stage]} s"])
    for row in result.get("evaluation", ()):
        speeds = row["images_per_second"]
        cells = "float model, fake quantization, executor `torch`"
        lines.append(
            [
                f"images per second, {row['batch']} at a time, {row['bits'].upper()}: {cells}",
                ", ".join(str(speeds[name]) for name in ("float", "fake_quantization", "torch")),
            ]
        )
    if "compiled" in (row := result.get("compiled", {})):
        title = f"images per second, {row['batch']} at a time, {row['bits'].upper()}: fake quantization, compiled"
        lines.append([title, f"{row['fake_quantization']}, {row['compiled']}"])
    for row in result.get("agreement", ()):
        title = f"bundled model, {row['bits'].upper()}: same classes as fake quantization on the GPU"
        title += f", of {row['images']}"
        lines.append([f"{title} images: executor `torch`", f"{100 * row['torch']:.2f} %"])
        lines.append([f"{title} images: fake quantization on a CPU", f"{100 * row['fake_quantization_on_cpu']:.2f} %"])
    for row in result.get("sqnr", ()):
        model = row["model"] if row["model"] != "demo" else "bundled model"
        model += f" with {row['blocks']} blocks" if "blocks" in row else ""
        off = f"{row['mean_db']} ({row['least_db']} to {row['most_db']})"
        lines.append([f"{model}, {what}: SQNR minus that of a CPU [dB], mean (least to most)", off])
    note = f"{result['device']}; the images are random, but for the bundled model. {source(name)}"
    return f"{markdown_table(['what', 'measured'], lines)}\n\n{note}"


def _kernel_lines(kernels: Mapping[str, Any], what: str) -> list[list[str]]:
    """Return the rows of what the search and the correction ask of a GPU."""
    lines = []
    for part in ("search", "correction"):
        found = kernels.get(part, {})
        measured = {
            label: f"{found[key]:,}"
            for key, label in (
                ("operations", "computing operations"),
                ("copies", "copies between types or devices"),
                ("waits", "waits for the GPU"),
                ("launches", "launches of kernels"),
            )
            if key in found
        }
        if "busy_share" in found:
            measured["share of the time in which the GPU computes"] = f"{100 * found['busy_share']:.0f} %"
        name = (
            f"{kernels.get('model')} with {kernels['blocks']} blocks" if "blocks" in kernels else kernels.get("model")
        )
        lines += [[f"{name}, {what}, {part}: {label}", value] for label, value in measured.items()]
    return lines
