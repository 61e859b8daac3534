"""ExecuTorch files: run by ExecuTorch's own runtime, compared with the exact integers, and what is refused."""

import functools
import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adalog import ArtifactError, Calibration, Config, DataError, QuantizedModel, Search, export
from adalog.export import executorch
from commands import call, say
from toys import Toy

present = pytest.mark.skipif(find_spec("executorch") is None, reason="executorch is not installed")
SMALL = {"images": 4, "search": Search(init=(8, 4), parents=4, rounds=1, steps=0), "stages": ()}
PREPARATION = {"size": [32, 32]}


def network(self, x):
    """A convolution, attention, and a depthwise convolution."""
    tokens = F.gelu(self.embed(x)).flatten(2).transpose(1, 2)
    q, k, v = self.qkv(self.norm(tokens)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return self.head(F.gelu(self.depthwise(mixed.flatten(2).mT.unflatten(-1, (4, 4)))).mean((2, 3)))


@pytest.fixture(scope="module")
def quantize(images):
    """A function that quantizes the toy by a method, with changed choices."""
    parts = {"embed": nn.Conv2d(3, 16, 8, 8), "norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48)}
    model = Toy(network, **parts, depthwise=nn.Conv2d(16, 16, 3, 1, 1, groups=16), head=nn.Linear(16, 5)).eval()

    @functools.cache
    def make(bits="w8a8", method="uniform-tensor", **choices):
        config = replace(Config.preset(bits, method), **SMALL, **choices)
        quantized = Calibration(model, images).quantize(config)
        quantized.note(preprocessing=PREPARATION)
        return quantized.quantized

    return make


@pytest.fixture(scope="module")
def write(quantize):
    """A function that writes the toy's file at some bits, once."""

    @functools.cache
    def make(bits):
        return executorch.to_executorch(quantize(bits), "digest")

    return make


@present
@pytest.mark.parametrize("bits", ["w8a8", *(pytest.param(bits, marks=pytest.mark.slow) for bits in ("w4a8", "w8a6"))])
def test_files_have_certificates(bits, quantize, write, images):
    found = export.certify_executorch(quantize(bits), "digest", write(bits), [(images,)], executor="reference")
    assert found.passed, found.text()
    assert found.accumulators_equal
    assert {site.site for site in found.sites} == {row.site for row in quantize(bits).ledger}
    assert sum(site.off for site in found.sites) <= 1
    assert found.images == len(images)


@present
@pytest.mark.slow
def test_weights_of_four_bits_take_half_of_the_bytes(write):
    saved = len(write("w8a8")) - len(write("w4a8"))
    assert saved >= (48 + 5) * 16 // 2 - 64  # those of the linears; alignment may add some bytes


@present
def test_metadata_says_what_the_file_was_made_from(write, images):
    about = executorch.read_notes(write("w8a8"))
    assert about == {"artifact": "digest", "made_by": executorch.versions()}
    runtime = pytest.importorskip("executorch.runtime")
    (text,) = runtime.Runtime.get().load_program(write("w8a8")).load_method("preprocessing").execute([])
    assert json.loads(text) == PREPARATION


@present
@pytest.mark.slow
def test_certificates_notice_other_artifacts_and_changed_files(quantize, write, images):
    content = bytearray(write("w8a8"))
    found = export.certify_executorch(quantize("w8a8"), "another", bytes(content), [(images,)])
    assert "the file was made from another artifact" in found.failures
    sites = {site.name: site for site in executorch.ProgramModule(quantize("w8a8"), executorch.MAKERS).sites}
    place = content.rindex(executorch.UniformProduct(sites["qkv"]).units[:4].numpy().tobytes())
    content[place] ^= 1
    found = export.certify_executorch(quantize("w8a8"), "digest", bytes(content), [(images,)])
    assert "the file differs from the file that adalog writes for the artifact" in found.failures
    with pytest.raises(ArtifactError, match="not an ExecuTorch file that adalog exported"):
        export.certify_executorch(quantize("w8a8"), "digest", b"\0\0\0\0ET12", [(images,)])
    with pytest.raises(ValueError, match="there are no images"):
        export.certify_executorch(quantize("w8a8"), "digest", write("w8a8"), [])


@present
@pytest.mark.slow
def test_the_commands(tmp_path, monkeypatch, capsys, quantize):
    artifact, file = tmp_path / "toy.safetensors", tmp_path / "toy.pte"
    QuantizedModel(quantize()).save(artifact)
    code, error = call(monkeypatch, capsys, "export", artifact, "--to", "executorch", "-o", tmp_path / "toy.onnx")
    assert code == 2
    assert "give --out NAME.pte" in error
    told = json.loads(say(monkeypatch, capsys, "export", artifact, "--to", "executorch", "-o", file, "--json", "-"))
    assert told["files"] == {str(file): file.stat().st_size}
    assert told["certificates"][0]["passed"]
    assert executorch.read_notes(file.read_bytes())["artifact"] == told["certificates"][0]["digests"]["artifact"]


@pytest.mark.parametrize(
    ("method", "choices", "reason"),
    [
        ("adalog", {}, "its weight has zero points, and XNNPACK takes none"),
        ("uniform", {}, "its weight has zero points, and XNNPACK takes none"),
        ("uniform-tensor", {"per_head": True}, "has 4 scales, and XNNPACK takes one per tensor"),
        ("uniform-tensor", {"per_group": True}, "has 16 scales, and XNNPACK takes one per tensor"),
        ("uniform-tensor", {"post_softmax": "adalog"}, "of the kind log, and XNNPACK takes uniform ones"),
    ],
)
def test_a_refusal_names_the_site_the_reason_and_the_method_that_works(quantize, method, choices, reason):
    with pytest.raises(ArtifactError, match=f"site .*{reason}: quantize the model with --method uniform-tensor"):
        executorch.ProgramModule(quantize("w8a8", method, **choices), executorch.MAKERS)


def test_the_encoders_replay_the_artifact(quantize, images):
    """The exported program itself has the artifact's codes, before ExecuTorch changes it."""
    quantized = quantize("w8a6")
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    watched = executorch.InstrumentedModule(executorch.ProgramModule(quantized, executorch.MAKERS))
    results = watched(images[:1])
    inner = dict(zip(watched.names, results[-len(watched.names) :], strict=True))
    for name, quantizer in quantized.program.quantizers.items():
        wanted = quantizer.quantize(inner["value", name])
        assert (inner["codes", name].float() - executorch.LOW != wanted).sum() <= 1
    wanted = quantized.program.run([images[:1]])
    assert torch.allclose(results[0], wanted, atol=1e-4 * float(wanted.abs().max()))


def test_a_missing_package_is_named_with_its_extra(monkeypatch, quantize):
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.setitem(sys.modules, "executorch.exir", None)
    with pytest.raises(DataError, match=r"executorch .*pip install 'adalog\[executorch\]'"):
        executorch.to_executorch(quantize(), "digest")
