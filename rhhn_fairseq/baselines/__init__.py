"""What networks are compared with: n-grams, and Hopfield's memory."""
