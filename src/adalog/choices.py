"""Define the choices of a search and of the stages after it, as frozen dataclasses.

They are not in `config`, because `methods` needs them and `config` imports `methods`.
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
BlockLoss = Literal["squared", "fisher", "averaged", "low-rank", "output"]
Scope = Literal["block", "model"]
CorrectionTarget = Literal["output", "stream"]
FoldRanges = Literal["own", "deviations", "best"]


def check_whole(name: str, value: object, least: int) -> None:
    """Raise ValueError unless the value is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r} is not a whole number of at least {least}")


def check_choice(name: str, value: object, allowed: Any) -> None:
    """Raise ValueError unless the value is one of the Literal type `allowed`."""
    if value not in get_args(allowed):
        raise ValueError(f"{name} = {value!r} is not one of {', '.join(get_args(allowed))}")


def check_number(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise ValueError unless the value is a number above `low` and at most `high`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value <= high:
        most = "" if math.isinf(high) else f" and at most {high}"
        raise ValueError(f"{name} = {value!r} is not a number above {low}{most}")


def check_share(name: str, value: object) -> None:
    """Raise ValueError unless the value is a number from 0 to 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {value!r} is not a number from 0 to 1")


def check_span(name: str, value: object) -> None:
    """Raise ValueError unless the value is a pair of increasing positive factors."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"{name} = {value!r} is not a pair of increasing positive factors")
    check_number(name, value[0], 0)
    check_number(name, value[1], value[0])


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} is neither true nor false")


def check_bits(name: str, bits: object) -> None:
    """Raise ValueError unless the value is a number of bits, or 32 for float."""
    if not isinstance(bits, int) or not (MIN_BITS <= bits <= MAX_BITS or bits == FLOAT_BITS):
        raise ValueError(
            f"{name} = {bits!r} is not a whole number from {MIN_BITS} to {MAX_BITS}, or {FLOAT_BITS} for float"
        )


@dataclass(frozen=True)
class Search:
    """The search of AdaLog: Fast Progressive Combining Search (FPCS, Algorithm 1) and the rounds around it.

    "Sec." and "Algorithm" refer to the AdaLog paper (Wu et al., ECCV 2024).

    Args:
        strategy: How the two hyperparameters of a quantizer are searched: "fpcs" (Algorithm 1), "alternating" (one
            after the other), or "brute-force" (the whole grid).
        init: Sizes of the grid of the first step. Default from Sec. 4.1: n = 16 x 8 = 128 points.
        parents: Number of points that a step refines, each by 8 neighbours. Default from Sec. 4.1: 16 parents give n
            evaluations per step.
        steps: Number of steps after the first grid, p in the paper. Default from Sec. 4.1; the released code uses 6.
        rounds: Number of times that each operand is searched. Chosen by measurement: docs/benchmarks. The released code
            uses 3.
        rough_rows: A step scores candidates on a sample of at least this many tokens, and the best candidates on eight
            times as many. 0 always uses all tokens. Chosen by measurement: docs/benchmarks.
        refit: Give each row of a weight the scale that fits its codes best, once the codes are found.
            Chosen by measurement: docs/benchmarks.
        reach: The lower bound lies between the percentiles 0 and `reach`, the upper one between 1 - `reach` and 1.
            Chosen by measurement: docs/benchmarks. The paper uses 0.1.
        fold_ranges: How to find the ranges of the channels of a folded norm. "own": each channel has its own range, by
            its own error (RepQ-ViT's reparameterization, Sec. 4.1). "deviations": all channels have the same range
            in standard deviations around their mean. "best": for each norm, the kind with the smaller error of the
            linears' outputs on images that did not choose the ranges.
        importance: Rows (tokens) count by their squared gradient to this power, so that errors count where the model's
            output depends on them. 0 counts all rows alike, as in the paper. Chosen by measurement: docs/benchmarks.
        compare_uniform: After GELU, search a uniform quantizer too if one is closer to the values than the logarithmic
            quantizer that was found, and keep the one with the smaller error of the output. If False, activations after
            GELU get the quantizer `post_gelu`, as in the paper, unless a grouped convolution follows.

    Raises:
        ValueError: If a field has an invalid value.

    Examples:
        >>> config = adalog.Config(search=adalog.Search(steps=2))  # a shorter search
    """

    strategy: Strategy = "fpcs"
    init: tuple[int, int] = (16, 8)
    parents: int = 16
    steps: int = 4
    rounds: int = 1
    rough_rows: int = 256
    refit: bool = True
    reach: float = 0.4
    fold_ranges: FoldRanges = "best"
    importance: float = 0.5
    compare_uniform: bool = True

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, Strategy)
        check_choice("fold_ranges", self.fold_ranges, FoldRanges)
        for name, least in (("parents", 1), ("steps", 0), ("rounds", 1), ("rough_rows", 0)):
            check_whole(name, getattr(self, name), least)
        for name in ("refit", "compare_uniform"):
            check_flag(name, getattr(self, name))
        check_share("importance", self.importance)
        if not isinstance(self.reach, (int, float)) or not 0 < self.reach <= 0.5:
            raise ValueError(f"reach = {self.reach} is not a number above 0 and at most 0.5")
        if not isinstance(self.init, tuple) or len(self.init) != 2:
            raise ValueError(f"init = {self.init!r} is not a pair of sizes")
        for size in self.init:
            check_whole("init", size, 1)
        if math.prod(self.init) != 8 * self.parents:
            raise ValueError(f"init = {self.init} is not a grid of 8 * parents points, with parents = {self.parents}")


