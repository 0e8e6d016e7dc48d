"""Optimizers registered with fairseq by name."""

# Imported first, because it loads the plugin, which imports the modules here in its own order.
import fairseq  # noqa: F401
