"""Certify ExecuTorch files: compare their bytes, their sites and their outputs with those of the artifact."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.export import executorch
from adalog.export.certificate import NOISE_IMAGES, ROUNDING, Certificate, SiteReport, blank, compare_batches
from adalog.quantized import QuantizedProgram
from adalog.runtime import Compiled
from adalog.runtime.reference import CodeProduct, IntegerSite, finish

NAME = "executorch"  # the form and the engine of these certificates


def export_executorch(quantized: QuantizedProgram, source: str) -> tuple[bytes, Certificate]:
    """Return the ExecuTorch file of a quantized program, and its certificate on noise of the calibration's shape.

    Do not use the file if the certificate fails. source: the SHA-256 of the artifact.
    Raises ArtifactError if the program cannot be exported to ExecuTorch, and DataError if a package is missing.
    """
    noise = quantized.noise(NOISE_IMAGES)
    content = executorch.to_executorch(quantized, source)
    certificate = blank(NAME, NAME, "torch", source, content, executorch.versions())
    _compare(certificate, quantized, content, [noise])
    return content, certificate


@torch.no_grad()
def certify_executorch(
    quantized: QuantizedProgram,
    source: str,
    content: bytes,
    batches: Iterable[Sequence[Tensor]],
    *,
    executor: str = "torch",
) -> Certificate:
    """Compare an ExecuTorch file with its artifact, and return the certificate.

    The file must have the bytes that adalog writes for the artifact with the same versions of the packages.
    source: the SHA-256 of the artifact. content: the file. batches: the model's inputs, some images at a time.
    Raises ArtifactError if `to_executorch` did not write the file, ValueError if there are no images, and DataError if
    a package is missing.
    """
    certificate = blank(NAME, NAME, executor, source, content, executorch.versions())
    notes = executorch.read_notes(content)
    if notes["artifact"] != source:
        certificate.failures.append("the file was made from another artifact")
    if notes["made_by"] != executorch.versions():
        made_by = ", ".join(f"{name} {value}" for name, value in notes["made_by"].items())
        certificate.failures.append(f"the file was made by {made_by}: certify it with the same versions")
    elif executorch.to_executorch(quantized, notes["artifact"]) != content:
        certificate.failures.append("the file differs from the file that adalog writes for the artifact")
    try:
        _compare(certificate, quantized, content, batches)
    except ArtifactError as cause:
        certificate.failures.append(str(cause))
    return certificate


@torch.no_grad()
def _compare(
    certificate: Certificate, quantized: QuantizedProgram, content: bytes, batches: Iterable[Sequence[Tensor]]
) -> None:
    compiled = Compiled(quantized, certificate.executor)
    run = executorch.open_file(content)
    watched, replay, names = executorch.to_watched(quantized)
    inside = executorch.open_file(watched)

    def inspect(batch: Sequence[Tensor], codes: Mapping[str, Tensor]) -> list[SiteReport]:
        results = _one_by_one(inside, batch)
        inner = dict(zip(names, results[len(results) - len(names) :], strict=True))
        return [_site(quantized, site, inner, codes) for site in replay.sites]

    compare_batches(certificate, compiled, batches, lambda batch: _one_by_one(run, batch), inspect)


def _one_by_one(run: Callable[[Sequence[Tensor]], list[Tensor]], batch: Sequence[Tensor]) -> list[Tensor]:
    """Run a file on each image of a batch, and join the outputs."""
    results = [run([value[i : i + 1] for value in batch]) for i in range(len(batch[0]))]
    return [torch.cat(list(outputs)) for outputs in zip(*results, strict=True)]


def _site(
    quantized: QuantizedProgram, site: IntegerSite, inner: Mapping[tuple[str, str], Tensor], codes: Mapping[str, Tensor]
) -> SiteReport:
    """Compare a site of the export with its exact sums, for the values that it read."""
    sides = [site.left, *([site.right] if site.weight is None else [])]
    operands = codes_off = differ = 0
    wholes: list[Tensor] = []
    for quantizer, arg in zip(sides, site.node.args, strict=False):
        code = inner["codes", arg.name].long() - executorch.LOW
        operands += code.numel()
        codes_off += int((code != quantizer.quantize(inner["value", arg.name])).sum())
        differ += int((code != codes[arg.name]).sum())
        wholes += quantizer.integers(code)
    doubles = [integers.double() for integers in wholes]
    sums = CodeProduct(site).sums(doubles[:1], doubles[1:] or None)
    bias = site.node.args[2] if site.weight is not None and len(site.node.args) > 2 else None
    expected = finish(site, sums, None if bias is None else quantized.program.tensors[bias.name], wholes[0].shape)
    actual = inner["result", site.name]
    equal = actual.shape == expected.shape and bool(
        ((actual.double() - expected.double()).abs() <= ROUNDING * float(expected.abs().max())).all()
    )
    return SiteReport(site.name, equal, operands, codes_off, differ)
