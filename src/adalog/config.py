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
PostSoftmax = Literal["uniform", "twin", "log2", "log-sqrt2", "adalog", "split", "max-kept"]
Sharing = Literal["none", "mean", "power-of-two"]
Metric = Literal["squared", "cosine", "hessian"]
Tables = Literal["calibrated", "u8", "u16", "float"]
Strategy = Literal["fpcs", "alternating", "brute-force"]


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r} is not a whole number of at least {least}")


def _check_choice(name: str, value: object, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name} = {value!r} is none of {', '.join(get_args(allowed))}")


def _check_number(name: str, value: object, low: float, high: float = math.inf) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value <= high:
        raise ValueError(f"{name} = {value!r} is not above {low} and at most {high}")


def _check_span(name: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"{name} = {value!r} is not a pair of factors")
    _check_number(name, value[0], 0)
    _check_number(name, value[1], value[0])


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
    rounds: int = 1  # weight <-> activation; more gain next to nothing (released: 3)
    rough_rows: int = 512  # steps score so many tokens or more, and the survivors on all (0: all from the start)
    refit: bool = True  # once the codes of a weight are found, each row takes the scale that fits them best
    reach: float = 0.4  # bounds lie between the percentiles 0 and reach, 1 - reach and 1 (the paper: 0.1)

    def __post_init__(self) -> None:
        _check_choice("strategy", self.strategy, Strategy)
        for name, least in (("keep", 1), ("steps", 0), ("rounds", 1), ("rough_rows", 0)):
            _check_whole(name, getattr(self, name), least)
        _check_flag("refit", self.refit)
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


@dataclass(frozen=True)
class RangeSearch:
    """Every operand by its own values, no output looked at: see `rivals.search_ranges`.

    percentiles: the shares of the values below the upper end of a range; above its lower end are as many, and the share
    of the least own error wins. symmetric_weights: codes reach as far below zero as above. unit_softmax: logarithms
    after softmax have the scale 1. share: how the channels of a folded norm come to one scale; powers: how many
    doublings of it a channel may have (FQ-ViT's K). round_zero_point: the shared zero point is a whole number (the
    released RepQ-ViT: not, which no artifact stores). in_order: values are seen behind what is quantized already (the
    released RepQ-ViT).
    """

    percentiles: tuple[float, ...] = (1.0,)
    symmetric_weights: bool = False
    unit_softmax: bool = False
    share: Sharing = "none"
    powers: int = 3
    round_zero_point: bool = True
    in_order: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.percentiles, tuple) or not self.percentiles:
            raise ValueError(f"percentiles = {self.percentiles!r} is not a tuple of shares")
        for share in self.percentiles:
            _check_number("percentiles", share, 0.5, 1.0)
        for name in ("symmetric_weights", "unit_softmax", "round_zero_point", "in_order"):
            _check_flag(name, getattr(self, name))
        _check_choice("share", self.share, Sharing)
        _check_whole("powers", self.powers, 0)


@dataclass(frozen=True)
class ScaleSearch:
    """Symmetric scales in turn, among multiples of the largest value's, by an output's error (`rivals.search_scales`).

    metric: "squared" error, 1 - "cosine" of the angle, or squared error weighted by the diagonal of the loss's
    "hessian", from `probes` random gradients. span: the first multiple and the end of all. row_scales: a linear's rows
    have scales of their own, rather than its parts (queries, keys, values). released: one probe of rounding noise, the
    split after softmax found beside unquantized values, and its halves added up, as PTQ4ViT's code does.
    rough_stride: candidates are scored on every 5th row or image first, and the 16 best of them on all (ours).
    """

    metric: Metric = "hessian"
    span: tuple[float, float] = (0.01, 1.2)
    candidates: int = 100
    rounds: int = 3
    row_scales: bool = False
    probes: int = 8
    released: bool = False
    rough_stride: int = 5

    def __post_init__(self) -> None:
        _check_choice("metric", self.metric, Metric)
        _check_span("span", self.span)
        for name in ("candidates", "rounds", "probes", "rough_stride"):
            _check_whole(name, getattr(self, name), 1)
        for name in ("row_scales", "released"):
            _check_flag(name, getattr(self, name))


