"""A page to play with: text and handwriting come live, with the change of the weights that made them."""
