"""The colours of quantities, for pictures and for pages that are drawn without matplotlib.

They are those of cividis from its light end to its dark one, with white before them, so that nothing has no
colour. Their lightness falls steadily, and readers with any kind of colour vision see the same order.
"""

import numpy as np

QUANTITY = ("#ffffff", "#f4ebb0", "#d9c55f", "#aea371", "#7d7c78", "#4f576c", "#083370", "#00224e")
# The same from where a line on white is seen.
QUANTITY_OF_LINES = ("#dfc23e", *QUANTITY[3:])
# The strongest colour stands for this percentile, so that few large values do not set the scale.
PERCENTILE = 98.0


def colour_limit(values: np.ndarray, percentile: float = PERCENTILE) -> float:
    """The value of the strongest colour: a percentile, so that few large values do not set it.

    Args:
        values: any shape, none negative. percentile: in percent.

    Returns:
        a positive number, also where most values are zero.
    """
    values = np.asarray(values, dtype=np.float64)
    if not values.size:
        return 1.0
    return float(np.percentile(values, percentile)) or float(values.max()) or 1.0