@dataclass(frozen=True)
class ReleasedSearch:
    """The search of the authors' released code, including its deviations from the paper (`adalog.search.released`).

    Args:
        progressive: Refine the best scales of the first grid, which is FPCS in the released code. If False, the first
            grid alone decides.
        steps: Number of steps, including the first grid. Default from the released code; the paper has p = 4 steps.
        rounds: Number of times that each operand is searched. Default from the released code.

    Raises:
        ValueError: If a field has an invalid value.
    """

    progressive: bool = True
    steps: int = 6
    rounds: int = 3

    def __post_init__(self) -> None:
        check_flag("progressive", self.progressive)
        for name in ("steps", "rounds"):
            check_whole(name, getattr(self, name), 1)


@dataclass(frozen=True)
class RangeSearch:
    """A search that finds each quantizer from the operand's own values, without the output (`adalog.search.ranges`).

    MinMax, percentiles, FQ-ViT and RepQ-ViT use it. The defaults are those of MinMax.

    Args:
        percentiles: Candidate upper percentiles p; the lower end is 1 - p. The p with the smallest error of the operand
            itself is used.
        symmetric_weights: Quantize weights with ranges that reach as far below zero as above.
        unit_softmax: Give logarithmic quantizers after softmax the scale 1.
        share: How the channels of a folded norm get one scale: "none" (norms are not folded), "mean" (RepQ-ViT: the
            mean over channels), or "power-of-two" (FQ-ViT: one scale, multiplied by a power of two per channel).
        powers: Largest exponent for `share` = "power-of-two" (K in FQ-ViT, whose value is the default).
        round_zero_point: Round the shared zero point to a whole number. In the released RepQ-ViT it is not rounded; an
            artifact cannot store such a model.
        in_order: Observe each operand with everything before its site quantized, as the released RepQ-ViT does.

    Raises:
        ValueError: If a field has an invalid value.
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
            raise ValueError(f"percentiles = {self.percentiles!r} is not a tuple of numbers")
        for share in self.percentiles:
            check_number("percentiles", share, 0.5, 1.0)
        for name in ("symmetric_weights", "unit_softmax", "round_zero_point", "in_order"):
            check_flag(name, getattr(self, name))
        check_choice("share", self.share, Sharing)
        check_whole("powers", self.powers, 0)


@dataclass(frozen=True)
class ScaleSearch:
    """A search that finds symmetric scales, operand by operand, by the output's error (`adalog.search.scales`).

    EasyQuant, PTQ4ViT and APQ-ViT use it. The defaults are those of PTQ4ViT, unless stated otherwise.

    Args:
        metric: The error: "squared", "cosine" (1 minus the cosine of the angle between the outputs), or "hessian" (the
            squared error, weighted by the diagonal of the loss's Hessian).
        span: Interval of the candidates, as multiples of the scale that covers all values. The upper end is excluded.
        candidates: Number of candidates, spaced evenly over `span`.
        rounds: Number of times that each operand is searched.
        row_scales: Give each row of a linear its own scale. If False, each split (queries, keys, values) has one.
        probes: Number of random gradients from which the Hessian's diagonal is estimated. Chosen by adalog.
        released: Follow PTQ4ViT's code where it differs from the paper: one probe of rounding noise, a split after
            softmax that is found with V not quantized, and both halves of its values added up.
        rough_stride: Score all candidates on every n-th row or image first, and the best 16 on all. Chosen by adalog.

    Raises:
        ValueError: If a field has an invalid value.
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
    """A stage that searches the scales of a block's sites again, by the error of the block's output (APQ-ViT).

    `adalog.calibration.blockwise` implements it. The defaults are adalog's own, because the text of the APQ-ViT paper
    was not available.

    Args:
        candidates: Number of multiples of a scale to try, spaced evenly over `span`.
        span: Smallest and largest multiple.
        eliminated: Fraction of the output's weighted errors to ignore, the smallest ones first.
        rounds: Number of times that each scale is searched.
        probes: Number of random gradients, as in `ScaleSearch`.

    Raises:
        ValueError: If a field has an invalid value.
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
            raise ValueError(f"eliminated = {self.eliminated!r} is not a number of at least 0 and below 1")


@dataclass(frozen=True)
class Evolution:
    """A stage that perturbs the scales of weights block by block, by the InfoNCE loss of the model's output (Evol-Q).

    `adalog.calibration.evolution` implements it. The defaults are those of Evol-Q. Evol-Q's code also chooses the block
    and pass with the best top-1 on its test images; adalog does not use labels.

    Args:
        passes: Number of times that all blocks are visited.
        cycles: Number of mutants of a block per visit.
        population: Number of sets of scales that survive.
        samples: Number of survivors that are sampled for each mutant. The best of them is its parent.
        temperature: Temperature of the InfoNCE loss.
        radius: Largest difference between a mutant's scales and its parent's. None: 1e-4 at 8 bits, and 1e-3 below.

    Raises:
        ValueError: If a field has an invalid value.
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
    """A stage that fits weights and biases to the outputs of the float network, in closed form.

    `adalog.calibration.compensate` implements it, and the methods "adalog" and "adalog+" use it. The defaults were
    chosen by measurement: docs/design/stages.md.

    Args:
        images: Number of unlabelled images to fit. A site reads the first batches that give it 131,072 rows. None: the
            calibration images.
        ridge: Fit the weights by ridge regression. If False, they are only rounded.
        compensate: Choose codes that compensate for each other's errors. If False, each weight gets its nearest code.
        target: What a site is fitted to. "output": its output in the float network. "stream": if the output is added to
            a residual stream, the difference between the float stream and the quantized stream.
        coefficient: How far a weight, and the mean of its outputs, move from their own values (0) to the fitted values
            (1) before the weight is rounded.
        robust: Scale each weight so that its outputs, without rounding, keep their power; give a weight with more
            inputs than rows its nearest codes; let codes compensate for each other less if there are few rows per
            input; and change nothing at all if the error of the model's output is larger in the end. Published methods
            do none of this.
        importance: Rows (tokens) count by their squared gradient to this power, as in `Search`. With 0, all rows count
            alike.

    Raises:
        ValueError: If a field has an invalid value.

    Examples:
        >>> config = adalog.Config(stages=(adalog.Correction(images=64),))
    """

    images: int | None = None
    ridge: bool = True
    compensate: bool = True
    target: CorrectionTarget = "output"
    coefficient: float = 0.3
    robust: bool = True
    importance: float = 0.5

    def __post_init__(self) -> None:
        if self.images is not None:
            check_whole("images", self.images, 1)
        for name in ("ridge", "compensate", "robust"):
            check_flag(name, getattr(self, name))
        check_choice("target", self.target, CorrectionTarget)
        check_share("coefficient", self.coefficient)
        check_share("importance", self.importance)


@dataclass(frozen=True)
class Reconstruction:
    """A stage that trains codes, biases and scales by gradients to match the outputs of the float network.

    `adalog.calibration.reconstruct` implements it, and the method "adalog++" uses it. The defaults were chosen by
    measurement: docs/benchmarks.

    Args:
        images: Number of unlabelled images to fit. Every eighth of them is held out to evaluate the result.
        iterations: Number of training steps per block.
        batch: Number of images per step.
        weights: How codes are trained. "adaround": each is the float weight rounded up or down. "latent": float values
            are rounded with a straight-through gradient, and the scales of weights are trained too.
        scales: Train the scales and zero points of activations.
        biases: Train the biases.
        loss: The squared error of the block's output. "squared": all elements count the same. "fisher": weighted by the
            squared gradients of the model's loss, image by image. "averaged": weighted by their average over images.
            "low-rank": with a diagonal and a low-rank part of the Fisher information. "output": all elements count the
            same, and the error of the model's output with the float network behind the block is added, which is the KL
            divergence if the output is a classifier's; each of the two is divided by its initial value (GLF-Q,
            arXiv 2609.34564).
        drop: Fraction of a block's inputs and quantized activations that stay exact in a step (QDrop).
        rate: Learning rate of codes and zero points, in units of codes. It falls to zero by a cosine.
        scale_rate: Learning rate of the logarithms of scales, and of biases in units of the norm of their weight's row.
            It falls to zero by a cosine.
        scope: "block" trains one block after another by its output; "model" trains the whole model as one block. For
            "model", use the smaller rates of the method "adalog++".
        robust: Take a block's changes back if they make the model's output worse on images that are held out.

    Raises:
        ValueError: If a field has an invalid value.

    Examples:
        >>> config = adalog.Config(stages=(adalog.Correction(images=1024), adalog.Reconstruction()))
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
    robust: bool = True

    def __post_init__(self) -> None:
        check_choice("scope", self.scope, Scope)
        for name in ("images", "iterations", "batch"):
            check_whole(name, getattr(self, name), 1)
        check_choice("weights", self.weights, WeightRounding)
        check_choice("loss", self.loss, BlockLoss)
        for name in ("scales", "biases", "robust"):
            check_flag(name, getattr(self, name))
        for name in ("rate", "scale_rate"):
            check_number(name, getattr(self, name), 0)
        if not isinstance(self.drop, (int, float)) or not 0 <= self.drop < 1:
            raise ValueError(f"drop = {self.drop!r} is not a number of at least 0 and below 1")


AnySearch = Search | ReleasedSearch | RangeSearch | ScaleSearch
Fitting = Correction | Reconstruction  # the stages that fit unlabelled images
Stage = BlockRefinement | Evolution | Correction | Reconstruction

# Classes by the value of "kind" in JSON.
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
    """Raise ValueError unless the value is a tuple of stages in an order that is possible."""
    if not isinstance(stages, tuple) or not all(isinstance(stage, Stage) for stage in stages):
        raise ValueError(f"stages = {stages!r} is not a tuple of stages, as in (Correction(),)")
    fitting = [stage for stage in stages if isinstance(stage, Fitting)]
    order = ["correction" if isinstance(stage, Correction) else stage.scope for stage in fitting]
    in_order = order == [kind for kind in ("correction", "block", "model") if kind in order]
    if not in_order or fitting != list(stages[len(stages) - len(fitting) :]):
        raise ValueError(
            "stages that fit images come last, because the other stages evaluate changes on exact inputs: at most one "
            "Correction, then one Reconstruction of blocks, then one of the model"
        )


def kind_to_json(choices: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a search or stage, and the name of its kind, as JSON."""
    kind = next(name for name, kind in kinds.items() if type(choices) is kind)
    return {"kind": kind, **dataclasses.asdict(choices)}


def kind_from_json(name: str, fields: Any, kinds: dict[str, Any]) -> Any:
    """Return the search or stage that JSON fields describe. Without a "kind" it is the first of `kinds`.

    Messages call the field `name`. Raises ValueError for fields that the kind does not have.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{name} = {fields!r} is not a JSON object")
    kind = fields.get("kind", next(iter(kinds)))
    if kind not in kinds:
        raise ValueError(f"{name}: the kind {kind!r} is not one of {', '.join(kinds)}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items() if key != "kind"}
    check_fields(kinds[kind], given)
    return kinds[kind](**given)


def check_fields(kind: Any, given: dict[str, Any]) -> None:
    """Raise ValueError for fields that the dataclass `kind` does not have."""
    unknown = set(given) - {entry.name for entry in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no such choice in {kind.__name__}")
