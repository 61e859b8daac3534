"""The tables of speed and of what runs: of executors.json, and of the files that runtime.py wrote."""

from benchmarks.publish import RESULTS

import json
import math
from typing import Any


def executors_table() -> str:
    """Executors and tables compared with fake quantization, and speeds on DeiT-S, from executors.json."""
    result = json.loads((RESULTS / "executors.json").read_text())
    head = "| bits | executor | tables | type | top-1 | loss | other codes | error of logits | same answers as fake | "
    lines = [f"{head}images/s |", "|---" * 10 + "|"]
    for row in result["rows"]:
        cells = (row["bits"].upper(), row["executor"], row["table"], row["dtype"], f"{100 * row['top1']:.2f} %")
        beside = (f"{row['median_logit_error']:.1e}", f"{100 * row['agreement']:.2f} %")
        flips = row["code_flip_fraction"]  # None for another model, whose codes mean something else
        cells += (f"{row['loss']:.4g}", *(("", "", "") if flips is None else (f"{flips:.1e}", *beside)))
        lines.append("| " + " | ".join([*cells, f"{row['images_per_second']:.0f}"]) + " |")
    lines += ["", "| DeiT-S, batch 8 | " + " | ".join(result["speed"][0]["ratio"]) + " |"]
    lines.append("|---" * (1 + len(result["speed"][0]["ratio"])) + "|")
    for row in result["speed"]:
        rates = (f"{rate:.1f} ({row['ratio'][name]:.2f})" for name, rate in row["images_per_second"].items())
        lines.append("| " + " | ".join([f"{row['bits'].upper()}, images/s", *rates]) + " |")
    return "\n".join(lines)


# What is timed, by its name in the result files.
ENGINES = {
    "torch": "PyTorch eager, float32",
    "torch-bf16": "PyTorch eager, bfloat16",
    "onnxruntime": "ONNX Runtime, float32",
    "onnxruntime-int8": "ONNX Runtime int8, static",
    "onnxruntime-int8-dynamic": "ONNX Runtime int8, dynamic",
    "openvino": "OpenVINO, float32",
    "openvino-bf16": "OpenVINO, bfloat16",
    "openvino-int8": "OpenVINO int8, static, float32 around it",
    "openvino-int8-bf16": "OpenVINO int8, static, bfloat16 around it",
}
LEVELS = {"amx": "AMX", "avx512vnni": "AVX-512-VNNI", "avx2": "AVX2"}


def engine(name: str) -> str:
    """What is timed, for people; ours are bold."""
    kind, _, bits = name.partition("/")
    return f"**adalog {width(bits)}, native**" if kind == "native" else ENGINES[name]


def width(bits: str) -> str:
    """The bits of ours, and the method where it is not `adalog`, for people."""
    bits, _, method = bits.partition(":")
    return f"{bits.upper()} {method}" if method else bits.upper()


def age(result: dict[str, Any]) -> str:
    """What stands beside a file of kernels that are not the present ones, which names no commit."""
    return "" if "commit" in result else ", earlier kernels"


