"""Count the instructions of one image on 64-bit ARM, and estimate its cycles by models of processors.

    python benchmarks/arm.py [--model timm:deit_tiny_patch16_224 demo] [--bits w4a4 w8a8] [--mca llvm-mca-19] [--json F]
        [--work DIR]

No ARM processor is needed. A C program with the compiled kernels runs under emulation, which counts how often each
block of instructions runs. What a second image adds is the count of one image. llvm-mca then estimates the cycles of
each block from LLVM's model of a processor. It needs Debian's g++-aarch64-linux-gnu, qemu-user (up to version 8) and
llvm-19, or a later LLVM. A timm model has random weights, and is quantized as in `runtime.py`.

Each row is a model on a processor, with these fields:

- instructions: how many run.
- unknown: those that LLVM has no cycles of; they count as none.
- macs: the multiplications of the model's products.
- product_cycles: cycles of these, if the processor did nothing but its fastest product of bytes that the level has.
- throughput_cycles: cycles if no instruction waited for the result of another one, only for a unit that is free.
- cycles: cycles if each block ran many times in a row, and waited for its own results. This is too much for a block
  that needs only one result of the block before it, and too little for data that is not in the L1 cache.
- kernels: instructions and cycles by function.

All cycles are estimates.
"""

from benchmarks.publish import RESULTS, ROOT, publish
from benchmarks.runtime import SEED, artifact_of, pack_of

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adalog import load
from adalog.runtime import native
from adalog.study.cost import cost
from adalog.study.doctor import machine

COMPILER, EMULATOR, LISTER = "aarch64-linux-gnu-g++", "qemu-aarch64", "aarch64-linux-gnu-objdump"
# Processors that LLVM has a model of, with the fastest level of kernels that each runs.
PROCESSORS = {"cortex-a55": "neon", "neoverse-n1": "neon", "neoverse-n2": "i8mm", "neoverse-v1": "i8mm"}
# The products of bytes that each level has, with the multiplications of one instruction.
PRODUCTS = {"neon": {"sdot": 16}, "i8mm": {"sdot": 16, "usmmla": 32}}
FEATURES = "+dotprod,+i8mm"
TIMES = 100  # how often a block runs in the model
_TARGET = re.compile(r"^(b\.\w+|cbn?z \w+,|tbn?z \w+, #\d+,|adrp? \w+,|ldr \w+,) ?[0-9a-f]+$")
_JUMP = re.compile(r"^(b|bl|br|blr|ret)( .*)?$")  # as a model of a processor takes 100 cycles for any call

Block = tuple[int, int]  # address and number of instructions


@dataclass(frozen=True)
class Cycles:
    """Cycles of one run of a block.

    least: if no instruction waited for another one. unknown: instructions without known cycles.
    """

    chained: float
    least: float
    unknown: int


def build(folder: Path) -> tuple[Path, Path]:
    """Compile the program that runs packs for 64-bit ARM, and the plugin that counts blocks for this machine."""
    program, plugin, sources = folder / "pack", folder / "blocks.so", Path(native.__file__).parent
    flags = ["-O2", "-g0", "-fno-wrapv", f"-I{sources}"]
    main = folder / "pack.o"
    c = COMPILER.replace("g++", "gcc")
    subprocess.run([c, *flags, "-c", ROOT / "tests" / "pack.c", "-o", main], check=True)
    kernels = [sources / "native.cpp", sources / "model.cpp", main]
    subprocess.run([COMPILER, *flags, "-std=c++17", "-static", "-pthread", *kernels, "-o", program], check=True)
    source = Path(__file__).with_name("blocks.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", plugin], check=True)
    return program, plugin


def count(program: Path, plugin: Path, pack: Path, level: str, images: np.ndarray) -> Counter[Block]:
    """Return how often each block runs for these images, start included."""
    with tempfile.NamedTemporaryFile(mode="r") as counts:
        # All instructions that QEMU knows, but for vectors of other sizes, which the C library would use for copies.
        emulated = [EMULATOR, "-cpu", "max,sve=off,sme=off", "-plugin", f"{plugin},counts={counts.name}", program]
        command = [*emulated, level, "1", pack, str(len(images))]
        subprocess.run(command, input=images.tobytes(), stdout=subprocess.DEVNULL, check=True)
        blocks: Counter[Block] = Counter()
        for line in counts:
            address, size, times = map(int, line.split())
            blocks[address, size] += times  # a block may have been translated several times
        return blocks


def listing(program: Path) -> dict[int, tuple[str, str]]:
    """Return the function and the instruction at each address."""
    done = subprocess.run(
        [LISTER, "-d", "--no-show-raw-insn", "-C", program], capture_output=True, text=True, check=True
    )
    return parse_listing(done.stdout.splitlines())


def parse_listing(lines: Iterable[str]) -> dict[int, tuple[str, str]]:
    """Return the function and the instruction at each address from the lines of objdump."""
    code, function = dict[int, tuple[str, str]](), ""
    for line in lines:
        if heading := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = short_name(heading[1])
        elif entry := re.match(r"\s+([0-9a-f]+):\t(.*)$", line):
            code[int(entry[1], 16)] = function, assembly(entry[2])
    return code


def short_name(function: str) -> str:
    """Return the name of a function or class without namespaces, parameters and result: "multiply_rows"."""
    return re.split(r"[(<]", function.replace("(anonymous namespace)::", ""))[0].split(" ")[-1].rpartition("::")[2]


