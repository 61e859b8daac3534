"""Whatever bytes an artifact has: it is refused in one line that names the file, or it is a model that runs."""

import copy
import json
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from adalog import AdalogError, ArtifactError, Calibration, Config, Search, library
from adalog.graph.operations import OPERATIONS
from adalog.inputs.demo.model import DemoViT
from commands import refusal
from stored import apart, deserialise, header_of, joined, rebuilt, serialise, setting, spliced
from toys import Toy

FAST = Config(images=4, search=Search(rounds=1, steps=0), stages=())


def parts(m, x):
    """A bit of all that a program can hold, in few operations: offsets, heads, sizes, several values of one."""
    q, k, v = m.qkv(x).reshape(x.shape[0], 4, 3, 6).unbind(2)
    x = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    x = torch.cat([nn.functional.gelu(x)[:, m.order], torch.zeros(x.shape[0], 2, 6)], 1)
    return {"logits": m.fc(x).mean(1), "tokens": [x]}


def small():
    return Toy(parts, qkv=nn.Linear(6, 18), fc=nn.Linear(6, 3), order=nn.Buffer(torch.tensor([1, 0, 3, 2])))


def swin():
    from timm.models import SwinTransformer

    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 8, "window_size": 2, "num_classes": 3}
    return SwinTransformer(depths=(2,), num_heads=(2,), **sizes)


BASES = {
    "small": (small, (4, 6)),
    "demo": (lambda: DemoViT(width=16, depth=1, heads=2), (3, 32, 32)),
    "swin": (swin, (3, 8, 8)),
}
SHARES = {"small": 90, "demo": 8, "swin": 2}


@cache
def base(name):
    """The bytes of a model's artifact, and images that it takes."""
    maker, shape = BASES[name]
    torch.manual_seed(0)
    images = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    return serialise(Calibration(maker().eval(), images).quantize(FAST)), images[:2]


def bytes_changed(content, chance):
    """Flips, holes, insertions, swaps, an early end; half of them in the header."""
    data = bytearray(content)
    length = int.from_bytes(content[:8], "little")
    start, end = (0, 8 + length) if chance.random() < 0.5 else (8 + length, len(data))
    kind = chance.choice([0, 0, 0, 1, 2, 3, 3, 4])
    for _ in range(chance.choice([1, 1, 2, 20])):
        i, j = sorted(chance.randrange(start, end - 64) for _ in range(2))
        j = min(j, i + 64)
        if kind == 0:
            data[i] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[i:j]
        elif kind == 2:
            data[i:i] = chance.randbytes(chance.choice([1, 8, 64]))
        elif kind == 3:
            k = chance.randrange(start, end - 64)
            data[k : k + j - i], data[i:j] = data[i:j], data[k : k + j - i]
        else:
            del data[chance.randrange(len(data)) :]
            break
    return bytes(data)


