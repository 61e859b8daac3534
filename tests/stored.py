"""Models to bytes and back, as `save` and `load` do with files; bytes that are changed, and that loading refuses."""

import json
import struct

import pytest
from safetensors.torch import load as parse
from safetensors.torch import save as to_bytes

from adalog import ArtifactError, QuantizedModel, artifact
from adalog.artifact import KEY


def serialise(model):
    """The artifact's bytes of a model."""
    return artifact.serialise(model.quantized)


def deserialise(content, name="the artifact"):
    """The model that an artifact's bytes hold."""
    return QuantizedModel(artifact.deserialise(content, name))


def refused(content, match=None):
    """Loading raises ArtifactError, whose one-line message names the file."""
    with pytest.raises(ArtifactError, match=match) as error:
        deserialise(content, "some.file")
    assert str(error.value).startswith("some.file ")


def rebuilt(content, change=None, tensors=None):
    """The file with its JSON changed in place by `change`, and with some tensors replaced (None: left out)."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][KEY])
    if change is not None:
        change(header)
    stored = {**parse(content), **(tensors or {})}
    return to_bytes({name: value for name, value in stored.items() if value is not None}, {KEY: json.dumps(header)})
