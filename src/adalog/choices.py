"""Define the choices of the stages that fit images, the rows of the table of methods, and checks of choices."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from adalog.quantizers import FLOAT_BITS, MAX_BITS, MIN_BITS

Tables = Literal["calibrated", "u8", "u16", "float"]
WeightRounding = Literal["latent", "adaround"]
Scope = Literal["block", "model"]
CorrectionTarget = Literal["output", "stream"]


def check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r} is not a whole number of at least {least}")


def check_choice(name: str, value: object, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name} = {value!r} is not one of {', '.join(get_args(allowed))}")


def check_number(name: str, value: object, low: float, high: float = math.inf) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value <= high:
        most = "" if math.isinf(high) else f" and at most {high}"
        raise ValueError(f"{name} = {value!r} is not a number above {low}{most}")


def check_share(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{name} = {value!r} is not a number from 0 to 1")


def check_span(name: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"{name} = {value!r} is not a pair of increasing positive factors")
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
class Correction:
    """A stage that fits weights and biases to the outputs of the float network, in closed form.

    The methods "adalog" and "adalog+" use it. The defaults were chosen by measurement: docs/design/stages.md.

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
        mirrored: Fit the mirror image of each image too, left and right exchanged, if the model has one input and it is
            (N, C, H, W).

    Raises:
        ValueError: If a field has an invalid value.

    Examples:
        >>> config = adalog.Config(stages=(adalog.Correction(images=64),))
    """

    kind: ClassVar[str] = "correction"
    images: int | None = None
    ridge: bool = True
    compensate: bool = True
    target: CorrectionTarget = "output"
    coefficient: float = 0.3
    robust: bool = True
    importance: float = 0.5
    mirrored: bool = False

    def __post_init__(self) -> None:
        if self.images is not None:
            check_whole("images", self.images, 1)
        for name in ("ridge", "compensate", "robust", "mirrored"):
            check_flag(name, getattr(self, name))
        check_choice("target", self.target, CorrectionTarget)
        check_share("coefficient", self.coefficient)
        check_share("importance", self.importance)


@dataclass(frozen=True)
class Reconstruction:
    """A stage that trains codes, biases and scales by gradients to match the outputs of the float network.

    The method "adalog++" uses it. The defaults were chosen by measurement: docs/benchmarks.

    Args:
        images: Number of unlabelled images to fit. Every eighth of them is held out to evaluate the result. With
            `robust`, earlier stages do not fit these either.
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
        robust: Take a block's changes back if they make the model's output worse on images that are held out. The loss
            of a block that is the whole model tells that already.
        mirrored: As in `Correction`. The values of a block take twice the memory, and the number of steps is the same.

    Raises:
        ValueError: If a field has an invalid value.

    Examples:
        >>> config = adalog.Config(stages=(adalog.Correction(images=1024), adalog.Reconstruction()))
    """

    kind: ClassVar[str] = "reconstruction"
    images: int = 1024
    iterations: int = 400
    batch: int = 8
    weights: WeightRounding = "latent"
    scales: bool = True
    biases: bool = True
    loss: str = "squared"
    drop: float = 0.5
    rate: float = 0.03
    scale_rate: float = 0.005
    scope: Scope = "block"
    robust: bool = True
    mirrored: bool = False

    def __post_init__(self) -> None:
        check_choice("scope", self.scope, Scope)
        for name in ("images", "iterations", "batch"):
            check_whole(name, getattr(self, name), 1)
        check_choice("weights", self.weights, WeightRounding)
        for name in ("scales", "biases", "robust", "mirrored"):
            check_flag(name, getattr(self, name))
        for name in ("rate", "scale_rate"):
            check_number(name, getattr(self, name), 0)
        if not isinstance(self.drop, (int, float)) or not 0 <= self.drop < 1:
            raise ValueError(f"drop = {self.drop!r} is not a number of at least 0 and below 1")


Fitting = Correction | Reconstruction  # the stages that fit unlabelled images


def kind_to_json(choices: Any) -> dict[str, Any]:
    """Return the fields of a search or stage, and the name of its kind, as JSON."""
    return {"kind": choices.kind, **dataclasses.asdict(choices)}


def kind_from_json(name: str, fields: Any, kinds: Sequence[Any]) -> Any:
    """Return the search or stage that JSON fields describe. Without a "kind" it is the first of `kinds`.

    Messages call the field `name`. Raises ValueError for fields that the kind does not have.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{name} = {fields!r} is not a JSON object")
    by_name = {choice.kind: choice for choice in kinds}
    kind = fields.get("kind", kinds[0].kind)
    if kind not in by_name:
        raise ValueError(
            f"{name}: the kind {kind!r} is not one of {', '.join(by_name)}; add a class of your own to SEARCHES or "
            "STAGES in src/adalog/config.py"
        )
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items() if key != "kind"}
    check_fields(by_name[kind], values)
    return by_name[kind](**values)


def check_fields(kind: Any, values: dict[str, Any]) -> None:
    unknown = set(values) - {entry.name for entry in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no such choice in {kind.__name__}")


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

        def changes_of(choices: Any) -> dict[str, Any]:
            fields, defaults = kind_to_json(choices), kind_to_json(type(choices)())
            return {key: value for key, value in fields.items() if key == "kind" or value != defaults[key]}

        plain = {name: value for name, value in self.choices.items() if value != defaults[name]}
        if "search" in plain:
            plain["search"] = changes_of(plain["search"])
        if "stages" in plain:
            plain["stages"] = [changes_of(stage) for stage in plain["stages"]]
        return plain
