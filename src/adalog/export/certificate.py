"""Certify an export: compare its tensors, its sites and its outputs with those of the artifact."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from adalog import version
from adalog.errors import ArtifactError, converting
from adalog.export.engines import ELSEWHERE, Run, open_engine
from adalog.export.onnx import KEY, as_array, graph_digest, inputs_of, package, stored_tensors, tensor_name
from adalog.export.operands import Digit
from adalog.export.replay import EVERY_FORM, MAKERS, OnnxForm, ProgramModule
from adalog.graph.program import map_leaves, present_leaves
from adalog.quantized import QuantizedProgram
from adalog.runtime import Compiled
from adalog.runtime.reference import CodeProduct, IntegerSite

FORMAT = 1
NOISE_IMAGES = 2  # images of noise on which an export is certified before it is written
SITE_IMAGES = 8  # images on which every site is compared; on further images, only the model's outputs are compared
ROUNDING = 1e-5  # largest allowed error of a site's float product, as a fraction of its largest value
# The share of codes that an engine may round the other way at the edge between two codes. A product returns few
# distinct values, so a value at such an edge occurs many times.
CODES_OFF = 1e-3
CHANGED = 0.01  # the share of images whose largest output may change because floats between sites round differently
ERROR = 0.2  # the median relative error of the outputs that the same rounding may cause
MOVED = 1e-6  # relative change of the inputs that shows what rounding alone does to the artifact's own outputs
Answers = list[tuple[Tensor, Tensor]]  # of one batch: the artifact's and the file's value of each float output


@dataclass(frozen=True)
class SiteReport:
    """The comparison of one site, on the values that the engine computed itself.

    equal: True if the accumulators are the exact sums for the engine's codes. operands: the number of operand codes.
    off: how many of them are the wrong codes for the values that the engine encoded. differ: how many of them differ
    from the executor's codes, whose values may differ too.
    """

    site: str
    equal: bool
    operands: int
    off: int
    differ: int


@dataclass
class Certificate:
    """The result of comparing an exported file with its artifact.

    failures: the reasons why the certificate fails; empty if it passes. argmax_changed: the number of images that have
    another largest value in the first output, or None if that output is not (images, classes); `changed` lists the
    images. error: the median and the largest relative error of an image's outputs. own_error: the artifact's own median
    error on the first images, between the executor and fake quantization of inputs that are moved by a millionth.
    beyond_own: the number of changed images on which the artifact puts its own class ahead of the file's class by more
    than own_error times the norm of its outputs.
    """

    form: str
    engine: str
    executor: str
    digests: Mapping[str, str]
    versions: Mapping[str, str]
    images: int = 0
    sites: list[SiteReport] = field(default_factory=list)
    argmax_changed: int | None = None
    changed: list[int] = field(default_factory=list)
    error: Mapping[str, float] | None = None
    own_error: float = 0.0
    beyond_own: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def accumulators_equal(self) -> bool:
        return bool(self.sites) and all(site.equal for site in self.sites)

    def json(self) -> dict[str, Any]:
        """Return the certificate as JSON, with None for errors that are not finite."""
        content = map_leaves(asdict(self), float, lambda value: value if math.isfinite(value) else None)
        return {"format": FORMAT, "passed": self.passed, "accumulators_equal": self.accumulators_equal, **content}

    def text(self) -> str:
        """Return the certificate as a page of text."""
        operands, codes_off, differ = (
            sum(getattr(site, name) for site in self.sites) for name in ("operands", "off", "differ")
        )
        sums = "all equal" if self.accumulators_equal else "NOT equal" if self.sites else "not compared"
        lines = [
            f"{'PASSED' if self.passed else 'FAILED'}: {self.form} form in {self.engine} compared with {self.executor}",
            *(f"failure: {failure}" for failure in self.failures),
            f"images: {self.images:,}; sites: {len(self.sites)}, on the first {min(self.images, SITE_IMAGES)} images",
            f"accumulators: {sums}",
            f"codes: {operands:,}; wrong for their values: {codes_off:,}; different from the executor's: {differ:,}",
        ]
        if self.error is not None:
            median, largest = self.error["median"], self.error["largest"]
            lines.append(f"relative error of the outputs: median {median:.2g}, largest {largest:.2g}")
            lines.append(
                f"relative error of the artifact's own fake quantization, with inputs moved by {MOVED:.0e}: median "
                f"{self.own_error:.2g}"
            )
        if self.argmax_changed is not None:
            names = f" ({', '.join(map(str, self.changed[:20]))})" if self.changed else ""
            lines.append(f"images whose largest output changes: {self.argmax_changed:,}{names}")
            lines.append(f"images that change by more than the artifact's own error explains: {self.beyond_own:,}")
        lines += [f"SHA-256 of the {name}: {digest}" for name, digest in self.digests.items()]
        lines.append("; ".join(f"{name} {version}" for name, version in self.versions.items()))
        return "\n".join(lines)


def blank(
    form: str, engine: str, executor: str, source: str, content: bytes, versions: Mapping[str, str]
) -> Certificate:
    """Return the certificate of a file before any comparison. source: the SHA-256 of the artifact."""
    digests = {"artifact": source, "export": hashlib.sha256(content).hexdigest()}
    return Certificate(form, engine, executor, digests, versions)


@torch.no_grad()
def certify(
    quantized: QuantizedProgram,
    source: str,
    content: bytes,
    batches: Iterable[Sequence[Tensor]],
    *,
    engine: str = "onnxruntime",
    executor: str = "torch",
) -> Certificate:
    """Compare an exported file with its artifact, and return the certificate.

    source: the SHA-256 of the artifact. content: the file. batches: the model's inputs, some images at a time.
    Raises ArtifactError if `to_onnx` did not write the file, ValueError if there are no images, and AdalogError if a
    package is missing.
    """
    package(engine)
    model, metadata = read(content)
    form: OnnxForm = metadata["form"]
    versions = {"adalog": version.__version__}
    versions |= {name: str(package(name).__version__) for name in ("torch", "onnx", engine)}
    certificate = blank(form, engine, executor, source, content, versions)
    if metadata["artifact"] != source:
        certificate.failures.append("the file was made from another artifact")
    if metadata["graph"] != graph_digest(model):
        certificate.failures.append("the file was changed after adalog wrote it")
    replay = ProgramModule(quantized, MAKERS[form]).eval()
    replay(*quantized.zeros(1))  # records the names of its values
    names = changed_tensors(model, replay)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        certificate.failures.append(f"tensors of the file differ from the artifact: {names[0]}{more}")
    try:
        _compare(certificate, quantized, replay, model, content, batches)
    except ArtifactError as cause:
        certificate.failures.append(str(cause))
    return certificate


def read(content: bytes) -> tuple[Any, dict[str, Any]]:
    """Return a file's model and adalog's metadata. Raises ArtifactError if `to_onnx` did not write the file."""
    onnx = package("onnx")
    refusal = "the file is not an ONNX model that adalog exported"
    with converting(ArtifactError, f"{refusal} (", "): make one with `adalog export`"):  # parsers raise any exception
        model = onnx.load_model_from_string(content)
        notes = {entry.key: entry.value for entry in model.metadata_props}
        metadata = json.loads(notes[KEY])
        sane = metadata["form"] in EVERY_FORM and all(isinstance(metadata[key], str) for key in ("artifact", "graph"))
    outside = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer)
    if not sane or outside:
        raise ArtifactError(
            f"{refusal}, because its metadata or its tensors are not valid: make one with `adalog export`"
        )
    return model, metadata


def changed_tensors(model: Any, replay: ProgramModule) -> list[str]:
    """Return the names of the file's tensors that differ from the artifact's, in the file's order."""
    from onnx import numpy_helper

    expected_tensors = {tensor_name(name): as_array(value) for name, value in replay.named_buffers()}
    for name, weight in replay.stored_weights().items():
        expected_tensors |= stored_tensors(tensor_name(name), weight)
    names = []
    for initializer in model.graph.initializer:
        expected = expected_tensors.get(initializer.name)
        if expected is not None:
            actual = numpy_helper.to_array(initializer)
            if actual.shape != expected.shape or not (actual.astype(expected.dtype) == expected).all():
                names.append(initializer.name)
    return names


