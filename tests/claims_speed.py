"""Claims about the time of engines."""

from typing import Any

from claims import MEASURED, README, order, results, says


@says(README)
def speed_of_engines() -> str:
    amx, vnni, old = (
        {(row["name"], row["batch"]): row for row in results(f"runtime-deit_small_patch16_224{level}")["rows"]}
        for level in ("", "-avx512vnni", "-avx2")
    )
    for found in (amx, vnni, old):
        for batch in (1, 8):
            peers = [row["cpu_ms"] for (name, size), row in found.items() if "/" not in name and size == batch]
            order(found["native/w4a4", batch]["cpu_ms"] < min(peers), batch, peers)
    every = [row for found in (amx, vnni, old) for row in found.values()]
    errors = {name: max(row["logit_error"] for row in every if row["name"] == name) for name, _ in vnni}
    int8 = [error for name, error in errors.items() if "-int8" in name]
    four, six, eight = (errors[f"native/{bits}"] for bits in ("w4a4", "w6a6", "w8a8"))
    theirs, dynamic = "openvino-int8-bf16", "onnxruntime-int8-dynamic"
    order(four > max(int8) and eight < min(vnni[theirs, batch]["logit_error"] for batch in (1, 8)), errors)
    for found, best in ((amx, theirs), (vnni, theirs), (old, dynamic)):
        for batch in (1, 8):
            times = [row["cpu_ms"] for (name, size), row in found.items() if "/" not in name and size == batch]
            order(min(times) == found[best, batch]["cpu_ms"], times)

    def times(bits: str, than: str, found: Any) -> str:
        """For one image, and in brackets for eight at once."""
        each = [found[f"native/{bits}", batch]["cpu_ms"] / found[than, batch]["cpu_ms"] for batch in (1, 8)]
        return f"{each[0]:.2f} ({each[1]:.2f})"

    theirs_off = [f"{vnni[theirs, batch]['logit_error']:.2f}" for batch in (1, 8)]
    return (
        "On DeiT-S our kernels at W4A4 take less time than every peer with AMX, with AVX-512-VNNI and with AVX2: "
        f"{times('w4a4', theirs, amx)} of that of the fastest one with AMX, OpenVINO's int8 with bfloat16 around it, "
        "for one image, and in brackets for eight at once. The time has its price: on this network, whose weights are "
        f"random, the logits at W4A4 are off by {four:.2f}, those of the int8 peers by {min(int8):.2f} to "
        f"{max(int8):.2f}. (Two images and eight candidates calibrate ours there, eight images the peers.) Ours "
        f"are off by {six:.2f} at W6A6 and by {eight:.2f} at W8A8. With AVX-512-VNNI W6A6 takes "
        f"{times('w6a6', 'native/w4a4', vnni)} times as long as W4A4, and W8A8 "
        f"{times('w8a8', 'native/w4a4', vnni)} times. The fastest peer is the same there, "
        f"off by {theirs_off[0]} ({theirs_off[1]}): W6A6 takes {times('w6a6', theirs, vnni)} of its time, and W8A8 "
        f"{times('w8a8', theirs, vnni)}, or {times('w8a8:uniform', theirs, vnni)} with uniform quantizers alone, which "
        f"are off by {errors['native/w8a8:uniform']:.2f}. With AVX2 W6A6 takes "
        f"{times('w6a6', 'native/w4a4', old)} "
        f"times as long as W4A4, and W8A8 {times('w8a8', 'native/w4a4', old)} times. ONNX Runtime's dynamic int8, off "
        f"by {errors[dynamic]:.2f}, is the fastest peer there, by later instructions than AVX2: W6A6 takes "
        f"{times('w6a6', dynamic, old)} of its time, and W8A8 {times('w8a8', dynamic, old)}."
    )


