"""Packages that the plain installation leaves out, because only some of the commands need them."""

from collections.abc import Iterator
from contextlib import contextmanager

from rhhn_fairseq.errors import UsageError

# What is imported, the package on PyPI, and the extra of this one that brings it.
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
    "uvicorn": ("uvicorn", "demo"),
}


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Imports of packages that may be missing stand in this context.

    Args:
        purpose: what needs them, with its verb: "pictures need".

    Raises:
        UsageError: one of PACKAGES is missing; the line says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in PACKAGES:
            raise
        package, extra = PACKAGES[name]
        raise UsageError(f"{purpose} {package}: pip install {package}, or 'rhhn-fairseq[{extra}]'") from error
