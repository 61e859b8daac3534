"""The paper's tables on models and images of one's own: Tables 1 to 5, A and B, beside the published figures.

A table is a tuple of rows, a row is a configuration with the words that name it. `run` measures each configuration once
for each model and seed, whichever tables have it, and keeps what is finished in files; `markdown` writes what it
returns. Every published figure, with its source and the number of images it was calibrated on, is in published.json.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import adalog
from adalog.calibration.calibration import Calibration, raw_bytes
from adalog.choices import ReleasedSearch, Search
from adalog.config import Config
from adalog.errors import DataError
from adalog.files import write_whole
from adalog.graph.program import Program
from adalog.inputs import demo
from adalog.inputs.images import ImageSet, find_images
from adalog.inputs.zoo import LoadedModel
from adalog.methods import METHODS
from adalog.model import quickest
from adalog.quantize import sample_images
from adalog.study.cost import cost
from adalog.study.doctor import machine
from adalog.study.evaluate import check_classes, mcnemar, predict, score

IMAGES = 32  # that calibrate (Sec. 4.1)
_BITS = ("w4a4", "w3a3", "w6a6")
# What the published comparison has first, then the other quantizers in the same search, the readings, other rivals.
_METHODS = ("adalog", "repq-vit", "ptq4vit", "apq-vit")
# n candidates for each of two hyperparameters: 64 of each here, so that both searches look at the same grid.
_BRUTE_FORCE = Search(strategy="brute-force", init=(8, 8), parents=8)
_ALTERNATING = Search(strategy="alternating")

Progress = Callable[[int, int, str, dict[str, Any]], None]


@dataclass(frozen=True)
class Row:
    """A line of a table. names: its cells; method: its name in published.json; once: for the first seed only."""

    names: tuple[str, ...]
    config: Config
    method: str
    once: bool = False


@dataclass(frozen=True)
class Table:
    """columns: what the rows' names are. cost: whether FixOPs and size are shown. note: what is said below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    cost: bool = False
    note: str = ""


def _config(bits: str, method: str = "adalog", **changes: Any) -> Config:
    return replace(Config.preset(bits, method), **changes)


def _methods() -> Iterator[Row]:
    names = [*_METHODS, *(name for name in METHODS if name not in _METHODS)]
    return (Row((name,), _config(bits, name), name, name == "evol-q") for bits in _BITS for name in names)


# Without AdaLog: uniform after softmax and GELU, or after GELU alone. The paper says the first, and prints at W4/A4 the
# very figures of the second (its Table B).
_QUANTIZERS = (("uniform", "uniform"), ("adalog", "uniform"), ("adalog", "adalog"))


def _parts(bits: str, searches: Mapping[str, Search]) -> Iterator[Row]:
    for softmax, gelu in _QUANTIZERS:
        for search, choice in searches.items():
            config = _config(bits, post_softmax=softmax, post_gelu=gelu, search=choice)
            yield Row((softmax, gelu, search), config, f"{gelu}, {search}")


# The published figures are by the released code, whose logarithms after softmax have the scale 1, whose codes beyond
# the last are zero, and whose post-GELU scales of log2 and log-sqrt2 are those found for AdaLog.
_FRAMES = {"ours": "adalog", "released": "adalog-released"}


def _after_softmax() -> Iterator[Row]:
    yield Row(("float", "ours"), _config("w4a4s32"), "float")
    for bits in ("w4a4", "w4a4s3", "w4a4s2"):
        for frame, method in _FRAMES.items():
            for kind in ("uniform", "log2", "log-sqrt2", "adalog"):
                if (frame, kind) != ("released", "uniform"):  # which the released code does not have
                    yield Row((kind, frame), _config(bits, method, post_softmax=kind), kind)


def _after_gelu() -> Iterator[Row]:
    for frame, method in _FRAMES.items():
        for kind in ("uniform", "twin", "log2", "log-sqrt2", "adalog"):
            offset = "no" if kind in ("uniform", "twin") else "yes"
            yield Row((kind, offset, frame), _config("w4a4", method, post_gelu=kind), kind)