@dataclass(frozen=True)
class BlockRefinement:
    """The scales of a block's sites once more, by the error of the block's output: see `refine.refine_block`.

    candidates: multiples of a scale, evenly over `span`. eliminated: the share of the output's weighted errors, the
    smallest ones, that does not count (the paper's text was not at hand: these three are ours). probes: as in
    `ScaleSearch`.
    """

    candidates: int = 16
    span: tuple[float, float] = (0.6, 1.4)
    eliminated: float = 0.5
    rounds: int = 1
    probes: int = 8

    def __post_init__(self) -> None:
        _check_span("span", self.span)
        for name in ("candidates", "rounds", "probes"):
            _check_whole(name, getattr(self, name), 1)
        if not isinstance(self.eliminated, (int, float)) or not 0 <= self.eliminated < 1:
            raise ValueError(f"eliminated = {self.eliminated!r} is not at least 0 and below 1")


@dataclass(frozen=True)
class Evolution:
    """Weights' scales perturbed block by block, by the InfoNCE loss of the model's output: see `refine.evolve`.

    passes over all blocks; cycles: mutants of a block in each. population: of scales that are kept; samples: of which
    so many are drawn, and the best is a parent. radius: how far a mutant's scales are from its parent's; None: 1e-4 at
    8 bits, 1e-3 below (Evol-Q's code, which also picks the block and pass of the best top-1 on its test images; here no
    label is seen).
    """

    passes: int = 10
    cycles: int = 3
    population: int = 15
    samples: int = 10
    temperature: float = 3.0
    radius: float | None = None

    def __post_init__(self) -> None:
        for name in ("passes", "cycles", "population", "samples"):
            _check_whole(name, getattr(self, name), 1)
        _check_number("temperature", self.temperature, 0)
        if self.radius is not None:
            _check_number("radius", self.radius, 0)


AnySearch = Search | ReleasedSearch | RangeSearch | ScaleSearch
Refinement = BlockRefinement | Evolution

# As JSON names them.
_SEARCHES: dict[str, Any] = {
    "bounds": Search,
    "released": ReleasedSearch,
    "ranges": RangeSearch,
    "scales": ScaleSearch,
}
_REFINEMENTS: dict[str, Any] = {"blocks": BlockRefinement, "evolution": Evolution}


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
    refine: what is done to scales once all sites have theirs. images: how many calibrate (32). keep: (pattern, bits)
    for sites whose name matches, as file names do: both operands get these bits, 32 for float. Where several match the
    last decides; see `at` for sites that are searched as one.
    """

    weight_bits: int = 4
    activation_bits: int = 4
    softmax_bits: int = 4
    input_bits: int = 8
    post_softmax: PostSoftmax = "adalog"
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
    search: AnySearch = field(default_factory=Search)
    refine: Refinement | None = None

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits", "softmax_bits", "input_bits"):
            _check_bits(name, getattr(self, name))
        if not isinstance(self.keep, tuple):
            raise ValueError(f"keep = {self.keep!r} is not a tuple of (pattern, bits)")
        for entry in self.keep:
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str) or not entry[0]:
                raise ValueError(f"keep = {entry!r} is not (pattern, bits), as in ('head', 8)")
            _check_bits(f"keep of {entry[0]!r}", entry[1])
        choices = (PostSoftmax, "post_softmax"), (PowerLaw, "post_gelu"), (Beyond, "beyond"), (Rounding, "rounding")
        for allowed, name in (*choices, (Tables, "tables")):
            _check_choice(name, getattr(self, name), allowed)
        if self.post_softmax == "twin":
            raise ValueError("post_softmax = 'twin': a twin quantizer is for values of both signs")
        if self.post_softmax in ("split", "max-kept") and not isinstance(self.search, ScaleSearch):
            raise ValueError(f"post_softmax = {self.post_softmax!r} goes with search = ScaleSearch(...)")
        if isinstance(self.search, (RangeSearch, ScaleSearch)) and "adalog" in (self.post_softmax, self.post_gelu):
            raise ValueError(f"{type(self.search).__name__} finds no base: choose other quantizers than 'adalog'")
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
        return Config(weight_bits=weight, activation_bits=activation, softmax_bits=softmax, **METHODS[method].choices)

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
        fields = dataclasses.asdict(self)
        fields |= {"search": _kind_to_json(self.search, _SEARCHES), "refine": _kind_to_json(self.refine, _REFINEMENTS)}
        return json.dumps(fields, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Config":
        fields: dict[str, Any] = json.loads(text)
        search = _kind_from_json("search", fields.pop("search", {}), _SEARCHES)
        refine = fields.pop("refine", None)
        if refine is not None:
            refine = _kind_from_json("refine", refine, _REFINEMENTS)
        _check_fields(Config, fields)
        if isinstance(fields.get("keep"), list):
            fields["keep"] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in fields["keep"])
        return Config(search=search, refine=refine, **fields)


def _kind_to_json(choices: Any, kinds: dict[str, Any]) -> dict[str, Any] | None:
    if choices is None:
        return None
    return {"kind": next(name for name, kind in kinds.items() if type(choices) is kind), **dataclasses.asdict(choices)}


def _kind_from_json(name: str, fields: Any, kinds: dict[str, Any]) -> Any:
    """The choices of the kind that JSON names; of the first kind where it names none."""
    if not isinstance(fields, dict):
        raise ValueError(f"{name} = {fields!r} is no object")
    kind = fields.get("kind", next(iter(kinds)))
    if kind not in kinds:
        raise ValueError(f"{name} of the kind {kind!r} is none of {', '.join(kinds)}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items() if key != "kind"}
    _check_fields(kinds[kind], given)
    return kinds[kind](**given)


def _check_fields(kind: Any, given: dict[str, Any]) -> None:
    unknown = set(given) - {entry.name for entry in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no such choice in {kind.__name__}")


@dataclass(frozen=True)
class Method:
    """A published system: paper, venue and year, and the choices that differ from those of `Config`."""

    source: str
    choices: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The choices as JSON; of a search or refinement its kind and what differs from that kind's defaults."""
        usual_fields = {entry.name: entry.default for entry in dataclasses.fields(Config)}
        plain = {name: value for name, value in self.choices.items() if value != usual_fields[name]}
        for name, kinds in (("search", _SEARCHES), ("refine", _REFINEMENTS)):
            if name in plain:
                fields, usual = _kind_to_json(plain[name], kinds), dataclasses.asdict(type(plain[name])())
                assert fields is not None
                plain[name] = {key: value for key, value in fields.items() if key == "kind" or value != usual[key]}
        return plain


