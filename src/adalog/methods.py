"""The table of methods: one row per published system, with its choices in the shared frame."""

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
    """A published system: its paper, venue and year, and the choices that differ from the defaults of `Config`.

    label: what every table says beside the name (see `labelled`), where a row is not simply what its source describes.
    """

    source: str
    choices: dict[str, Any]
    label: str = ""

    def to_json(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The choices as JSON, without those that equal the defaults, which `Config.defaults` gives.

        A search or stage is written as its kind and the fields that differ from that kind's defaults. The stages are
        called "refine", as in files.
        """

        def told(choices: Any, kinds: dict[str, Any]) -> dict[str, Any]:
            fields, usual = (kind_to_json(each, kinds) for each in (choices, type(choices)()))
            return {key: value for key, value in fields.items() if key == "kind" or value != usual.get(key)}

        plain = {name: value for name, value in self.choices.items() if value != defaults[name]}
        if "search" in plain:
            plain["search"] = told(plain["search"], SEARCH_KINDS)
        if "stages" in plain:
            stages = [told(stage, STAGE_KINDS) for stage in plain.pop("stages")]
            plain["refine"] = stages if len(stages) > 1 else stages[0]
        return plain


_ADALOG = "AdaLog (Wu et al., ECCV 2024)"
_REPQ_VIT = "RepQ-ViT (Li et al., ICCV 2023)"
_PTQ4VIT = "PTQ4ViT (Yuan et al., ECCV 2022)"
_RELEASED_OFFSET = 0.16997124254703522  # minus the minimum of GELU, as the released code of AdaLog has it
_UNIFORM = {"post_softmax": "uniform", "post_gelu": "uniform"}
_SPLIT_AND_TWIN = {"post_softmax": "split", "post_gelu": "twin", "input_bits": FLOAT_BITS}
# FQ-ViT and RepQ-ViT share these. Values beyond the codes are zero, as in the released codes that gave the published
# figures, although the papers clip them.
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

# Reconstruction as published takes 20,000 steps of 32 images a block, for which a GPU is used; these rows take fewer.
_BRECQ = Reconstruction(weights="adaround", loss="fisher", drop=0.0, biases=False, rate=0.1)
_SHORTENED = f"in {_BRECQ.iterations} steps of {_BRECQ.batch} images a block (published: 20,000 of 32)"

# There is one row per method. A row "-released" computes what the authors' released code does, where that is not what
# the row without this word computes; benchmarks/golden.py compares it with outputs of that code. The first
# three rows differ from adalog in the quantizers of power-law activations alone.
METHODS: dict[str, Method] = {
    "uniform": Method(f"{_ADALOG}: its rows of uniform quantizers, in its search", {**_UNIFORM}),
    # Eqs. 1-2
    "log2": Method(f"{_ADALOG}: its rows of FQ-ViT's quantizer", {"post_softmax": "log2", "post_gelu": "log2"}),
    # Eqs. 3-4
    "log-sqrt2": Method(
        f"{_ADALOG}: its rows of RepQ-ViT's quantizer", {"post_softmax": "log-sqrt2", "post_gelu": "log-sqrt2"}
    ),
    # Eqs. 5-15, our reading
    "adalog": Method(_ADALOG, {"post_softmax": "adalog", "post_gelu": "adalog"}),
    # Ours: what we recommend. Weights and biases are fitted in closed form once the search is done.
    "adalog+": Method(
        f"{_ADALOG}, then corrected in closed form (ours)",
        {"post_softmax": "adalog", "post_gelu": "adalog", "stages": (Correction(),)},
    ),
    # Ours: the most that this package gets out of as many images, in a multiple of the time.
    "adalog++": Method(
        f"{_ADALOG}, then corrected in closed form, and trained block by block and end to end (ours)",
        {
            "post_softmax": "adalog",
            "post_gelu": "adalog",
            "stages": (
                Correction(images=Reconstruction().images),
                Reconstruction(),
                # Scales and biases, which are few, do most of this; larger steps of codes fit the images alone.
                Reconstruction(scope="model", drop=0.0, rate=0.003, scale_rate=0.003),
            ),
        },
    ),
    # The paper taken literally: codes saturate, the logarithm is rounded, scales are layer-wise (Sec. 4.1), and each
    # pair of hyperparameters takes one pass of Algorithm 1 on all data.
    "adalog-paper": Method(
        f"{_ADALOG}, to the letter but for percentiles and first points from samples, overlapping patches thinned, "
        "weights searched again once their activation is found, and the image at 8 bits, of which it says nothing",
        {
            "beyond": "saturate",
            "rounding": "log",
            "tables": "float",
            "offset": 0.17,
            "per_head": False,
            "search": Search(steps=4, rounds=1, rough_rows=0, refit=False, reach=0.1, fold_ranges="own"),
        },
    ),
    # The released code has 2**bits + 1 values, keeps the image in float, and does not fold the norm of the head.
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
    # The percentile is the one in FQ-ViT's comparison.
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
    # It builds on PTQ4ViT, whose choices stay where APQ-ViT does not change them.
    "apq-vit": Method(
        "APQ-ViT (Ding et al., ACM MM 2022)",
        {
            **_SPLIT_AND_TWIN,
            "post_softmax": "max-kept",
            "search": ScaleSearch(rounds=1),
            "stages": (BlockRefinement(),),
        },
        label="our reading",  # the text of its paper was not at hand: see docs/decisions/17-the-rivals.md
    ),
    "repq-vit": Method(_REPQ_VIT, {**_REPQ_VIT_CHOICES, "search": _REPQ_VIT_SEARCH}),
    # No file stores it: see `RangeSearch`.
    "repq-vit-released": Method(
        f"{_REPQ_VIT}, its released code",
        {**_REPQ_VIT_CHOICES, "search": replace(_REPQ_VIT_SEARCH, round_zero_point=False, in_order=True)},
    ),
    "evol-q": Method("Evol-Q (Frumkin et al., ICCV 2023)", {**_FQ_VIT, "stages": (Evolution(),)}),
    # BRECQ weights errors by the loss of labels; here it is the distance to the float network's outputs.
    "brecq": Method(
        f"BRECQ (Li et al., ICLR 2021) after the search of AdaLog, without labels, {_SHORTENED}",
        {**_UNIFORM, "stages": (_BRECQ,)},
    ),
    "brecq-adalog": Method(
        f"{_ADALOG}, then BRECQ as in its Table 4, without labels, {_SHORTENED}", {"stages": (_BRECQ,)}
    ),
    "qdrop": Method(
        f"QDrop (Wei et al., ICLR 2022) after the search of AdaLog, {_SHORTENED}",
        {**_UNIFORM, "stages": (replace(_BRECQ, loss="squared", drop=0.5),)},
    ),
    "aphq-vit": Method(
        "APHQ-ViT (Wu et al., CVPR 2025): its averaged Hessian, by random probes, without its MLPs of ReLU; after the "
        f"search of AdaLog, {_SHORTENED}",
        {**_UNIFORM, "stages": (replace(_BRECQ, loss="averaged", drop=0.5),)},
        label="our reading",
    ),
    "fima-q": Method(
        "FIMA-Q (Wu et al., CVPR 2025): its diagonal and low-rank Fisher information, of 4 gradients on 64 images "
        f"(published: 15, on all); after the search of AdaLog, {_SHORTENED}",
        {**_UNIFORM, "stages": (replace(_BRECQ, loss="low-rank", drop=0.5),)},
        label="our reading",
    ),
    "qwt": Method(
        "QwT (Fu et al., CVPR 2025) on 512 images: what the stream lacks after a block is fitted in closed form, but "
        "by the block's own weights and not by a linear beside it",
        {**_REPQ_VIT_CHOICES, "search": _REPQ_VIT_SEARCH, "stages": (Correction(images=512, target="stream"),)},
        label="our reading",
    ),
    "erq": Method(
        "ERQ (Zhong et al., ICML 2024): its ridge regressions, with codes rounded as GPTQ does",
        {**_REPQ_VIT_CHOICES, "search": _REPQ_VIT_SEARCH, "stages": (Correction(images=32),)},
        label="our reading",
    ),
}


def labelled(name: str) -> str:
    """A method's name with its label in brackets, as tables show it; any other name as it is."""
    label = METHODS[name].label if name in METHODS else ""
    return f"{name} ({label})" if label else name
