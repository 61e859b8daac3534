"""Define `Config`, all choices of one quantized model, with the source of each default."""

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from adalog.baselines import (
    BlockRefinement,
    Evolution,
    MaxKeptFormat,
    RangeSearch,
    ReleasedSearch,
    ScaleSearch,
    SplitFormat,
    TwinFormat,
)
from adalog.baselines.fisher import LOSSES as FISHER_LOSSES
from adalog.calibration.block_errors import LOSSES as BLOCK_LOSSES
from adalog.calibration.refinement import Refinement
from adalog.choices import (
    Correction,
    Fitting,
    Reconstruction,
    Tables,
    check_bits,
    check_choice,
    check_fields,
    check_flag,
    check_whole,
    kind_from_json,
    kind_to_json,
)
from adalog.methods import METHODS
from adalog.quantizers import (
    FLOAT_BITS,
    Beyond,
    Format,
    LargestLevelFormat,
    LogFormat,
    Rounding,
    UniformFormat,
    UniformQuantizer,
)
from adalog.search import AnySearch
from adalog.search.bounds import Search

PowerLaw = Literal["uniform", "twin", "log2", "log-sqrt2", "adalog"]
PostSoftmax = Literal[PowerLaw, "split", "max-kept"]
Range = Literal["uniform", "symmetric"]  # of a uniform quantizer
Stage = Refinement | Correction | Reconstruction

# What names in files and in `Config` stand for: the kinds of searches and stages, and the losses of a reconstruction.
SEARCHES = (Search, ReleasedSearch, RangeSearch, ScaleSearch)
_LATER = {"activations": "uniform", "per_group": True}  # fields that older artifacts lack, with their defaults
STAGES = (BlockRefinement, Evolution, Correction, Reconstruction)
LOSSES = {**BLOCK_LOSSES, **FISHER_LOSSES}