def runtime_results() -> list[dict[str, Any]]:
    """The files that `benchmarks/runtime.py` wrote."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("runtime-*.json"))]


def runtime_table() -> str:
    """The time of our kernels over that of each peer, and the errors of all, from each runtime-*.json."""
    results = runtime_results()
    peers = list(dict.fromkeys(row["name"] for result in results for row in result["rows"] if "/" not in row["name"]))
    heads = ("model", "kernels", "threads", "bits", "batch", "CPU [ms]", "error", "weights [MB]", "load [CPU s]")
    lines = [f"| {' | '.join((*heads, *map(engine, peers)))} |", "|---" * (len(heads) + len(peers)) + "|"]
    for result in results:
        name = result["model"].rpartition(":")[2]
        errors = {(row["name"], row["batch"]): f"{row['logit_error']:.2f}" for row in result["rows"]}
        for row in result["rows"]:
            if row["name"] not in peers:
                bits, ratios = row["name"].partition("/")[2], result["ratios"][f"{row['name']}/b{row['batch']}"]
                cells = (name, result["level"] + age(result), result["threads"], width(bits), row["batch"])
                cells += (f"{row['cpu_ms']:.1f}",)
                cells += (f"{row['logit_error']:.2f}", f"{row['weight_bytes'] / 1e6:.2f}")
                cells += (f"{row['load_cpu_seconds']:.1f}",)
                cells += tuple(
                    f"{ratios[peer]:.2f} ({errors[peer, row['batch']]})" if peer in ratios else "" for peer in peers
                )
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def speed_table() -> str:
    """DeiT-S by all engines on one thread: a row per engine, processors side by side."""
    results = [each for each in runtime_results() if "deit_small" in each["model"] and each["threads"] == 1]
    results.sort(key=lambda result: list(LEVELS).index(result["level"]))
    times = [{(row["name"], row["batch"]): row["cpu_ms"] for row in result["rows"]} for result in results]
    rows = sorted((row for each in results for row in each["rows"]), key=lambda row: row["logit_error"])
    errors = {row["name"]: row["logit_error"] for row in rows}  # the largest of each
    columns = [(index, batch) for index in range(len(results)) for batch in (1, 8)]
    heads = [f"{LEVELS[results[index]['level']]}, {batch} at once" for index, batch in columns]
    lines = ["| engine | error of the logits | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for name in [*(name for name in errors if "/" in name), *(name for name in ENGINES if name in errors)]:
        cells = (times[index].get((name, batch)) for index, batch in columns)
        told = ("" if value is None else f"{value:.1f} ms" for value in cells)
        lines.append(f"| {engine(name)} | {errors[name]:.2f} | {' | '.join(told)} |")
    processors = dict.fromkeys(f"{LEVELS[one['level']]}: {one['machine']['processor']}{age(one)}" for one in results)
    text = (
        "DeiT-S on 224 x 224, random weights: CPU milliseconds of a batch on one thread, medians of calls in turn, and "
        "the largest relative error of the logits to the float model, after a short calibration on noise. "
        f"{'; '.join(processors)}; shared with other work. Columns of different processors are different runs; an "
        "empty cell was not measured. Where a processor has more instructions than the heading says, PyTorch, "
        "OpenVINO and our kernels do without them, and ONNX Runtime does not. All figures: "
        "[measured](docs/measured.md)."
    )
    return "\n".join([*lines, "", text])


def accuracy_table() -> str:
    """Accuracy beside milliseconds, from each runtime-*.json of a model with real weights."""
    results = [result for result in runtime_results() if "accuracy" in result]
    names = {"demo": "the bundled ViT", "realbench": "TinyViT"}
    lines = ["| model | engine | top-1 | agreement | error of the logits | 1 at once | 8 at once |", "|---" * 7 + "|"]
    for result in results:
        times = {(row["name"], row["batch"]): f"{row['cpu_ms']:.2f} ms" for row in result["rows"]}
        errors = {row["name"]: row["logit_error"] for row in result["rows"] if row["batch"] == 8}
        for name, found in result["accuracy"].items():
            if name != "fp32":
                cells = (names[result["model"]], engine(name), f"{100 * found['top1']:.2f} %")
                cells += (f"{100 * found['agreement']:.2f} %", f"{errors[name]:.3f}")
                lines.append(f"| {' | '.join((*cells, times[name, 1], times[name, 8]))} |")
    tops = (
        f"{names[each['model']]} has {100 * each['accuracy']['fp32']['top1']:.2f} % in full precision, on "
        f"{each['accuracy']['fp32']['images']:,} images"
        for each in results
    )
    machines = dict.fromkeys(f"{each['machine']['processor']}, {LEVELS[each['level']]}{age(each)}" for each in results)
    text = (
        f"CPU milliseconds of a batch on one thread, medians of calls in turn ({'; '.join(machines)}; shared with "
        f"other work). All that need calibration have the same 32 images; {'; '.join(tops)}."
    )
    return "\n".join([*lines, "", text])


def limits_table() -> str:
    """How far `native` is from the processor's roofs, from limits.json."""
    result = json.loads((RESULTS / "limits.json").read_text())
    heads = ("model", "bits", "batch", "products", "values", "traffic", "limit", "a run", "over the limit")
    heads += ("linears and convolutions", "attention")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in result["rows"]:
        cells = (row["model"].rpartition(":")[2], row["bits"].upper(), row["batch"])
        cells += tuple(f"{row[f'{name}_ms']:.2f}" for name in ("products", "values", "traffic", "limit"))
        cells += (f"{row['ms']:.2f}", f"**{row['over_limit']:.2f}**")
        found = (row["operations"][name] for name in ("linear", "attention"))
        cells += tuple(f"{each['ms'] / each['limit_ms']:.2f}" for each in found)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    roofs, machine = result["roofs"], result["machine"]
    reads = ", ".join(f"{speed:.0f} GB/s from {name}" for name, speed in roofs["reads"].items())
    text = (
        f"CPU milliseconds of a batch on one thread ({machine['processor']}, {LEVELS[roofs['level']]}{age(result)}; "
        "shared with other work), the least of many; the last three columns are times over limits. The roofs: "
        f"{roofs['dots']:.0f} billion products of bytes, {roofs['exps']:.1f} billion values of 2^x and "
        f"{roofs['erfs']:.1f} billion of erf in a second, and {reads}. Figures: `benchmarks/results/limits.json`."
    )
    return "\n".join([*lines, "", text])


