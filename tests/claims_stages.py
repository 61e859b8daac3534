"""Claims about what the stages after the search give back."""

from statistics import fmean
from typing import Any

from adalog.study.tables import p_value
from claims import MEASURED, README, listed, order, results, says, tenths


def of_stages(bits: str, stage: str, images: int) -> float:
    """The mean top-1 on the bundled model after a stage, in percent."""
    rows = results("reconstruct-demo")["rows"]
    wanted = (bits, stage, images)
    return 100 * fmean(row["top1"] for row in rows if (row["bits"], row["stage"], row["images"]) == wanted)


@says(README)
def stages_readme() -> str:
    full = 100 * results("reconstruct-demo")["fp32"]
    before = of_stages("w2a2", "search", 32)
    same, more = (of_stages("w2a2", "correction", images) - before for images in (32, 128))
    trained = {
        bits: [of_stages(bits, stage, 1024) for stage in ("reconstruction", "end-to-end")]
        for bits in ("w4a4", "w3a3", "w2a2")
    }
    order(all(-0.5 < whole - blocks < 0.1 for blocks, whole in trained.values()), trained)
    back = trained["w2a2"][0] - before
    order(full - of_stages("w4a4", "search", 32) < 0.65)  # less than a standard error
    return (
        f"At 2 bits a correction gives back {tenths(same)} of the {tenths(full - before)} points that the search loses "
        f"on the bundled model, from the same 32 images, and {tenths(more)} from 128; reconstruction after it "
        f"gives back {tenths(back)} from 1,024, and training end to end adds nothing there. At 4 bits there is "
        "nothing to give back."
    )


@says(README)
def stages_real() -> str:
    result, rows = results("reconstruct-realbench"), results("reconstruct-realbench-1000")["rows"]
    both = result["rows"] + results("reconstruct-realbench-draw1")["rows"]
    found = {
        key: 100 * fmean(row["top1"] for row in both if (row["bits"], row["stage"]) == key)
        for key in {(row["bits"], row["stage"]) for row in both}
    }
    stages = ("search", "correction", "reconstruction", "end-to-end")
    four, three = ([found[bits, stage] for stage in stages] for bits in ("w4a4", "w3a3"))
    order(four == sorted(four) and three == sorted(three) and three[3] < 25, found)
    six_rows, eight = ([row for row in rows if row["bits"] == bits] for bits in ("w6a6", "w8a8"))
    six = [100 * row["top1"] for row in six_rows]
    order(len(six) == 3 and six == sorted(six), six)
    order(eight[1]["top1"] == eight[2]["top1"] < eight[0]["top1"], eight)
    p = {bits: [p_value(some[0], row) for row in some[1:]] for bits, some in (("w6a6", six_rows), ("w8a8", eight))}
    order(min(p["w6a6"]) > 0.05 and min(p["w8a8"]) > 0.3, p)
    order(all(row["agreement"] > some[0]["agreement"] for some in (six_rows, eight) for row in some[1:]), rows)
    return (
        f"On TinyViT, which has {100 * result['fp32']:.1f} %, W4A4 goes from {four[0]:.1f} % to {four[1]:.1f} % by a "
        f"correction from 1,000 images, to {four[2]:.1f} % by training its blocks after that, and to {four[3]:.1f} % "
        f"end to end; W3A3 goes from {three[0]:.1f} % to {three[1]:.1f}, {three[2]:.1f} and {three[3]:.1f} % "
        f"(two draws), which is still of no use. At W6A6 ({six[0]:.1f} %, then {six[1]:.1f} % and {six[2]:.1f} %) and "
        f"at W8A8 ({100 * eight[0]['top1']:.1f} %, then {100 * eight[1]['top1']:.1f} % twice) "
        "neither of the first two can be told from the search by top-1: p is "
        f"{listed([f'{value:.2f}' for value in p['w6a6']])} at W6A6 and above 0.3 at W8A8, by McNemar's test beside "
        "the search. Both agree with full precision on more images than the search."
    )


@says(MEASURED)
def cost_of_a_step() -> str:
    found = results("reconstruct-cost")
    step = found["cpu_seconds_of_a_step"]["median"]
    order(found["model"] == "deit_small_patch16_224" and found["bfloat16"], found)
    return (
        f"A step that trains a block of DeiT-S (random weights, {found['bits'].upper()}, {found['images']} images) "
        f"takes {step:.2f} CPU seconds now, {found['ratio']:.2f} of what the float block takes forwards and backwards "
        "in float32 (one thread, products of the step in bfloat16; `benchmarks/reconstruct_cost.py`)."
    )


