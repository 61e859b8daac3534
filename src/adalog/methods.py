"""Define the table of methods: one row per published method, with its choices for `Config`."""

from adalog.baselines.methods import METHODS as BASELINES
from adalog.choices import Correction, Method, Reconstruction
from adalog.search.bounds import Search

_ADALOG = "AdaLog (Wu et al., ECCV 2024)"
_CORRECTED_ADALOG = f"{_ADALOG}, then corrected in closed form from its calibration images (ours)"
_CORRECTED = {"stages": (Correction(),)}
_PER_TENSOR = {
    "post_softmax": "uniform",
    "post_gelu": "uniform",
    "weights": "symmetric",
    "per_head": False,
    "per_group": False,
    **_CORRECTED,
}
_ONE_KIND = {"search": Search(compare_uniform=False), **_CORRECTED}

# There is one row per method. If the authors' released code differs from the paper, a second row with the suffix
# "-released" computes what that code does, and experiments/golden.py compares it with outputs of that code. The first
# three rows differ from "adalog" only in the quantizers of power-law activations. A row without stages has none.
METHODS: dict[str, Method] = {
    "uniform": Method(
        f"{_CORRECTED_ADALOG}: its rows of uniform quantizers",
        {"post_softmax": "uniform", "post_gelu": "uniform", **_CORRECTED},
    ),
    # The quantizers that engines for phones and accelerators have: XNNPACK takes the first row, and compilers that need
    # zero points of zero take the second.
    "uniform-tensor": Method(
        f"{_CORRECTED_ADALOG}: uniform, with one scale per tensor and symmetric weights, for ExecuTorch", _PER_TENSOR
    ),
    "symmetric": Method(
        f"{_CORRECTED_ADALOG}: uniform-tensor with symmetric activations, for standard QDQ files",
        {**_PER_TENSOR, "activations": "symmetric"},
    ),
    # Eqs. 1-2
    "log2": Method(
        f"{_CORRECTED_ADALOG}: its rows of FQ-ViT's quantizer",
        {"post_softmax": "log2", "post_gelu": "log2", **_ONE_KIND},
    ),
    # Eqs. 3-4
    "log-sqrt2": Method(
        f"{_CORRECTED_ADALOG}: its rows of RepQ-ViT's quantizer",
        {"post_softmax": "log-sqrt2", "post_gelu": "log-sqrt2", **_ONE_KIND},
    ),
    # Eqs. 5-15 of the paper
    "adalog": Method(_CORRECTED_ADALOG, {"post_softmax": "adalog", "post_gelu": "adalog", **_CORRECTED}),
    # The recommended method of adalog if there are more images than the paper calibrates on.
    "adalog+": Method(
        f"{_ADALOG}, then corrected in closed form from 128 images and their mirror images (ours)",
        {"post_softmax": "adalog", "post_gelu": "adalog", "stages": (Correction(images=128, mirrored=True),)},
    ),
    # The most accurate method of adalog, which takes much longer.
    "adalog++": Method(
        f"{_ADALOG}, then corrected in closed form, and trained end to end (ours)",
        {
            "post_softmax": "adalog",
            "post_gelu": "adalog",
            "stages": (
                Correction(images=Reconstruction().images),
                # Training blocks first takes longer, and the result is no better (docs/benchmarks/stages.md). At these
                # rates, scales and biases change, and hardly any code does. A larger rate of scales did not improve
                # TinyViT. The KL divergence, which this loss adds for a classifier, keeps the power of the logits.
                Reconstruction(
                    scope="model",
                    loss="output",
                    iterations=1600,
                    drop=0.0,
                    rate=0.003,
                    scale_rate=0.001,
                    mirrored=True,
                ),
            ),
        },
    ),
    # The paper to the letter: codes saturate, the logarithm is rounded, scales are layer-wise (Sec. 4.1), and each pair
    # of hyperparameters takes one pass of Algorithm 1 on all data.
    "adalog-paper": Method(
        f"{_ADALOG}, to the letter, except that percentiles and first points come from samples, overlapping patches "
        "are sampled, weights are searched again after their activation, and choices that the paper leaves open are "
        "ours, such as 8 bits for the image (docs/design/search.md)",
        {
            "beyond": "saturate",
            "rounding": "log",
            "tables": "float",
            "offset": 0.17,
            "per_head": False,
            "search": Search(
                steps=4,
                rounds=1,
                rough_rows=0,
                refit=False,
                reach=0.1,
                fold_ranges="own",
                importance=0.0,
                compare_uniform=False,
            ),
        },
    ),
    **BASELINES,
}
"""The published methods by name. `Config.preset` takes these names.

Examples:
    >>> adalog.METHODS["repq-vit"].source
    'RepQ-ViT (Li et al., ICCV 2023)'
"""


def label(name: str) -> str:
    """Return a method's name with its label in brackets, as tables show it; other names are returned unchanged."""
    text = METHODS[name].label if name in METHODS else ""
    return f"{name} ({text})" if text else name
