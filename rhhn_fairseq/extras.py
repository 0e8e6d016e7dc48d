"""Packages that the plain installation leaves out, because only some of the commands need them."""

from collections.abc import Iterator
from contextlib import contextmanager

from rhhn_fairseq.errors import UsageError

# Import name, package on PyPI, and the extra of this package that installs it.
PACKAGES = {
    "babel": ("Babel", "synthetic"),
    "HersheyFonts": ("Hershey-Fonts", "handwriting"),
    "huggingface_hub": ("huggingface_hub", "export"),
    "matplotlib": ("matplotlib", "plots"),
    "onnx": ("onnx", "export"),
    "onnxscript": ("onnxscript", "export"),
    "num2words": ("num2words", "synthetic"),
    "optuna": ("optuna", "tune"),
    "safetensors": ("safetensors", "export"),
    "sklearn": ("scikit-learn", "synthetic"),
    "starlette": ("starlette", "demo"),
    "svgelements": ("svgelements", "handwriting"),
    "uvicorn": ("uvicorn", "demo"),
}


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Context for imports of packages that may be missing.

    Args:
        purpose: what needs them, with its verb: "pictures need".

    Raises:
        UsageError: one of PACKAGES is missing; the message says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in PACKAGES:
            raise
        package, extra = PACKAGES[name]
        raise UsageError(f"{purpose} {package}: pip install {package}, or '.[{extra}]'") from error
