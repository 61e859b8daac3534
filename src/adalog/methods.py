"""Define the table of methods: one row per published method, with its choices for `Config`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from adalog.choices import (
    SEARCH_KINDS,
    STAGE_KINDS,
    BlockRefinement,
    Correction,
    Evolution,
    RangeSearch,
    Reconstruction,
    ReleasedSearch,
    ScaleSearch,
    Search,
    kind_to_json,
)
from adalog.quantizers import FLOAT_BITS


@dataclass(frozen=True)
class Method:
    """A published method: its source, and its choices for `Config`.

    Args:
        source: The paper, with venue and year.
        choices: Fields of `Config` by name. The other fields have their defaults, but `stages` is then ().
        label: A remark that tables show after the name, if the row is not exactly what its source describes.
    """

    source: str
    choices: dict[str, Any]
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", {"stages": (), **self.choices})

    def to_json(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the choices that differ from the defaults, as JSON that `Config.from_json` reads.

        A search or stage is its kind and the fields that differ from the defaults of that kind.

        Args:
            defaults: The defaults of `Config`, from `Config.defaults()`.

        Returns:
            The choices by the name of the field.
        """

        def changed(choices: Any, kinds: dict[str, Any]) -> dict[str, Any]:
            fields, usual = (kind_to_json(each, kinds) for each in (choices, type(choices)()))
            return {key: value for key, value in fields.items() if key == "kind" or value != usual.get(key)}

        plain = {name: value for name, value in self.choices.items() if value != defaults[name]}
        if "search" in plain:
            plain["search"] = changed(plain["search"], SEARCH_KINDS)
        if "stages" in plain:
            plain["stages"] = [changed(stage, STAGE_KINDS) for stage in plain["stages"]]
        return plain


_ADALOG = "AdaLog (Wu et al., ECCV 2024)"
_REPQ_VIT = "RepQ-ViT (Li et al., ICCV 2023)"
_PTQ4VIT = "PTQ4ViT (Yuan et al., ECCV 2022)"
_RELEASED_OFFSET = 0.16997124254703522  # minus the minimum of GELU, as in the released code of AdaLog
_CORRECTED_ADALOG = f"{_ADALOG}, then corrected in closed form from its calibration images (ours)"
_CORRECTED = {"stages": (Correction(),)}
_ONE_KIND = {"search": Search(compare_uniform=False), **_CORRECTED}
_UNIFORM = {"post_softmax": "uniform", "post_gelu": "uniform"}
_SPLIT_AND_TWIN = {"post_softmax": "split", "post_gelu": "twin", "input_bits": FLOAT_BITS}
# FQ-ViT and RepQ-ViT share these. Values beyond the codes become zero, as in the released code that produced the
# published results, although the papers clip them.
_FLOAT_LOG: dict[str, Any] = {
    "post_gelu": "uniform",
    "beyond": "zero",
    "rounding": "log",
    "tables": "float",
    "per_head": False,
    "fold_rows": 1,
}
_FQ_VIT: dict[str, Any] = {
    **_FLOAT_LOG,
    "post_softmax": "log2",  # with the scale 1
    "search": RangeSearch(symmetric_weights=True, unit_softmax=True, share="power-of-two"),
}
_REPQ_VIT_SEARCH = RangeSearch(percentiles=(0.999, 0.9999, 0.99999), share="mean")
_REPQ_VIT_CHOICES: dict[str, Any] = {**_FLOAT_LOG, "post_softmax": "log-sqrt2", "fold_head": False}

# Published reconstruction takes 20,000 steps of 32 images per block on a GPU. These rows take fewer steps.
_BRECQ = Reconstruction(weights="adaround", loss="fisher", drop=0.0, biases=False, rate=0.1, robust=False)
_SHORTENED = f"in {_BRECQ.iterations} steps of {_BRECQ.batch} images per block (published: 20,000 of 32)"

