"""Importing this lets transformers know quantized models: pipeline("image-classification", model=FOLDER or OWNER/NAME).

The model answers with its integers where an executor runs them here. Needs `pip install 'adalog[hf]'`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from adalog import hub
from adalog.model import load, quickest


class AdalogConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """What config.json of a saved folder says: the names of the classes."""

    model_type = hub.MODEL_TYPE


class AdalogForImageClassification(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A saved model as transformers calls it: float32 pixel values on the CPU in, logits out."""

    config_class = AdalogConfig
    main_input_name = "pixel_values"

    def __init__(self, config: AdalogConfig, runs: nn.Module):
        super().__init__(config)
        self.runs = runs

    @classmethod
    def from_pretrained(cls, name: Any, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        """The model of a folder, or of a repository of the Hub.

        options: `config` and `revision`, as transformers gives them; its others have no meaning here.
        """
        revision = options.get("revision") or "main"
        config = options.get("config") or AdalogConfig.from_pretrained(name, revision=revision)
        runs, _, _ = quickest(load(hub.PREFIX + str(name), revision=revision), torch.get_num_threads())
        return cls(config, runs).train(False)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def forward(self, pixel_values: Tensor, **options: Any) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=hub.logits_of(self.runs(pixel_values.float())))


AutoConfig.register(hub.MODEL_TYPE, AdalogConfig)
AutoModelForImageClassification.register(AdalogConfig, AdalogForImageClassification)