def load_table() -> str:
    """How long a fresh process takes until a model answers, from load.json."""
    result = json.loads((RESULTS / "load.json").read_text())
    names = {
        "run": "**`adalog.run`**",
        "native": "`native`, with PyTorch",
        "onnxruntime": "ONNX Runtime, the artifact exported",
        "numpy": "importing NumPy alone",
    }
    heads = ("model", "", "ready [CPU s]", "first answer [CPU s]", "memory [MiB]", "beside the weights [MiB]")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in result["rows"]:
        for way in (name for name in names if name in row["ways"]):
            found = row["ways"][way]
            cells = (f"{found['ready_seconds']:.3f}", "" if way == "numpy" else f"{found['first_seconds']:.3f}")
            cells += tuple(f"{found[name] / 2**20:.0f}" for name in ("peak_bytes", "beside_weights"))
            lines.append(f"| {' | '.join((row['model'].rpartition(':')[2], names[way], *cells))} |")
    text = (
        "Processes that start, load and answer one image, on one thread, in turn; medians "
        f"({result['machine']['processor']}{age(result)}; shared with other work). "
        "Figures: `benchmarks/results/load.json`."
    )
    return "\n".join([*lines, "", text])


_EXPORTED = {"demo": "the bundled ViT", "realbench": "TinyViT"}


def export_table() -> str:
    """What exports answer beside their artifacts, and what time they take, from each export-*.json."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("export-*.json"))]
    heads = (
        "model",
        "bits",
        "form",
        "engine",
        "accumulators",
        "other answers",
        "median error",
        "own error",
        "time",
        "ONNX file",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in (row for result in results for row in result["rows"]):
        name = _EXPORTED.get(row["model"], row["model"].rpartition(":")[2])
        equal = "all equal" if row["accumulators_equal"] else "differ"
        cells = (name, row["bits"].upper(), row["form"], ENGINES[row["engine"]].partition(",")[0])
        cells += (equal, f"{row['argmax_changed']} of {row['images']:,}", f"{row['error']['median']:.0e}")
        own = f"{row['own_error']:.0e}" if "own_error" in row else ""
        cells += (own, f"{row['time_over_fp32']:.2f}", f"{row['bytes'] / 1e6:.2f} MB")
        lines.append(f"| {' | '.join(cells)} |")
    tried, caught = (sum(result[f"damaged_{what}"] for result in results) for what in ("tried", "caught"))
    spent = [max(each["cpu_seconds"] for each in result["exports"]) for result in results]
    machines = dict.fromkeys(result["machine"]["processor"] for result in results)
    executors = " or ".join(f"`{each}`" for each in dict.fromkeys(result["executor"] for result in results))
    text = (
        "Other answers: images whose largest output differs from the artifact's, which the executor "
        f"{executors} computes. Median error: of the outputs, relative. Own error: the "
        "artifact's, between its executor and fake quantization where its inputs are moved by a millionth; an error "
        "of this size says little of an export. Time: CPU time over that of the "
        f"float model in the same engine, one image at a time on one thread ({', '.join(machines)}; shared with other "
        "work). OpenVINO computes in float32. All but the bundled ViT and TinyViT have random weights and images of "
        "noise. In each model's first file 20 initialisers were changed, one at a time: certificates caught "
        f"{caught} of these {tried} changes. An export takes at most {math.ceil(max(spent))} CPU seconds."
    )
    return "\n".join([*lines, "", text])
