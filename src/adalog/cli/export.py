"""`adalog export`: an artifact as a file for other engines."""

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
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("model.onnx"),
    form: Annotated[
        str,
        typer.Option(help="mixed: matrices as quantized floats, which engines are quick at; integer: as integers."),
    ] = "mixed",
    to: Annotated[
        str, typer.Option(help="onnx, or openvino: an .xml file for OpenVINO and a .bin file beside it.")
    ] = "onnx",
    json_out: JsonOption = None,
) -> None:
    """Write an artifact as ONNX, or for OpenVINO, after a first certificate: what fails it is not written."""
    if form not in export.FORMS:
        raise ValueError(f"--form {form!r} is none of {', '.join(export.FORMS)}")
    if to not in TARGETS:
        raise ValueError(f"--to {to!r} is none of {', '.join(TARGETS)}")
    if to == "openvino" and out.suffix != ".xml":
        raise DataError(f"{out} is no name for OpenVINO: give --out NAME.xml, which NAME.bin goes with")
    weights = out.with_suffix(".bin") if to == "openvino" else None
    check_outputs(out, weights, json_out, reads=(file,))
    content = artifact.read(file)
    quantized = artifact.deserialise(content, str(file))
    if not Compiled(quantized, "reference").sites:
        raise DataError(f"{file} has no multiplication in integers: there is nothing to export")
    chosen: export.Form = "mixed" if form == "mixed" else "integer"
    engines = ["onnxruntime", *(["openvino"] if to == "openvino" else [])]
    with waiting(f"export {file}"), naming_file(file, "cannot be exported"):
        exported, certificates = export.export(quantized, hashlib.sha256(content).hexdigest(), chosen, engines)
        written = {out: exported}
        if weights is not None and all(each.passed for each in certificates):
            description, numbers = export.to_openvino(exported)
            written = {weights: numbers, out: description}
    failures = [failure for each in certificates for failure in each.failures]
    if failures:
        # OpenVINO may compute another program where it also puts out what is watched.
        hint = "; --form integer may pass" if to == "openvino" and form == "mixed" else ""
        note(f"failed: {out} is not written, since it fails its certificate: {failures[0]}{hint}")
        raise typer.Exit(FAILED)
    for path, bytes_of in written.items():
        files.write_whole(path, bytes_of)
    if json_out != "-":
        say(*(f"{path}: {len(bytes_of):,} bytes" for path, bytes_of in written.items()))
    told = {"files": {str(path): len(bytes_of) for path, bytes_of in written.items()}, "form": form}
    emit_json({**told, "certificates": [each.json() for each in certificates]}, json_out)
