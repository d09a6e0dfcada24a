"""What both sides know of checkpoints: names, seals, which are complete. Knows neither torch nor Megatron."""
