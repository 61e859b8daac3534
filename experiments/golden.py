"""Compare methods with outputs of their authors' released code, and measure how much `adalog` improves on them.

    python -m experiments.golden --golden DIR [--json FILE]

DIR holds outputs of released code on a small timm VisionTransformer:

- One *.safetensors file, in DIR or in the folder above, has the weights as `state.*`, and the calibration `images`. The
  script derives the architecture from the shapes.
- One JSON file per setting, in DIR or in its folder `rivals`, has the `bits`, the `hyperparameters` of each layer, and
  the mean squared error of each layer's output (`mse` in `relative_output_mse`).
- The field `method` of such a file is "RepQ-ViT" or "PTQ4ViT". A file without that field comes from AdaLog's code and
  has the fields `fpcs` and `post_gelu`.
- Errors of PTQ4ViT are weighted by the gradient that its code back-propagated, `probe_logit_gradient`.

Held-out images are Gaussian noise with the mean and deviation of the calibration images.

The script prints one JSON object and saves it as benchmarks/results/golden.json. The field "ok" is false, and the exit
code is 1, in these cases:

- The error of a layer is off by more than 1 %, or by more than 3 % if AdaLog's code has another quantizer after GELU.
- In a file of AdaLog's code, fewer than 90 % of the layers are within 0.1 %, or a q or an activation's zero point
  differs.
- The geometric mean of the ratios of adalog's errors to the released ones is above 1, or above 0.85 at 6 bits.
"""

from benchmarks.publish import RESULTS, publish

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file
from torch import nn

from adalog import Calibration, Config
from adalog.baselines import RangeSearch, ReleasedSearch, ScaleSearch
from adalog.calibration.calibration import SearchResult
from adalog.config import PowerLaw
from adalog.quantizers import LogQuantizer, Quantizer, UniformQuantizer
from adalog.study.doctor import machine

METHODS = {"AdaLog": "adalog-released", "RepQ-ViT": "repq-vit-released", "PTQ4ViT": "ptq4vit-released"}
POST_GELU: dict[str, PowerLaw] = {
    "adalog": "adalog",
    "log2": "log2",
    "logsqrt2": "log-sqrt2",
    "ptq4vit": "twin",
    "uniform": "uniform",
}


def load_vit(tensors: dict[str, torch.Tensor], heads: int) -> nn.Module:
    """Return the timm VisionTransformer with these weights."""
    from timm.models import VisionTransformer

    state = {name.removeprefix("state."): value for name, value in tensors.items() if name.startswith("state.")}
    width, channels, patch, _ = state["patch_embed.proj.weight"].shape
    rows, columns = tensors["images"].shape[2:]
    model = VisionTransformer(
        img_size=(rows, columns),
        patch_size=patch,
        in_chans=channels,
        embed_dim=width,
        depth=1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks.")),
        num_heads=heads,
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        num_classes=state["head.weight"].shape[0],
    )
    model.load_state_dict(state)
    return model.eval()


def load_folder(folder: Path) -> tuple[nn.Module, torch.Tensor, dict[str, dict[str, Any]]]:
    """Return the model, the calibration images, and the settings by name, AdaLog's settings first."""
    (weights,) = sorted(folder.glob("*.safetensors")) or sorted(folder.parent.glob("*.safetensors"))
    tensors = load_file(weights)
    paths = [*sorted(folder.glob("*.json")), *sorted(folder.glob("rivals/*.json"))]
    settings = {path.stem: json.loads(path.read_text()) for path in paths}
    # RepQ-ViT has one scale per tensor. Only AdaLog's files show the number of heads.
    others = [*settings.values(), *(json.loads(path.read_text()) for path in sorted(weights.parent.glob("*.json")))]
    scales = [content["hyperparameters"]["blocks.0.attn.matmul1.A_quantizer"]["scale"] for content in others]
    return load_vit(tensors, heads=max(map(len, scales))), tensors["images"], settings


def layer_name(searched: SearchResult) -> str:
    """Return the name of a layer in the released code."""
    name, role = searched.sites[0].name, searched.sites[0].role
    return {"qk": name.removesuffix(".qk") + ".matmul1", "av": name.removesuffix(".av") + ".matmul2"}.get(role, name)


def released_config(content: dict[str, Any]) -> Config:
    """Return the config of this file's method as released, with the settings that the file lists."""
    bits = content["bits"]
    if bits["head"] != bits["activation"]:
        raise typer.BadParameter(f"the head has {bits['head']} bits, not {bits['activation']} as the other activations")
    method = content.get("method", "AdaLog")
    if method not in METHODS:
        raise typer.BadParameter(f"method {method!r} is none of {', '.join(METHODS)}")
    config = Config.preset(f"w{bits['weight']}a{bits['activation']}s{bits['softmax']}", METHODS[method])
    if isinstance(config.search, RangeSearch):
        ranges = replace(config.search, percentiles=tuple(content["percentiles"]))
        return replace(config, input_bits=bits["patch_embed_input"], search=ranges)
    if isinstance(config.search, ScaleSearch):
        span, rounds = (content["alpha"], content["beta"]), content["rounds"]
        scales = replace(config.search, span=span, candidates=content["n"], rounds=rounds)
        return replace(config, input_bits=bits["patch_embed_input"], search=scales)
    search_of_ours = ReleasedSearch(progressive=content["fpcs"], steps=content["steps"], rounds=content["rounds"])
    return replace(config, post_gelu=POST_GELU[content["post_gelu"]], search=search_of_ours)


