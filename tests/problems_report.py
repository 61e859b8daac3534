"""Files for reports: as they are, and with hostile text wherever a file holds text."""

import torch

from adalog import artifact
from adalog.report import examine
from stored import rebuilt

HOSTILE = (
    "</script><script>window.ran = 1</script>",
    '"><img src=x onerror="window.ran = 1">',
    "'></title></style><svg onload='window.ran = 1'>",
    "{{ 7 * 7 }}{% raw %}]]><!--",
    "javascript:window.ran=1",
)


def subject_of(content, name="some.safetensors", images=None):
    """What a report says of an artifact's bytes, without images or on so many random ones."""
    quantized = artifact.deserialise(content, name)
    sample = None
    if images is not None:
        shape = quantized.example[0].shape[1:]
        sample = torch.randn(images, *shape, generator=torch.Generator().manual_seed(0))
    return examine(name, content, quantized, sample)


def hostile(content):
    """A file whose ledger, refusals and provenance hold hostile text, under a hostile name."""

    def change(header):
        for row, name in zip(header["ledger"], HOSTILE, strict=False):
            row[:5] = [name] * 5
        header["refusals"] = {name: f"{name}: {name}" for name in HOSTILE}
        header["provenance"] = {name: [name] for name in HOSTILE}

    return subject_of(rebuilt(content, change), HOSTILE[0])
