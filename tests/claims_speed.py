"""Claims about the engines on TinyViT."""

from claims import MEASURED, README, order, results, says


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
    order(top["native/w8a8"] >= top["fp32"] > top["openvino-int8"] > top["native/w4a4"], top)
    for batch in (1, 8):
        each = [time[name, batch] for name in ("openvino-int8", "openvino-bf16", "native/w8a8", "openvino")]
        order(each == sorted(each), each)
    return (
        f"On TinyViT, which has real weights, W8A8 keeps full precision's {top['native/w8a8']:.1f} % and takes "
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
    order(all(time[quickest, batch] <= each for (_, batch), each in time.items()), time)
    lost = {name: f"{top['fp32'] - each:.1f} points" for name, each in top.items()}
    return (
        f"On TinyViT OpenVINO's int8 with bfloat16 around it is the quickest, and loses {lost[quickest]}. W6A6 loses "
        f"{lost['native/w6a6']} in {times_as_long('native/w6a6', quickest)} times its time, for one image and in "
        f"brackets for eight. W8A8 loses none that this measures, in {times_as_long('native/w8a8', quickest)} times, "
        f"and with uniform quantizers alone {lost['native/w8a8:uniform']} in "
        f"{times_as_long('native/w8a8:uniform', quickest)} times. OpenVINO in bfloat16 loses {lost['openvino-bf16']}: "
        f"W8A8 takes {times_as_long('native/w8a8', 'openvino-bf16')} times as long as it."
    )
