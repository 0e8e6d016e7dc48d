"""The colours of quantities, for pictures and for pages that are drawn without matplotlib.

They are those of cividis from its light to its dark end, preceded by white, so that zero has no colour.
Their lightness decreases steadily, so readers with any kind of colour vision see the same order.
"""

import numpy as np

QUANTITY = ("#ffffff", "#f4ebb0", "#d9c55f", "#aea371", "#7d7c78", "#4f576c", "#083370", "#00224e")
# The same scale, beginning where a line is visible on white.
QUANTITY_OF_LINES = ("#dfc23e", *QUANTITY[3:])
# The strongest colour represents this percentile, so that a few large values do not set the scale.
PERCENTILE = 98.0


def colour_limit(values: np.ndarray, percentile: float = PERCENTILE) -> float:
    """Returns the value of the strongest colour: a percentile, so that a few large values do not set it.

    Args:
        values: any shape, none negative. percentile: in percent.

    Returns:
        a positive number, even if most values are zero.
    """
    values = np.asarray(values, dtype=np.float64)
    if not values.size:
        return 1.0
    return float(np.percentile(values, percentile)) or float(values.max()) or 1.0
