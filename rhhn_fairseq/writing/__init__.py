"""Handwriting from a trained model: drawing points, how its weights change meanwhile, and the picture of
both."""
