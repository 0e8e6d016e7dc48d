"""What a model says of its own weights, among the metrics of the validation."""

import torch


class LogsDiagnostics:
    """A task whose validation has the model's ``diagnostics`` among its metrics.

    So they stand in the line of the validation, in TensorBoard, and in ``rhhn plot curves``.
    """

    def post_validate(self, model: torch.nn.Module, stats: dict, agg) -> None:
        """fairseq calls it with the metrics of a validation, before it prints and stores them.

        Args:
            model: the one that was validated. stats: the metrics by name, to which others are added.
            agg: unused.
        """
        diagnostics = getattr(model, "diagnostics", dict)
        stats |= {key: round(value, 4) for key, value in diagnostics().items()}
