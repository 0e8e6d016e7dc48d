"""Handwriting as sequences of pen offsets: reading corpora, cleaning, preparing, and reading back.

A line of handwriting is an array [N, 3] of (dx, dy, pen bit), one row per point: its offset from the point
before, x to the right and y downwards, and 1 if the pen is lifted after it. Row 0 is where the pen first
touches; its offset is zero and is never predicted. The last point's pen bit is 1.
"""
