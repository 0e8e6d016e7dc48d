"""The colours of quantities, for pictures and for pages that are drawn without matplotlib.

They are those of cividis from its light end to its dark one, with white before them, so that nothing has no
colour. Their lightness falls steadily, and readers with any kind of colour vision see the same order.
"""

QUANTITY = ("#ffffff", "#f4ebb0", "#d9c55f", "#aea371", "#7d7c78", "#4f576c", "#083370", "#00224e")
# The same from where a line on white is seen.
QUANTITY_OF_LINES = ("#dfc23e", *QUANTITY[3:])