# --- the run ---------------------------------------------------------------------------------------------------------


def _compare(
    certificate: Certificate,
    quantized: QuantizedProgram,
    replay: ProgramModule,
    model: Any,
    content: bytes,
    batches: Iterable[Sequence[Tensor]],
) -> None:
    compiled = Compiled(quantized, certificate.executor)
    plain, names = open_engine(certificate.engine, content), [entry.name for entry in model.graph.input]
    watched, values = _watch(model, replay)
    inside = open_engine(certificate.engine, watched)

    def run(batch: Sequence[Tensor]) -> list[Any]:
        results = _run(plain, inputs_of(batch, names), certificate.engine)
        return [results.get(entry.name) for entry in model.graph.output]

    def inspect(batch: Sequence[Tensor], codes: Mapping[str, Tensor]) -> list[SiteReport]:
        feeds = inputs_of(batch, names)
        inner = {**feeds, **_run(inside, feeds, certificate.engine)}
        return [_site(replay, site, inner, values, codes) for site in replay.sites]

    compare_batches(certificate, compiled, batches, run, inspect)


def compare_batches(
    certificate: Certificate,
    compiled: Compiled,
    batches: Iterable[Sequence[Tensor]],
    run: Callable[[Sequence[Tensor]], Sequence[Any]],
    inspect: Callable[[Sequence[Tensor], Mapping[str, Tensor]], list[SiteReport]],
) -> None:
    """Compare the outputs on all images, and every site on the first ones; write the results to the certificate.

    compiled: the artifact. run: returns the file's outputs for a batch. inspect: compares every site on a batch, given
    the executor's codes; it gets only images of the first one's size. Raises ValueError if there are no images.
    """
    answers, firsts = list[Answers](), list[list[Tensor]]()
    count = 0
    for batch in batches:
        answers.append(pair(present_leaves(compiled(*batch)), run(batch)))
        if count < SITE_IMAGES and _shapes(batch) == _shapes(firsts[0] if firsts else batch):
            firsts.append([value[: SITE_IMAGES - count] for value in batch])
        count += len(batch[0])
    if not count:
        raise ValueError("there are no images to compare: give at least one")
    certificate.images = count
    few = [torch.cat(values) for values in zip(*firsts, strict=True)]
    certificate.sites = inspect(few, compiled.codes(*few))
    own = pair(present_leaves(compiled(*few)), present_leaves(compiled.quantized.program.run(move(few))))
    certificate.own_error = float(relative_errors([own]).median())
    judge(certificate, answers)