def places(value, path=()):
    """The paths to everything inside nested lists and objects."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def hostile(chance, header):
    """A value that has no business where it is put."""
    node = chance.choice(header["nodes"])
    return chance.choice(
        [
            *(None, True, False, -1, 0, 1, 2, 7, 2**20, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**400),
            *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800", "é", "a\nb"),
            "float64",
            *([], [[]], {}, [0], [-1], [10**9, 10**9], [2**16, 2**16], [1] * 9, {"a": 1, "b": 2}, {"list": 3}),
            *({"dtype": "int64"}, {"dtype": "bool"}, {"float": "nan"}, {"float": "-inf"}, {"list": [1, 2]}),
            *({"ref": node[0]}, {"ref": chance.choice(list(header["dtypes"]))}, {"ref": header["inputs"][0][0]}),
            *([{"ref": node[0]}] * 3, {"output": [["a", {"ref": node[0]}]]}, {"dict": [["a", 1], ["a", 2]]}),
            *(node[0], node[1], node[2], node, chance.choice(sorted(OPERATIONS))),
        ]
    )


def json_changed(content, chance):
    """One to three changes of what our header says."""
    table, header, data = apart(content)
    words = [*sorted(OPERATIONS), *header["dtypes"], *header["quantizers"]]  # of before any change
    repeated = None
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        kind = chance.randrange(8)
        if kind < 4:  # the program, which is most of what can do harm
            where = header.get("nodes", [])
        elif kind == 4:
            where = table
        else:
            where = header
        paths = list(places(where))
        if not paths:
            continue
        *path, key = chance.choice(paths)
        for step in path:
            where = where[step]
        value = where[key]
        change = chance.randrange(12)
        if change == 0:
            del where[key]
        elif change == 1 and isinstance(where, list):
            where.insert(chance.randrange(len(where) + 1), value)
        elif change == 2 and isinstance(where, list):
            other = chance.randrange(len(where))
            where[key], where[other] = where[other], where[key]
        elif change == 3 and isinstance(where, dict):
            repeated = where
        elif change < 9 and isinstance(value, (int, float)):
            where[key] = value + chance.choice([-1, 1, value, -2 * value, 2**16, 2**30])
        elif change < 9 and isinstance(value, str):
            where[key] = chance.choice(words)
        elif change < 9 and isinstance(value, list) and value:
            where[key] = chance.choice([value * 2, value[::-1], value[1:], value[:1]])
        else:
            try:
                where[key] = copy.deepcopy(hostile(chance, header))
            except (LookupError, TypeError):  # an earlier change took away what it looks up
                where[key] = None
    text = json.dumps(header)
    if repeated:
        once = json.dumps(repeated)
        name = chance.choice(list(repeated))
        text = text.replace(once, f"{once[:-1]}, {json.dumps(name)}: {json.dumps(repeated[name])}}}", 1)
    return joined(table, text, data)


def mutant(seed, shares):
    """(content, images) of one of these bases, by its share: the same seed always gives the same."""
    chance = random.Random(seed)
    name = chance.choices(list(shares), list(shares.values()))[0]
    content, images = base(name)
    change = json_changed if chance.random() < 0.75 else bytes_changed
    return change(content, chance), images


def outcome(content, images):
    """Return "refused", "fails" or "runs". Anything else that loading or running does is an error of adalog."""
    try:
        model = deserialise(content, "some.file")
    except ArtifactError as error:
        check_told(str(error))
        return "refused"
    try:
        model(images)
    except (AdalogError, ValueError) as error:
        check_told(f"some.file {error}")
        return "fails"
    assert all(line.isprintable() for line in model.summary().splitlines())
    for executor in ("torch", *["native"] * bool(library.levels())):
        runs_or_tells(model, executor, images)
    return "runs"


def runs_or_tells(model, executor, images):
    try:
        model.compile(executor)(images)
    except (AdalogError, ValueError) as error:
        check_told(f"some.file {error}")


def check_told(told):
    """One line, not long, that names the file."""
    assert told.startswith("some.file ")
    assert told.isprintable()
    assert len(told) < 500


def hunt(seeds, shares):
    """Under a smaller limit than the usual 1 GiB an image, which these models would not need."""
    counts = {"refused": 0, "fails": 0, "runs": 0}
    seed = -1
    try:
        with mock.patch("adalog.graph.program.MAX_ELEMENTS", 2**22):
            for seed in seeds:
                counts[outcome(*mutant(seed, shares))] += 1
    except Exception as error:
        raise AssertionError(f"the mutant of seed {seed}: {type(error).__name__}: {error}") from error
    return counts


@pytest.mark.slow
def test_mutants():
    counts = hunt(range(500), SHARES)
    assert counts["refused"] > 500 / 3
    assert counts["runs"] > 500 / 15
    assert counts["fails"] > 1


def program(*nodes):
    """An operation list in place of the model's own; the last value is the output."""

    def change(header):
        header["nodes"] = [[f"n{i}", op, args, kwargs, ""] for i, (op, args, kwargs) in enumerate(nodes)]
        header["output"] = {"ref": f"n{len(nodes) - 1}"}

    return lambda content: rebuilt(content, change)


def aten(op, *args, **kwargs):
    return f"aten.{op}", list(args), kwargs


X, LAST = {"ref": "x"}, {"ref": "n0"}
BILLIONS = [2**30, 2**30]


