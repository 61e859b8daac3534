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
    order(time["openvino-int8", 1] < time["native/w8a8", 1] < time["openvino", 1], time)
    return (
        f"On TinyViT, which has real weights, W8A8 keeps full precision's {top['native/w8a8']:.1f} % and takes "
        f"{times_as_long('native/w8a8', 'openvino')} of the time of OpenVINO's float32. OpenVINO's int8 from the same "
        f"32 images is quicker and has {top['openvino-int8']:.1f} %: W8A8 takes "
        f"{times_as_long('native/w8a8', 'openvino-int8')} times as long. ONNX Runtime's int8 has "
        f"{top['onnxruntime-int8']:.1f} and {top['onnxruntime-int8-dynamic']:.1f} %."
    )


@says(MEASURED)
def engines_on_tinyvit() -> str:
    time, top = tinyvit()
    order(time["native/w4a4", 1] > time["openvino-int8", 1], time)
    return (
        f"On TinyViT OpenVINO's int8 is the quickest, and loses {top['fp32'] - top['openvino-int8']:.1f} points. W6A6 "
        f"loses {top['fp32'] - top['native/w6a6']:.1f} points in {times_as_long('native/w6a6', 'openvino-int8')} times "
        f"its time, for one image and in brackets for eight. W8A8 loses none that this measures, in "
        f"{times_as_long('native/w8a8', 'openvino-int8')} times, and with uniform quantizers alone "
        f"{top['fp32'] - top['native/w8a8:uniform']:.1f} points in "
        f"{times_as_long('native/w8a8:uniform', 'openvino-int8')} times."
    )
