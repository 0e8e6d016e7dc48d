"""Candidates for the GPU, measured against today's code before they may enter the package; see
``experiments/notes/gpu_next.md``."""
