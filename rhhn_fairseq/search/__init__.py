"""Drawing outputs from trained models, in plain PyTorch."""
