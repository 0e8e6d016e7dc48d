"""Compares systems at equal parameters, equal time and an equal search for good options (Optuna)."""
