"""Matrix products: which code computes them, weights in 8 bits, and matrices scaled by outer products."""