_ADALOG = "AdaLog (Wu et al., ECCV 2024)"
_UNIFORM = {"post_softmax": "uniform", "post_gelu": "uniform"}
_PTQ4VIT = {"post_softmax": "split", "post_gelu": "twin", "input_bits": FLOAT_BITS}
# Of FQ-ViT and RepQ-ViT. What is beyond the codes is zero, as in the codes that the published figures are from, and not
# clipped as the texts have it.
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
    "post_softmax": "log2",  # of scale 1
    "search": RangeSearch(symmetric_weights=True, unit_softmax=True, share="power-of-two"),
}

# One row a method. The first three differ from adalog in the quantizer of each power-law activation alone.
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
    # The text taken literally: codes saturate, the logarithm is rounded, scales are layer-wise (Sec. 4.1), one pass of
    # Algorithm 1 on all data for each hyperparameter pair.
    "adalog-paper": Method(
        f"{_ADALOG}, to the letter",
        {
            "beyond": "saturate",
            "rounding": "log",
            "tables": "float",
            "offset": 0.17,
            "per_head": False,
            "search": Search(steps=4, rounds=1, rough_rows=0, refit=False, reach=0.1),
        },
    ),
    # The released code: 2**bits + 1 values, a float image, the head's norm not folded.
    "adalog-released": Method(
        f"{_ADALOG}, its released code",
        {
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
    ),
    "minmax": Method(
        "minimum and maximum (Jacob et al., CVPR 2018)", {**_UNIFORM, "per_head": False, "search": RangeSearch()}
    ),
    # The share is that of FQ-ViT's comparison.
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
    "ptq4vit": Method("PTQ4ViT (Yuan et al., ECCV 2022)", {**_PTQ4VIT, "search": ScaleSearch()}),
    # What it does not change is PTQ4ViT's, on which it builds.
    "apq-vit": Method(
        "APQ-ViT (Ding et al., ACM MM 2022)",
        {**_PTQ4VIT, "post_softmax": "max-kept", "search": ScaleSearch(rounds=1), "refine": BlockRefinement()},
    ),
    "repq-vit": Method(
        "RepQ-ViT (Li et al., ICCV 2023)",
        {
            **_FLOAT_LOG,
            "post_softmax": "log-sqrt2",
            "fold_head": False,
            "search": RangeSearch(percentiles=(0.999, 0.9999, 0.99999), share="mean"),
        },
    ),
    "evol-q": Method("Evol-Q (Frumkin et al., ICCV 2023)", {**_FQ_VIT, "refine": Evolution()}),
}
