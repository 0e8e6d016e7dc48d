"""What trained models make: text, translations, handwriting, and the scores of what they make."""