@dataclass(frozen=True)
class Config:
    """The bits, quantizers and search of one quantized model.

    "Sec.", "Table" and "Eq." refer to the AdaLog paper (Wu et al., ECCV 2024). Bits are 2 to 8, or 32 for float.

    Args:
        weight_bits: Bits of weights. Default: W4A4, the paper's main setting (Table 1).
        activation_bits: Bits of activations. Default: W4A4, the paper's main setting (Table 1).
        softmax_bits: Bits of the attention weights after softmax, S in the paper (Table A).
        input_bits: Bits of the images at the first convolution. Default: the convention of the field.
        post_softmax: Quantizer of the attention weights after softmax: "uniform", "log2", "log-sqrt2" or "adalog";
            "split" and "max-kept" only with `ScaleSearch`. Default from the paper.
        post_gelu: Quantizer of activations after GELU: "uniform", "twin", "log2", "log-sqrt2" or "adalog". Default from
            the paper. All other activations get an asymmetric uniform quantizer (Sec. 3.4).
        weights: Quantizer of weights: "uniform" (asymmetric, Sec. 3.4), or "symmetric" (half of the codes as zero
            point, which some inference engines require). "symmetric" is only for `Search`; the searches of other
            methods have fields of their own.
        activations: Uniform quantizer of activations and images: "uniform" (asymmetric, Sec. 3.4), or "symmetric". The
            same restrictions hold as for `weights`. A `Reconstruction` then needs `scales` = False, because it trains
            zero points.
        r: Denominator of the logarithm's base: log2(base) = q / r. Default from Sec. 4.1.
        q_min: Smallest numerator q that is searched. Chosen by measurement: docs/benchmarks. The released code starts
            at 10, but small values of q are best at 6 bits.
        q_max: Largest numerator q that is searched. Default from the released code.
        offset: The offset that lifts the negative tail of GELU (Eqs. 11-15; 0.17 in the paper). None: minus the
            activation's minimum, found numerically.
        beyond: What becomes of values beyond the last logarithmic level: "saturate" takes the last level (the paper);
            "zero" adds a code for zero, so that there are 2**bits + 1 codes (the released code); "zero-coded" uses the
            last code for zero. Chosen by measurement: docs/benchmarks.
        rounding: Which logarithmic level a value takes: "log" rounds the logarithm (the paper), "nearest" takes the
            nearest level. Chosen by measurement: docs/benchmarks.
        tables: Width of the integers that represent logarithmic levels: "calibrated" chooses a width per site, "u8" and
            "u16" are fixed. With "float", or with `beyond` = "zero", the model does not run in integers.
        per_head: Give Q, K and V a scale per head (the released code) instead of one per tensor (Sec. 4.1).
        per_group: Give the input of a grouped convolution a uniform scale per group, instead of one per tensor.
        fold_rows: Fold a norm only if its linears read at least this many rows in calibration. A head that reads one
            token per image has only as many rows as images. Chosen by measurement: docs/benchmarks.
        fold_head: Allow folding of the norm before the head. The released code does not fold it.
        images: Number of images that calibrate. Default from Sec. 4.1.
        pinned: Pairs (pattern, bits) for sites whose names match the pattern, in the syntax of file names. Bits are a
            number for all operands, 32 for float, or text such as "w4a8", "w4", "a8s4" or "i4": w for weights, a for
            activations (also after softmax, unless s is given), s for attention weights, i for images. If several
            patterns match, the last one that names an operand decides.
        search: How quantizers are found: `Search` (Algorithm 1), or the search of another method.
        stages: Stages that change the result of the search, one after another. With (), the result is the search's.
            Chosen by measurement: docs/benchmarks.

    Raises:
        ValueError: If a field has an invalid value, or if fields contradict each other.

    Examples:
        >>> config = adalog.Config(weight_bits=3, activation_bits=4, pinned=(("head", 8),))
        >>> config.bits
        'w3a4'
    """

    weight_bits: int = 4
    activation_bits: int = 4
    softmax_bits: int = 4
    input_bits: int = 8
    post_softmax: PostSoftmax = "adalog"
    post_gelu: PowerLaw = "adalog"
    weights: Range = "uniform"
    activations: Range = "uniform"
    r: int = 37
    q_min: int = 1
    q_max: int = 137
    offset: float | None = None
    beyond: Beyond = "zero-coded"
    rounding: Rounding = "nearest"
    tables: Tables = "calibrated"
    per_head: bool = True
    per_group: bool = True
    fold_rows: int = 128
    fold_head: bool = True
    images: int = 32
    pinned: tuple[tuple[str, int | str], ...] = ()
    search: AnySearch = field(default_factory=Search)
    stages: tuple[Stage, ...] = (Correction(),)

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits", "softmax_bits", "input_bits"):
            check_bits(name, getattr(self, name))
        _check_pinned(self.pinned)
        if not isinstance(self.search, AnySearch):
            raise ValueError(f"search = {self.search!r} is not a search: give one such as Search() or ScaleSearch()")
        choices = (PostSoftmax, "post_softmax"), (PowerLaw, "post_gelu"), (Beyond, "beyond"), (Rounding, "rounding")
        for allowed, name in (*choices, (Tables, "tables"), (Range, "weights"), (Range, "activations")):
            check_choice(name, getattr(self, name), allowed)
        if self.post_softmax == "twin":
            raise ValueError("post_softmax = 'twin' is not possible: a twin quantizer is for values of both signs")
        if self.post_softmax in ("split", "max-kept") and not isinstance(self.search, ScaleSearch):
            raise ValueError(f"post_softmax = {self.post_softmax!r} needs search = ScaleSearch(...)")
        if not self.search.finds_bases and "adalog" in (self.post_softmax, self.post_gelu):
            raise ValueError(
                f"{type(self.search).__name__} cannot search the base of 'adalog' quantizers: choose others for "
                "post_softmax and post_gelu, such as 'uniform'"
            )
        for name in ("r", "q_min", "q_max", "fold_rows", "images"):
            check_whole(name, getattr(self, name), 1)
        if self.q_min > self.q_max:
            raise ValueError(f"q_min = {self.q_min} is above q_max = {self.q_max}")
        for name in ("per_head", "per_group", "fold_head"):
            check_flag(name, getattr(self, name))
        _check_stages(self.stages)
        self._check_symmetric()
        if self.offset is not None and not (isinstance(self.offset, (int, float)) and 0 < self.offset < math.inf):
            raise ValueError(f"offset = {self.offset} is not positive and finite")

    def _check_symmetric(self) -> None:
        """Raise ValueError if the search or a stage would not keep the quantizers symmetric."""
        for name in ("weights", "activations"):
            if getattr(self, name) != "uniform" and not isinstance(self.search, Search):
                raise ValueError(f"{name} = {getattr(self, name)!r} needs search = Search(...)")
        if self.activations == "symmetric" and any(
            isinstance(stage, Reconstruction) and stage.scales for stage in self.stages
        ):
            raise ValueError("activations = 'symmetric' needs Reconstruction(scales=False): it would train zero points")

    @staticmethod
    def preset(bits: str, method: str = "adalog") -> "Config":
        """Return the choices of a published method.

        Args:
            bits: Bits of weights and activations, such as "w4a4"; "w4a4s3" also gives the bits after softmax.
            method: Name of the method, a key of `adalog.METHODS`.

        Returns:
            The choices of the method at these bits.

        Raises:
            ValueError: If the method is unknown, or if `bits` has another form.

        Examples:
            >>> config = adalog.Config.preset("w3a3", "adalog+")
            >>> config.weight_bits, config.images_needed
            (3, 128)
        """
        match = re.fullmatch(r"w(\d+)a(\d+)(?:s(\d+))?", str(bits), re.ASCII | re.IGNORECASE)
        if match is None:
            raise ValueError(f"bits = {bits!r} is not of the form w4a4 or w4a4s3")
        if method not in METHODS:
            similar = difflib.get_close_matches(str(method), METHODS, 1, 0)[0]
            raise ValueError(f"method = {method!r} is not one of {', '.join(METHODS)}; the closest is {similar}")
        weight, activation, softmax = (int(digit or match[2]) for digit in match.groups())
        return Config(weight_bits=weight, activation_bits=activation, softmax_bits=softmax, **METHODS[method].choices)

    def with_fitted_images(self, images: int) -> "Config":
        """Return the choices with another number of images for the stages that fit images.

        Args:
            images: Number of unlabelled images that each of these stages fits.

        Returns:
            A copy of the choices.

        Raises:
            ValueError: If no stage fits images.
        """
        refusal = f"no stage fits images, so {images} images cannot be fitted: choose the method adalog+"
        return self._with_stages(Fitting, refusal, images=images)

    def with_training(self, iterations: int | None = None, batch: int | None = None) -> "Config":
        """Return the choices with a shorter or longer training in each `Reconstruction`.

        Args:
            iterations: Number of training steps per block. None keeps the number.
            batch: Number of images per step. None keeps the number.

        Returns:
            A copy of the choices.

        Raises:
            ValueError: If no stage trains, or if a number is not a whole number of at least 1.
        """
        refusal = "no stage trains, so its steps cannot change: choose the method adalog++"
        numbers = {"iterations": iterations, "batch": batch}
        changes = {name: number for name, number in numbers.items() if number is not None}
        return self._with_stages(Reconstruction, refusal, **changes)

    def _with_stages(self, kind: Any, refusal: str, **changes: Any) -> "Config":
        if not any(isinstance(stage, kind) for stage in self.stages):
            raise ValueError(refusal)
        stages = [dataclasses.replace(stage, **changes) if isinstance(stage, kind) else stage for stage in self.stages]
        return dataclasses.replace(self, stages=tuple(stages))

    @property
    def images_fitted(self) -> int:
        """The number of images that the stages fit; 0 if they fit no images, or those that calibrate."""
        return max((stage.images or 0 for stage in self.stages if isinstance(stage, Fitting)), default=0)

    @property
    def images_needed(self) -> int:
        """The number of images that the search and the stages need: the larger of `images` and `images_fitted`."""
        return max(self.images, self.images_fitted)

    @property
    def bits(self) -> str:
        """The bits as text in the form that `preset` reads, such as "w4a4" or "w4a4s3"."""
        softmax = "" if self.softmax_bits == self.activation_bits else f"s{self.softmax_bits}"
        return f"w{self.weight_bits}a{self.activation_bits}{softmax}"

    def for_sites(self, sites: Iterable[str]) -> "Config":
        """Return the choices for sites that are searched together, with the bits that are pinned for any of them.

        Linears that share an activation (separate q, k and v) or a folded norm are searched together.

        Args:
            sites: Names of the sites.

        Returns:
            The choices, with these bits as `weight_bits` and so on; the same object if no pattern matches.

        Examples:
            >>> config = adalog.Config(pinned=(("head", 8), ("*.qkv", "w6")))
            >>> config.for_sites(["head"]).bits, config.for_sites(["blocks.0.attn.qkv"]).bits
            ('w8a8', 'w6a4')
        """
        names = list(sites)
        matching = [bits for pattern, bits in self.pinned if any(fnmatchcase(name, pattern) for name in names)]
        if not matching:
            return self
        widths: dict[str, Any] = {}
        for bits in matching:
            widths |= pinned_widths(bits)
        return dataclasses.replace(self, **widths, pinned=())

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Return the default of every field.

        Returns:
            The defaults by the name of the field.
        """
        return {entry.name: getattr(Config(), entry.name) for entry in dataclasses.fields(Config)}

    def to_json(self) -> str:
        """Return all choices as JSON, as artifacts store them.

        Returns:
            A JSON object with every field by name. The search and each stage is an object; its `kind` names its class.
            Fields that were added later are left out if they have their defaults, so that artifacts keep their bytes.
        """
        search = kind_to_json(self.search)
        stages = [kind_to_json(stage) for stage in self.stages]
        fields = dataclasses.asdict(self) | {"search": search, "stages": stages}
        return json.dumps(
            {key: value for key, value in fields.items() if _LATER.get(key, ...) != value}, sort_keys=True
        )

    @staticmethod
    def from_json(text: str) -> "Config":
        """Return the choices that a JSON text describes: the inverse of `to_json`.

        Args:
            text: A JSON object. Fields that it does not have get their defaults.

        Returns:
            The choices.

        Raises:
            ValueError: If the text is not JSON, names an unknown field, or gives a field an invalid value.
        """
        fields: dict[str, Any] = json.loads(text)
        search = kind_from_json("search", fields.pop("search", {}), SEARCHES)
        if "stages" in fields:
            if not isinstance(fields["stages"], list):
                raise ValueError(f"stages = {fields['stages']!r} is not a list")
            fields["stages"] = tuple(kind_from_json("stages", entry, STAGES) for entry in fields["stages"])
        check_fields(Config, fields)
        if isinstance(fields.get("pinned"), list):
            fields["pinned"] = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in fields["pinned"])
        return Config(search=search, **fields)


def check_config(config: object) -> None:
    if not isinstance(config, Config):
        raise ValueError(f"config = {config!r} is not a Config: give one such as Config.preset('w4a4')")


def weight_format(config: Config, *own_dims: int) -> Format:
    """Return the format of a weight that has parameters of its own along these dimensions."""
    return _range_format(config.weights, config.weight_bits, own_dims)


def uniform_format(bits: int, config: Config, *own_dims: int) -> Format:
    """Return the format of an activation with a uniform quantizer, which has parameters of its own along dimensions."""
    return _range_format(config.activations, bits, own_dims)


def _range_format(kind: Range, bits: int, own_dims: tuple[int, ...]) -> Format:
    if kind == "symmetric":
        return LargestLevelFormat(bits, own_dims, kind=UniformQuantizer)
    return UniformFormat(bits, own_dims)


def power_law_format(kind: PostSoftmax, bits: int, config: Config, offset: float) -> Format:
    """Return the format of an activation after softmax or GELU whose quantizer has this kind, such as "log2".

    log2 and log-sqrt2 use exact powers, with a float scale as in their papers. AdaLog uses the rounded tables of Eq. 9.
    """
    if kind == "uniform" or bits == FLOAT_BITS:
        return uniform_format(bits, config)
    if kind == "twin":
        return TwinFormat(bits, offset=offset)
    if kind in ("split", "max-kept"):
        return SplitFormat(bits) if kind == "split" else MaxKeptFormat(bits)
    q, r = {"log2": (1, 1), "log-sqrt2": (1, 2), "adalog": (0, config.r)}[kind]
    return LogFormat(
        bits,
        r=r,
        q=q,
        q_min=config.q_min,
        q_max=config.q_max,
        table=kind == "adalog",
        beyond=config.beyond,
        rounding=config.rounding,
        offset=offset,
    )


def pinned_widths(bits: int | str) -> dict[str, int]:
    """Return the fields of `Config` that pinned bits set. Raises ValueError for text of another form."""
    if isinstance(bits, int):
        return dict.fromkeys(("weight_bits", "activation_bits", "softmax_bits", "input_bits"), bits)
    match = re.fullmatch(r"(?:w(\d+))?(?:a(\d+))?(?:s(\d+))?(?:i(\d+))?", bits, re.ASCII | re.IGNORECASE)
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
        for name, width in pinned_widths(entry[1]).items():
            check_bits(f"pinned {name} of {entry[0]!r}", width)


def _check_stages(stages: object) -> None:
    if not isinstance(stages, tuple) or not all(isinstance(stage, Stage) for stage in stages):
        raise ValueError(f"stages = {stages!r} is not a tuple of stages, as in (Correction(),)")
    fitting = [stage for stage in stages if isinstance(stage, Fitting)]
    for stage in fitting:
        if isinstance(stage, Reconstruction) and stage.loss not in tuple(LOSSES):
            raise ValueError(f"loss = {stage.loss!r} is not one of {', '.join(LOSSES)}")
    order = ["correction" if isinstance(stage, Correction) else stage.scope for stage in fitting]
    in_order = order == [kind for kind in ("correction", "block", "model") if kind in order]
    if not in_order or fitting != list(stages[len(stages) - len(fitting) :]):
        raise ValueError(
            "stages that fit images come last, because the other stages evaluate changes on exact inputs: at most one "
            "Correction, then one Reconstruction of blocks, then one of the model"
        )
