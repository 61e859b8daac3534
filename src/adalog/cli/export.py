"""`adalog export`: convert an artifact for other inference engines."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from adalog import DataError, artifact, export, files
from adalog.cli.console import FAILED, check_outputs, emit_json, note, say, waiting
from adalog.cli.options import JsonOption
from adalog.cli.targets import naming_file
from adalog.runtime import Compiled

TARGETS = ("onnx", "openvino")


def command(
    file: Annotated[Path, typer.Argument(help="Artifact to export, written by `adalog quantize`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("model.onnx"),
    form: Annotated[
        str,
        typer.Option(
            help="Form of matrix products. mixed: on dequantized values, which engines run fast; integer: on integers."
        ),
    ] = "mixed",
    to: Annotated[
        str,
        typer.Option(help="Format to write: onnx, or openvino (with --out NAME.xml; also writes NAME.bin)."),
    ] = "onnx",
    json_out: JsonOption = None,
) -> None:
    """Convert an artifact to ONNX or OpenVINO.

    The command first compares the export with the artifact on random images.
    If they differ by more than rounding explains, it writes nothing, and the exit code is 1.
    """
    if form not in export.FORMS:
        raise ValueError(f"--form {form!r} is not one of {', '.join(export.FORMS)}")
    if to not in TARGETS:
        raise ValueError(f"--to {to!r} is not one of {', '.join(TARGETS)}")
    if to == "openvino" and out.suffix != ".xml":
        raise DataError(
            f"{out} does not end in .xml, as OpenVINO needs: give --out NAME.xml, which also writes NAME.bin"
        )
    weights = out.with_suffix(".bin") if to == "openvino" else None
    check_outputs(out, weights, json_out, reads=(file,))
    content = artifact.read(file)
    quantized = artifact.deserialise(content, str(file))
    if not Compiled(quantized, "reference").sites:
        raise DataError(
            f"{file} has no site that runs in integers, so there is nothing to export: quantize more of the model"
        )
    chosen: export.Form = "mixed" if form == "mixed" else "integer"
    engines = ["onnxruntime", *(["openvino"] if to == "openvino" else [])]
    with waiting(f"exporting {file}"), naming_file(file, "cannot be exported"):
        exported, certificates = export.export(quantized, hashlib.sha256(content).hexdigest(), chosen, engines)
        written = {out: exported}
        if weights is not None and all(each.passed for each in certificates):
            description, numbers = export.to_openvino(exported)
            written = {weights: numbers, out: description}
    failures = [failure for each in certificates for failure in each.failures]
    if failures:
        # OpenVINO may optimize the mixed form differently when it also outputs the values to compare.
        hint = "; --form integer may work" if to == "openvino" and form == "mixed" else ""
        note(f"failed: {out} was not written, because the export differs from the artifact: {failures[0]}{hint}")
        raise typer.Exit(FAILED)
    for path, bytes_of in written.items():
        files.write_whole(path, bytes_of)
    if json_out != "-":
        say(*(f"{path}: {len(bytes_of):,} bytes" for path, bytes_of in written.items()))
    told = {"files": {str(path): len(bytes_of) for path, bytes_of in written.items()}, "form": form}
    emit_json({**told, "certificates": [each.json() for each in certificates]}, json_out)
