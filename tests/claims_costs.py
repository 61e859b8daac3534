"""Claims about the search, the released code, executors, folds and FixOPs."""

import re
from statistics import geometric_mean
from typing import Any

from claims import MEASURED, NUMBERS, README, listed, order, printed, results, says

COST, INTEGER = "docs/cost.md", "docs/integer.md"

# --- the search ---


def ablation(variant: str, images: str = "loss") -> str:
    """How much more error a variant leaves than the default."""
    return f"{abs(100 * (results('search-demo-ablation')['variants'][variant][images] - 1)):.1f} %"


@says(MEASURED)
def search_realbench() -> str:
    found = results("search-realbench")
    return (
        f"`realbench` is the TinyViT above on {NUMBERS[found['images']]} images, on which the direct search takes "
        f"{found['seconds']['direct']:.0f} seconds. Where a site sees so few tokens, one round is not always enough: "
        f"the largest ratio is {found['default']['loss_ratio']['max']:.2f} as it comes, and "
        f"{found['loss_ratio']['max']:.2f} with up to three rounds."
    )


@says("docs/decisions/04-one-search-for-every-product.md")
def search_speedup() -> str:
    found = [results(f"search-{name}") for name in ("deit_tiny_patch16_224", "demo", "realbench")]
    least = min(kind["speedup"] for each in found for kind in (each, each["default"]))
    ratios = [kind["loss_ratio"]["geomean"] for each in found for kind in (each, each["default"])]
    order(max(ratios) < 1, ratios)
    equal = results("search-deit_tiny_patch16_224")
    order(equal["equals"]["equal"], equal["equals"])
    return (
        f"at least {NUMBERS[int(least)]} times as fast as a direct search by PyTorch alone in float32, at smaller "
        f"losses on average; with equal steps, types and kernels {equal['equals']['speedup_over_fused']:.1f} times on "
        f"one block of DeiT-T ({equal['images']} images)."
    )


@says("docs/decisions/05-the-order-of-a-search.md")
def search_rounds() -> str:
    variants = results("search-demo-ablation")["variants"]
    more = variants["6 steps and 3 rounds"]["seconds"] / variants["default"]["seconds"]
    apart = max(abs(variants["6 steps and 3 rounds"][images] - 1) for images in ("loss", "held_out"))
    return f"rounds instead take {more:.2f} times the time and leave the same error within {100 * apart:.2f} %"


@says("docs/decisions/06-what-is-searched.md")
def search_reach() -> str:
    return (
        f"a reach of 0.1 leaves {ablation('bounds within 0.1 of the values')} more error, `adalog-paper` as a whole "
        f"{ablation('adalog-paper')} more."
    )


@says("docs/decisions/07-rough-steps.md")
def search_rows() -> str:
    variants = results("search-demo-ablation")["variants"]
    whole, default = variants["all rows in every step"], variants["default"]
    return (
        f"all rows in every step take {whole['seconds']:.0f} seconds instead of {default['seconds']:.0f}, at the same "
        f"error within {100 * abs(whole['loss'] - 1):.2f} %."
    )


@says("docs/decisions/08-weights-keep-their-codes.md")
def search_refit() -> str:
    name = "scales not refitted"
    return (
        f"without it the error is {ablation(name)} larger on the calibration images and {ablation(name, 'held_out')} on"
    )


@says(MEASURED)
def search_halved() -> str:
    now, before = (results(f"search-deit_tiny_patch16_224-full{which}") for which in ("", "-before"))
    same = ("processor", "torch", "numpy", "compiled library")
    order(all(now["machine"][key] == before["machine"][key] for key in same), now["machine"], before["machine"])
    ratios = [10 ** ((before["sqnr"][site] - now["sqnr"][site]) / 10) for site in now["sqnr"]]
    order(max(ratios) < 1.005, max(ratios))
    return (
        f"On DeiT-T the present search takes {now['cpu_seconds'] / before['cpu_seconds']:.2f} of the CPU time of the "
        "earlier one, measured one after the other. Its squared errors are "
        f"{geometric_mean(ratios):.4f} times as large in the geometric mean over sites, and {max(ratios):.4f} at most."
    )


@says(README)
def search_in_all() -> str:
    found = results("search-deit_tiny_patch16_224-full")
    order(found["data"] is None and found["blocks"] == 0, found["data"], found["blocks"])  # images of noise, all blocks
    return (
        f"Quantizing DeiT-T at {found['bits'].upper()} from {found['images']} images takes "
        f"{found['cpu_seconds']:.0f} CPU seconds on one thread of an {found['machine']['processor']} and "
        f"{found['peak_rss_bytes'] / 2**30:.2f} GiB of memory in all, measured with random weights and images of noise."
    )


