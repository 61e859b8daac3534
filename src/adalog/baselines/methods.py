"""Define the rows of other published methods in the table of methods, and of released code."""

from dataclasses import replace
from typing import Any

from adalog.baselines import BlockRefinement, Evolution, RangeSearch, ReleasedSearch, ScaleSearch
from adalog.choices import Correction, Method, Reconstruction
from adalog.quantizers import FLOAT_BITS
from adalog.search.bounds import Search

_ADALOG = "AdaLog (Wu et al., ECCV 2024)"
_REPQ_VIT = "RepQ-ViT (Li et al., ICCV 2023)"
_PTQ4VIT = "PTQ4ViT (Yuan et al., ECCV 2022)"
_RELEASED_OFFSET = 0.16997124254703522  # minus the minimum of GELU, as in the released code of AdaLog
_UNIFORM: dict[str, Any] = {"post_softmax": "uniform", "post_gelu": "uniform"}
_WITHOUT_HEADS: dict[str, Any] = {**_UNIFORM, "per_head": False}
_SPLIT_AND_TWIN = {"post_softmax": "split", "post_gelu": "twin", "input_bits": FLOAT_BITS}
# Values beyond the codes become zero, as in the released code that produced the published results, although the papers
# clip them.
_RELEASED_LOG: dict[str, Any] = {"beyond": "zero", "rounding": "log", "tables": "float", "fold_rows": 1}
_FLOAT_LOG = {**_RELEASED_LOG, "post_gelu": "uniform", "per_head": False}  # of FQ-ViT and RepQ-ViT
_FQ_VIT: dict[str, Any] = {
    **_FLOAT_LOG,
    "post_softmax": "log2",  # with the scale 1
    "search": RangeSearch(symmetric_weights=True, unit_softmax=True, share="power-of-two"),
}
_REPQ_VIT_SEARCH = RangeSearch(percentiles=(0.999, 0.9999, 0.99999), share="mean")
_REPQ_VIT_CHOICES: dict[str, Any] = {
    **_FLOAT_LOG,
    "post_softmax": "log-sqrt2",
    "fold_head": False,
    "search": _REPQ_VIT_SEARCH,
}
_CORRECTION = Correction(images=32, coefficient=1.0, robust=False, importance=0.0)

# Published reconstruction takes 20,000 steps of 32 images per block on a GPU. These rows take fewer steps.
_BRECQ = Reconstruction(weights="adaround", loss="fisher", drop=0.0, biases=False, rate=0.1, robust=False)
_SHORTENED = f"in {_BRECQ.iterations} steps of {_BRECQ.batch} images per block (published: 20,000 of 32)"

METHODS: dict[str, Method] = {
    # The released code has 2**bits + 1 levels, keeps the image in float, and does not fold the norm of the head.
    "adalog-released": Method(
        f"{_ADALOG}, its released code",
        {
            **_RELEASED_LOG,
            "offset": _RELEASED_OFFSET,
            "input_bits": FLOAT_BITS,
            "q_min": 10,
            "fold_head": False,
            "search": ReleasedSearch(),
        },
    ),
    "minmax": Method("minimum and maximum (Jacob et al., CVPR 2018)", {**_WITHOUT_HEADS, "search": RangeSearch()}),
    # FQ-ViT's comparison uses this percentile.
    "percentile": Method(
        "percentiles (Li et al., Fully Quantized Network for Object Detection, CVPR 2019)",
        {**_WITHOUT_HEADS, "search": RangeSearch(percentiles=(0.99999,))},
    ),
    "easyquant": Method(
        "EasyQuant (Wu et al., arXiv 2020)",
        {**_WITHOUT_HEADS, "search": ScaleSearch(metric="cosine", span=(0.5, 2.0), row_scales=True)},
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
    "repq-vit": Method(_REPQ_VIT, _REPQ_VIT_CHOICES),
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
        {**_REPQ_VIT_CHOICES, "stages": (replace(_CORRECTION, images=512, target="stream"),)},
        label="our reading",
    ),
    "erq": Method(
        "ERQ (Zhong et al., ICML 2024): its ridge regressions, with codes rounded as GPTQ does",
        {**_REPQ_VIT_CHOICES, "stages": (_CORRECTION,)},
        label="our reading",
    ),
}
"""The rows by name."""