def twice(content):
    """A tensor named twice in safetensors' own table."""
    table, header, data = apart(content)
    name = next(name for name in table if name != "__metadata__")
    text = joined(table, json.dumps(header), b"")[8:].decode()
    text = text.replace("{", f"{{{json.dumps(name)}: {json.dumps(table[name])}, ", 1).encode()
    return len(text).to_bytes(8, "little") + text + data


def twice_in_ours(content):
    return spliced(content, json.dumps(header_of(content)).replace("{", '{"format": 2, ', 1))


def overlap(content):
    table, header, data = apart(content)
    first, second = [name for name in table if name != "__metadata__"][:2]
    table[first] = table[second]
    return joined(table, json.dumps(header), data)


def doubled(content):
    """Sixty-two squarings of a size: 2**(2**62)."""
    squares = [("sym.mul", [{"ref": f"n{i}"}, {"ref": f"n{i}"}], {}) for i in range(1, 63)]
    return program(aten("sym_size.int", X, 1), ("sym.add", [LAST, 1], {}), *squares)(content)


def per_batch(content):
    """One element for one image, 2**40 for two."""
    squares = [("sym.mul", [{"ref": f"n{i}"}, {"ref": f"n{i}"}], {}) for i in range(4)]
    power = [("sym.mul", [{"ref": "n4"}, {"ref": "n4"}], {}), ("sym.mul", [{"ref": "n5"}, {"ref": "n3"}], {})]
    return program(aten("sym_size.int", X, 0), *squares, *power, aten("zeros.default", [{"ref": "n6"}]))(content)


def many(content):
    """Three values that are each small enough, all kept to the end."""

    def change(header):
        header["nodes"] = [[f"n{i}", *aten("zeros.default", [2**27]), ""] for i in range(3)]
        header["output"] = [{"ref": f"n{i}"} for i in range(3)]

    return rebuilt(content, change)


def changed(*path):
    return lambda content: rebuilt(content, setting(*path))


HOSTILE = {
    "header length": (lambda content: (2**62).to_bytes(8, "little") + content[8:], "is not an adalog artifact"),
    "huge JSON": (lambda content: spliced(content, "[" + "[]," * 30_000_000 + "[]]"), "its JSON takes"),
    "deep JSON": (lambda content: spliced(content, "[" * 100_000 + "]" * 100_000), "RecursionError"),
    "a tensor twice": (twice, "a key twice"),
    "a field twice": (twice_in_ours, "a key twice"),
    "overlapping tensors": (overlap, "SafetensorError"),
    "not UTF-8": (lambda content: content.replace(b"adalog", b"\xff\xfedalo", 1), "UnicodeDecodeError"),
    "zeros": (program(aten("zeros.default", BILLIONS)), "aten.zeros.default"),
    "full": (program(aten("full.default", [2**29], 1)), r"aten.full.default \(n0\) takes [\d,]+ elements"),
    "arange": (program(aten("arange.default", 10**12)), r"takes 2,000,000,000,\d+ elements"),
    "arange step": (program(aten("arange.start_step", 0, 1, 1e-12)), r"takes 1,000,000,000,\d+ elements"),
    "expand": (
        program(aten("sum.default", X), aten("expand.default", LAST, [2**30])),
        r"aten.expand.default \(n1\) takes [\d,]+ elements",
    ),
    "repeat": (program(aten("repeat.default", X, [1, 2**20, 2**20])), "aten.repeat.default"),
    "pad": (program(aten("constant_pad_nd.default", X, [0, 2**40])), "aten.constant_pad_nd.default"),
    "upsample": (
        program(aten("unsqueeze.default", X, 1), aten("upsample_nearest2d.vec", LAST, [2**16, 2**16], None)),
        "takes",
    ),
    "pieces": (
        program(aten("zeros.default", [2**27]), aten("unbind.int", LAST)),
        "cannot be split into 134217728 parts",
    ),
    "many": (many, r"aten.zeros.default \(n1\) takes [\d,]+ elements"),
    "patches": (
        program(
            aten("zeros.default", [1, 1, 8000, 8000]),
            aten("ones.default", [1, 1, 4000, 4000]),
            aten("conv2d.default", LAST, {"ref": "n1"}),
        ),
        "takes",
    ),
    "broadcast": (
        program(
            aten("ones.default", [4096, 1, 1, 4096]),
            aten("ones.default", [1, 4096, 4096, 1]),
            aten("matmul.default", LAST, {"ref": "n1"}),
        ),
        "takes",
    ),
    "powers": (doubled, "sizes must be 64-bit integers"),
    "text": (program(("sym.mul", ["a", 2**40], {})), "sizes must be 64-bit integers"),
    "another device": (
        program(aten("zeros_like.default", X, device="cuda:0")),
        "chooses the device or layout of its value",
    ),
    "another argument": (program(aten("relu.default", X, slope=2)), "aten.relu.default"),
    "another kind of argument": (program(aten("relu.default", "x")), "aten.relu.default"),
    "another operation": (program(("aten.set_.source_Storage", [X], {})), "is not one that a program can hold"),
    "no operations": (changed("nodes", []), "no operations"),
    "no output": (changed("output", [1]), "output holds no value"),
    "escape": (changed("refusals", "\x1b[2J", ""), "print"),
    "channels": (changed("quantizers", "qk.left", "shape", [1, 1, 1, 1, 1]), "do not fit a value"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "huge JSON" else ()) for kind in HOSTILE]
)
def test_hostile_files(kind):
    change, told = HOSTILE[kind]
    with pytest.raises(ArtifactError, match=told) as error:
        deserialise(change(base("small")[0]), "some.file")
    check_told(str(error.value))