@says(README)
def search_beside_its_equal() -> str:
    """Both losses are means over sites, held out."""
    block, demo = (results(f"search-{name}")["equals"] for name in ("deit_tiny_patch16_224", "demo"))
    order(block["equal"] and demo["equal"], block["search"], demo["search"])
    ratios = [found["loss_ratio"]["held_out_geomean"] for found in (block, demo)]
    order(max(ratios) < 1, ratios)
    return (
        f"On one block of it the search is {block['speedup_over_fused']:.0f} times as fast as one that makes a whole "
        "product for each candidate, with equal steps, types and kernels and at a smaller loss on average; on the "
        f"bundled model it is {demo['speedup_over_fused']:.0f} times as fast"
    )


@says("docs/decisions/12-one-float-run.md")
def search_whole() -> str:
    found = results("search-deit_tiny_patch16_224-full")
    return (
        f"a DeiT-T at {found['bits'].upper()} with {found['images']} images takes {found['cpu_seconds']:.0f} CPU "
        "seconds in all."
    )


# --- the released code, executors, folds ---


@says(MEASURED)
def golden_model() -> str:
    found = results("golden")
    order(
        {row["sites"] for row in found["files"].values()} == {2 + 2 * 6}, "layers"
    )  # the image's, two blocks', the head
    return f"with outputs of their authors' code on a random ViT of two blocks with {NUMBERS[found['images']]} images."


@says(MEASURED)
def golden_ties() -> str:
    off = max(row["max_mse_ratio"] for name, row in results("golden")["files"].items() if name.startswith("tiny_w6a6"))
    return (
        "where nothing is clipped all zero points cost the same, float noise in the inputs picks one, and a layer's "
        f"error moves by up to {100 * (off - 1):.1f} %."
    )


@says(MEASURED)
def golden_held_out() -> str:
    gains = results("golden")["adalog_over_released"]
    order(all(gain["held_out"] > gain["calibration"] for gain in gains.values()), gains)
    count = NUMBERS[results("golden")["images"]].capitalize()
    behind = listed(
        [f"{bits.upper()} ({gain['held_out']:.3f})" for bits, gain in gains.items() if gain["held_out"] > 1]
    )
    return (
        f"{count} images are few: at every width adalog is better on them than on held-out noise, where the released "
        f"code is ahead of it at {behind}."
    )


@says("docs/decisions/09-zero-coded-nearest-levels.md")
def golden_gains() -> str:
    gains = results("golden")["adalog_over_released"]
    one, other = (
        [f"{gains[bits][images]:.3f}" for bits in ("w6a6", "w4a4", "w3a3")] for images in ("calibration", "held_out")
    )
    return (
        f"{one[0]} at W6A6, {one[1]} at W4A4, {one[2]} at W3A3 on the calibration images; on held-out noise "
        f"{listed(other)}"
    )


@says("docs/decisions/16-the-released-code-apart.md")
def golden_settings() -> str:
    files = results("golden")["files"]
    order(all(row["q_equal"] and row["activation_zero_points_equal"] for row in files.values()), "q or zero points")
    off = [name for name, row in files.items() if row["within_0.1_percent"] < 1]
    order(len(off) == 1, off)
    return "the same q and zero points of activations everywhere, errors equal within 0.1 % but for one setting."


@says(MEASURED)
def executors_images() -> str:
    many, few = sorted({row["images"] for row in results("executors")["rows"]}, reverse=True)
    return (
        f"`benchmarks/executors.py` compares executors on the bundled model's {many:,} images ({few} for `reference` "
        "and for float64), quantized in a run of their own."
    )


@says(MEASURED)
def executors_float64() -> str:
    rows = [row for row in results("executors")["rows"] if row["dtype"] == "float64"]
    order(bool(rows) and all(row["code_flip_fraction"] == 0 and row["agreement"] == 1 for row in rows), rows)
    return "In float64 no code differs; [why some do in float32](integer.md)."


@says(INTEGER)
def executors_speed() -> str:
    found = {row["bits"]: row["ratio"] for row in results("executors")["speed"]}
    order(0.95 < found["w4a4"]["torch"] < 1.05, found)
    return (
        f"`torch` is as fast as fp32 PyTorch run eagerly, and {found['w4a4']['torch compiled']:.1f} times as fast when "
        f"compiled; at W6A6 it is {found['w6a6']['torch compiled']:.1f} times as fast when compiled"
    )


