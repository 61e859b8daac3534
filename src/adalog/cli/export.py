"""`adalog export`: convert an artifact for other inference engines."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from adalog import DataError, artifact, export, files
from adalog.cli.console import FAILED, check_outputs, note, show, waiting
from adalog.cli.options import JsonOption, check_choice
from adalog.cli.targets import naming_file
from adalog.quantized import QuantizedProgram
from adalog.runtime import Compiled

TARGETS = ("onnx", "openvino", "executorch")
_SUFFIXES = {"openvino": ".xml", "executorch": ".pte"}


def command(
    file: Annotated[Path, typer.Argument(help="Artifact to export, written by `adalog quantize`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("model.onnx"),
    form: Annotated[
        str,
        typer.Option(
            help="Form of matrix products. mixed: on dequantized values, which engines run fast; integer: on integers; "
            "qdq: only QuantizeLinear and DequantizeLinear, for other compilers (artifacts of --method symmetric at "
            "w8a8; also writes NAME.encodings.json)."
        ),
    ] = "mixed",
    to: Annotated[
        str,
        typer.Option(
            help="Format to write: onnx; openvino (with --out NAME.xml; also writes NAME.bin); or executorch (with "
            "--out NAME.pte; artifacts of --method uniform-tensor), for phones and boards."
        ),
    ] = "onnx",
    json_out: JsonOption = None,
) -> None:
    """Convert an artifact to ONNX, OpenVINO or ExecuTorch.

    The command first compares the export with the artifact on random images.
    If they differ by more than rounding explains, it writes nothing, and the exit code is 1.
    """
    check_choice("--form", form, export.EVERY_FORM)
    check_choice("--to", to, TARGETS)
    if (form == "qdq" and to != "onnx") or (form != "mixed" and to == "executorch"):
        raise ValueError(f"--form {form} cannot be combined with --to {to}")
    suffix = _SUFFIXES.get(to)
    if suffix is not None and out.suffix != suffix:
        raise DataError(f"{out} does not end in {suffix}, as files for {to} do: give --out NAME{suffix}")
    sidecar = out.with_suffix(".bin") if to == "openvino" else None
    sidecar = out.with_suffix(".encodings.json") if form == "qdq" else sidecar
    check_outputs(out, sidecar, json_out, reads=(file,))
    content = artifact.read(file)
    quantized = artifact.deserialise(content, str(file))
    with naming_file(file, "cannot be exported"):
        sites = Compiled(quantized, "reference").sites
    if not sites:
        raise DataError(
            f"{file} has no site that runs in integers, so there is nothing to export: quantize more of the model"
        )
    with waiting(f"exporting {file}"), naming_file(file, "cannot be exported"):
        exported, certificates = _export(quantized, hashlib.sha256(content).hexdigest(), form, to)
        contents = {out: exported}
        if sidecar is not None and all(certificate.passed for certificate in certificates):
            described, further = (
                export.to_openvino(exported) if to == "openvino" else (exported, export.to_encodings(exported))
            )
            contents = {sidecar: further, out: described}
    failures = [failure for certificate in certificates for failure in certificate.failures]
    if failures:
        # OpenVINO may optimize the mixed form differently when it also outputs the values to compare.
        hint = "; --form integer may work" if to == "openvino" and form == "mixed" else ""
        note(f"failed: {out} was not written, because the export differs from the artifact: {failures[0]}{hint}")
        raise typer.Exit(FAILED)
    for path, bytes_of in contents.items():
        files.write_whole(path, bytes_of)
    sizes = {str(path): len(bytes_of) for path, bytes_of in contents.items()}
    record = {"files": sizes, "form": certificates[0].form, "certificates": [one.json() for one in certificates]}
    show(record, json_out, *(f"{path}: {size:,} bytes" for path, size in sizes.items()))


def _export(quantized: QuantizedProgram, source: str, form: str, to: str) -> tuple[bytes, list[export.Certificate]]:
    """Return the exported file and its certificates."""
    if to == "executorch":
        content, certificate = export.export_executorch(quantized, source)
        return content, [certificate]
    engines = ["onnxruntime", *(["openvino"] if to == "openvino" else [])]
    kind = next(kind_of_form for kind_of_form in export.EVERY_FORM if kind_of_form == form)
    return export.export(quantized, source, kind, engines)
