"""The choices of how to search, and of the stages that follow: frozen dataclasses, each default with its source.

They are apart from `Config`, so that `methods` can name them and `config` can read the table of methods.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from adalog.quantizers import FLOAT_BITS, MAX_BITS, MIN_BITS

PowerLaw = Literal["uniform", "twin", "log2", "log-sqrt2", "adalog"]
PostSoftmax = Literal["uniform", "twin", "log2", "log-sqrt2", "adalog", "split", "max-kept"]
Weights = Literal["uniform", "symmetric"]
Sharing = Literal["none", "mean", "power-of-two"]
Metric = Literal["squared", "cosine", "hessian"]
Tables = Literal["calibrated", "u8", "u16", "float"]
Strategy = Literal["fpcs", "alternating", "brute-force"]
WeightRounding = Literal["latent", "adaround"]
BlockLoss = Literal["squared", "fisher", "averaged", "low-rank"]
Scope = Literal["block", "model"]
CorrectionTarget = Literal["output", "stream"]
FoldRanges = Literal["own", "deviations", "by-bits"]


def check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r} is not a whole number of at least {least}")


def check_choice(name: str, value: object, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name} = {value!r} is none of {', '.join(get_args(allowed))}")


def check_number(name: str, value: object, low: float, high: float = math.inf) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value <= high:
        raise ValueError(f"{name} = {value!r} is not above {low} and at most {high}")


def check_span(name: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"{name} = {value!r} is not a pair of factors")
    check_number(name, value[0], 0)
    check_number(name, value[1], value[0])


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} is neither true nor false")


def check_bits(name: str, bits: object) -> None:
    if not isinstance(bits, int) or not (MIN_BITS <= bits <= MAX_BITS or bits == FLOAT_BITS):
        raise ValueError(
            f"{name} = {bits!r} is not a whole number from {MIN_BITS} to {MAX_BITS}, or {FLOAT_BITS} for float"
        )


@dataclass(frozen=True)
class Search:
    """Algorithm 1 and the rounds around it.

    fold_ranges: how the channels of a norm get the ranges that a fold shares: each channel its "own", by its own error
    (RepQ-ViT's reparameterization, Sec. 4.1), or all channels one range in standard "deviations" around the channel's
    mean (ours, which fits other images better where codes are fine); "by-bits": their own up to 4 bits.
    """

    strategy: Strategy = "fpcs"
    init: tuple[int, int] = (16, 8)  # n = 128 = 16 x 8 points of the first step (Sec. 4.1)
    parents: int = 16  # how many points a step refines; 16 x 8 children = n evaluations
    steps: int = 4  # p (Sec. 4.1; the released code takes 6)
    rounds: int = 1  # how often each operand is searched again; more rounds gain next to nothing (released: 3)
    rough_rows: int = 256  # steps score this many tokens or more, survivors eight times as many (0: all, always)
    refit: bool = True  # each row of a weight takes the scale that fits its codes best, once they are found
    reach: float = 0.4  # bounds lie between the percentiles 0 and reach, 1 - reach and 1 (the paper: 0.1)
    fold_ranges: FoldRanges = "by-bits"

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, Strategy)
        check_choice("fold_ranges", self.fold_ranges, FoldRanges)
        for name, least in (("parents", 1), ("steps", 0), ("rounds", 1), ("rough_rows", 0)):
            check_whole(name, getattr(self, name), least)
        check_flag("refit", self.refit)
        if not isinstance(self.reach, (int, float)) or not 0 < self.reach <= 0.5:
            raise ValueError(f"reach = {self.reach} is not above 0 and at most 0.5")
        if not isinstance(self.init, tuple) or len(self.init) != 2:
            raise ValueError(f"init = {self.init!r} is not a pair of sizes")
        for size in self.init:
            check_whole("init", size, 1)
        if math.prod(self.init) != 8 * self.parents:
            raise ValueError(f"init = {self.init} is not 8 points for each of parents = {self.parents}")


@dataclass(frozen=True)
class ReleasedSearch:
    """The search of the authors' released code, quirk by quirk: see `search.released`.

    progressive: whether the best scales of the first grid are refined (their FPCS); otherwise the grid alone decides.
    """

    progressive: bool = True
    steps: int = 6  # including the first grid (the paper: p = 4)
    rounds: int = 3

    def __post_init__(self) -> None:
        check_flag("progressive", self.progressive)
        for name in ("steps", "rounds"):
            check_whole(name, getattr(self, name), 1)


@dataclass(frozen=True)
class RangeSearch:
    """Every operand is quantized by its own values, without a look at the output: see `search.ranges`.

    percentiles: candidate upper percentiles p; the lower end is 1 - p, and the p with the least own error wins.
    symmetric_weights: codes reach as far below zero as above. unit_softmax: logarithms after softmax have the scale 1.
    share: how the channels of a folded norm come to one scale. powers: how often that may be doubled for a channel
    (FQ-ViT's K). round_zero_point: the shared zero point is a whole number (in the released RepQ-ViT it is not, and no
    artifact stores that). in_order: an operand is observed once everything before its site is quantized (the released
    RepQ-ViT).
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
            check_number("percentiles", share, 0.5, 1.0)
        for name in ("symmetric_weights", "unit_softmax", "round_zero_point", "in_order"):
            check_flag(name, getattr(self, name))
        check_choice("share", self.share, Sharing)
        check_whole("powers", self.powers, 0)


@dataclass(frozen=True)
class ScaleSearch:
    """Symmetric scales are found in turn by the output's error: see `search.scales`.

    metric: "squared" error, 1 - "cosine" of the angle, or squared error weighted by the diagonal of the loss's
    "hessian", from `probes` random gradients. span: the first multiple, and the end that none reaches. row_scales:
    whether each row of a linear has a scale of its own; otherwise each of its splits (queries, keys, values) has one.
    released: as in PTQ4ViT's code, there is one probe of rounding noise, the split after softmax is found with V not
    quantized, and both halves of its values are added up. rough_stride: candidates are scored on every 5th row or image
    first, and the 16 best of them on all (ours).
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
        check_choice("metric", self.metric, Metric)
        check_span("span", self.span)
        for name in ("candidates", "rounds", "probes", "rough_stride"):
            check_whole(name, getattr(self, name), 1)
        for name in ("row_scales", "released"):
            check_flag(name, getattr(self, name))


@dataclass(frozen=True)
class BlockRefinement:
    """The scales of a block's sites are searched again by the error of the block's output: see `calibration.blockwise`.

    candidates: how many multiples of a scale are tried, evenly over `span`. eliminated: this share of the output's
    weighted errors, the smallest ones, does not count. These three are ours, since the paper's text was not at hand.
    probes: as in `ScaleSearch`.
    """

    candidates: int = 16
    span: tuple[float, float] = (0.6, 1.4)
    eliminated: float = 0.5
    rounds: int = 1
    probes: int = 8

    def __post_init__(self) -> None:
        check_span("span", self.span)
        for name in ("candidates", "rounds", "probes"):
            check_whole(name, getattr(self, name), 1)
        if not isinstance(self.eliminated, (int, float)) or not 0 <= self.eliminated < 1:
            raise ValueError(f"eliminated = {self.eliminated!r} is not at least 0 and below 1")


@dataclass(frozen=True)
class Evolution:
    """Scales of weights are perturbed block by block by the InfoNCE loss of the output: see `calibration.evolution`.

    passes: how often all blocks are visited. cycles: the mutants of a block per visit. population: how many sets of
    scales survive. samples: how many of these are drawn for each mutant; the best of them is its parent. radius: how
    far the scales of a mutant may be from its parent's; None: 1e-4 at 8 bits, 1e-3 below (as in Evol-Q's code, which
    also picks the block and pass with the best top-1 on its test images; here no label is seen).
    """

    passes: int = 10
    cycles: int = 3
    population: int = 15
    samples: int = 10
    temperature: float = 3.0
    radius: float | None = None

    def __post_init__(self) -> None:
        for name in ("passes", "cycles", "population", "samples"):
            check_whole(name, getattr(self, name), 1)
        check_number("temperature", self.temperature, 0)
        if self.radius is not None:
            check_number("radius", self.radius, 0)


@dataclass(frozen=True)
class Correction:
    """Weights and biases are fitted to the float network's outputs in closed form: see `calibration.compensate`.

    images: how many unlabelled images are fitted; a site reads the first batches that give it 131,072 rows. ridge:
    whether weights are fitted, or rounded alone. compensate: whether codes make up for each other's errors, or are the
    nearest. target: what a site is fitted to, its own "output" in the float network or, where that is added to a
    "stream", what the quantized stream lacks of the float sum.
    """

    images: int = 128
    ridge: bool = True
    compensate: bool = True
    target: CorrectionTarget = "output"

    def __post_init__(self) -> None:
        check_whole("images", self.images, 1)
        for name in ("ridge", "compensate"):
            check_flag(name, getattr(self, name))
        check_choice("target", self.target, CorrectionTarget)


@dataclass(frozen=True)
class Reconstruction:
    """Codes, biases and scales are trained by the float network's outputs: see `calibration.reconstruct`.

    scope: whether one "block" after another is trained by its output, or the "model" as one block; the method
    `adalog++` has rates for the latter. images: how many unlabelled images are fitted, every eighth of which judges.
    iterations: the steps of each block, with `batch` images each. weights: codes are the float weight's rounded up or
    down ("adaround"), or "latent" values rounded straight through, whose scales are trained as well. scales: whether
    activations' scales and zero points are trained. biases: whether biases are. loss: the squared error of the block's
    output, all of it the same ("squared"), weighted by the squared gradients of the model's loss, image by image
    ("fisher") or their average ("averaged"), or by a diagonal and a low-rank part of the Fisher information
    ("low-rank"). drop: the share of a block's inputs and quantized activations that stay exact in a step. rate: of
    codes and zero points, in units of codes. scale_rate: of the logarithms of scales, and of biases, in units of the
    norm of their weight's row. Both fall to zero by a cosine.
    """

    images: int = 1024
    iterations: int = 400
    batch: int = 8
    weights: WeightRounding = "latent"
    scales: bool = True
    biases: bool = True
    loss: BlockLoss = "squared"
    drop: float = 0.5
    rate: float = 0.03
    scale_rate: float = 0.005
    scope: Scope = "block"

    def __post_init__(self) -> None:
        check_choice("scope", self.scope, Scope)
        for name in ("images", "iterations", "batch"):
            check_whole(name, getattr(self, name), 1)
        check_choice("weights", self.weights, WeightRounding)
        check_choice("loss", self.loss, BlockLoss)
        for name in ("scales", "biases"):
            check_flag(name, getattr(self, name))
        for name in ("rate", "scale_rate"):
            check_number(name, getattr(self, name), 0)
        if not isinstance(self.drop, (int, float)) or not 0 <= self.drop < 1:
            raise ValueError(f"drop = {self.drop!r} is not at least 0 and below 1")


AnySearch = Search | ReleasedSearch | RangeSearch | ScaleSearch
Fitting = Correction | Reconstruction  # the stages that fit unlabelled images
Stage = BlockRefinement | Evolution | Correction | Reconstruction

# The kinds by their names in JSON.
SEARCH_KINDS: dict[str, Any] = {
    "bounds": Search,
    "released": ReleasedSearch,
    "ranges": RangeSearch,
    "scales": ScaleSearch,
}
STAGE_KINDS: dict[str, Any] = {
    "blocks": BlockRefinement,
    "evolution": Evolution,
    "correction": Correction,
    "reconstruction": Reconstruction,
}


def check_stages(stages: object) -> None:
    if not isinstance(stages, tuple) or not all(isinstance(stage, Stage) for stage in stages):
        raise ValueError(f"stages = {stages!r} is not a tuple of stages, as in (Correction(),)")
    fitting = [stage for stage in stages if isinstance(stage, Fitting)]
    order = ["correction" if isinstance(stage, Correction) else stage.scope for stage in fitting]
    in_order = order == [kind for kind in ("correction", "block", "model") if kind in order]
    if not in_order or fitting != list(stages[len(stages) - len(fitting) :]):
        raise ValueError(
            "stages that fit images come last, since others judge what they change beside exact inputs: at most one "
            "Correction, then one Reconstruction of blocks, then one of the model"
        )


def kind_to_json(choices: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    """The fields of a search or stage with the name of its kind.

    Files of format 3 call `parents` "keep". They name `fold_ranges` and `scope` only where these are not the default,
    since the first of them were written before there was a choice.
    """
    kind = next(name for name, kind in kinds.items() if type(choices) is kind)
    fields = renamed(dataclasses.asdict(choices), {"parents": "keep"})
    for field, default in (("fold_ranges", "by-bits"), ("scope", "block")):
        if fields.get(field) == default:
            del fields[field]
    return {"kind": kind, **fields}


def kind_from_json(name: str, fields: Any, kinds: dict[str, Any]) -> Any:
    """The choices that `kind_to_json` wrote; a kind that is not named is the first one.

    name: of the field, for messages. Raises ValueError for choices that cannot be.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{name} = {fields!r} is no object")
    fields = renamed(fields, {"keep": "parents"})
    kind = fields.get("kind", next(iter(kinds)))
    if kind not in kinds:
        raise ValueError(f"{name} of the kind {kind!r} is none of {', '.join(kinds)}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items() if key != "kind"}
    check_fields(kinds[kind], given)
    return kinds[kind](**given)


def stages_to_json(stages: tuple[Stage, ...]) -> Any:
    """The stages as format 3 has them: None for no stage, an object for one, else a list of objects."""
    found = [kind_to_json(stage, STAGE_KINDS) for stage in stages]
    return found if len(found) > 1 else found[0] if found else None


def stages_from_json(name: str, given: Any) -> tuple[Stage, ...]:
    """The stages that `stages_to_json` wrote. name: as of `kind_from_json`, which says what is raised."""
    entries = [] if given is None else given if isinstance(given, list) else [given]
    return tuple(kind_from_json(name, entry, STAGE_KINDS) for entry in entries)


def renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The fields under other names: files of format 3 keep a few that Python no longer uses."""
    return {names.get(key, key): value for key, value in fields.items()}


def check_fields(kind: Any, given: dict[str, Any]) -> None:
    """Raise ValueError for fields that the dataclass `kind` does not have."""
    unknown = set(given) - {entry.name for entry in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no such choice in {kind.__name__}")
