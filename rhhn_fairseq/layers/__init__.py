"""Layers built from cells: stacks, directions, residuals and regularisers, in plain PyTorch."""
