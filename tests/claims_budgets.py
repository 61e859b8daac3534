"""Claims about widths that are chosen site by site."""

from benchmarks.publish import RESULTS

import json
from typing import Any

from claims import MEASURED, README, listed, order, says, tenths


def budgets(model: str) -> dict[str, Any]:
    """What was measured of chosen widths."""
    found: dict[str, Any] = json.loads((RESULTS / f"budgets-{model}.json").read_text(encoding="utf-8"))
    return found


def falls(bits: str) -> list[float]:
    """By how many percent chosen widths lower the KL divergence of the bundled model, one figure a draw."""
    rows = [row for row in budgets("demo")["demo"] if row["bits"] == bits]
    for row in rows:
        order(row["bytes_budget"] <= row["bytes_uniform"] and row["bops_budget"] <= row["bops_uniform"], row)
    return sorted(100 * (1 - row["kl_budget"] / row["kl_uniform"]) for row in rows)


@says(MEASURED)
def budgets_demo() -> str:
    four, three = falls("w4a4"), falls("w3a3")
    order(len(four) == len(three) == 3 and four[0] > 20 and three[0] > 20, four, three)
    return (
        f"On three draws of the bundled model the KL divergence falls by {four[0]:.0f} to {four[-1]:.0f} % at W4A4 and "
        f"by {three[0]:.0f} to {three[-1]:.0f} % at W3A3."
    )


@says(MEASURED)
def budgets_cost() -> str:
    result = budgets("demo")
    seconds = result["cpu_seconds_of_rows"]
    order(max(seconds) < 240, seconds)
    return (
        f"Its {result['rows']} losses of single operands, on {result['judged_by']} images each, take "
        f"{min(seconds):.0f} to {max(seconds):.0f} CPU seconds beside the searches."
    )


@says(MEASURED)
def budgets_counts() -> str:
    result = budgets("demo")
    first = [row | {"judged": result["judged_by"]} for row in result["demo"] if row["seed"] == 0]
    rows = sorted([*result["counts"], *first], key=lambda row: row["judged"])
    counts = sorted({row["judged"] for row in rows})
    four, three = (
        [100 * (1 - row["kl_budget"] / row["kl_uniform"]) for row in rows if row["bits"] == bits]
        for bits in ("w4a4", "w3a3")
    )
    order(max(four) == four[-1] and max(three) == three[-1] and len(four) == len(three) == len(counts), rows)
    order(min(four) > 20 and min(three) > 20, four, three)
    return (
        f"On the first draw, {listed([str(count) for count in counts])} images that choose lower the divergence by "
        f"{listed([f'{fall:.0f}' for fall in four])} % at W4A4 and by {listed([f'{fall:.0f}' for fall in three])} % at "
        "W3A3: a few are enough to gain, and 128 choose best."
    )


@says(README)
def budgets_both() -> str:
    (row,) = (row for row in budgets("realbench")["realbench"] if row["bits"] == "w4a4")
    order(row["bytes_budget"] <= row["bytes_uniform"] and row["bops_budget"] <= row["bops_uniform"], row)
    before, after = 100 * row["top1_uniform"], 100 * row["top1_budget"]
    order(after > before + 8, before, after)
    (six,) = (row for row in budgets("realbench")["realbench"] if row["bits"] == "w6a6")
    order(six["bytes_budget"] <= six["bytes_uniform"] and six["bops_budget"] <= six["bops_uniform"], six)
    order(six["top1_budget"] > six["top1_uniform"], six)
    four = falls("w4a4")
    same = [row for row in budgets("demo")["demo"] if row["bits"] == "w4a4"]
    apart = 100 * abs(sum(row["top1_budget"] - row["top1_uniform"] for row in same)) / len(same)
    order(apart < 0.65, apart)
    order(six["top1_budget"] - six["top1_uniform"] < 0.0155, six)  # a standard error on 1,000 images
    return (
        f"At no more bytes and BOPs than W4A4 takes, such widths lift TinyViT from {before:.1f} % to {after:.1f} % by "
        f"search alone; at those of W6A6 top-1 goes from {100 * six['top1_uniform']:.1f} % to "
        f"{100 * six['top1_budget']:.1f} %, within a standard error. Both are of one draw. "
        f"{budgets('realbench')['judged_by']} more of TinyViT's support images (described below), without their "
        "labels, tell what each operand costs. On the bundled ViT at W4A4, where "
        f"{budgets('demo')['judged_by']} training images tell that, the KL divergence falls by {four[0]:.0f} to "
        f"{four[-1]:.0f} % on three draws, and top-1 stays the same within a standard error."
    )


@says(MEASURED)
def budgets_foretold() -> str:
    times = [row["kl_budget"] / row["foretold"] for row in budgets("demo")["demo"]]
    return (
        f"On test images the KL divergence of the bundled model's chosen widths is {tenths(min(times))} to "
        f"{tenths(max(times))} times the foretold one."
    )