def _shapes(batch: Sequence[Tensor]) -> list[torch.Size]:
    return [value.shape[1:] for value in batch]


def move(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs with each float moved by about a millionth of its value, in the same way in each call."""
    generator = torch.Generator().manual_seed(0)
    return [
        value * (1 + MOVED * torch.randn(value.shape, generator=generator, dtype=value.dtype))
        if value.is_floating_point()
        else value
        for value in inputs
    ]


def _run(run: Run, inputs: Mapping[str, Any], engine: str) -> dict[str, Any]:
    with converting(ArtifactError, f"{engine} cannot run the file (", ELSEWHERE):
        return run(inputs)


def _watch(model: Any, replay: ProgramModule) -> tuple[bytes, dict[str, str]]:
    """Return the file with the values of all sites as outputs, and the name of each encoded value by `Digit.at`."""
    from onnx import ModelProto, ValueInfoProto

    copy = ModelProto()
    copy.CopyFrom(model)
    makers = {name: node for node in copy.graph.node for name in node.output}
    names, values, firsts = dict[str, None](), dict[str, str](), dict[str, str]()
    for node in copy.graph.node:
        firsts.setdefault(node.name.rpartition("/")[0], node.input[0] if node.input else "")
    for product in replay.products.values():
        trace = product.traced
        assert trace is not None
        digits = [digit for part in (*trace.left, *(trace.right or ())) for digit in part]
        for at in (digit.at for digit in digits):
            values[at] = firsts.get(at, "")
        names |= dict.fromkeys([*trace.results, *(digit.name for digit in digits)])
    missing = [name for name in names if name not in makers]
    if missing:
        raise ArtifactError(f"the file has no value {missing[0]}, which the artifact computes: export it again")
    ends = {entry.name for entry in (*copy.graph.output, *copy.graph.input)}
    names |= {name: None for name in values.values() if name in makers}
    copy.graph.output.extend(ValueInfoProto(name=name) for name in names if name not in ends)
    return copy.SerializeToString(), values


def _site(
    replay: ProgramModule,
    site: IntegerSite,
    inner: Mapping[str, Any],
    values: Mapping[str, str],
    codes: Mapping[str, Tensor],
) -> SiteReport:
    """Compare a site of the export with its exact sums, for the values that it read."""
    trace = replay.products[site.name].traced
    assert trace is not None
    sides = [(site.left, trace.left), *([] if trace.right is None else [(site.right, trace.right)])]
    operands = codes_off = differ = 0
    wholes: list[list[Tensor]] = []
    for quantizer, parts in sides:
        integers = [_whole(part, inner) for part in parts]
        wholes.append(integers)
        value = inner.get(values.get(parts[0][0].at, ""))
        operands += integers[0].numel()
        differ += _unequal(integers, quantizer.integers(codes[parts[0][0].operand]))
        exact = [] if value is None else quantizer.integers(quantizer.quantize(torch.as_tensor(value)))
        codes_off += _unequal(integers, exact) if exact else integers[0].numel()
    exactly = max(site.bounds) < 2**53
    ready = [[part.double() if exactly else part for part in integers] for integers in wholes]
    sums = CodeProduct(site).sums(ready[0], ready[1] if len(ready) > 1 else None)
    scales: Sequence[Tensor | None] = trace.scales or [None] * len(sums)
    equal = all(
        _same(site, total, torch.as_tensor(inner[name]), scale, ready[0][0])
        for name, total, scale in zip(trace.results, sums, scales, strict=True)
    )
    return SiteReport(site.name, equal, operands, codes_off, differ)


def _whole(part: Sequence[Digit], inner: Mapping[str, Any]) -> Tensor:
    """Return the integers of a part that was written as digits."""
    digits = [digit.factor * (torch.as_tensor(inner[digit.name]).long() - digit.zero_point) for digit in part]
    return torch.stack(digits).sum(0)


def _unequal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """Count the places at which any part differs."""
    if ones[0].shape != others[0].shape:
        return ones[0].numel()
    different = [first != second for first, second in zip(ones, others, strict=True)]
    return int(torch.stack(different).any(0).sum())


def _same(site: IntegerSite, sums: Tensor, actual: Tensor, scale: Tensor | None, left: Tensor) -> bool:
    """Return True if a site's results are its exact sums or, up to rounding, the sums times the scale."""
    expected = sums if site.geometry is None else site.image(sums, left.shape)
    if actual.shape != expected.shape:
        return False
    if scale is None:
        return bool((actual.double() == expected.double()).all())
    real = expected.double() * scale.double()
    largest = float(real.abs().max()) if real.numel() else 0.0
    return bool(((actual.double() - real).abs() <= ROUNDING * largest).all())


def pair(expected: Sequence[Any], actual: Sequence[Any]) -> Answers:
    """Pair the float outputs of a batch (artifact, file). Raises ArtifactError if there are none, or shapes differ."""
    pairs = [(first, torch.as_tensor(second)) for first, second in zip(expected, actual, strict=True)]
    for first, second in pairs:
        if first.shape != second.shape:
            raise ArtifactError(
                f"the file returns an output of shape {tuple(second.shape)}, but the artifact returns "
                f"{tuple(first.shape)}: export it again"
            )
    floats = [(first, second) for first, second in pairs if first.is_floating_point() and first.ndim]
    if not floats:
        raise ArtifactError(
            "the model does not return a float output per image, so there is nothing to compare: quantize it without "
            "the argmax, or the mean of all images, at its end"
        )
    return floats


def relative_errors(answers: Sequence[Answers]) -> Tensor:
    """Return the relative error of each image, over all of its outputs together: (images,)."""
    errors = []
    for batch in answers:
        expected, actual = (
            torch.cat([output.double().reshape(len(output), -1) for output in side], 1)
            for side in zip(*batch, strict=True)
        )
        errors.append((actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30))
    return torch.cat(errors)


def judge(certificate: Certificate, answers: Sequence[Answers]) -> None:
    """Compare the outputs of all batches, and write the results and the failures to the certificate."""
    errors = relative_errors(answers)
    expected, actual = (torch.cat(list(side)) for side in zip(*(batch[0] for batch in answers), strict=True))
    certificate.error = {"median": float(errors.median()), "largest": float(errors.max())}
    if expected.ndim == 2 and expected.shape[1] > 1:
        certificate.changed = torch.nonzero(expected.argmax(1) != actual.argmax(1)).flatten().tolist()
        certificate.argmax_changed = len(certificate.changed)
        preferred = expected.amax(1) - expected.gather(1, actual.argmax(1, keepdim=True))[:, 0]
        certificate.beyond_own = int((preferred > certificate.own_error * expected.norm(dim=1)).sum())
        if certificate.beyond_own > max(1, CHANGED * certificate.images):
            certificate.failures.append(
                f"the largest output of {certificate.beyond_own} images changes, not by rounding alone"
            )
    if not certificate.error["median"] <= max(ERROR, 2 * certificate.own_error):
        certificate.failures.append(
            f"the median relative error of the outputs is too large: {certificate.error['median']:.2g}"
        )
    unequal = [site.site for site in certificate.sites if not site.equal]
    if unequal or not certificate.sites:
        certificate.failures.append(
            f"accumulators differ from the exact sums of the codes: {unequal[0] if unequal else 'no site was found'}"
        )
    sites_off = [site for site in certificate.sites if site.off > max(1, CODES_OFF * site.operands)]
    if sites_off:
        certificate.failures.append(
            f"{sites_off[0].off} of {sites_off[0].operands} codes of {sites_off[0].site} are wrong for their values"
        )
