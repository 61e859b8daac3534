"""What to quantize to and how to search: frozen choices, each default with its source, and the table of methods."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from adalog.quantizers import MAX_BITS, MIN_BITS, Beyond, Rounding

PowerLaw = Literal["uniform", "log2", "log-sqrt2", "adalog"]


@dataclass(frozen=True)
class Search:
    """Algorithm 1 and the rounds around it."""

    strategy: Literal["fpcs", "alternating", "brute-force"] = "fpcs"
    init: tuple[int, int] = (16, 8)  # n = 128 = 16 x 8 points of the first step (Sec. 4.1)
    keep: int = 16  # parents of a step; 16 x 8 children = n evaluations
    steps: int = 4  # p (Sec. 4.1; the released code takes 6)
    rounds: int = 3  # weight <-> activation, at most; ends early when a round changes nothing (released: 3)
    rough_rows: int = 4  # all but the last step score every rough_rows-th row; 1: all rows in every step


@dataclass(frozen=True)
class Config:
    """Bits, quantizers and search of one quantized model.

    weight_bits, activation_bits, softmax_bits: 2 to 8. input_bits: of the first convolution's input (8 by the field's
    convention, Sec. 4.1). post_softmax, post_gelu: the quantizer of what follows a power law; everything else is
    asymmetric uniform. r: the denominator of log2(base) = q / r (37, Sec. 4.1); q is searched in 1 ... q_max (the
    released code stops at 137; from 1 because small q win at 6 bits). beyond, rounding: see `quantizers.log_quantize`;
    zero-coded and nearest because they store in `bits` bits at the least loss.
    per_head: Q, K and V have a scale a head (as released) rather than one a tensor. images: how many calibrate (32).
    """

    weight_bits: int = 4
    activation_bits: int = 4
    softmax_bits: int = 4
    input_bits: int = 8
    post_softmax: PowerLaw = "adalog"
    post_gelu: PowerLaw = "adalog"
    r: int = 37
    q_max: int = 137
    beyond: Beyond = "zero-coded"
    rounding: Rounding = "nearest"
    per_head: bool = True
    images: int = 32
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits", "softmax_bits", "input_bits"):
            bits = getattr(self, name)
            if not isinstance(bits, int) or not MIN_BITS <= bits <= MAX_BITS:
                raise ValueError(f"{name} = {bits!r} is not a whole number from {MIN_BITS} to {MAX_BITS}")
        if self.beyond == "zero":
            raise ValueError('beyond = "zero" has 2**bits + 1 values, which a model cannot store; take "zero-coded"')
        for name in ("post_softmax", "post_gelu"):
            if getattr(self, name) not in METHODS:
                raise ValueError(f"{name} = {getattr(self, name)!r} is none of {', '.join(METHODS)}")
        if self.images < 1:
            raise ValueError(f"images = {self.images}: calibration takes one image or more")

    @staticmethod
    def preset(bits: str, method: str = "adalog") -> "Config":
        """The choices of a method at bits like "w4a4" or "w4a4s3" (weights, activations, softmax)."""
        match = re.fullmatch(r"w(\d)a(\d)(?:s(\d))?", bits)
        if match is None:
            raise ValueError(f"bits = {bits!r} is not of the form w4a4 or w4a4s3")
        if method not in METHODS:
            raise ValueError(f"method = {method!r} is none of {', '.join(METHODS)}")
        weight, activation, softmax = (int(digit or match[2]) for digit in match.groups())
        return Config(weight_bits=weight, activation_bits=activation, softmax_bits=softmax, **METHODS[method])

    @property
    def bits(self) -> str:
        """The name of its bits, as `preset` reads it."""
        softmax = "" if self.softmax_bits == self.activation_bits else f"s{self.softmax_bits}"
        return f"w{self.weight_bits}a{self.activation_bits}{softmax}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Config":
        fields: dict[str, Any] = json.loads(text)
        search = fields.pop("search", {})
        if "init" in search:
            search["init"] = tuple(search["init"])
        return Config(search=Search(**search), **fields)


# One row a method: the quantizer of each power-law activation, the rest of the recipe equal.
METHODS: dict[str, dict[str, Any]] = {
    "uniform": {"post_softmax": "uniform", "post_gelu": "uniform"},
    "log2": {"post_softmax": "log2", "post_gelu": "log2"},  # Eqs. 1-2
    "log-sqrt2": {"post_softmax": "log-sqrt2", "post_gelu": "log-sqrt2"},  # Eqs. 3-4
    "adalog": {"post_softmax": "adalog", "post_gelu": "adalog"},  # Eqs. 5-15
}