def assembly(text: str) -> str:
    """Return an instruction of objdump for an assembler: without comments, and with targets that it accepts."""
    text = re.sub(r"\s*(//.*|<.*>)", "", text).replace("\t", " ").strip()
    return _JUMP.sub(
        "b 64", _TARGET.sub(lambda match: f"{match[1]} {4096 if match[1].startswith('adr') else 64}", text)
    )


def estimate(blocks: Mapping[Block, Sequence[str]], processor: str, mca: str) -> dict[Block, Cycles]:
    """Return the cycles of one run of each block by LLVM's model of a processor.

    blocks: the instructions of each. LLVM does not know the cycles of some instructions, such as atomic ones.
    """
    regions = [
        "\n".join([f"# LLVM-MCA-BEGIN {address} {size}", *code, "# LLVM-MCA-END"])
        for (address, size), code in blocks.items()
    ]
    options = ["-mtriple=aarch64", f"-mcpu={processor}", f"-mattr={FEATURES}", f"-iterations={TIMES}", "-json"]
    options.append("-skip-unsupported-instructions=any")
    views = ["-instruction-info=false", "-resource-pressure=false"]
    command, text = [mca, *options, *views], "\n".join(regions) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{mca} refused a block: {done.stderr[-500:]}")
    cycles = dict[Block, Cycles]()
    for region in json.loads(done.stdout[done.stdout.index("{") :])["CodeRegions"]:
        address, size = map(int, region["Name"].split())
        summary, unknown = region["SummaryView"], len(blocks[address, size]) - len(region["Instructions"])
        cycles[address, size] = Cycles(summary["TotalCycles"] / TIMES, summary["BlockRThroughput"], unknown)
    return cycles


def product_cycles(level: str, processor: str, mca: str) -> float:
    """Return the cycles per multiplication of the fastest product of bytes of a level."""
    blocks = {
        (place, 0): [f"{name} v{register}.4s, v30.16b, v31.16b" for register in range(8)]
        for place, name in enumerate(PRODUCTS[level])
    }
    cycles = estimate(blocks, processor, mca)
    return min(cycles[place, 0].least / (8 * size) for place, size in enumerate(PRODUCTS[level].values()))


def row_of(
    counts: Mapping[Block, int], code: Mapping[int, tuple[str, str]], macs: int, processor: str, mca: str
) -> dict[str, Any]:
    """Return the row of a model on a processor. counts: how often each block runs for one image."""
    level, ran = PROCESSORS[processor], [block for block, times in counts.items() if times > 0]
    instructions = {(address, size): [code[address + 4 * place][1] for place in range(size)] for address, size in ran}
    cycles = estimate(instructions, processor, mca)
    kernels: dict[str, dict[str, float]] = defaultdict(lambda: {"instructions": 0, "cycles": 0.0})
    for block in ran:
        kernel = kernels[code[block[0]][0]]
        kernel["instructions"] += block[1] * counts[block]
        kernel["cycles"] += cycles[block].chained * counts[block]
    order = sorted(kernels.items(), key=lambda item: -item[1]["cycles"])
    return {
        "processor": processor,
        "level": level,
        "instructions": sum(block[1] * counts[block] for block in ran),
        "unknown": sum(cycles[block].unknown * counts[block] for block in ran),
        "macs": macs,
        "product_cycles": round(macs * product_cycles(level, processor, mca)),
        "throughput_cycles": round(sum(cycles[block].least * counts[block] for block in ran)),
        "cycles": round(sum(cycles[block].chained * counts[block] for block in ran)),
        "kernels": {name: {key: round(value) for key, value in kernel.items()} for name, kernel in order[:8]},
    }


def rows_of(model: str, bits: str, built: tuple[Path, Path], mca: str, work: Path) -> list[dict[str, Any]]:
    """Return a row per processor."""
    artifact = artifact_of(model, bits, work)
    pack, loaded = pack_of(artifact), load(artifact)
    images = np.random.default_rng(SEED).random((2, *loaded.example[0].shape[1:]), np.float32)
    macs, code = cost(loaded.program, [images.shape[1:]]).macs, listing(built[0])
    rows = []
    for level in dict.fromkeys(PROCESSORS.values()):
        one, two = (count(*built, pack, level, images[:number]) for number in (1, 2))
        counts = {block: times - one[block] for block, times in two.items()}
        rows += [
            {"model": model, "bits": bits, **row_of(counts, code, macs, processor, mca)}
            for processor in PROCESSORS
            if PROCESSORS[processor] == level
        ]
    return rows


def version_of(command: str, pattern: str) -> str:
    """Return the version that a program prints, or "" if it does not match the pattern."""
    printed = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(pattern, printed)
    return match[1] if match else ""


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["timm:deit_tiny_patch16_224", "demo"])
    parser.add_argument("--bits", nargs="+", default=["w4a4", "w8a8"])
    parser.add_argument("--mca", default=shutil.which("llvm-mca-19") or "llvm-mca", help="the program llvm-mca")
    parser.add_argument("--json", type=Path, default=RESULTS / "arm.json", help="file to write")
    parser.add_argument("--work", type=Path, help="folder that keeps the artifacts for later runs")
    asked = parser.parse_args(given)
    versions = {
        "llvm": version_of(asked.mca, r"LLVM version ([\d.]+)"),
        "compiler": version_of(COMPILER, r" ([\d.]+)\n"),
        "qemu": version_of(EMULATOR, r"version ([\d.]+)"),
    }
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder))
        work = asked.work or Path(folder)
        rows = [
            row for model in asked.model for bits in asked.bits for row in rows_of(model, bits, built, asked.mca, work)
        ]
    publish({"rows": rows, "versions": versions, "seed": SEED, "machine": machine()}, asked.json)


if __name__ == "__main__":
    main()
