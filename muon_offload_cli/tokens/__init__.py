"""Training tokens as files: reading text and conversations, checking them, writing Megatron's indexed format.

Both sides use it, so that the launcher finds every fault of the data before a rank starts. Knows neither
torch nor Megatron.
"""
