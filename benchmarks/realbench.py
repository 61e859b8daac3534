"""How much accuracy quantization costs a real pretrained transformer on real images.

    python benchmarks/realbench.py --realbench DIR --bits w8a8 w6a6 w4a4 w3a3 [--methods adalog uniform]
        [--json FILE]

DIR, or the environment variable ADALOG_REALBENCH, names a folder with TinyViT-5M, which has no classifier, and 2,000
labelled images. Each query takes the label of the support image whose features are nearest. 32 support images, drawn
with the seed, calibrate. Prints one JSON object and saves it as benchmarks/results/realbench.json: top-1 of the float
model and of each quantized model; for a quantized model also its agreement with the float one, McNemar's p against the
float one and against `adalog` at the same bits, which queries it gets right (one bit each, hexadecimal), and the SQNR
of every site. `--work DIR` keeps finished rows.
"""

from benchmarks.publish import RESULTS, publish

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from adalog import METHODS, Calibration, Config
from adalog.inputs.images import Preprocessing, find_images
from adalog.model import quickest
from adalog.study.doctor import machine
from adalog.study.evaluate import classify_by_nearest, predict, score
from adalog.study.tables import kept, p_value, packed

IMAGES = 32


def load_model(folder: Path) -> nn.Module:
    import timm

    model = timm.create_model("tiny_vit_5m_224", num_classes=0)
    model.load_state_dict(load_file(folder / "tiny_vit_5m_224_in22k.safetensors"))
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, default=os.environ.get("ADALOG_REALBENCH"))
    parser.add_argument("--bits", nargs="+", default=["w8a8", "w6a6", "w4a4", "w3a3"])
    parser.add_argument("--methods", nargs="+", default=["adalog", "uniform"], choices=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path, default=RESULTS / "realbench.json")
    given = parser.parse_args()
    if given.realbench is None or not Path(given.realbench).is_dir():
        print(f"skipped: there is no folder {given.realbench}; give --realbench DIR or set ADALOG_REALBENCH")
        sys.exit(0)
    torch.set_num_threads(1)
    folder = Path(given.realbench)
    model, preprocessing = load_model(folder), Preprocessing(size=(224, 224), resize=256)
    images = find_images(folder)
    labels = torch.tensor(images.labels)
    support = torch.tensor([path.parent.name == "support" for path in images.paths])

    def classes(network: nn.Module, at_once: int) -> torch.Tensor:
        features = predict(network, images.batches(preprocessing, jobs=given.jobs), jobs=at_once)
        return classify_by_nearest(features[support], labels[support], features[~support])

    def finished(name: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        return kept(None if given.work is None else given.work / f"{name}.json", key, make)

    data = {"images": len(images), "folder": folder.resolve().name}
    reference = torch.tensor(finished("fp32", data, lambda: classes(model, given.jobs).tolist()))
    truth = labels[~support]
    calibration: Calibration | None = None
    rows: list[dict[str, Any]] = []
    for bits in given.bits:
        for method in given.methods:
            config = Config.preset(bits, method)

            def row(config: Config = config, bits: str = bits, method: str = method) -> dict[str, Any]:
                nonlocal calibration
                if calibration is None:
                    pool = images.select(torch.nonzero(support).flatten().tolist())
                    sample = pool.sample(IMAGES, given.seed).load(preprocessing)
                    calibration = Calibration(model, sample, seed=given.seed)
                start = time.process_time()
                quantized = calibration.quantize(config, jobs=given.jobs)
                seconds = time.process_time() - start
                runs, executor, at_once = quickest(quantized, given.jobs)
                answers = classes(runs, at_once)
                result = score(answers, truth, reference)
                print(f"{bits} {method}: {100 * result.top1.value:.1f} %, {seconds:.0f} s", file=sys.stderr)
                return {
                    "bits": bits,
                    "method": method,
                    "executor": executor or "fake quantization",
                    "top1": result.top1.value,
                    "agreement": result.agreement,
                    "mcnemar_p": result.p_value,
                    "right": packed(answers == truth),
                    "lost": result.lost,
                    "gained": result.gained,
                    "seconds": round(seconds, 1),
                    "sqnr": {entry.site: round(entry.sqnr, 2) for entry in quantized.ledger},
                    "left": {entry.site: entry.left for entry in quantized.ledger},
                }

            key = {**data, "config": config.to_json(), "seed": given.seed, "calibration_images": IMAGES}
            rows.append(finished(f"{bits}-{method}-{given.seed}", key, row))
    beside = {row["bits"]: row for row in rows if row["method"] == "adalog"}
    for row in rows:
        other = beside.get(row["bits"], row)
        row["mcnemar_p_adalog"] = None if other is row else p_value(other, row)
    float_score = score(reference, truth)
    result = {
        "fp32": {"top1": float_score.top1.value, "low": float_score.top1.low, "high": float_score.top1.high},
        "queries": len(truth),
        "calibration_images": IMAGES,
        "seed": given.seed,
        "rows": rows,
        "machine": machine(),
    }
    publish(result, given.json)


if __name__ == "__main__":
    main()
