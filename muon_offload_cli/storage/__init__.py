"""Bytes on disk and in host memory: reserved files, extents, stores and the staging ring.

Knows neither Megatron nor optimizers. torch is imported only where memory is pinned.
"""