@says(MEASURED)
def speed_on_the_bundled_model() -> str:
    found, accuracy = results("runtime-demo"), results("runtime-demo")["accuracy"]
    time = {(row["name"], row["batch"]): row["cpu_ms"] for row in found["rows"]}
    peers, int8 = {name for name, _ in time if "/" not in name}, ("openvino-int8", "openvino-int8-bf16")
    for batch in (1, 8):
        order(time["native/w4a4", batch] < min(time[name, batch] for name in peers), time)
    best = min(peers, key=lambda name: time[name, 8])
    same = {name: 100 * each["agreement"] for name, each in accuracy.items() if name != "fp32"}
    order(best == "openvino-int8-bf16" and same["native/w4a4"] < same[best] < same["native/w8a8:uniform"], same)
    slower = [time[f"native/{bits}", 8] / time[name, 8] for bits in ("w6a6", "w8a8") for name in int8]
    uniform = [time["native/w8a8:uniform", batch] / time[best, batch] for batch in (1, 8)]
    return (
        "On the bundled model W4A4 is the quickest, for one image and for eight, and agrees "
        "with full precision on "
        f"{same['native/w4a4']:.2f} % of the images. OpenVINO's int8 with bfloat16 around it, the next of the engines "
        f"for eight, agrees on {same[best]:.2f} %; W8A8 with uniform quantizers alone agrees on "
        f"{same['native/w8a8:uniform']:.2f} %, in {uniform[0]:.2f} of its time for one image and {uniform[1]:.2f} for "
        f"eight. W6A6 and W8A8 take {min(slower):.2f} to {max(slower):.2f} times as long as OpenVINO's int8 for eight."
    )


# --- on TinyViT ---


def tinyvit() -> tuple[dict[tuple[str, int], float], dict[str, float]]:
    """(CPU milliseconds by engine and batch, top-1 by engine [%])."""
    found = results("runtime-realbench")
    top = {name: 100 * each["top1"] for name, each in found["accuracy"].items()}
    return {(row["name"], row["batch"]): row["cpu_ms"] for row in found["rows"]}, top


def times_as_long(name: str, peer: str) -> str:
    """For one image, and in brackets for eight."""
    time, _ = tinyvit()
    return f"{time[name, 1] / time[peer, 1]:.2f} ({time[name, 8] / time[peer, 8]:.2f})"


@says(README)
def speed_on_tinyvit() -> str:
    time, top = tinyvit()
    order(top["fp32"] - 1 < top["native/w8a8"] < top["fp32"], top)
    order(top["native/w8a8"] > top["openvino-int8"] > top["native/w4a4"], top)
    for batch in (1, 8):
        each = [time[name, batch] for name in ("openvino-int8", "openvino-bf16", "native/w8a8", "openvino")]
        order(each == sorted(each), each)
    return (
        "On TinyViT, which has real weights, W8A8 keeps "
        f"{top['native/w8a8']:.1f} of {top['fp32']:.1f} % and takes "
        f"{times_as_long('native/w8a8', 'openvino')} of the time of OpenVINO's float32. OpenVINO in bfloat16 needs no "
        f"calibration, has {top['openvino-bf16']:.1f} %, and is quicker: W8A8 takes "
        f"{times_as_long('native/w8a8', 'openvino-bf16')} times as long. OpenVINO's int8 from the same 32 images has "
        f"{top['openvino-int8']:.1f} %, and W8A8 takes {times_as_long('native/w8a8', 'openvino-int8')} times as long "
        f"as it. ONNX Runtime's int8 has {top['onnxruntime-int8']:.1f} and {top['onnxruntime-int8-dynamic']:.1f} %."
    )


@says(MEASURED)
def engines_on_tinyvit() -> str:
    time, top = tinyvit()
    quickest = "openvino-int8-bf16"
    for batch in (1, 8):
        of_batch = {name: each for (name, count), each in time.items() if count == batch}
        peers = {name: each for name, each in of_batch.items() if "/" not in name}
        order(min(of_batch, key=lambda name: of_batch[name]) == "native/w4a4", of_batch)
        order(min(peers, key=lambda name: peers[name]) == quickest, peers)
    lost = {name: f"{top['fp32'] - each:.1f} points" for name, each in top.items()}
    return (
        f"On TinyViT W4A4 takes the least time, and loses {lost['native/w4a4']}. OpenVINO's int8 with bfloat16 around "
        f"it, the quickest of the other engines, loses {lost[quickest]}. W6A6 loses {lost['native/w6a6']} in "
        f"{times_as_long('native/w6a6', quickest)} times its time, for one image and in brackets for eight. W8A8 loses "
        f"{lost['native/w8a8']} in {times_as_long('native/w8a8', quickest)} times, and with uniform quantizers alone "
        f"{lost['native/w8a8:uniform']} in {times_as_long('native/w8a8:uniform', quickest)} times. OpenVINO in "
        f"bfloat16 loses {lost['openvino-bf16']}: W8A8 takes {times_as_long('native/w8a8', 'openvino-bf16')} times as "
        "long as it."
    )