@says(INTEGER)
def executors_errors() -> str:
    rows = {(row["bits"], row["executor"], row["dtype"]): row for row in results("executors")["rows"]}
    six, four = (rows[bits, "torch", "float32"]["median_logit_error"] for bits in ("w6a6", "w4a4"))
    short = [re.sub("e-0", "e-", f"{value:.0e}") for value in (six, four)]
    return f"the median relative error of the logits in float32 is {short[0]} at W6A6 and {short[1]} at W4A4"


@says(MEASURED)
def folds_of_the_head() -> str:
    rows, told = results("folds")["rows"], results("folds")["calibration_images"]
    ratios = [row["sites"]["head"][kind]["held_out"] for row in rows for kind in ("own", "shared")]
    order(min(ratios) > 1, ratios)
    return (
        f"The head reads one token per image and so has {told} rows of calibration; on other images it is better off "
        "without a fold at every width."
    )


@says(MEASURED)
def folds_ranges() -> str:
    rows = results("folds")["rows"]
    better = [row["bits"] for row in rows if row["shared_held_out"] < row["own_held_out"] * 0.99]
    order(better == [row["bits"] for row in rows if row["bits"] > 4], better)
    return (
        "With more than 4 bits, one range in standard deviations for all channels holds better on other images than "
        "each channel's own range."
    )


@says("docs/decisions/10-folding-is-proved.md")
def folds_evidence() -> str:
    rows = {row["bits"]: row for row in results("folds")["rows"]}
    few = [1 - rows[bits]["own_held_out"] for bits in (3, 4)]
    many = [1 - rows[bits]["shared_held_out"] for bits in (6, 8)]
    order(all(0.18 < each < 0.22 for each in few) and all(0.23 < each < 0.27 for each in many), few, many)
    return (
        "on held-out images folding takes a fifth of the error away at 3 and 4 bits and a quarter at 6 and 8; the "
        "bundled model's head would be worse for it at every width; and at 8 bits each channel's own range would raise "
        f"the error by {100 * (rows[8]['own_held_out'] - 1):.0f} %."
    )


# --- FixOPs ---


def costs() -> dict[str, dict[str, Any]]:
    return {row["bits"]: row for row in results("cost")["rows"]}


def millions(value: float) -> str:
    return f"{value / 1e6:.0f}"


def totals(bits: str) -> tuple[float, float, float]:
    """The FixOPs of Eq. 10 as printed, the same with the conversions, and the paper's."""
    row = costs()[bits]
    conversions = sum(row["roles"][role]["fixops"] for role in ("quantize", "dequantize"))
    return row["as_printed"]["fixops"], row["as_printed"]["fixops"] + conversions, row["paper"]["fixops"]


@says(COST)
def cost_float() -> str:
    row = costs()["fp32"]
    return (
        f"{row['macs'] / 1e9:.4f} billion MACs times 16 are {row['fixops'] / 1e9:.2f} billion; the paper has "
        f"{row['paper']['fixops'] / 1e9:.1f}. With the float multiplications of LayerNorm, GELU, softmax and the "
        f"attention's scale it would be {(row['fixops'] + row['elementwise_fixops']) / 1e9:.2f} billion, which is not "
        f"{row['paper']['fixops'] / 1e9:.1f}."
    )


@says(COST)
def cost_products() -> str:
    row = costs()["w4a4"]
    plain_products = row["macs"] * 16 / 64
    image = plain_products + row["roles"]["conv"]["count"] * (32 - 16) / 64
    four, three = totals("w4a4"), totals("w3a3")
    return (
        f"All products at 4 by 4 bits cost {millions(plain_products)} million FixOPs, {millions(image)} with an 8-bit "
        f"input, and {millions(four[0])} with the extra bit of the mantissas (Eq. 10 as printed); the paper has "
        f"{millions(four[2])}. At 3 bits our figure is {millions(three[0])} and the paper's {millions(three[2])}. The "
        f"differences, {millions(four[2] - four[0])} and {millions(three[2] - three[0])}, hardly depend on the bits, "
        "so most of them are not products of codes."
    )