TABLES = {
    "1": Table("Top-1 by method and bits", ("method",), tuple(_methods())),
    "2": Table(
        "AdaLog and FPCS, off and on",
        ("after softmax", "after GELU", "search"),
        tuple(row for bits in _BITS[:2] for row in _parts(bits, {"alternating": _ALTERNATING, "FPCS": Search()})),
    ),
    "3": Table(
        "FixOPs and size",
        ("method",),
        tuple(Row((name,), _config(bits, name), name) for bits in _BITS[:2] for name in ("adalog", "repq-vit")),
        cost=True,
        note="FixOPs of the products, of quantizing and of dequantizing. Logarithmic codes count as the paper's Eq. 10 "
        "is printed, mantissas that are shifted, and not as the table of integers that runs.",
    ),
    "4": Table(
        "AdaLog off and on, by search alone (no reconstruction)",
        ("after softmax", "after GELU"),
        tuple(
            replace(row, names=row.names[:2], method=row.names[1])
            for bits in _BITS[:2]
            for row in _parts(bits, {"FPCS": Search()})
        ),
    ),
    "5": Table(
        "Searches: what they find and what they take",
        ("search", "candidates of a pair", "complexity"),
        (
            Row(("alternating", "64 + 64", "O(n)"), _config("w3a3", search=_ALTERNATING), "alternating"),
            Row(("FPCS", "5 x 128 and a walk", "O(pn)"), _config("w3a3"), "FPCS"),
            Row(("brute force", "64 x 64", "O(n²)"), _config("w3a3", search=_BRUTE_FORCE), "brute force", True),
        ),
        note="FPCS is that of `adalog`, whose steps score a sample of the rows; the others score all of them. "
        "Alternating and brute force look at the same 64 values of either hyperparameter.",
    ),
    "A": Table("Quantizers after softmax", ("after softmax", "search"), tuple(_after_softmax())),
    "B": Table("Quantizers after GELU", ("after GELU", "offset", "search"), tuple(_after_gelu())),
}


def bits_name(config: Config) -> str:
    """As the paper writes them: W4/A4, W4/A4/S3."""
    softmax = "" if config.softmax_bits == config.activation_bits else f"/S{config.softmax_bits}"
    return f"W{config.weight_bits}/A{config.activation_bits}{softmax}"


# --- what others have published --------------------------------------------------------------------------------------


@cache
def published() -> dict[str, Any]:
    """published.json: "models", the timm name of each; "figures"; "notes" on what a table's figures leave open.

    A figure has its table, model, bits, method, measure ("top1" [%], "fixops", "megabytes", "gpu_minutes"), value, the
    number of calibration images (0 where nothing was calibrated), and source.
    """
    content: dict[str, Any] = json.loads(resources.files("adalog.study").joinpath("published.json").read_text("utf-8"))
    return content


def find_published(table: str, model: str, bits: str, method: str, images: int) -> dict[str, float]:
    """The figures of a row by measure, none where they were calibrated on other than `images` images.

    model: as `models.load_model` takes it; what follows a dot in a timm name, the weights' tag, is passed over.
    """
    names = {name: short for short, name in published()["models"].items()}
    short = names.get(model.partition(".")[0])
    wanted = {"table": table, "model": short, "bits": bits, "method": method, "calibration_images": images}
    return {
        figure["measure"]: figure["value"]
        for figure in published()["figures"]
        if all(figure[name] == value for name, value in wanted.items())
    }


# --- measuring -------------------------------------------------------------------------------------------------------