def test_values_that_grow_with_the_batch():
    content, images = base("small")
    model = deserialise(per_batch(content))
    assert model(images[:1]).shape == (1,)
    with pytest.raises(AdalogError, match=r"aten.zeros.default \(n7\) takes 1,099,511,\d+,\d+ elements"):
        model(images)


def test_a_failing_operation_is_told():
    content, images = base("small")
    far = program(aten("full.default", [1], 10**6, dtype={"dtype": "int64"}), aten("index.Tensor", X, [LAST]))
    model = deserialise(far(content))
    with pytest.raises(AdalogError, match=r"^operation aten.index.Tensor \(n1\) fails: IndexError: index 1000000 is"):
        model(images)


BOUNDED = """
import resource, sys
import adalog
from pathlib import Path

good, *files = sys.argv[1:]
adalog.load(good)  # imports what loading needs
for file in files:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + 60 * Path(file).stat().st_size + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
    try:
        adalog.load(file)
    except adalog.ArtifactError as error:
        print("memory" if "memory" in str(error).lower() else "refused")
    else:
        print("loaded")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads how much memory a process has from Linux")
def test_memory_is_bounded_by_the_file(tmp_path):
    """60 times the file and 64 MiB: for hostile files, and for whole ones of two bits, which expand the most."""
    content = base("small")[0]
    names = [name for name in HOSTILE if name != "huge JSON"]
    torch.manual_seed(0)
    wide = nn.Linear(2048, 2048).eval()
    images = torch.randn(2, 3, 2048)
    two_bits = Calibration(wide, images).quantize(replace(FAST, weight_bits=2, images=2))
    files = {name: HOSTILE[name][0](content) for name in names} | {"two bits": serialise(two_bits)}
    for name, data in {"good": content, **files}.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", BOUNDED, "good", *files]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["refused"] * len(names) + ["loaded"]


@pytest.mark.parametrize("command", ["inspect", "evaluate"])
@pytest.mark.parametrize("kind", ["header length", "deep JSON", "not UTF-8", "zeros", "another operation", "escape"])
def test_the_command_line_refuses(tmp_path, kind, command, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.file").write_bytes(HOSTILE[kind][0](base("small")[0]))
    (tmp_path / "out.json").write_text("old")
    error = refusal(monkeypatch, capsys, command, "some.file", "--json", "out.json")
    check_told(error.strip().removeprefix("error: "))
    assert (tmp_path / "out.json").read_text() == "old"


def test_the_command_line_refuses_another_models_file(tmp_path, monkeypatch, capsys):
    """A whole file whose model does not take the bundled images."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.file").write_bytes(base("small")[0])
    error = refusal(monkeypatch, capsys, "evaluate", "some.file")
    assert error.startswith("error: some.file was not made from the bundled model")