@says(MEASURED)
def brecq_with_logarithms() -> str:
    found = results("tables-demo-4")["rows"]
    trained = ("weights", "weights and activations")

    def pairs(bits: str, figure: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """With logarithmic quantizers and with uniform ones, for each of what is trained."""
        rows = {(row["names"][1], row["names"][3]): row[figure] for row in found if row["bits"] == bits}
        return [(rows["adalog", what], rows["uniform", what]) for what in trained]

    (alone, both), four = pairs("w3a3", "top1"), pairs("w4a4", "top1")
    each = [pair for one, other in (alone, both) for pair in zip(one["values"], other["values"], strict=True)]
    order(all(one > other for one, other in each) and alone[0]["mean"] > both[0]["mean"], each)
    order(all(0 < other["mean"] - one["mean"] < 0.0065 for one, other in four), four)  # a standard error
    alike = pairs("w4a4", "agreement")
    order(all(one["mean"] > other["mean"] for one, other in alike), alike)
    means = [f"{100 * side['mean']:.2f}" for pair in (alone, both, *four, *alike) for side in pair]
    return (
        f"At W3A3 BRECQ has {means[0]} % with logarithmic quantizers and {means[1]} % with uniform ones where it "
        f"trains weights alone, and {means[2]} and {means[3]} % where it trains activations' scales as well; the order "
        f"is the same in each of three draws. At W4A4 top-1 cannot tell them apart ({means[4]} and {means[5]} %, "
        f"{means[6]} and {means[7]} %), and those with logarithmic quantizers agree with full precision on more images "
        f"({means[8]} and {means[9]} %, {means[10]} and {means[11]} %)."
    )


@says(MEASURED)
def stages_at_two_bits() -> str:
    found = results("tables-demo-D")["rows"]
    rows = {tuple(row["names"]): row["top1"] for row in found}
    order({row["bits"] for row in found} == {"w2a2"} and {len(row["seeds"]) for row in found} == {3}, found)

    def share(name: str, stages: str = "reconstruction") -> str:
        return f"{100 * rows[name, stages]['mean']:.1f}"

    log, uniform = (rows[name, "reconstruction"]["values"] for name in ("brecq-adalog", "brecq"))
    more = sum(one > other for one, other in zip(log, uniform, strict=True))
    order(more == 2, log, uniform)
    best = rows["adalog+", "correction and reconstruction"]["mean"]
    order(best == max(each["mean"] for each in rows.values()), rows)
    order(
        max(rows[name, "reconstruction"]["mean"] for name in ("qdrop", "aphq-vit", "fima-q", "brecq-adalog"))
        < rows["adalog+", "correction"]["mean"],
        rows,
    )
    return (
        f"At W2A2, where the search alone has {share('adalog', 'no')} %, a correction has "
        f"{share('adalog+', 'correction')} %, and {share('adalog+', 'correction and reconstruction')} % once blocks "
        f"are trained after it. ERQ has {share('erq', 'correction')} %, QwT {share('qwt', 'correction')} %, QDrop "
        f"{share('qdrop')} %, APHQ-ViT {share('aphq-vit')} %, FIMA-Q {share('fima-q')} %, and BRECQ {share('brecq')} % "
        f"with uniform quantizers and {share('brecq-adalog')} % with logarithmic ones, which have more in two of three "
        "draws. Those that train take 400 steps a block here, where they were published with 20,000."
    )


@says(MEASURED)
def shares_of_exact_values() -> str:
    tenth, half, falling = (
        {(row["bits"], row["stage"]): row for name in names for row in results(f"reconstruct-realbench{name}")["rows"]}
        for names in (["-tenth", "-tenth-end-to-end"], [""], ["-falling"])
    )

    def top1(found: dict[tuple[str, str], Any], bits: str) -> list[str]:
        return [f"{100 * found[bits, stage]['top1']:.1f}" for stage in ("reconstruction", "end-to-end")]

    keys = [(bits, stage) for bits in ("w3a3", "w4a4") for stage in ("reconstruction", "end-to-end")]
    p = [p_value(half[key], tenth[key]) for key in keys]
    order(all(half[key]["top1"] > tenth[key]["top1"] for key in keys[:2]) and max(p[:2]) < 1e-4, p)
    order(min(p[2:]) > 0.3, p)
    order(p_value(half[keys[0]], falling[keys[0]]) < 0.05 and p_value(half[keys[1]], falling[keys[1]]) < 0.01)
    three, four = ((top1(half, bits), top1(tenth, bits)) for bits in ("w3a3", "w4a4"))
    last = top1(falling, "w3a3")
    return (
        "In a step half of a block's inputs and activations stay exact, as in QDrop (`Reconstruction.drop`). With "
        f"a tenth of them TinyViT has {three[1][0]} % at W3A3 after its blocks and {three[1][1]} % end to end, where "
        f"half has {three[0][0]} and {three[0][1]} % (one draw, McNemar's p below 1e-04). A share that falls from half "
        f"to none by a cosine has {last[0]} and {last[1]} %, on another processor. At W4A4 a tenth ({four[1][0]} and "
        f"{four[1][1]} %) cannot be told from half ({four[0][0]} and {four[0][1]} %, p above 0.3). The figures are in "
        "`benchmarks/results/reconstruct-realbench.json` and in the files beside it that have -tenth and -falling in "
        "their names; in the first one the blocks at W3A3 are those that commit e0758ee trained with the same choices."
    )


@says(MEASURED)
def brecq_on_tinyvit() -> str:
    result = results("realbench-brecq")
    rows = {row["method"]: row for row in result["rows"]}
    log, uniform, search = (100 * rows[name]["top1"] for name in ("brecq-adalog", "brecq", "adalog"))
    p = p_value(rows["brecq-adalog"], rows["brecq"])
    blocks = ("w3a3", "reconstruction")
    ours, half = (
        next(100 * row["top1"] for row in results(name)["rows"] if (row["bits"], row["stage"]) == blocks)
        for name in ("reconstruct-realbench-tenth", "reconstruct-realbench")
    )
    order({row["bits"] for row in result["rows"]} == {"w3a3"} and half > log > ours > uniform > search, log, ours, half)
    order(p < 1e-5, p)
    return (
        f"On TinyViT at W3A3, from 1,000 support images and one draw, it has {log:.1f} % with logarithmic quantizers "
        f"and {uniform:.1f} % with uniform ones (McNemar's p {p:.0e}; activations' scales are trained as well; the "
        f"search alone has {search:.1f} %). The reconstruction after a correction, above, has {ours:.1f} % with a "
        f"tenth of the activations exact and {half:.1f} % with half of them "
        "(`benchmarks/results/realbench-brecq.json`)."
    )
