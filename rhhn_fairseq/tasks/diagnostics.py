"""A model's diagnostics of its own weights, as metrics of the validation."""

import torch


class LogsDiagnostics:
    """Mixin for a task that adds the model's ``diagnostics`` to the metrics of the validation.

    They then appear in the validation's log line, in TensorBoard, and in ``rhhn plot curves``.
    """

    def post_validate(self, model: torch.nn.Module, stats: dict, agg) -> None:
        """Adds diagnostics; fairseq calls it with a validation's metrics before it prints and stores them.

        Args:
            model: the validated model. stats: the metrics by name, to which the diagnostics are added.
            agg: unused.
        """
        diagnostics = getattr(model, "diagnostics", dict)
        stats |= {key: round(value, 4) for key, value in diagnostics().items()}
