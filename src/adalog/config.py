"""All choices of one quantized model, frozen, each default with its source."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from adalog.choices import (
    SEARCH_KINDS,
    AnySearch,
    Fitting,
    PostSoftmax,
    PowerLaw,
    RangeSearch,
    ScaleSearch,
    Search,
    Stage,
    Tables,
    Weights,
    check_bits,
    check_choice,
    check_fields,
    check_flag,
    check_stages,
    check_whole,
    kind_from_json,
    kind_to_json,
    renamed,
    stages_from_json,
    stages_to_json,
)
from adalog.methods import METHODS
from adalog.quantizers import Beyond, Rounding


@dataclass(frozen=True)
class Config:
    """Bits, quantizers and search of one quantized model.

    Each field says what it decides, and where its default comes from. Raises ValueError for values that a choice cannot
    have, and for choices that contradict each other.
    """

    # Bits are 2 to 8, or 32 for float. W4A4 is the paper's main setting (Table 1).
    weight_bits: int = 4
    activation_bits: int = 4
    softmax_bits: int = 4  # those of the attention weights; the paper's S bits (Table 3)
    input_bits: int = 8  # those of the images at the first convolution: the field's convention (Sec. 4.1)

    # The quantizers of activations that follow a power law; all others are asymmetric uniform (Sec. 3.1).
    post_softmax: PostSoftmax = "adalog"
    post_gelu: PowerLaw = "adalog"

    # The quantizers of weights: asymmetric uniform (Sec. 3.1), or uniform with half of the codes as the zero point, the
    # only weights that some engines take. It is a choice of `Search`; rivals' searches have their own.
    weights: Weights = "uniform"

    # log2(base) = q / r: r = 37 (Sec. 4.1); q is searched from q_min to q_max. The released code has 10 ... 137; here
    # it starts at 1, since small q win at 6 bits (docs/decisions).
    r: int = 37
    q_min: int = 1
    q_max: int = 137

    # The offset that lifts GELU's negative tail (Eqs. 11-15; the paper: 0.17). None: minus the activation's minimum,
    # found numerically.
    offset: float | None = None

    # What becomes of values beyond the last level, and which level a value takes: see `log_quantize`. "zero-coded" and
    # "nearest" fit in `bits` bits at the least loss (docs/decisions); the paper saturates and rounds the logarithm.
    beyond: Beyond = "zero-coded"
    rounding: Rounding = "nearest"

    # The width of the integers that stand for logarithmic levels (docs/integer.md): "calibrated" chooses one per site,
    # "u8" and "u16" are fixed. With "float" levels, or with `beyond` "zero", a model does not run in integers.
    tables: Tables = "calibrated"

    # Whether Q, K and V have a scale per head (the released code) or per tensor (Sec. 4.1 as printed).
    per_head: bool = True

    # A norm is folded if at least this many rows of calibration give its channels their scales. A head that reads one
    # token per image has 32, and folding makes it worse: benchmarks/results/folds.json.
    fold_rows: int = 128
    fold_head: bool = True  # whether the norm of the head may be folded (the released code does not fold it)

    images: int = 32  # how many images calibrate (Sec. 4.1)

    # (pattern, bits) for sites whose names match the pattern, as file names would. Bits are a number for all operands,
    # 32 for float, or text such as "w4a8", "w4", "a8s4" or "i4": weights, activations (after softmax too, unless s is
    # given), attention weights, images. Where several patterns match, the last that names an operand decides; `at` says
    # what happens to sites that are searched together.
    pinned: tuple[tuple[str, int | str], ...] = ()

    search: AnySearch = field(default_factory=Search)  # Algorithm 1, or a rival's search
    stages: tuple[Stage, ...] = ()  # what changes the result of the search, one after another (APQ-ViT, Evol-Q, ours)

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits", "softmax_bits", "input_bits"):
            check_bits(name, getattr(self, name))
        _check_pinned(self.pinned)
        choices = (PostSoftmax, "post_softmax"), (PowerLaw, "post_gelu"), (Beyond, "beyond"), (Rounding, "rounding")
        for allowed, name in (*choices, (Tables, "tables"), (Weights, "weights")):
            check_choice(name, getattr(self, name), allowed)
        if self.post_softmax == "twin":
            raise ValueError("post_softmax = 'twin': a twin quantizer is for values of both signs")
        if self.post_softmax in ("split", "max-kept") and not isinstance(self.search, ScaleSearch):
            raise ValueError(f"post_softmax = {self.post_softmax!r} goes with search = ScaleSearch(...)")
        if isinstance(self.search, (RangeSearch, ScaleSearch)) and "adalog" in (self.post_softmax, self.post_gelu):
            raise ValueError(f"{type(self.search).__name__} finds no base: choose other quantizers than 'adalog'")
        if self.weights != "uniform" and not isinstance(self.search, Search):
            raise ValueError(f"weights = {self.weights!r} goes with search = Search(...)")
        for name in ("r", "q_min", "q_max", "fold_rows", "images"):
            check_whole(name, getattr(self, name), 1)
        if self.q_min > self.q_max:
            raise ValueError(f"q_min = {self.q_min} is above q_max = {self.q_max}")
        for name in ("per_head", "fold_head"):
            check_flag(name, getattr(self, name))
        check_stages(self.stages)
        if self.offset is not None and not (isinstance(self.offset, (int, float)) and 0 < self.offset < math.inf):
            raise ValueError(f"offset = {self.offset} is not positive and finite")

    @staticmethod
    def preset(bits: str, method: str = "adalog") -> "Config":
        """The choices of a method at bits such as "w4a4" or "w4a4s3" (weights, activations, softmax).

        Raises ValueError for an unknown method and for bits of another form.
        """
        match = re.fullmatch(r"w(\d+)a(\d+)(?:s(\d+))?", bits)
        if match is None:
            raise ValueError(f"bits = {bits!r} is not of the form w4a4 or w4a4s3")
        if method not in METHODS:
            raise ValueError(f"method = {method!r} is none of {', '.join(METHODS)}")
        weight, activation, softmax = (int(digit or match[2]) for digit in match.groups())
        return Config(weight_bits=weight, activation_bits=activation, softmax_bits=softmax, **METHODS[method].choices)

    def fitting(self, images: int) -> "Config":
        """These choices with so many images for the stages that fit any. Raises ValueError if there is none."""
        if not self.images_fitted:
            raise ValueError(f"{images} images are to be fitted, but no stage fits any: choose the method adalog+")
        stages = [
            dataclasses.replace(each, images=images) if isinstance(each, Fitting) else each for each in self.stages
        ]
        return dataclasses.replace(self, stages=tuple(stages))

    @property
    def images_fitted(self) -> int:
        """How many images the stages fit; 0 if none fits any."""
        return max((stage.images for stage in self.stages if isinstance(stage, Fitting)), default=0)

    @property
    def images_wanted(self) -> int:
        """How many images the search and the stages take in all."""
        return max(self.images, self.images_fitted)

    @property
    def bits(self) -> str:
        """The bits in the form that `preset` reads."""
        softmax = "" if self.softmax_bits == self.activation_bits else f"s{self.softmax_bits}"
        return f"w{self.weight_bits}a{self.activation_bits}{softmax}"

    def at(self, sites: Iterable[str]) -> "Config":
        """The choices for sites that are searched together, with the bits that are pinned for any of them.

        Linears that share an activation (separate q, k and v), or a folded norm, are searched together.
        """
        names = list(sites)
        found = [bits for pattern, bits in self.pinned if any(fnmatchcase(name, pattern) for name in names)]
        if not found:
            return self
        widths: dict[str, Any] = {}
        for bits in found:
            widths |= _pinned_widths(bits)
        return dataclasses.replace(self, **widths, pinned=())

    @staticmethod
    def defaults() -> dict[str, Any]:
        """The default of every field, by name."""
        return {entry.name: getattr(Config(), entry.name) for entry in dataclasses.fields(Config)}

    def to_json(self) -> str:
        """All choices as JSON; a search or stage is an object whose "kind" names its class.

        Files of format 3 call `pinned` and `Search.parents` "keep", and `stages` "refine"; `weights` is left out where
        it is "uniform", as all weights were when the format was made.
        """
        fields = dataclasses.asdict(self)
        if self.weights == "uniform":
            del fields["weights"]
        fields |= {
            "search": kind_to_json(self.search, SEARCH_KINDS),
            "stages": stages_to_json(self.stages),
        }
        return json.dumps(renamed(fields, {"pinned": "keep", "stages": "refine"}), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Config":
        """The choices that `to_json` wrote. The names "pinned" and "stages" are read too."""
        fields: dict[str, Any] = renamed(json.loads(text), {"keep": "pinned", "refine": "stages"})
        search = kind_from_json("search", fields.pop("search", {}), SEARCH_KINDS)
        stages = stages_from_json("stages", fields.pop("stages", None))
        check_fields(Config, fields)
        if isinstance(fields.get("pinned"), list):
            fields["pinned"] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in fields["pinned"])
        return Config(search=search, stages=stages, **fields)


def _pinned_widths(bits: int | str) -> dict[str, int]:
    """The fields of `Config` that pinned bits decide. Raises ValueError for text of another form."""
    if isinstance(bits, int):
        return dict.fromkeys(("weight_bits", "activation_bits", "softmax_bits", "input_bits"), bits)
    match = re.fullmatch(r"(?:w(\d+))?(?:a(\d+))?(?:s(\d+))?(?:i(\d+))?", bits, re.ASCII)
    if match is None or not bits:
        raise ValueError(f"pinned bits {bits!r} are not of the form 8, w4a8, w4, a8s4 or i4")
    weight, activation, softmax, image = match.groups()
    widths = {"weight_bits": weight, "activation_bits": activation, "softmax_bits": softmax or activation}
    return {name: int(width) for name, width in (widths | {"input_bits": image}).items() if width is not None}


def _check_pinned(pinned: object) -> None:
    if not isinstance(pinned, tuple):
        raise ValueError(f"pinned = {pinned!r} is not a tuple of (pattern, bits)")
    for entry in pinned:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str) or not entry[0]:
            raise ValueError(f"pinned = {entry!r} is not (pattern, bits), as in ('head', 8)")
        if not isinstance(entry[1], str):
            check_bits(f"pinned bits of {entry[0]!r}", entry[1])
            continue
        for name, width in _pinned_widths(entry[1]).items():
            check_bits(f"pinned {name} of {entry[0]!r}", width)
