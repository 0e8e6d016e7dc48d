"""Handwriting from a trained model: drawing points, measuring how its weights change, plotting both."""