def kept(path: Path | None, key: dict[str, Any], make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON has it, kept in a file; made again where that holds it for another key.

    Raises DataError for a file that holds nothing of the kind.
    """
    if path is not None and path.exists():
        try:
            found = json.loads(path.read_text())
            if found["key"] == key:
                return found["value"]
        except (ValueError, LookupError, TypeError) as cause:
            raise DataError(f"{path} holds no finished row ({cause}): remove it, or name another folder") from cause
    value = make()
    if path is not None:
        write_whole(path, json.dumps({"key": key, "value": value}).encode())
    return value


@dataclass(frozen=True)
class Bench:
    """A model with the images that calibrate it and those that judge it: normalised, or files. labels: (N,)."""

    model: LoadedModel
    pool: Tensor | ImageSet
    judged: Tensor | ImageSet
    labels: Tensor

    @staticmethod
    def of(model: LoadedModel, data: Path | None, images: int) -> "Bench":
        """The bundled images for the bundled model; for others the folders train and val of `data`.

        Raises DataError where they are not there, are fewer than the `images` that calibrate, or have no labels.
        """
        if model.name == "demo":
            bench = Bench(model, demo.calibration_images(), *demo.test_images())
        else:
            if data is None:
                raise DataError(f"{model.name} brings no images: give --data DIR with folders train and val")
            for name in ("train", "val"):
                if not (data / name).is_dir():
                    raise DataError(f"{data} has no folder {name}: give one with train to calibrate, val to judge by")
            judged = find_images(data / "val")
            if judged.labels is None:
                raise DataError(
                    f"{data / 'val'} has no labels to judge by: make a subfolder a class, or add a CSV file of "
                    "file,label"
                )
            bench = Bench(model, find_images(data / "train"), judged, torch.tensor(judged.labels))
        if images > len(bench.pool):
            raise DataError(
                f"{model.name} has {len(bench.pool)} images to calibrate with, --images {images} are wanted: give more "
                "images, or want fewer"
            )
        return bench

    def fingerprint(self) -> dict[str, Any]:
        """Of the model, with the file of code that it is from, and its images; of those in files by their names."""
        weights, images = hashlib.sha256(), hashlib.sha256(raw_bytes(self.labels))
        code = Path(self.model.name.rpartition(":")[0])
        if code.suffix == ".py" and code.is_file():
            weights.update(code.read_bytes())
        for name, value in self.model.module.state_dict().items():
            weights.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            weights.update(raw_bytes(value))
        for given in (self.pool, self.judged):
            if isinstance(given, Tensor):
                images.update(raw_bytes(given))
            else:
                images.update(json.dumps(["/".join(path.parts[-2:]) for path in given.paths]).encode())
        return {
            "model": self.model.name,
            "weights": weights.hexdigest(),
            "images": images.hexdigest(),
            "preprocessing": repr(self.model.prepared),
            "adalog": adalog.__version__,
        }

    def sample(self, count: int, seed: int, jobs: int) -> Tensor:
        """The images that calibrate."""
        if isinstance(self.pool, Tensor):
            drawn = sample_images(self.pool, count, seed)
            assert isinstance(drawn, Tensor)
            return drawn
        return self.pool.sample(count, seed).load(self.model.prepared, jobs=jobs)

    def classes(self, network: nn.Module, jobs: int, device: torch.device) -> Tensor:
        """The class that a network gives each image: (N,)."""
        judged = self.judged
        images = judged if isinstance(judged, Tensor) else judged.batches(self.model.prepared, jobs=jobs)
        return predict(network, images, jobs=jobs if device.type == "cpu" else 1, device=device).argmax(dim=1)

    def check(self, device: torch.device) -> None:
        """Whether the model runs on its images and has their classes: DataError where not."""
        last = int(self.labels.argmax())
        judged = self.judged
        one = judged[[last]] if isinstance(judged, Tensor) else judged.select([last]).load(self.model.prepared)
        logits = predict(self.model.module.to(device), one, device=device)
        if isinstance(judged, ImageSet):
            check_classes(judged.classes, logits, str(judged.paths[0].parents[1]), self.model.name)
        score(logits, self.labels[[last]])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return (3, *self.model.prepared.size)


def plan(names: Sequence[str], images: int = IMAGES) -> dict[Config, Row]:
    """The configurations of these tables, each once, in the order they are measured; and a row that each is of.

    What takes long comes last: the released search, and rows of one seed. Raises ValueError for a name that is no
    table's.
    """
    found: dict[Config, Row] = {}
    for name in names:
        if name not in TABLES:
            raise ValueError(f"table {name!r} is none of {', '.join(TABLES)}")
        for row in TABLES[name].rows:
            found.setdefault(replace(row.config, images=images), row)

    def long(each: tuple[Config, Row]) -> int:
        return 2 * each[1].once + isinstance(each[0].search, ReleasedSearch)

    return dict(sorted(found.items(), key=long))


def run(
    names: Sequence[str],
    benches: Sequence[Bench],
    *,
    seeds: int = 1,
    images: int = IMAGES,
    jobs: int = 1,
    device: torch.device | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure these tables, in this order, and return them as JSON has them.

    seeds: draws of the `images` images that calibrate, from 0 on; all tables have the first before any has the next.
    jobs: sites searched, and batches run, at once. work: a folder of finished rows, which are not measured again.
    progress(done, total, what, result) comes after each row, with the result of what is finished by then.
    Raises ValueError for a name that is no table's.
    """
    planned, place = plan(names, images), device or torch.device("cpu")
    runs = [(config, seed) for seed in range(seeds) for config, row in planned.items() if not (seed and row.once)]
    result: dict[str, Any] = {
        "tables": {name: _described(name) for name in sorted(set(names))},
        "models": {},
        "calibration_images": images,
        "executors": [],
        "rows": [],
        "finished": 0,
        "of": len(runs) * len(benches),
        "machine": machine(),
    }
    for bench in benches:
        name, before = bench.model.name, list(result["rows"])
        records: dict[Config, dict[int, dict[str, Any]]] = {}
        bench.model.module.to(place)
        calibrations: dict[int, Calibration] = {}  # of one seed at a time, once something is to be measured

        def calibrated(seed: int, bench: Bench = bench, known: dict[int, Calibration] = calibrations) -> Calibration:
            if seed not in known:
                known.clear()
                known[seed] = Calibration(bench.model.module, bench.sample(images, seed, jobs).to(place), seed=seed)
            return known[seed]

        finished = _Finished(work, bench)
        whole = finished("fp32", {}, partial(_full_precision, bench, calibrated, jobs, place))
        told = {field: whole[field] for field in ("top1", "fixops", "bytes")}
        result["models"][name] = {"images": len(bench.labels), **told}
        for config, seed in runs:
            text = config.to_json()
            short = f"{config.bits}-{hashlib.sha256(text.encode()).hexdigest()[:8]}-{seed}"
            make = partial(_measure, bench, calibrated, config, seed, whole, jobs, place)
            record = finished(short, {"config": text, "seed": seed}, make)
            records.setdefault(config, {})[seed] = record
            result["executors"] = sorted({record["executor"], *result["executors"]})
            result["rows"] = before + list(_rows(names, name, whole, records, images))
            result["finished"] += 1
            if progress is not None:
                row = " ".join((name, bits_name(config), *planned[config].names))
                what = f"{row}, seed {seed}: {100 * record['top1']:.2f} %, {record['seconds']:.0f} s"
                progress(result["finished"], result["of"], what, result)
    return result


def _described(name: str) -> dict[str, Any]:
    """What is said of a table beside its rows."""
    table = TABLES[name]
    notes = {"note": table.note, "published_note": published()["notes"].get(name, "")}
    return {"title": table.title, "columns": list(table.columns), "cost": table.cost, **notes}


class _Finished:
    """The finished measurements of a model in a folder, or in none."""

    def __init__(self, work: Path | None, bench: Bench):
        self._work, self._key = work, bench.fingerprint()
        self._model = "".join(letter if letter.isalnum() else "-" for letter in bench.model.name)

    def __call__(self, name: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        path = None if self._work is None else self._work / f"{self._model}-{name}.json"
        return kept(path, {**self._key, **key}, make)


def _full_precision(
    bench: Bench, calibrated: Callable[[int], Calibration], jobs: int, device: torch.device
) -> dict[str, Any]:
    classes = bench.classes(bench.model.module, jobs, device)
    right = classes == bench.labels
    return {
        "classes": classes.tolist(),
        "top1": float(right.double().mean()),
        "right": packed(right),
        **_costs(calibrated(0).program, bench),
    }


def _measure(
    bench: Bench,
    calibrated: Callable[[int], Calibration],
    config: Config,
    seed: int,
    whole: Mapping[str, Any],
    jobs: int,
    device: torch.device,
) -> dict[str, Any]:
    """One configuration, judged in integers where those run: seconds are of its searches and of what comes after."""
    calibration = calibrated(seed)
    calibration.quantize(replace(config, refine=None), jobs=jobs if device.type == "cpu" else 1)
    start = time.process_time()
    quantized = calibration.quantize(config)
    seconds = time.process_time() - start + sum(searched.seconds for searched in calibration.search(config))
    runs, executor, at_once = quickest(quantized, jobs)
    classes = bench.classes(runs, at_once, device)
    right = classes == bench.labels
    return {
        "executor": executor or "fake quantization",
        "top1": float(right.double().mean()),
        "agreement": float((classes == torch.tensor(whole["classes"])).double().mean()),
        "right": packed(right),
        "seconds": round(seconds, 2),
        **_costs(quantized.program, bench),
    }


def _costs(program: Program, bench: Bench) -> dict[str, Any]:
    """FixOPs of the products, as the paper counts them, and of the ways to codes and back; bytes of the tensors."""
    found = cost(program, [bench.shape], as_printed=True)
    ways = [total.fixops for role, total in found.by_role().items() if role in ("quantize", "dequantize")]
    return {"fixops": found.fixops + sum(ways), "bytes": sum(found.size_bytes.values())}


def packed(right: Tensor) -> str:
    """Which images are right, (N,), a bit each, as a hexadecimal number."""
    return np.packbits(right.numpy()).tobytes().hex()


def _rows(
    names: Sequence[str],
    model: str,
    whole: Mapping[str, Any],
    records: Mapping[Config, Mapping[int, Mapping[str, Any]]],
    images: int,
) -> Iterator[dict[str, Any]]:
    """The lines of these tables that are finished for one seed or more, table by table."""
    for name in sorted(set(names)):
        for row in TABLES[name].rows:
            found = records.get(replace(row.config, images=images), {})
            if not found:
                continue
            beside = records.get(replace(Config.preset(row.config.bits), images=images), {})
            yield {
                "table": name,
                "model": model,
                "bits": row.config.bits,
                "names": list(row.names),
                "method": row.method,
                "seeds": list(found),
                **{field: _spread(record[field] for record in found.values()) for field in _MEASURED},
                "p_float": [p_value(whole, record) for record in found.values()],
                "p_adalog": [
                    p_value(beside[seed], record) if beside is not found and seed in beside else None
                    for seed, record in found.items()
                ],
                "published": find_published(name, model, row.config.bits, row.method, images),
            }


_MEASURED = ("top1", "agreement", "seconds", "fixops", "bytes")


def _spread(values: Iterable[float]) -> dict[str, Any]:
    found = list(values)
    return {"mean": mean(found), "std": stdev(found) if len(found) > 1 else 0.0, "values": found}


def p_value(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """McNemar's, of who is right about which image: of two records with "right", as `packed` gives it."""
    one, other = int(first["right"], 16), int(second["right"], 16)
    return mcnemar((one & ~other).bit_count(), (other & ~one).bit_count())


# --- as text ---------------------------------------------------------------------------------------------------------


def markdown(result: Mapping[str, Any], heading: str = "## ") -> str:
    """What `run` returns, a Markdown table for each table and model."""
    parts = []
    for name, table in result["tables"].items():
        parts.append(f"{heading}Table {name}: {table['title']}")
        rows = [row for row in result["rows"] if row["table"] == name]
        for model, whole in result["models"].items():
            found = [row for row in rows if row["model"] == model]
            if found:
                beside = find_published(name, model, "fp32", "fp32", 0)
                parts += [f"{model}:", _markdown_table(table, {**whole, "published": beside}, found)]
        compared = any(row["published"] for row in rows)
        parts += [text for text in (table["note"], compared and table["published_note"]) if text]
    seeds = 1 + max((seed for row in result["rows"] for seed in row["seeds"]), default=0)
    draws = f"Mean ± standard deviation over {seeds} draws" if seeds > 1 else "One draw"
    judged = ", ".join(f"{model} on {whole['images']:,} images" for model, whole in result["models"].items())
    machine = result["machine"]
    parts.append(
        f"{draws} of {result['calibration_images']} calibration images; {judged}. p: McNemar's exact test beside the "
        "full-precision model, and beside adalog at the same bits; of several draws the median. CPU s: of the search, "
        f"also where it was shared with another row. Run by {' and '.join(result['executors'])}. adalog "
        f"{machine['adalog']}, torch {machine['torch']}, {machine['processor']}."
    )
    if result["finished"] < result["of"]:
        parts.append(f"Unfinished: {result['finished']} of {result['of']} measurements.")
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Mapping[str, Any], whole: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The full-precision model, then the rows.

    Columns in which nothing is said, such as published figures of a model without any, are left out.
    """
    names, draws = table["columns"], max(len(row["seeds"]) for row in rows)
    lines = [{"bits": "W32/A32", names[0]: "full precision", **_figures(whole, table["cost"])}]
    for row in rows:
        beside = [value for value in row["p_adalog"] if value is not None]
        line = {"bits": bits_name(Config.preset(row["bits"])), **dict(zip(names, row["names"], strict=True))}
        line |= _figures(row, table["cost"])
        if len(row["seeds"]) < draws:
            line["top-1 [%]"] += f" ({len(row['seeds'])} of {draws} draws)"
        line["agreement [%]"] = _percent(row["agreement"])
        line["p, float"] = f"{median(row['p_float']):.2g}"
        line["p, adalog"] = f"{median(beside):.2g}" if beside else ""
        line["CPU s"] = f"{row['seconds']['mean']:.0f}"
        if "gpu_minutes" in row["published"]:
            line["published GPU min"] = f"{row['published']['gpu_minutes']:g}"
        lines.append(line)
    columns = list(dict.fromkeys(("bits", *names, *(column for line in lines for column in line))))
    columns = [column for column in columns if any(line.get(column) for line in lines)]
    cells = [columns, ["---"] * len(columns), *([line.get(column, "") for column in columns] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _figures(told: Mapping[str, Any], with_cost: bool) -> dict[str, str]:
    """The cells of what was measured of a row, or of the full-precision model, and of what is published."""
    others = told["published"]
    cells = {"top-1 [%]": _percent(told["top1"]), "published [%]": f"{others['top1']:.2f}" if "top1" in others else ""}
    if with_cost:
        for title, field, other, unit, form in _COSTS:
            value = told[field] if isinstance(told[field], (int, float)) else told[field]["mean"]
            cells[title] = format(value / 1e6, form)
            cells[f"published {title}"] = format(others[other] / unit, form) if other in others else ""
    return cells


_COSTS = (("FixOPs [M]", "fixops", "fixops", 1e6, ",.0f"), ("size [MB]", "bytes", "megabytes", 1, ".2f"))


def _percent(value: float | Mapping[str, Any]) -> str:
    if isinstance(value, (int, float)):
        return f"{100 * value:.2f}"
    spread = f" ± {100 * value['std']:.2f}" if len(value["values"]) > 1 else ""
    return f"{100 * value['mean']:.2f}{spread}"
