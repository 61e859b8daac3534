"""Models to bytes and back, as `save` and `load` do with files."""

from adalog import QuantizedModel, artifact


def serialise(model):
    """The artifact's bytes of a model."""
    return artifact.serialise(model.quantized)


def deserialise(content, name="the artifact"):
    """The model that an artifact's bytes hold."""
    return QuantizedModel(artifact.deserialise(content, name))