@says(COST)
def cost_conversions() -> str:
    four, three = totals("w4a4"), totals("w3a3")
    over = [f"{100 * (each[1] / each[2] - 1):.1f}" for each in (four, three)]
    return (
        "With one float multiplication for every quantized value and every dequantized output "
        f"our rows add up to {millions(four[1])} and {millions(three[1])}, which is {over[0]} and {over[1]} % above "
        f"the paper. This is no proof. The paper's two figures differ by {millions(four[2] - three[2])} and ours by "
        f"{millions(four[1] - three[1])}, which is more than rounding explains, and two numbers fit many sums."
    )


@says(COST)
def cost_rival() -> str:
    fixops = {
        (bits, method): printed("3", bits, "DeiT-T", method, "fixops")
        for bits in ("w4a4", "w3a3")
        for method in ("repq-vit", "adalog")
    }
    more = [millions(fixops[bits, "repq-vit"] - fixops[bits, "adalog"]) for bits in ("w4a4", "w3a3")]
    count, widths = costs()["fp32"]["roles"]["av"]["count"], {"w4a4": 4, "w3a3": 3}
    # A float by a code of b bits, less a mantissa of b + 1 bits by one of b.
    apart = [millions(count * (32 * bits - (bits + 1) * bits) / 64) for bits in widths.values()]
    scale = millions(costs()["fp32"]["roles"]["softmax"]["fixops"])
    return (
        f"Table 3 gives RepQ-ViT {more[0]} million more than AdaLog at 4 bits and {more[1]} million more at 3 bits. "
        f"The float multiplication by its element-wise scale after softmax costs {scale} million at any bits; float "
        f"products of softmax and V cost {apart[0]} and {apart[1]} million more than ours."
    )


@says(COST)
def cost_table_bytes() -> str:
    row = costs()["w4a4"]
    order(row["tables"] == {"u8": 24} and row["roles"]["look-up"]["count"] > 0, row["tables"])
    return f"Here a layer has two tables with one byte per entry (u8), {row['table_bytes']} bytes in all."


@says(COST)
def cost_tables() -> str:
    row = costs()["w4a4"]
    count = row["roles"]["av"]["count"] + 12 * 197 * 768 * 192  # A V, and the linears after GELU
    return (
        f"{millions(row['fixops'])} million FixOPs, compared with {millions(row['as_printed']['fixops'])} million and "
        f"{millions(count)} million shifts, which FixOPs do not count."
    )


@says(COST)
def cost_of_wide_tables() -> str:
    """A table of 16 bits instead of 8 doubles one factor of the products with a logarithmic operand."""
    row, other = costs()["w6a6"], costs()["w4a4"]
    order(row["tables"] == other["tables"] == {"u8": 24}, row["tables"], other["tables"])
    logarithmic = row["roles"]["av"]["count"] + 12 * 197 * 768 * 192  # A V, and the linears after GELU
    wide = {bits: costs()[bits]["fixops"] + logarithmic * 8 * int(bits[1]) / 64 for bits in ("w6a6", "w4a4")}
    chosen = {
        each["table"] for each in results("executors")["rows"] if each["bits"] == "w6a6" and " x " in each["table"]
    }
    (bundled,) = (each.removeprefix("u16 x ") for each in chosen)  # there is no other kind of table
    (real,) = (each for each in results("realbench")["rows"] if (each["method"], each["bits"]) == ("adalog", "w6a6"))
    tables = [kind.rpartition(" ")[2] for kind in real["left"].values() if " log " in kind]
    order(bundled.isdecimal() and tables.count("u16") > 2 * tables.count("u8") > 0, chosen, tables)
    return (
        f"At W6A6 it chose {row['tables']['u8']} tables of 8 bits here, from images of noise. From real images it "
        f"mostly chooses 16 bits at that width: for all {bundled} tables of the bundled ViT and for "
        f"{tables.count('u16')} of {len(tables)} of TinyViT. With tables of 16 bits alone the products of W6A6 would "
        f"take {wide['w6a6'] / 1e6:,.0f} million FixOPs instead of {millions(row['fixops'])} million; those of W4A4 "
        f"would take {millions(wide['w4a4'])} million instead of {millions(other['fixops'])} million."
    )


@says(COST)
def cost_size() -> str:
    parameters, paper = costs()["fp32"]["size_bytes"]["float"] / 4, costs()["fp32"]["paper"]["size_bytes"]
    files = [sum(costs()[bits]["file_bytes"].values()) for bits in ("w4a4", "w3a3")]
    theirs = [costs()[bits]["paper"]["size_bytes"] for bits in ("w4a4", "w3a3")]
    order(all(ours < other for ours, other in zip(files, theirs, strict=True)), files, theirs)
    return (
        f"Table 3's {paper / 1e6:.1f} MB for the float model is close to {parameters / 1e6:.3f} million parameters of "
        f"4 bytes in units of 2²⁰ bytes ({4 * parameters / 2**20:.1f}), not of 10⁶ ({4 * parameters / 1e6:.1f}). The "
        f"files here are smaller than its {theirs[0] / 1e6:.1f} and {theirs[1] / 1e6:.1f} MB in either unit."
    )