def find_all(calibration: Calibration, content: dict[str, Any]) -> list[SearchResult]:
    """Search all products with the method of this file."""
    if "probe_logit_gradient" in content:
        calibration.probe(torch.tensor(content["probe_logit_gradient"]))
    return calibration.search(released_config(content))


def compare(content: dict[str, Any], found: list[SearchResult]) -> dict[str, Any]:
    """Compare adalog's results with the results of the released code in one setting."""
    ratios, q_equal, zero_points_equal, furthest = {}, True, True, 0.0
    for searched in found:
        name = layer_name(searched)
        ratios[name] = searched.mean_square_error() / content["relative_output_mse"][name]["mse"]
        sides = {"A_quantizer": searched.assignment.left, "B_quantizer": searched.assignment.right}
        if searched.group.first.role not in ("qk", "av"):
            sides = {"a_quantizer": searched.assignment.left, "w_quantizer": searched.assignment.right}
        for side, ours in sides.items():
            theirs = content["hyperparameters"].get(f"{name}.{side}", {})
            if isinstance(ours, Quantizer) and "scale" in theirs and "method" in content:
                furthest = max(furthest, scale_distance(ours.scale, theirs["scale"]))
            if side == "w_quantizer":
                continue
            if isinstance(ours, LogQuantizer) and "q" in theirs:
                q_equal &= [ours.q] == theirs["q"]
            if isinstance(ours, UniformQuantizer) and "zero_point" in theirs:
                zero_points_equal &= ours.zero_point.flatten().tolist() == theirs["zero_point"]
    off = [max(ratio, 1 / ratio) for ratio in ratios.values()]
    return {
        "max_mse_ratio": max(off),
        "within_0.1_percent": sum(value <= 1.001 for value in off) / len(off),
        "q_equal": q_equal,
        "activation_zero_points_equal": zero_points_equal,
        **({"max_scale_difference": furthest} if "method" in content else {}),
        "sites": len(off),
        "worst": max(ratios, key=lambda name: max(ratios[name], 1 / ratios[name])),
    }


def scale_distance(ours: torch.Tensor, theirs: list[float]) -> float:
    """Return the largest relative difference of scales.

    One scale of the released code may cover a run of rows (queries, keys or values).
    """
    scale, other = ours.flatten().double(), torch.tensor(theirs, dtype=torch.float64)
    return float((scale / other.repeat_interleave(len(scale) // len(other)) - 1).abs().max())


def passes(content: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return True if a setting is as close to the released code as the module's docstring requires."""
    if "method" in content:
        return bool(row["max_mse_ratio"] <= 1.01)
    if content["post_gelu"] != "adalog":
        return row["max_mse_ratio"] <= 1.03
    close = row["max_mse_ratio"] <= 1.01 and row["within_0.1_percent"] >= 0.9
    return close and row["q_equal"] and row["activation_zero_points_equal"]


def main(
    golden: Annotated[Path, typer.Option()], json_out: Annotated[Path | None, typer.Option("--json")] = None
) -> None:
    """Compare methods with outputs of their authors' released code; the exit code is 1 if they differ too much."""
    torch.set_num_threads(1)
    model, images, settings = load_folder(golden)
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    other = mean + std * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    calibration, held_out = Calibration(model, images), Calibration(model, other)

    files, gains, sites = {}, {}, {}
    ok = True
    for name, content in settings.items():
        config = released_config(content)
        theirs = find_all(calibration, content)
        files[name] = compare(content, theirs)
        ok &= passes(content, files[name])
        if "method" in content or content["post_gelu"] != "adalog" or not content["fpcs"]:
            continue
        ours_config = replace(Config.preset(config.bits, "adalog"), stages=())
        ours = calibration.search(ours_config)
        ratios = {
            layer_name(site): site.mean_square_error() / content["relative_output_mse"][layer_name(site)]["mse"]
            for site in ours
        }
        unseen = [
            held_out.evaluate(site, ours_config).mean_square_error()
            / held_out.evaluate(other, config).mean_square_error()
            for site, other in zip(ours, theirs, strict=True)
        ]
        gains[config.bits] = {"calibration": geometric_mean(list(ratios.values())), "held_out": geometric_mean(unseen)}
        sites[config.bits] = ratios
        ok &= gains[config.bits]["calibration"] <= (0.85 if content["bits"]["activation"] == 6 else 1.0)
    result = {
        "ok": ok,
        "files": files,
        "adalog_over_released": gains,
        "adalog_over_released_by_site": sites,
        "images": len(images),
        "machine": machine(),
    }
    publish(result, json_out or RESULTS / "golden.json")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    typer.run(main)
