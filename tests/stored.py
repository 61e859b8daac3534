"""Models to bytes and back, as `save` and `load` do with files; bytes that are changed, and that loading refuses."""

import json
import struct

import pytest
from safetensors.torch import load as parse
from safetensors.torch import save as to_bytes

from adalog import ArtifactError, QuantizedModel, artifact
from adalog.artifact import KEY
from adalog.export import to_pack


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


def apart(content, key=KEY):
    """The table of a safetensors file, the JSON that it holds under this key, and the bytes of the tensors."""
    (length,) = struct.unpack("<Q", content[:8])
    table = json.loads(content[8 : 8 + length])
    return table, json.loads(table["__metadata__"][key]), content[8 + length :]


def joined(table, text, data, key=KEY):
    """The file again, with this text in place of its JSON."""
    start = json.dumps({**table, "__metadata__": {key: text}}).encode()
    start += b" " * (-len(start) % 8)  # tensors are aligned
    return struct.pack("<Q", len(start)) + start + data


def header_of(content, key=KEY):
    """The JSON of an artifact, or of another safetensors file that holds it under this key."""
    return apart(content, key)[1]


def spliced(content, text, key=KEY):
    """The file with this text in place of its JSON, and the same tensors."""
    table, _, data = apart(content, key)
    return joined(table, text, data, key)


def rebuilt(content, change=None, tensors=None, key=KEY):
    """The file with its JSON changed in place by `change`, and with some tensors replaced (None: left out)."""
    header = header_of(content, key)
    if change is not None:
        change(header)
    if tensors is None:
        return spliced(content, json.dumps(header), key)
    stored = {**parse(content), **tensors}
    return to_bytes({name: value for name, value in stored.items() if value is not None}, {key: json.dumps(header)})


def setting(*path):
    """A change of JSON in place.

    path: keys, or functions of a part that return a part of it; then the new value, or a function of all JSON for it.
    """
    *before, last, value = path

    def change(header):
        place = header
        for step in before:
            place = step(place) if callable(step) else place[step]
        place[last] = value(header) if callable(value) else value

    return change


def packed(model, path, batches=(1,), *options):
    """Write the pack of a model for some batch sizes to a path, and the artifact beside it. options: of `to_pack`."""
    model.save(path.with_suffix(".safetensors"))
    path.write_bytes(to_pack(path.with_suffix(".safetensors"), batches, *options))
    return path


def first(kernel):
    """A function of a tape's JSON that returns the arguments of its first call of this kernel."""
    return lambda tape: next(arguments for _, name, arguments in tape["calls"] if name == kernel)