# --- speed ---


@says(README)
def without_pytorch() -> str:
    row = next(row for row in results("load")["rows"] if "deit_small" in row["model"])
    ours, theirs = row["ways"]["run"], row["ways"]["native"]
    return (
        "A fresh process without PyTorch, `adalog.run` on NumPy, safetensors and the compiled library, is ready to "
        f"answer for DeiT-S at {row['bits'].upper()} after {ours['ready_seconds']:.2f} CPU seconds, with "
        f"{ours['beside_weights'] / 2**20:.0f} MiB beside the weights; with PyTorch it takes "
        f"{theirs['ready_seconds']:.1f} seconds and {theirs['beside_weights'] / 2**20:.0f} MiB."
    )


@says("docs/how-to/run-on-several-processes.md")
def two_ranks() -> str:
    found, tables, trained = (results("scale")[part] for part in ("quantize", "tables", "reconstruct"))
    (run,) = found["runs"]
    order(found["same_bytes"] and found["wall_ratio"] <= 0.6 and found["memory"] <= 1.2, found)
    order(tables["equal_rows"] and tables["wall_ratio"] <= 0.6 and trained["same_bytes"], tables, trained)
    return (
        f"Two ranks of one thread take {run['ratio']:.2f} of the time of one to quantize DeiT-T at W4A4, from loading "
        f"to the result ({run['whole']['ranks'] / run['whole']['alone']:.2f} with the start of Python), with the same "
        f"file and {found['memory']:.2f} times the memory in each. Two independent processes, run at once on the same "
        f"two cores, each took {1 / found['L']:.2f} times as long as one alone, since cores share caches and memory. "
        f"{len(tables['rows'])} rows of the paper's Table 1 on the bundled model take two ranks "
        f"{tables['seconds']['two'] / tables['seconds']['one']:.2f} of the time from start to end, and are equal. "
        "`qdrop` with 128 images at W3A3, which trains the bundled model's blocks, takes them "
        f"{trained['seconds']['two'] / trained['seconds']['one']:.2f} of the time from start to end, and writes the "
        "same file; steps have become quicker since."
    )


@says("docs/how-to/run-on-several-processes.md")
def killed_ranks() -> str:
    found = results("scale")["kills"]
    order(found["equal"] == found["tried"] == 10, found)
    running = sum(each["running"] for each in found["moments"])
    return (
        f"With `--max-restarts 3` a rank was killed at {NUMBERS[found['tried']]} random moments of quantizing the "
        f"bundled model and of three rows of Table 1, {NUMBERS[running]} times before the end: all files and rows were "
        "those of an undisturbed run."
    )


@says("docs/how-to/run-on-several-processes.md")
def many_images() -> str:
    found = results("scale")["stream"]
    return (
        f"On {found['images']:,} links to the bundled model's images, memory grew by "
        f"{found['growth_bytes'] / 1e6:.1f} MB from the first tenth to the end, and the time that the bar foretold "
        f"after that tenth was {found['eta_over_true']:.2f} of what the rest took."
    )


@says("docs/native.md")
def side_by_side() -> str:
    found = results("throughput")
    rows = {row["batch"]: row["over_two"] | {"idle": row["idle"]} for row in found["rows"]}
    order(rows[1]["threads"] >= 0.8 and rows[8]["threads"] >= 0.9, rows)
    order(all(row["four"] >= 0.95 and row["models"] >= 0.95 and row["idle"] < 1e-4 for row in rows.values()), rows)
    return (
        f"For DeiT-S at W4A4 on two cores of an {found['machine']['processor']}, the measure is the throughput of two "
        f"processes of one thread each. One process of two threads has {rows[1]['threads']:.2f} of it at batch 1 and "
        f"{rows[8]['threads']:.2f} at batch 8. Four processes of one thread have "
        f"{min(row['four'] for row in rows.values()):.2f} of it or more, and two models in one process "
        f"{min(row['models'] for row in rows.values()):.2f} or more. A process that waits takes less than 0.01 % of a "
        "core."
    )
