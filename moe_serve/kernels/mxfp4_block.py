"""The block of MXFP4 (mxfp4.py), for code that imports no torch."""

MXFP4_BLOCK = 32  # neighbours in a row that share a scale
