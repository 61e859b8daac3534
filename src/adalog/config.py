"""What to quantize to and how to search: frozen choices, each default with its source, and the table of methods."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from adalog.quantizers import FLOAT_BITS, MAX_BITS, MIN_BITS, Beyond, Rounding

PowerLaw = Literal["uniform", "twin", "log2", "log-sqrt2", "adalog"]
Tables = Literal["calibrated", "u8", "u16", "float"]
Strategy = Literal["fpcs", "alternating", "brute-force"]


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r} is not a whole number of at least {least}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} is neither true nor false")


def _check_bits(name: str, bits: object) -> None:
    if not isinstance(bits, int) or not (MIN_BITS <= bits <= MAX_BITS or bits == FLOAT_BITS):
        raise ValueError(
            f"{name} = {bits!r} is not a whole number from {MIN_BITS} to {MAX_BITS}, or {FLOAT_BITS} for float"
        )


@dataclass(frozen=True)
class Search:
    """Algorithm 1 and the rounds around it."""

    strategy: Strategy = "fpcs"
    init: tuple[int, int] = (16, 8)  # n = 128 = 16 x 8 points of the first step (Sec. 4.1)
    keep: int = 16  # parents of a step; 16 x 8 children = n evaluations
    steps: int = 4  # p (Sec. 4.1; the released code takes 6)
    rounds: int = 1  # weight <-> activation; a second doubles the time for a small gain (released: 3)
    rough_stride: int = 5  # steps score every 5th token or image (or 6th, 7th, ...: every column of a grid), then all
    reach: float = 0.4  # bounds lie between the percentiles 0 and reach, 1 - reach and 1 (the paper: 0.1)

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy = {self.strategy!r} is none of {', '.join(get_args(Strategy))}")
        for name, least in (("keep", 1), ("steps", 0), ("rounds", 1), ("rough_stride", 1)):
            _check_whole(name, getattr(self, name), least)
        if not isinstance(self.reach, (int, float)) or not 0 < self.reach <= 0.5:
            raise ValueError(f"reach = {self.reach} is not above 0 and at most 0.5")
        if not isinstance(self.init, tuple) or len(self.init) != 2:
            raise ValueError(f"init = {self.init!r} is not a pair of sizes")
        for size in self.init:
            _check_whole("init", size, 1)
        if math.prod(self.init) != 8 * self.keep:
            raise ValueError(f"init = {self.init} is not 8 points for each of keep = {self.keep} parents")


@dataclass(frozen=True)
class ReleasedSearch:
    """The search of the authors' released code, quirk by quirk: see `released`.

    progressive: refine the first grid's best scales (their FPCS); without it the grid alone decides.
    """

    progressive: bool = True
    steps: int = 6  # the first grid counted (the paper: p = 4)
    rounds: int = 3

    def __post_init__(self) -> None:
        _check_flag("progressive", self.progressive)
        for name in ("steps", "rounds"):
            _check_whole(name, getattr(self, name), 1)


_SEARCHES = {"bounds": Search, "released": ReleasedSearch}  # as JSON names them


@dataclass(frozen=True)
class Config:
    """Bits, quantizers and search of one quantized model.

    weight_bits, activation_bits, softmax_bits: 2 to 8, or 32 for float. input_bits: of the first convolution's input (8
    by the field's convention, Sec. 4.1). post_softmax, post_gelu: the quantizer of what follows a power law; everything
    else is asymmetric uniform. r: the denominator of log2(base) = q / r (37, Sec. 4.1); q is searched in q_min ...
    q_max (released: 10 ... 137; from 1 because small q win at 6 bits). offset: what lifts GELU's tail; None: minus the
    minimum of the activation at hand (the paper: 0.17). beyond, rounding: see `quantizers.log_quantize`; zero-coded and
    nearest because they store in `bits` bits at the least loss. tables: of what integers a logarithmic quantizer's
    levels are (docs/integer.md), of a width that is found for each site or of this one; "float" ones do not run in
    integers, nor do those of `beyond` "zero".
    per_head: Q, K and V have a scale a head (as released) rather than one a tensor. fold_rows: a norm is folded where
    at least so many rows of calibration give its channels their scales (a head on one token an image has 32, and is the
    worse for it: benchmarks/results/folds.json). fold_head: whether the last norm is one to fold (released: not).
    images: how many calibrate (32). keep: (pattern, bits) for sites whose name matches, as file names do: both operands
    get these bits, 32 for float. Where several match the last decides; see `at` for sites that are searched as one.
    """

    weight_bits: int = 4
    activation_bits: int = 4
    softmax_bits: int = 4
    input_bits: int = 8
    post_softmax: PowerLaw = "adalog"
    post_gelu: PowerLaw = "adalog"
    r: int = 37
    q_min: int = 1
    q_max: int = 137
    offset: float | None = None
    beyond: Beyond = "zero-coded"
    rounding: Rounding = "nearest"
    tables: Tables = "calibrated"
    per_head: bool = True
    fold_rows: int = 128
    fold_head: bool = True
    images: int = 32
    keep: tuple[tuple[str, int], ...] = ()
    search: Search | ReleasedSearch = field(default_factory=Search)

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits", "softmax_bits", "input_bits"):
            _check_bits(name, getattr(self, name))
        if not isinstance(self.keep, tuple):
            raise ValueError(f"keep = {self.keep!r} is not a tuple of (pattern, bits)")
        for entry in self.keep:
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str) or not entry[0]:
                raise ValueError(f"keep = {entry!r} is not (pattern, bits), as in ('head', 8)")
            _check_bits(f"keep of {entry[0]!r}", entry[1])
        choices = {"post_softmax": PowerLaw, "post_gelu": PowerLaw, "beyond": Beyond, "rounding": Rounding}
        choices["tables"] = Tables
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} = {getattr(self, name)!r} is none of {', '.join(get_args(allowed))}")
        if self.post_softmax == "twin":
            raise ValueError("post_softmax = 'twin': a twin quantizer is for values of both signs")
        for name in ("r", "q_min", "q_max", "fold_rows", "images"):
            _check_whole(name, getattr(self, name), 1)
        if self.q_min > self.q_max:
            raise ValueError(f"q_min = {self.q_min} is above q_max = {self.q_max}")
        for name in ("per_head", "fold_head"):
            _check_flag(name, getattr(self, name))
        if self.offset is not None and not (isinstance(self.offset, (int, float)) and 0 < self.offset < math.inf):
            raise ValueError(f"offset = {self.offset} is not positive and finite")

    @staticmethod
    def preset(bits: str, method: str = "adalog") -> "Config":
        """The choices of a method at bits like "w4a4" or "w4a4s3" (weights, activations, softmax)."""
        match = re.fullmatch(r"w(\d+)a(\d+)(?:s(\d+))?", bits)
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

    def at(self, sites: Iterable[str]) -> "Config":
        """The choices for sites that are searched as one: with the bits that `keep` has for any of them.

        One search have the linears of one activation (separate q, k and v), or of one folded norm.
        """
        names = list(sites)
        found = [bits for pattern, bits in self.keep if any(fnmatchcase(name, pattern) for name in names)]
        if not found:
            return self
        bits = found[-1]
        return dataclasses.replace(
            self, weight_bits=bits, activation_bits=bits, softmax_bits=bits, input_bits=bits, keep=()
        )

    def to_json(self) -> str:
        kind = next(name for name, search in _SEARCHES.items() if isinstance(self.search, search))
        fields = dataclasses.asdict(self)
        return json.dumps({**fields, "search": {"kind": kind, **fields["search"]}}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Config":
        fields: dict[str, Any] = json.loads(text)
        search: dict[str, Any] = fields.pop("search", {})
        if not isinstance(search, dict):
            raise ValueError(f"search = {search!r} is no object")
        kind_of_search = search.pop("kind", "bounds")
        if kind_of_search not in _SEARCHES:
            raise ValueError(f"search of the kind {kind_of_search!r} is none of {', '.join(_SEARCHES)}")
        searcher = _SEARCHES[kind_of_search]
        for kind, given in ((Config, fields), (searcher, search)):
            unknown = set(given) - {entry.name for entry in dataclasses.fields(kind)}
            if unknown:
                raise ValueError(f"{', '.join(sorted(unknown))}: no such choice in {kind.__name__}")
        if isinstance(fields.get("keep"), list):
            fields["keep"] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in fields["keep"])
        if isinstance(search.get("init"), list):
            search["init"] = tuple(search["init"])
        return Config(search=searcher(**search), **fields)


# One row a method. The first three differ from adalog in the quantizer of each power-law activation alone.
METHODS: dict[str, dict[str, Any]] = {
    "uniform": {"post_softmax": "uniform", "post_gelu": "uniform"},
    "log2": {"post_softmax": "log2", "post_gelu": "log2"},  # Eqs. 1-2
    "log-sqrt2": {"post_softmax": "log-sqrt2", "post_gelu": "log-sqrt2"},  # Eqs. 3-4
    "adalog": {"post_softmax": "adalog", "post_gelu": "adalog"},  # Eqs. 5-15, our reading
    # The text taken literally: codes saturate, the logarithm is rounded, scales are layer-wise (Sec. 4.1), one pass of
    # Algorithm 1 on all data for each hyperparameter pair.
    "adalog-paper": {
        "beyond": "saturate",
        "rounding": "log",
        "tables": "float",
        "offset": 0.17,
        "per_head": False,
        "search": Search(rough_stride=1, reach=0.1),
    },
    # The released code: 2**bits + 1 values, a float image, the head's norm not folded.
    "adalog-released": {
        "beyond": "zero",
        "rounding": "log",
        "tables": "float",
        "offset": 0.16997124254703522,
        "input_bits": FLOAT_BITS,
        "q_min": 10,
        "fold_rows": 1,
        "fold_head": False,
        "search": ReleasedSearch(),
    },
}
