"""The offloader: chunk plan, life of a step. Knows torch, not Megatron."""