# There is one row per method. If the authors' released code differs from the paper, a second row with the suffix
# "-released" computes what that code does, and benchmarks/golden.py compares it with outputs of that code. The first
# three rows differ from "adalog" only in the quantizers of power-law activations. A row without stages has none.
METHODS: dict[str, Method] = {
    "uniform": Method(f"{_CORRECTED_ADALOG}: its rows of uniform quantizers", {**_UNIFORM, **_CORRECTED}),
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
        f"{_ADALOG}, then corrected in closed form from 128 images (ours)",
        {"post_softmax": "adalog", "post_gelu": "adalog", "stages": (Correction(images=128),)},
    ),
    # The most accurate method of adalog, which takes much longer.
    "adalog++": Method(
        f"{_ADALOG}, then corrected in closed form, and trained block by block and end to end (ours)",
        {
            "post_softmax": "adalog",
            "post_gelu": "adalog",
            "stages": (
                Correction(images=Reconstruction().images),
                Reconstruction(),
                # Training mostly changes scales and biases here. Larger rates for codes would overfit the images.
                Reconstruction(scope="model", drop=0.0, rate=0.003, scale_rate=0.003),
            ),
        },
    ),
    # The paper to the letter: codes saturate, the logarithm is rounded, scales are layer-wise (Sec. 4.1), and each pair
    # of hyperparameters takes one pass of Algorithm 1 on all data.
    "adalog-paper": Method(
        f"{_ADALOG}, to the letter, except that percentiles and first points come from samples, overlapping patches "
        "are sampled, weights are searched again after their activation, and the image has 8 bits, which the paper "
        "leaves open",
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
    # The released code has 2**bits + 1 levels, keeps the image in float, and does not fold the norm of the head.
    "adalog-released": Method(
        f"{_ADALOG}, its released code",
        {
            "beyond": "zero",
            "rounding": "log",
            "tables": "float",
            "offset": _RELEASED_OFFSET,
            "input_bits": FLOAT_BITS,
            "q_min": 10,
            "fold_rows": 1,
            "fold_head": False,
            "search": ReleasedSearch(),
        },
    ),
    "minmax": Method(
        "minimum and maximum (Jacob et al., CVPR 2018)", {**_UNIFORM, "per_head": False, "search": RangeSearch()}
    ),
    # FQ-ViT's comparison uses this percentile.
    "percentile": Method(
        "percentiles (Li et al., Fully Quantized Network for Object Detection, CVPR 2019)",
        {**_UNIFORM, "per_head": False, "search": RangeSearch(percentiles=(0.99999,))},
    ),
    "easyquant": Method(
        "EasyQuant (Wu et al., arXiv 2020)",
        {
            **_UNIFORM,
            "per_head": False,
            "search": ScaleSearch(metric="cosine", span=(0.5, 2.0), row_scales=True),
        },
    ),
    "fq-vit": Method("FQ-ViT (Lin et al., IJCAI 2022)", _FQ_VIT),
    "ptq4vit": Method(_PTQ4VIT, {**_SPLIT_AND_TWIN, "search": ScaleSearch()}),
    "ptq4vit-released": Method(
        f"{_PTQ4VIT}, its released code",
        {**_SPLIT_AND_TWIN, "offset": _RELEASED_OFFSET, "search": ScaleSearch(released=True)},
    ),
    # APQ-ViT builds on PTQ4ViT and keeps its choices unless its paper changes them.
    "apq-vit": Method(
        "APQ-ViT (Ding et al., ACM MM 2022)",
        {
            **_SPLIT_AND_TWIN,
            "post_softmax": "max-kept",
            "search": ScaleSearch(rounds=1),
            "stages": (BlockRefinement(),),
        },
        label="our reading",  # the text of its paper was not available: see docs/design/evaluation.md
    ),
    "repq-vit": Method(_REPQ_VIT, {**_REPQ_VIT_CHOICES, "search": _REPQ_VIT_SEARCH}),
    # Artifacts cannot store this model: see `round_zero_point` of `RangeSearch`.
    "repq-vit-released": Method(
        f"{_REPQ_VIT}, its released code",
        {**_REPQ_VIT_CHOICES, "search": replace(_REPQ_VIT_SEARCH, round_zero_point=False, in_order=True)},
    ),
    "evol-q": Method("Evol-Q (Frumkin et al., ICCV 2023)", {**_FQ_VIT, "stages": (Evolution(),)}),
    # BRECQ weights errors by the gradients of the loss on labels. Without labels, the loss is the distance to the
    # outputs of the float network.
    "brecq": Method(
        f"BRECQ (Li et al., ICLR 2021) after the search of AdaLog, without labels, {_SHORTENED}",
        {**_UNIFORM, "stages": (_BRECQ,)},
    ),
    "brecq-adalog": Method(
        f"{_ADALOG}, then BRECQ as in its Table 4, without labels, {_SHORTENED}",
        {"search": Search(compare_uniform=False), "stages": (_BRECQ,)},
    ),
    "qdrop": Method(
        f"QDrop (Wei et al., ICLR 2022) after the search of AdaLog, {_SHORTENED}",
        {**_UNIFORM, "stages": (replace(_BRECQ, loss="squared", drop=0.5),)},
    ),
    "aphq-vit": Method(
        "APHQ-ViT (Wu et al., CVPR 2025): its averaged Hessian from random probes, without its MLPs with ReLU; after "
        f"the search of AdaLog, {_SHORTENED}",
        {**_UNIFORM, "stages": (replace(_BRECQ, loss="averaged", drop=0.5),)},
        label="our reading",
    ),
    "fima-q": Method(
        "FIMA-Q (Wu et al., CVPR 2025): its diagonal and low-rank Fisher information, from 4 gradients on 64 images "
        f"(published: 15 on all images); after the search of AdaLog, {_SHORTENED}",
        {**_UNIFORM, "stages": (replace(_BRECQ, loss="low-rank", drop=0.5),)},
        label="our reading",
    ),
    "qwt": Method(
        "QwT (Fu et al., CVPR 2025) on 512 images: the error of the stream after a block is compensated in closed "
        "form, but by the block's own weights instead of an additional linear",
        {
            **_REPQ_VIT_CHOICES,
            "search": _REPQ_VIT_SEARCH,
            "stages": (Correction(images=512, target="stream", coefficient=1.0, robust=False, importance=0.0),),
        },
        label="our reading",
    ),
    "erq": Method(
        "ERQ (Zhong et al., ICML 2024): its ridge regressions, with codes rounded as GPTQ does",
        {
            **_REPQ_VIT_CHOICES,
            "search": _REPQ_VIT_SEARCH,
            "stages": (Correction(images=32, coefficient=1.0, robust=False, importance=0.0),),
        },
        label="our reading",
    ),
}
"""The published methods by name. `Config.preset` takes these names.

Examples:
    >>> adalog.METHODS["repq-vit"].source
    'RepQ-ViT (Li et al., ICCV 2023)'
"""


def labelled(name: str) -> str:
    """Return a method's name with its label in brackets, as tables show it; other names are returned unchanged."""
    label = METHODS[name].label if name in METHODS else ""
    return f"{name} ({label})" if label else name
