"""`adalog detect`: draw the objects that a detector finds in an image."""

from io import BytesIO
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from adalog import files
from adalog.cli import detectors
from adalog.cli.console import check_outputs, show, waiting
from adalog.cli.options import (
    CheckpointOption,
    ExecutorOption,
    JsonOption,
    NoPretrainedOption,
    ThreadsOption,
    thread_count,
)
from adalog.detection import coco, zoo
from adalog.detection.draw import draw
from adalog.detection.images import read

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def command(
    file: Annotated[Path, typer.Argument(help=f"Artifact of a detector, or full-precision detector: {zoo.KINDS}.")],
    image: Annotated[Path, typer.Argument(help="Image to search for objects.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Image to write: .png, .jpg or .webp.")] = Path("drawn.png"),
    score: Annotated[float, typer.Option(min=0, max=1, help="Draw only objects with at least this score.")] = 0.3,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    executor: ExecutorOption = None,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Draw the boxes, masks, names and scores of the objects that a detector finds in an image."""
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"--out {out} must end in one of {', '.join(FORMATS)}")
    check_outputs(out, json_out, reads=(file, image, checkpoint))
    picture = read(image)
    jobs = thread_count(threads)
    detector = detectors.load_detector(file, no_pretrained, checkpoint, executor, jobs)
    if executor != "native":  # the native executor has its own threads
        torch.set_num_threads(jobs)
    with waiting(f"searching {image}"):
        (detections,) = detector(detector.settings.resizing.batch([picture]))
    names, content = detector.settings.names, BytesIO()
    results = coco.results_of([detections], [0], range(len(names)))
    draw(picture, detections, names, score).save(content, FORMATS[out.suffix.lower()])
    files.write_whole(out, content.getvalue())
    rows = [
        {"name": names[row["category_id"]], "score": row["score"], "box": row["bbox"], "mask": row["segmentation"]}
        for row in results
        if row["score"] >= score
    ]
    title = escape(f"{len(rows)} objects in {image}, drawn into {out}")
    table = Table("name", "score", "x, y, width, height", title=title)
    for row in rows:
        table.add_row(escape(row["name"]), f"{row['score']:.2f}", ", ".join(f"{side:.0f}" for side in row["box"]))
    show({"file": str(file), "image": str(image), "drawn": str(out), "objects": rows}, json_out, table)
