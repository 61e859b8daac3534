"""What can go wrong, by name. Each message says what, which value, and what to do."""


class AdalogError(Exception):
    """Anything this package refuses to do."""


class CaptureError(AdalogError):
    """A model that cannot be turned into a program."""


class CalibrationError(AdalogError):
    """Images, or values inside the model, that cannot calibrate it."""


class ArtifactError(AdalogError):
    """A file that is not a whole and valid artifact."""


class DataError(AdalogError):
    """Images or labels that cannot be read, or outputs of a model that cannot be judged by them."""
