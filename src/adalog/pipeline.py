"""Register quantized models with transformers, so that its image classification pipeline runs them.

Importing this module is enough. It needs `pip install 'adalog[hf]'`. The model runs in integers if the executor
"native" runs on this machine.

Examples:
    >>> import adalog.pipeline
    >>> from transformers import pipeline
    >>> classify = pipeline("image-classification", model="small-vit")  # a folder, or OWNER/NAME on the Hub
    >>> predictions = classify("image.jpg")
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from adalog import hub
from adalog.errors import ArtifactError
from adalog.model import load, quickest


class AdalogConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """The configuration in `config.json` of a saved folder: the names of the classes."""

    model_type = hub.MODEL_TYPE


class AdalogForImageClassification(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A saved model with the interface of transformers: pixel values in float32 on the CPU in, logits out.

    Args:
        config: The configuration of the saved folder.
        runs: The module that computes the logits from pixel values (B, 3, H, W).
    """

    config_class = AdalogConfig
    main_input_name = "pixel_values"

    def __init__(self, config: AdalogConfig, runs: nn.Module):
        super().__init__(config)
        self.runs = runs

    @classmethod
    def from_pretrained(cls, name: Any, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        """Load the model from a folder or from a repository of the Hub.

        Args:
            name: A folder that `QuantizedModel.save_pretrained` wrote, or OWNER/NAME on the Hub.
            *arguments: Ignored.
            **options: `config` and `revision` have the meaning that transformers gives them. The others are ignored.

        Returns:
            The model, in evaluation mode.

        Raises:
            ArtifactError: If the file is not a valid artifact, if it cannot be read or downloaded, or if the folder
                names no classes.
        """
        revision = options.get("revision") or "main"
        config = options.get("config") or AdalogConfig.from_pretrained(name, revision=revision)
        if hub.ARCHITECTURE not in (config.architectures or ()):
            raise ArtifactError(
                f"{name} names no classes, so it is not an image classifier: load it with adalog.load, or save it "
                "again with save_pretrained(folder, classes=names)"
            )
        runs, _, _ = quickest(load(hub.PREFIX + str(name), revision=revision), torch.get_num_threads())
        return cls(config, runs).train(False)

    @property
    def device(self) -> torch.device:
        """The device of the inputs and outputs: the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the inputs and outputs: float32."""
        return torch.float32

    def forward(self, pixel_values: Tensor, **options: Any) -> ImageClassifierOutput:
        """Compute the logits.

        Args:
            pixel_values: Preprocessed images, (B, 3, H, W).
            **options: Ignored.

        Returns:
            The logits (B, classes), as transformers wraps them.
        """
        return ImageClassifierOutput(logits=hub.logits_of(self.runs(pixel_values.float())))


AutoConfig.register(hub.MODEL_TYPE, AdalogConfig)
AutoModelForImageClassification.register(AdalogConfig, AdalogForImageClassification)
