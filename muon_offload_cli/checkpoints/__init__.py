"""What both sides know of checkpoints: names, seals, which ones are complete. Knows neither torch nor Megatron."""
